#include "proxy.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "clock.hpp"

namespace uccl_ep {
namespace {

constexpr uint64_t kTickNs = 1'000'000;
constexpr uint64_t kBackOffNs = 50'000;               // the longest an idle proxy looks away
constexpr uint64_t kSpinningPasses = 200;             // empty ones, before a proxy yields between them
constexpr uint64_t kCrowdedPasses = 4;                // empty ones, before a proxy looks away on a crowded host
constexpr unsigned long kTimerSlackNs = 1000;         // Linux's default, 50 us, would double that time
constexpr uint64_t kForwardAfterAbortNs = 100'000'000;  // verdicts may still leave for this long at a stop
constexpr uint64_t kCompletionsPerPoll = 256;
constexpr uint64_t kMaxMergedBytes = uint64_t{1} << 30;

std::unique_ptr<Plan> make_plan(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats) {
    switch (shared.plan) {
        case PlanKind::kNative:
            return make_native_plan(shared, lane, outbound, stats);
        case PlanKind::kCounted:
            return make_counted_plan(shared, lane, outbound, stats);
        case PlanKind::kFenced:
            break;
    }
    return make_fenced_plan(shared, lane, outbound, stats);
}

std::vector<RingReader> rings_of(const EngineShared &shared, uint32_t lane) {
    std::vector<RingReader> rings;
    for (uint32_t ring = lane; ring < shared.channel->num_rings(); ring += shared.num_proxies) {
        rings.emplace_back(*shared.channel, ring);
    }
    return rings;
}

// Of one write, however many commands are merged into it.
uint64_t most_bytes(const TransportLimits &limits) {
    return std::min(limits.max_message, kMaxMergedBytes) / limits.alignment * limits.alignment;
}

// A thread of the host takes a line back in 0.1 us, and asks again sooner than a device can. On a crowded host
// an empty pass gives the core away.
bool looks_away(const EngineOptions &options) { return options.over_bus && !options.crowded; }

}  // namespace

Proxy::Proxy(std::shared_ptr<EngineShared> shared, uint32_t lane)
    : shared_(std::move(shared)),
      lane_(lane),
      outbound_(*shared_, lane, stats_, can_renew(*shared_->ops)),
      plan_(make_plan(*shared_, lane, outbound_, stats_)),
      notices_(*shared_, lane, outbound_, stats_, [this](uint32_t peer) { faults_.lost(peer); }),
      rings_(rings_of(*shared_, lane)),
      completions_(kCompletionsPerPoll),
      max_write_(most_bytes(shared_->limits)),
      cap_peer_(shared_->options.max_inflight_peer != 0 ? shared_->options.max_inflight_peer
                                                        : shared_->limits.max_inflight),
      capped_(cap_peer_ != 0 || shared_->options.max_inflight_nic != 0),
      names_(shared_->signal_names.data()),
      senders_(shared_->sender_signals.data()),
      is_remote_(shared_->is_remote.data()),
      data_bytes_(shared_->data_bytes),
      alignment_(shared_->limits.alignment),
      num_ranks_(shared_->layout.num_ranks),
      num_signals_(shared_->layout.num_signals()),
      outbox_entries_(shared_->layout.outbox_entries()),
      batch_(shared_->options.batch),
      windowed_(plan_->windowed()),
      follows_completions_(plan_->follows_completions()),
      look_away_(looks_away(shared_->options) ? LookAway::kNsOfRing : 0),
      wake_(reinterpret_cast<void (*)(void *)>(shared_->options.wake_function)),
      faults_(*shared_, lane),
      renewal_(*shared_, lane, outbound_, stats_, faults_) {
    if (!shared_->options.trace_path.empty()) {
        trace_ = std::make_unique<TraceRecorder>();
        outbound_.trace(trace_.get());
        plan_->trace(trace_.get());
    }
}

uint64_t Proxy::poll_completions() {
    // Also with nothing posted: a transport may need the call to place what peers write here, or what
    // it has completed but not yet placed there (see transport.h).
    const int64_t count =
        shared_->ops->poll_completions(shared_->ops->context, lane_, completions_.data(), completions_.size());
    if (count < 0) {
        faults_.lane_broke(count, shared_->remote_peers.size() == 1 ? shared_->remote_peers[0] : shared_->rank,
                           "polling completions failed");
        return 0;
    }
    for (int64_t i = 0; i < count; ++i) {
        const uccl_ep_completion &completion = completions_[static_cast<uint64_t>(i)];
        const Op *op = outbound_.find(completion.token);
        if (op == nullptr) {
            faults_.fail(Fault{shared_->rank, Reason::kTransport, 0, 0, completion.token,
                               "the transport completed token " + std::to_string(completion.token) +
                                   ", which was not posted or had completed before"});
            continue;
        }
        // The peer is the record's: a transport need not know the one of a completion.
        if (completion.status != 0 && renewal_.takes(completion, op->peer)) {
            continue;
        }
        if (op->kind == OpKind::kNotice || op->kind == OpKind::kVerdict) {
            notices_.completed(*op);  // best effort: an error says no more than the peer's state does
            outbound_.release(completion.token);
            continue;
        }
        if (op->kind == OpKind::kCommand) {
            rings_[op->ring].finish(op->first_ticket, op->commands);
            if (trace_ != nullptr) {
                trace_->add(TraceKind::kCompleted, rings_[op->ring].index, op->first_ticket, op->peer, op->bytes,
                            op->commands);
            }
            charge(op->peer, op->bytes, false);
        }
        if (completion.status != 0) {
            if (!shared_->verdicts->aborted() && !shared_->verdicts->peer_closed(op->peer) &&
                !shared_->verdicts->gone(op->peer)) {
                faults_.peer_failed(completion.status, op->peer, "a write failed");
            }
        } else {
            renewal_.succeeded();
            if (follows_completions_) {
                plan_->completed(*op);
            }
        }
        outbound_.release(completion.token);
    }
    stats_.completions.add(static_cast<uint64_t>(count));
    return static_cast<uint64_t>(count);
}

bool Proxy::flush() {
    if (faults_.broken() || renewal_.down() || !outbound_.staged()) {
        return false;
    }
    const int64_t result = outbound_.flush();
    if (result < 0) {
        faults_.lane_broke(result, outbound_.next_peer(), "posting failed");
    }
    return true;
}

uint64_t Proxy::pass(bool look) {
    looked_ = {0, rings_.size()};
    passes_.store(passes_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    inside_.store("poll_completions", std::memory_order_relaxed);
    uint64_t done = faults_.broken() ? 0 : poll_completions();
    if (renewal_.down() && !faults_.broken()) {
        inside_.store("renew_lane", std::memory_order_relaxed);
        renewal_.renew();
    }
    const bool aborted = shared_->verdicts->aborted();
    bool news = done != 0;
    if (!aborted && !faults_.broken()) {
        inside_.store("poll_arrivals", std::memory_order_relaxed);
        done += plan_->poll();
        news = done != 0;
        if (look && !outbound_.staged() && !renewal_.down()) {
            looked_ = drain();
            done += looked_.commands;
        }
        if (const Fault *fault = plan_->fault()) {
            faults_.fail(*fault);
        }
    }
    inside_.store("post_writes or post_signals", std::memory_order_relaxed);
    flush();
    inside_.store(nullptr, std::memory_order_relaxed);
    for (RingReader &ring : rings_) {
        ring.publish();
    }
    if (news && wake_ != nullptr) {
        wake_(reinterpret_cast<void *>(shared_->options.wake_context));
    }
    return done;
}

bool Proxy::finished(uint64_t now) {
    if (!shared_->stop_requested.load(std::memory_order_acquire)) {
        return false;
    }
    if (now >= shared_->stop_deadline_ns.load(std::memory_order_relaxed)) {
        return true;
    }
    if (faults_.broken() || shared_->verdicts->aborted()) {
        if (aborted_at_ns_ == 0) {
            aborted_at_ns_ = now;
        }
        notices_.tick(now);
        flush();
        return faults_.broken() || (notices_.told() && now - aborted_at_ns_ > 2 * kTickNs) ||
               now - aborted_at_ns_ > kForwardAfterAbortNs;
    }
    if (!drained_told_) {
        const bool quiet = std::all_of(rings_.begin(), rings_.end(),
                                       [](const RingReader &ring) { return !ring.begun && ring.quiet(); });
        if (!idle() || !quiet) {
            return false;
        }
        drained_told_ = true;
        shared_->drained.fetch_add(1, std::memory_order_acq_rel);
    }
    if (lane_ != 0) {
        return true;
    }
    // Data of every lane first, then the word that says this rank left in order.
    return shared_->drained.load(std::memory_order_acquire) >= shared_->num_proxies && notices_.tell_closed() &&
           notices_.told();
}

// Spin, then yield, since a software NIC may need the very core that posts to it, and where nothing was done for long
// and nothing is under way, look away for at most 50 us. Where threads outnumber cores, looks in vain take the core from
// the very threads that are waited for: a few, then away whatever is under way. A network moves on meanwhile, and the
// next look finds more at once. Returns whether it looked away.
bool Proxy::back_off(uint64_t empty_passes, uint64_t idle_ns) {
    const EngineOptions &options = shared_->options;
    const bool stopping = shared_->stop_requested.load(std::memory_order_relaxed);
    const bool idle = idle_ns >= options.look_ns && outbound_.outstanding() == 0;
    if (!stopping && (options.crowded ? empty_passes > kCrowdedPasses : idle)) {
        const timespec limit{0, static_cast<long>(kBackOffNs)};
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&shared_->wake), FUTEX_WAIT_PRIVATE, 0, &limit, nullptr, 0);
        return true;
    }
    if (empty_passes < kSpinningPasses) {
        cpu_pause();
    } else {
        sched_yield();
    }
    return false;
}

