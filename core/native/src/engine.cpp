#include "engine.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstddef>
#include <stdexcept>

#include "clock.hpp"

namespace uccl_ep {
namespace {

// Beyond the stop's own limit: threads on a busy machine may not be scheduled for long. They are waited for while any of
// them still passes, and for at most so many periods.
constexpr std::chrono::seconds kPassPeriod{2};
constexpr int kMostPeriods = 15;

void require(bool holds, const std::string &words) {
    if (!holds) {
        throw std::invalid_argument(words);
    }
}

// A wish: refusal costs speed only.
void run_on(const EngineOptions &options, uint32_t lane) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    CPU_ZERO(&set);
    const auto add = [&set](uint32_t cpu) {
        if (cpu < CPU_SETSIZE) {
            CPU_SET(cpu, &set);
        }
    };
    if (options.pin) {
        const uint32_t wanted = options.first_cpu + lane;
        add(!options.cpus.empty() ? options.cpus[wanted % options.cpus.size()]
            : online > 0          ? wanted % static_cast<uint32_t>(online)
                                  : 0);
    } else {
        for (const uint32_t cpu : options.cpus) {
            add(cpu);
        }
    }
    if (CPU_COUNT(&set) != 0) {
        (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
    }
}

}  // namespace

void prepare(EngineShared &shared) {
    const uccl_ep_transport_ops *ops = shared.ops;
    require(ops != nullptr && ops->magic == UCCL_EP_TRANSPORT_MAGIC, "no uccl_ep_transport_ops at this address");
    require(ops->size >= offsetof(uccl_ep_transport_ops, poll_arrivals),
            "the transport's table of functions is too short: compile it against uccl_ep/transport.h");
    require(ops->post_writes != nullptr && ops->poll_completions != nullptr,
            "the transport lacks post_writes or poll_completions");
    require(shared.plan != PlanKind::kNative || ops->post_signals != nullptr,
            "the native plan needs a transport with post_signals; use the plan counted or fenced");
    require(shared.plan != PlanKind::kCounted || ops->poll_arrivals != nullptr,
            "the counted plan needs a transport with poll_arrivals; use the plan native or fenced");
    require(shared.plan != PlanKind::kFenced || shared.limits.placement_proof,
            "the fenced plan needs delivery_complete or flush");
    require(shared.num_proxies >= 1 && shared.num_proxies <= kMaxLanes,
            "the number of proxies must be from 1 to " + std::to_string(kMaxLanes));
    require(shared.num_proxies <= shared.limits.lanes,
            "more proxies than the transport has lanes (" + std::to_string(shared.limits.lanes) + ")");
    require(shared.limits.alignment >= 1 && shared.limits.max_message >= shared.limits.alignment,
            "the transport's max_message is below its alignment");
    require(shared.limits.send_queue_depth >= 1, "the transport's send_queue_depth must be at least 1");
    require(shared.layout.num_signals() <= kMaxSignals, "more signals than a command can name");
    require(shared.rank < shared.layout.num_ranks && shared.layout.num_ranks <= kMaxRanks,
            "rank outside the group, or a group above " + std::to_string(kMaxRanks) + " ranks");
    require(shared.channel != nullptr && shared.channel->num_rings() >= 1, "no channel");
    shared.data_bytes = shared.layout.data_bytes();
    shared.control_bytes = shared.layout.control_bytes();
    shared.is_remote.assign(shared.layout.num_ranks, 0);
    for (const uint32_t peer : shared.remote_peers) {
        require(peer < shared.layout.num_ranks && peer != shared.rank,
                "remote peer " + std::to_string(peer) + " is this rank or no rank");
        shared.is_remote[peer] = 1;
    }
    const uint32_t per_kind = static_cast<uint32_t>(shared.layout.signals_per_kind());
    const uint32_t channels = shared.layout.num_channels;
    shared.signal_names.resize(shared.layout.num_signals());
    for (uint32_t signal = 0; signal < shared.layout.num_signals(); ++signal) {
        shared.signal_names[signal] = {signal % per_kind / channels, signal / per_kind * channels + signal % channels};
    }
    shared.sender_signals =
        std::vector<SenderSignal>(uint64_t{shared.layout.num_ranks} * shared.layout.outbox_entries());
    shared.inflight_peer = std::vector<std::atomic<uint64_t>>(shared.layout.num_ranks);
}

Engine::Engine(std::shared_ptr<EngineShared> shared) : shared_(std::move(shared)), ends_(std::make_shared<Ends>()) {
    prepare(*shared_);
    for (uint32_t lane = 0; lane < shared_->num_proxies; ++lane) {
        proxies_.push_back(std::make_shared<Proxy>(shared_, lane));
    }
}

Engine::~Engine() { stop(shared_->options.timeout_s < 5 ? shared_->options.timeout_s : 5); }

void Engine::start() {
    if (!threads_.empty() || shared_->stop_requested.load()) {
        throw std::invalid_argument("an engine starts once");
    }
    ends_->running = shared_->num_proxies;
    for (uint32_t lane = 0; lane < shared_->num_proxies; ++lane) {
        // The thread owns all it touches, so that one that never returns cannot touch freed memory.
        threads_.emplace_back([shared = shared_, proxy = proxies_[lane], ends = ends_, lane] {
            (void)pthread_setname_np(pthread_self(), ("uccl_ep " + std::to_string(lane)).c_str());  // 15 characters
            run_on(shared->options, lane);
            proxy->run();
            const std::lock_guard lock(ends->mutex);
            --ends->running;
            ends->changed.notify_all();
        });
    }
}

bool Engine::running() const {
    const std::lock_guard lock(ends_->mutex);
    return ends_->running != 0;
}

uint64_t Engine::passes() const {
    uint64_t sum = 0;
    for (const auto &proxy : proxies_) {
        sum += proxy->passes();
    }
    return sum;
}

bool Engine::stop(double timeout_s) {
    if (threads_.empty()) {
        return stop_error_.empty();
    }
    shared_->stop_deadline_ns = now_ns() + static_cast<uint64_t>(timeout_s * 1e9);
    shared_->stop_requested.store(true, std::memory_order_release);
    shared_->wake.store(1);
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&shared_->wake), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    bool ended = false;
    {
        std::unique_lock lock(ends_->mutex);
        const auto all_ended = [&] { return ends_->running == 0; };
        ended = ends_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), all_ended);
        uint64_t seen = passes();
        for (int period = 0; !ended && period < kMostPeriods; ++period) {
            ended = ends_->changed.wait_for(lock, kPassPeriod, all_ended);
            const uint64_t now = passes();
            if (now == seen) {
                break;
            }
            seen = now;
        }
    }
    for (std::thread &thread : threads_) {
        if (ended) {
            thread.join();
        } else {
            thread.detach();
        }
    }
    threads_.clear();
    if (ended && !shared_->options.trace_path.empty()) {
        std::vector<const TraceRecorder *> recorders;
        for (const auto &proxy : proxies_) {
            recorders.push_back(proxy->recorder());
        }
        trace_error_ =
            write_trace(trace_path(shared_->options.trace_path, shared_->rank), shared_->rank, recorders, kernels_);
    }
    if (!ended) {
        stop_error_ = "a proxy did not end in time";
        for (uint32_t lane = 0; lane < proxies_.size(); ++lane) {
            if (const char *function = proxies_[lane]->inside()) {
                stop_error_ = "proxy " + std::to_string(lane) + " did not end in time: " + function +
                              " of the transport does not return";
            }
        }
    }
    return ended;
}

std::string Engine::error() const {
    for (const auto &proxy : proxies_) {
        const std::string words = proxy->error();
        if (!words.empty()) {
            return words;
        }
    }
    return stop_error_.empty() ? trace_error_ : stop_error_;
}

}  // namespace uccl_ep
