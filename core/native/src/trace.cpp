#include "trace.hpp"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

namespace uccl_ep {
namespace {

double microseconds(uint64_t ns) { return static_cast<double>(ns) * 1e-3; }

// Every command is a nestable asynchronous slice with an id of its own, from the moment it was popped to its
// completion; the posting is an instant inside it. The id is local to the rank: Perfetto shows what has a global
// one beside the processes, not under them.
class Writer {
  public:
    Writer(FILE *file, uint32_t rank) : file_(file), rank_(rank) {}

    void name(uint32_t thread) {
        begin();
        std::fprintf(file_, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%u,\"args\":{\"name\":\"rank %u\"}}",
                     rank_, rank_);
        begin();
        std::fprintf(file_,
                     "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%u,\"tid\":%u,\"args\":{\"name\":\"proxy %u\"}}",
                     rank_, thread, thread);
    }

    void command(char phase, const char *what, uint64_t time_ns, uint32_t thread, uint32_t ring, uint64_t ticket,
                 uint32_t peer, uint64_t bytes) {
        begin();
        std::fprintf(file_,
                     "{\"ph\":\"%c\",\"cat\":\"command\",\"id2\":{\"local\":\"%u.%" PRIu64
                     "\"},\"name\":\"%s\",\"pid\":%u,"
                     "\"tid\":%u,\"ts\":%.3f,\"args\":{\"ring\":%u,\"ticket\":%" PRIu64
                     ",\"peer\":%u,\"bytes\":%" PRIu64 "}}",
                     phase, ring, ticket, what, rank_, thread, microseconds(time_ns), ring, ticket, peer, bytes);
    }

    void events(const std::string &json) {
        if (json.empty()) {
            return;
        }
        begin();
        std::fputs(json.c_str(), file_);
    }

    void instant(const char *what, uint64_t time_ns, uint32_t thread, uint32_t signal, uint64_t value, uint32_t peer) {
        begin();
        std::fprintf(file_,
                     "{\"ph\":\"i\",\"s\":\"t\",\"cat\":\"signal\",\"name\":\"%s\",\"pid\":%u,\"tid\":%u,\"ts\":%.3f,"
                     "\"args\":{\"signal\":%u,\"value\":%" PRIu64 ",\"peer\":%u}}",
                     what, rank_, thread, microseconds(time_ns), signal, value, peer);
    }

  private:
    void begin() {
        std::fputs(first_ ? "\n" : ",\n", file_);
        first_ = false;
    }

    FILE *file_;
    uint32_t rank_;
    bool first_ = true;
};

void write_recorder(Writer &writer, uint32_t thread, const TraceRecorder &recorder) {
    writer.name(thread);
    std::map<uint32_t, uint64_t> looked;  // by ring: when it was last seen empty
    recorder.visit([&](const TraceEvent &event) {
        switch (event.kind) {
            case TraceKind::kLook:
                looked[event.ring] = event.time_ns;
                return;
            case TraceKind::kPopped: {
                // The device's clock is not this one: a push is known to lie between two looks.
                const auto look = looked.find(event.ring);
                if (look != looked.end()) {
                    writer.command('b', "pushed", look->second, thread, event.ring, event.number, event.peer,
                                   event.bytes);
                    writer.command('e', "pushed", event.time_ns, thread, event.ring, event.number, event.peer,
                                   event.bytes);
                    looked.erase(look);
                }
                writer.command('b', "command", event.time_ns, thread, event.ring, event.number, event.peer,
                               event.bytes);
                return;
            }
            case TraceKind::kPosted:
            case TraceKind::kCompleted: {
                const bool posted = event.kind == TraceKind::kPosted;
                for (uint32_t i = 0; i < event.extra; ++i) {
                    writer.command(posted ? 'n' : 'e', posted ? "posted" : "command", event.time_ns, thread, event.ring,
                                   event.number + i, event.peer, event.bytes);
                }
                return;
            }
            case TraceKind::kSignalled:
                writer.instant("signal sent", event.time_ns, thread, event.ring, event.number, event.peer);
                return;
            case TraceKind::kRaised:
                writer.instant("signal raised", event.time_ns, thread, event.ring, event.number, event.peer);
                return;
        }
    });
}

}  // namespace

std::string trace_path(const std::string &path, uint32_t rank) {
    const size_t slash = path.rfind('/');
    const size_t dot = path.rfind('.');
    std::string number(1, '.');
    number += std::to_string(rank);
    if (dot == std::string::npos || (slash != std::string::npos && dot < slash)) {
        return path + number + ".json";
    }
    return path.substr(0, dot) + number + path.substr(dot);
}

std::string write_trace(const std::string &path, uint32_t rank, const std::vector<const TraceRecorder *> &recorders,
                        const KernelEvents &kernels) {
    const std::unique_ptr<FILE, int (*)(FILE *)> file(std::fopen(path.c_str(), "w"), std::fclose);
    if (file == nullptr) {
        return "cannot write the trace " + path + ": " + std::strerror(errno);
    }
    std::fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", file.get());
    Writer writer(file.get(), rank);
    uint64_t dropped = 0;
    for (uint32_t i = 0; i < recorders.size(); ++i) {
        write_recorder(writer, i, *recorders[i]);
        dropped += recorders[i]->dropped();
    }
    writer.events(kernels.json);
    std::fprintf(file.get(),
                 "\n],\"otherData\":{\"rank\":%u,\"dropped_events\":%" PRIu64 ",\"lost_kernel_spans\":%" PRIu64
                 ",\"kernel_clock_error_ns\":%" PRIu64 "}}\n",
                 rank, dropped, kernels.lost, kernels.clock_error_ns);
    return std::ferror(file.get()) != 0 ? "the trace " + path + " could not be written in full" : "";
}

}  // namespace uccl_ep
