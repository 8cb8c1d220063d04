// The trace of a run: every command begins and ends once, names of files, and nothing when off.
#include <unistd.h>

#include <fstream>
#include <iterator>

#include "check.hpp"
#include "harness.hpp"
#include "trace.hpp"
#include "uccl_ep/null_transport.hpp"

using namespace uccl_ep;

namespace {

uint64_t count(const std::string &text, const std::string &what) {
    uint64_t found = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) {
        ++found;
    }
    return found;
}

}  // namespace

TEST(each_rank_has_a_file_of_its_own) {
    CHECK_EQ(trace_path("run/trace.json", 3), "run/trace.3.json");
    CHECK_EQ(trace_path("a.b/trace", 12), "a.b/trace.12.json");
}

TEST(every_command_begins_and_ends_once) {
    const std::string base = "/tmp/uccl_ep_trace_" + std::to_string(getpid()) + ".json";
    NullTransport network(1, 64);
    EngineOptions options;
    options.trace_path = base;
    Host host(0, test_layout(2, 4), network.ops(), PlanKind::kNative, TransportLimits{}, 1, 2, 16, options);
    host.engine = std::make_unique<Engine>(host.shared);
    host.engine->start();
    for (uint64_t i = 1; i <= 20; ++i) {
        host.push(i % 2, Command{Operation::kWrite, 1, host.data_signal(0, i % 2), 64, 0, 0, (i + 1) / 2});
        host.push(i % 2, Command{Operation::kWriteSignal, 1, host.data_signal(0, i % 2), 64, 64, 64, (i + 1) / 2});
    }
    CHECK(host.engine->stop(20));
    CHECK_EQ(host.engine->error(), "");
    const std::string path = trace_path(base, 0);
    std::ifstream file(path);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    unlink(path.c_str());
    CHECK_EQ(count(text, "\"ph\":\"n\""), 40u);
    CHECK_EQ(count(text, "\"name\":\"command\""), 80u);
    CHECK_EQ(count(text, "signal sent") + host.engine->proxies()[0]->stats().coalesced_signals.get(), 20u);
    CHECK_EQ(count(text, "\"value\":10,"), 2u);  // the last of either signal is always sent
    CHECK_EQ(count(text, "{"), count(text, "}"));
    CHECK(text.find(",\n]") == std::string::npos);
}

TEST(events_of_kernels_stand_beside_those_of_proxies) {
    const std::string path = "/tmp/uccl_ep_trace_kernels_" + std::to_string(getpid()) + ".json";
    TraceRecorder recorder;
    for (const bool proxies : {false, true}) {
        std::vector<const TraceRecorder *> recorders;
        if (proxies) {
            recorders.push_back(&recorder);
        }
        CHECK_EQ(write_trace(path, 3, recorders, {"{\"ph\":\"X\"},\n{\"ph\":\"X\"}", 5, 1200}), "");
        std::ifstream file(path);
        const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        unlink(path.c_str());
        CHECK_EQ(count(text, "\"ph\":\"X\""), 2u);
        CHECK_EQ(count(text, "\"ph\":\"M\""), proxies ? 2u : 0u);
        CHECK_EQ(count(text, "\"lost_kernel_spans\":5,\"kernel_clock_error_ns\":1200"), 1u);
        CHECK(text.find(",\n]") == std::string::npos && text.find("[,") == std::string::npos);
        CHECK_EQ(count(text, ",\n{"), proxies ? 3u : 1u);
    }
}

TEST(a_file_that_cannot_be_written_is_told) {
    CHECK(write_trace("/nowhere/at/all.json", 0, {}).find("/nowhere/at/all.json") != std::string::npos);
}

TEST(the_newest_events_are_kept) {
    TraceRecorder recorder;
    for (uint64_t i = 0; i < TraceRecorder::kEvents + 5; ++i) {
        recorder.add(TraceKind::kPopped, 0, i, 0, 0, 0);
    }
    uint64_t expected = 5;
    recorder.visit([&](const TraceEvent &event) { CHECK_EQ(event.number, expected++); });
    CHECK_EQ(expected, TraceRecorder::kEvents + 5);
    CHECK_EQ(recorder.dropped(), 5u);
}

CHECK_MAIN()
