#include "proxy.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "clock.hpp"

namespace uccl_ep {
namespace {

constexpr uint64_t kTickNs = 1'000'000;
constexpr uint64_t kBackOffNs = 50'000;               // the longest an idle proxy looks away
constexpr uint64_t kCrowdedPasses = 4;                // empty ones, before a proxy looks away on a crowded host
constexpr unsigned long kTimerSlackNs = 1000;         // Linux's default, 50 us, would double that time
constexpr uint64_t kForwardAfterAbortNs = 100'000'000;  // verdicts may still leave for this long at a stop
constexpr uint64_t kCompletionsPerPoll = 256;
constexpr uint64_t kMostRenewals = 8;  // of a lane, one after another, without an operation that succeeded
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

// A thread of the host takes a line back in 0.1 us, and asks again sooner than a device can. On a crowded host
// an empty pass gives the core away.
bool looks_away(const EngineOptions &options) { return options.over_bus && !options.crowded; }

}  // namespace

bool can_renew(const uccl_ep_transport_ops &ops) {
    return ops.size >= offsetof(uccl_ep_transport_ops, renew_lane) + sizeof ops.renew_lane && ops.renew_lane != nullptr;
}

Proxy::Proxy(std::shared_ptr<EngineShared> shared, uint32_t lane)
    : shared_(std::move(shared)),
      lane_(lane),
      outbound_(*shared_, lane, stats_, can_renew(*shared_->ops)),
      plan_(make_plan(*shared_, lane, outbound_, stats_)),
      notices_(*shared_, lane, outbound_, stats_, [this](uint32_t peer) { lost(peer); }),
      completions_(kCompletionsPerPoll),
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
      renewable_(can_renew(*shared_->ops)),
      wake_(reinterpret_cast<void (*)(void *)>(shared_->options.wake_function)) {
    for (uint32_t ring = lane; ring < shared_->channel->num_rings(); ring += shared_->num_proxies) {
        rings_.emplace_back(*shared_->channel, ring);
    }
    const TransportLimits &limits = shared_->limits;
    max_write_ = std::min(limits.max_message, kMaxMergedBytes) / limits.alignment * limits.alignment;
    cap_peer_ = shared_->options.max_inflight_peer != 0 ? shared_->options.max_inflight_peer : limits.max_inflight;
    if (!shared_->options.trace_path.empty()) {
        trace_ = std::make_unique<TraceRecorder>();
        outbound_.trace(trace_.get());
        plan_->trace(trace_.get());
    }
    capped_ = cap_peer_ != 0 || shared_->options.max_inflight_nic != 0;
}

std::string Proxy::error() const {
    const std::lock_guard lock(error_mutex_);
    return error_;
}

void Proxy::remember(const std::string &words) {
    const std::lock_guard lock(error_mutex_);
    if (error_.empty()) {
        error_ = "proxy " + std::to_string(lane_) + ": " + words;
    }
}

// The transport calls a peer dead: its words go into the exception, where that is one for the group.
void Proxy::lost(uint32_t peer) {
    const char *words =
        shared_->ops->last_error != nullptr ? shared_->ops->last_error(shared_->ops->context, lane_) : nullptr;
    if (words != nullptr && *words != 0 && !shared_->verdicts->shrinks()) {
        remember("rank " + std::to_string(peer) + " was lost; " + words);
    }
}

void Proxy::fail(const Fault &fault) {
    remember(fault.words);
    shared_->verdicts->report(fault.culprit, fault.reason, fault.signal, fault.expected, fault.seen);
}

void Proxy::lane_broke(int64_t error, uint32_t peer, const char *what) {
    if (shared_->verdicts->shrinks() && shared_->ops->peer_state != nullptr && peer != shared_->rank &&
        shared_->ops->peer_state(shared_->ops->context, peer) == UCCL_EP_PEER_DEAD) {
        shared_->verdicts->lost(peer, Reason::kDead, 0);
        return;
    }
    broken_ = true;
    const char *words =
        shared_->ops->last_error != nullptr ? shared_->ops->last_error(shared_->ops->context, lane_) : nullptr;
    const bool dead = shared_->ops->peer_state != nullptr && peer != shared_->rank &&
                      shared_->ops->peer_state(shared_->ops->context, peer) == UCCL_EP_PEER_DEAD;
    fail(Fault{peer, dead ? Reason::kDead : Reason::kTransport, 0, 0, 0,
               std::string(what) + " towards rank " + std::to_string(peer) + ": " +
                   std::strerror(static_cast<int>(-error)) + (words != nullptr && *words != 0 ? "; " : "") +
                   (words != nullptr ? words : "")});
}

// Everything a kernel could get wrong, before a byte moves. The rank at fault is this one.
bool Proxy::check(const Command &command, uint32_t *key) {
    const char *wrong = nullptr;
    if (command.operation != Operation::kWrite && command.operation != Operation::kWriteSignal) {
        wrong = "unknown operation";
    } else if (command.peer >= num_ranks_ || is_remote_[command.peer] == 0) {
        wrong = "no rank that is reached through the transport";
    } else if (command.bytes > kMaxWriteBytes) {
        wrong = "more than 16 MiB in one command";
    } else if (command.local_offset > data_bytes_ || command.bytes > data_bytes_ - command.local_offset) {
        wrong = "source outside the data window";
    } else if (command.remote_offset > data_bytes_ || command.bytes > data_bytes_ - command.remote_offset) {
        wrong = "target outside the data window";
    } else if (command.signal >= num_signals_) {
        wrong = "no such signal";
    } else if (names_[command.signal].writer != shared_->rank) {
        wrong = "a signal that another rank writes";
    } else if (alignment_ > 1 && (command.bytes % alignment_ | command.local_offset % alignment_ |
                                  command.remote_offset % alignment_) != 0) {
        wrong = "not aligned as the transport needs";
    } else {
        *key = command.peer * outbox_entries_ + names_[command.signal].entry;
        SenderSignal &signal = senders_[*key];
        uint8_t owner = signal.owner.load(std::memory_order_relaxed);
        if (owner == 0) {
            signal.owner.compare_exchange_strong(owner, static_cast<uint8_t>(lane_ + 1));
            owner = signal.owner.load(std::memory_order_relaxed);
        }
        if (owner != lane_ + 1) {
            wrong = "a signal that was sent on the rings of two proxies";
        } else if (signal.open ? command.value != signal.value : command.value <= signal.value) {
            wrong = "message out of sequence";
        } else {
            signal.value = command.value;
            signal.open = command.operation == Operation::kWrite;
            return true;
        }
    }
    refuse(command, wrong);
    return false;
}

[[gnu::cold, gnu::noinline]] void Proxy::refuse(const Command &command, const char *wrong) {
    fail(Fault{shared_->rank, Reason::kBadCommand, command.signal, shared_->data_bytes, command.remote_offset,
               std::string("command refused: ") + wrong + " (operation " +
                   std::to_string(static_cast<uint32_t>(command.operation)) + ", peer " + std::to_string(command.peer) +
                   ", " + std::to_string(command.bytes) + " bytes from " + std::to_string(command.local_offset) +
                   " to " + std::to_string(command.remote_offset) + " of windows of " +
                   std::to_string(shared_->data_bytes) + " bytes, signal " + std::to_string(command.signal) + " of " +
                   std::to_string(num_signals_) + ", value " + std::to_string(command.value) + ")"});
}

bool Proxy::under_caps(uint32_t peer, uint64_t bytes) const {
    if (!capped_) {
        return true;
    }
    // A write larger than a cap goes alone.
    const uint64_t of_peer = shared_->inflight_peer[peer].load(std::memory_order_relaxed);
    if (cap_peer_ != 0 && of_peer != 0 && of_peer + bytes > cap_peer_) {
        return false;
    }
    const uint64_t cap_nic = shared_->options.max_inflight_nic;
    const uint64_t of_nic = shared_->inflight_nic.load(std::memory_order_relaxed);
    return cap_nic == 0 || of_nic == 0 || of_nic + bytes <= cap_nic;
}

void Proxy::charge(uint32_t peer, uint64_t bytes, bool add) {
    if (capped_) {
        const uint64_t change = add ? bytes : uint64_t{0} - bytes;
        shared_->inflight_peer[peer].fetch_add(change, std::memory_order_relaxed);
        shared_->inflight_nic.fetch_add(change, std::memory_order_relaxed);
    }
}

void Proxy::seal() {
    if (have_open_) {
        have_open_ = false;
        tally_.writes += 1;
        tally_.bytes += open_.write->bytes;
        plan_->write(*open_.write, *open_.op);
    }
}

// Pop the next command. False: there is none, or it was refused.
inline bool Proxy::begin(RingReader &ring) {
    if (!ring.peek(&ring.current) || !check(ring.current, &ring.key)) {
        return false;
    }
    ring.begun = true;
    ring.done = 0;
    ring.begin();
    tally_.commands += 1;
    if (trace_ != nullptr) {
        ring.trace_pop(*trace_);
    }
    return true;
}

// Stage the next `piece` bytes of the ring's command as a write of their own.
inline bool Proxy::open(RingReader &ring, uint64_t piece, bool last) {
    const Command &command = ring.current;
    seal();
    if (!outbound_.room(2 * Plan::kOperationsPerCommand) || !under_caps(command.peer, piece) ||
        (windowed_ && !plan_->admit(command.peer, ring.key, command.value))) {
        return false;
    }
    const uint32_t ring_slot = static_cast<uint32_t>(&ring - rings_.data());
    if (piece == 0) {
        Op op;
        op.last = last;
        op.peer = command.peer;
        op.ring = ring_slot;
        op.signal = command.signal;
        op.key = ring.key;
        op.value = command.value;
        plan_->end(op);
        return true;
    }
    open_ = outbound_.stage();
    Op &op = *open_.op;
    op.last = last;
    op.peer = command.peer;
    op.ring = ring_slot;
    op.commands = 1;
    op.signal = command.signal;
    op.key = ring.key;
    op.first_ticket = ring.ticket();
    op.bytes = piece;
    op.value = command.value;
    uccl_ep_write &write = *open_.write;
    write.peer = command.peer;
    write.local_region = UCCL_EP_REGION_DATA;
    write.remote_region = UCCL_EP_REGION_DATA;
    write.local_offset = command.local_offset + ring.done;
    write.remote_offset = command.remote_offset + ring.done;
    write.bytes = piece;
    have_open_ = true;
    ring.add_write(ring.ticket());
    charge(command.peer, piece, true);
    if (ring.done != 0) {
        stats_.split.add(1);
    }
    return true;
}

// A command for a rank that is gone, where the group goes on without it: done, without a write.
bool Proxy::dropped(RingReader &ring) {
    if (!ring.begun) {
        if (!ring.peek(&ring.current) || !shared_->verdicts->gone(ring.current.peer)) {
            return false;
        }
        ring.begin();
    } else if (!shared_->verdicts->gone(ring.current.peer)) {
        return false;
    }
    ring.begun = false;
    ring.pop();
    return true;
}

bool Proxy::stage(RingReader &ring) {
    if (some_gone_ && dropped(ring)) {
        return true;
    }
    if (!ring.begun && !begin(ring)) {
        return false;
    }
    const Command &command = ring.current;
    const uint64_t piece = std::min(command.bytes - ring.done, max_write_);
    const bool ends_command = ring.done + piece == command.bytes;
    const bool last = ends_command && command.operation == Operation::kWriteSignal;
    const bool same_message =
        have_open_ && !open_.op->last && open_.op->key == ring.key && open_.op->value == command.value;

    if (same_message && piece == 0) {
        open_.op->last = last;
    } else if (piece == 0 && !last) {
        // A write of nothing that ends nothing.
    } else if (same_message && ring.done == 0 && &rings_[open_.op->ring] == &ring &&
               open_.op->first_ticket + open_.op->commands == ring.ticket() &&
               open_.write->local_offset + open_.write->bytes == command.local_offset &&
               open_.write->remote_offset + open_.write->bytes == command.remote_offset &&
               open_.write->bytes + piece <= max_write_ && under_caps(command.peer, piece)) {
        open_.write->bytes += piece;
        open_.op->bytes += piece;
        open_.op->commands += 1;
        open_.op->last = last;
        ring.add_write(ring.ticket());
        charge(command.peer, piece, true);
        tally_.merged += 1;
    } else if (!open(ring, piece, last)) {
        return false;
    }
    ring.done += piece;
    if (ends_command) {
        ring.begun = false;
        ring.pop();
    }
    return true;
}

uint64_t Proxy::drain(RingReader &ring) {
    uint64_t done = 0;
    while (done < batch_ && stage(ring)) {
        ++done;
    }
    if (trace_ != nullptr && ring.empty()) {
        ring.seen_empty();
    }
    looked_commands_ += done;
    if (ring.begun || done == batch_) {
        rings_with_more_ += 1;
    }
    return done;
}

uint64_t Proxy::poll_completions() {
    // Also with nothing posted: a transport may need the call to place what peers write here, or what
    // it has completed but not yet placed there (see transport.h).
    const int64_t count =
        shared_->ops->poll_completions(shared_->ops->context, lane_, completions_.data(), completions_.size());
    if (count < 0) {
        lane_broke(count, shared_->remote_peers.size() == 1 ? shared_->remote_peers[0] : shared_->rank,
                   "polling completions failed");
        return 0;
    }
    for (int64_t i = 0; i < count; ++i) {
        const uccl_ep_completion &completion = completions_[static_cast<uint64_t>(i)];
        const Op *op = outbound_.find(completion.token);
        if (op == nullptr) {
            fail(Fault{shared_->rank, Reason::kTransport, 0, 0, completion.token,
                       "the transport completed token " + std::to_string(completion.token) +
                           ", which was not posted or had completed before"});
            continue;
        }
        lane_down_ = lane_down_ || (completion.status != 0 && renewable_);
        // The peer is the record's: a transport need not know the one of a completion.
        if (completion.status != 0 && can_retry(op->peer)) {
            failed_.push_back({completion.token, op->peer, completion.status});
            again_.push_back(completion.token);
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
                lane_broke(completion.status, op->peer, "a write failed");
                broken_ = false;  // other peers of the lane may still take verdicts
            }
        } else {
            renewals_in_vain_ = 0;
            if (follows_completions_) {
                plan_->completed(*op);
            }
        }
        outbound_.release(completion.token);
    }
    stats_.completions.add(static_cast<uint64_t>(count));
    return static_cast<uint64_t>(count);
}