void Proxy::run() {
    (void)prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
    uint64_t empty_passes = 0;
    uint64_t since_clock = 0;
    uint64_t now = now_ns();
    uint64_t busy_since = 0;
    uint64_t idle_since = now;
    bool looked_away = false;
    for (;;) {
        // A stop asks whether the rings are empty, so they are looked at.
        const bool look = shared_->stop_requested.load(std::memory_order_relaxed) || !look_away_.away(now_ns);
        const uint64_t done = pass(look);
        stats_.passes.add(1);
        if (look) {
            const bool ahead = looked_.rings_with_more == 0;
            look_away_.looked(looked_.commands, ahead ? static_cast<uint32_t>(rings_.size()) : 0, now_ns);
        }
        if (done != 0 && busy_since == 0) {
            busy_since = now_ns();
        } else if (done == 0 && busy_since != 0) {
            now = now_ns();
            idle_since = now;
            stats_.busy_ns.add(now > busy_since ? now - busy_since : 0);
            busy_since = 0;
        }
        empty_passes = done != 0 ? 0 : empty_passes + 1;
        // A yield may take as long as other threads like, so each is followed by a look at the clock.
        if (++since_clock >= 64 || looked_away || empty_passes > kSpinningPasses) {
            since_clock = 0;
            now = now_ns();
            if (now - last_tick_ns_ >= kTickNs) {
                last_tick_ns_ = now;
                if (!faults_.broken()) {
                    notices_.tick(now);
                    plan_->tick();
                }
            }
        }
        if (shared_->stop_requested.load(std::memory_order_relaxed) && done == 0 && look) {
            now = now_ns();
            if (finished(now)) {
                return;
            }
        } else if (shared_->stop_requested.load(std::memory_order_relaxed) &&
                   now_ns() >= shared_->stop_deadline_ns.load(std::memory_order_relaxed)) {
            return;
        }
        looked_away = done == 0 && back_off(empty_passes, now - idle_since);
    }
}

}  // namespace uccl_ep