// An error of the lane, not of the peer: what failed may be posted again once nothing of it can land any more.
bool Proxy::can_retry(uint32_t peer) {
    if (!renewable_ || renewals_in_vain_ >= kMostRenewals || shared_->verdicts->aborted() ||
        shared_->verdicts->peer_closed(peer) || shared_->verdicts->gone(peer)) {
        return false;
    }
    return shared_->ops->peer_state == nullptr ||
           shared_->ops->peer_state(shared_->ops->context, peer) != UCCL_EP_PEER_DEAD;
}

// A new generation of the lane, when all that was posted under the old one has completed.
void Proxy::renew() {
    if (outbound_.posted() != failed_.size()) {
        return;
    }
    const uint64_t now = now_ns();
    if (renew_deadline_ns_ == 0) {
        renew_deadline_ns_ = now + static_cast<uint64_t>(shared_->options.timeout_s * 1e9);
    }
    const int64_t result = shared_->ops->renew_lane(shared_->ops->context, lane_);
    if (result > 0) {
        outbound_.repost(again_);
        lane_down_ = false;
        stats_.lane_generations.add(1);
        stats_.retried.add(failed_.size());
        ++renewals_in_vain_;
    } else if (result < 0 || now >= renew_deadline_ns_) {
        renewable_ = lane_down_ = false;
        if (!failed_.empty()) {
            lane_broke(failed_[0].status, failed_[0].peer, "a write failed, and its lane could not be renewed");
        }
    } else {
        return;
    }
    failed_.clear();
    again_.clear();
    renew_deadline_ns_ = 0;
}

bool Proxy::flush() {
    if (broken_ || lane_down_ || !outbound_.staged()) {
        return false;
    }
    const int64_t result = outbound_.flush();
    if (result < 0) {
        lane_broke(result, outbound_.next_peer(), "posting failed");
    }
    return true;
}

uint64_t Proxy::pass(bool look) {
    looked_commands_ = 0;
    rings_with_more_ = rings_.size();
    passes_.store(passes_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    inside_.store("poll_completions", std::memory_order_relaxed);
    uint64_t done = broken_ ? 0 : poll_completions();
    if (lane_down_ && !broken_) {
        inside_.store("renew_lane", std::memory_order_relaxed);
        renew();
    }
    const bool aborted = shared_->verdicts->aborted();
    bool news = done != 0;
    some_gone_ = shared_->verdicts->any_gone();
    if (!aborted && !broken_) {
        inside_.store("poll_arrivals", std::memory_order_relaxed);
        done += plan_->poll();
        news = done != 0;
        if (look && !outbound_.staged() && !lane_down_) {
            rings_with_more_ = 0;
            for (RingReader &ring : rings_) {
                done += drain(ring);
            }
            seal();
            stats_.commands.add(tally_.commands);
            stats_.writes.add(tally_.writes);
            stats_.merged.add(tally_.merged);
            stats_.bytes.add(tally_.bytes);
            tally_ = {};
        }
        if (const Fault *fault = plan_->fault()) {
            fail(*fault);
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
    if (broken_ || shared_->verdicts->aborted()) {
        if (aborted_at_ns_ == 0) {
            aborted_at_ns_ = now;
        }
        notices_.tick(now);
        flush();
        return broken_ || (notices_.told() && now - aborted_at_ns_ > 2 * kTickNs) ||
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

// Spin, then yield, then look away for at most 50 us, and that only when nothing is under way. Where threads outnumber
// cores, looks in vain take the core from the very threads that are waited for: a few, then away whatever is under way.
// A network moves on meanwhile, and the next look finds more at once.
void Proxy::back_off(uint64_t empty_passes) {
    const EngineOptions &options = shared_->options;
    const bool stopping = shared_->stop_requested.load(std::memory_order_relaxed);
    const bool idle = empty_passes >= uint64_t{options.spins} + options.yields && outbound_.outstanding() == 0;
    if (!stopping && (options.crowded ? empty_passes > kCrowdedPasses : idle)) {
        const timespec limit{0, static_cast<long>(kBackOffNs)};
        syscall(SYS_futex, reinterpret_cast<uint32_t *>(&shared_->wake), FUTEX_WAIT_PRIVATE, 0, &limit, nullptr, 0);
    } else if (empty_passes < options.spins) {
        cpu_pause();
    } else {
        sched_yield();
    }
}

void Proxy::run() {
    (void)prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
    const uint64_t idle_passes = shared_->options.crowded ? kCrowdedPasses : shared_->options.spins;
    uint64_t empty_passes = 0;
    uint64_t since_clock = 0;
    uint64_t now = now_ns();
    uint64_t busy_since = 0;
    for (;;) {
        // A stop asks whether the rings are empty, so they are looked at.
        const bool look = shared_->stop_requested.load(std::memory_order_relaxed) || !look_away_.away(now_ns);
        const uint64_t done = pass(look);
        stats_.passes.add(1);
        if (look) {
            const bool ahead = rings_with_more_ == 0;
            look_away_.looked(looked_commands_, ahead ? static_cast<uint32_t>(rings_.size()) : 0, now_ns);
        }
        if (done != 0 && busy_since == 0) {
            busy_since = now_ns();
        } else if (done == 0 && busy_since != 0) {
            now = now_ns();
            stats_.busy_ns.add(now > busy_since ? now - busy_since : 0);
            busy_since = 0;
        }
        empty_passes = done != 0 ? 0 : empty_passes + 1;
        if (++since_clock >= 64 || empty_passes > idle_passes) {
            since_clock = 0;
            now = now_ns();
            if (now - last_tick_ns_ >= kTickNs) {
                last_tick_ns_ = now;
                if (!broken_) {
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
        if (done == 0) {
            back_off(empty_passes);
        }
    }
}

}  // namespace uccl_ep
