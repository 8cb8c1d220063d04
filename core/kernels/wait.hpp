// Every wait of every kernel goes through here: it has a limit, ends when anybody failed, and can say
// what was waited for.
#pragma once

#include "counters.hpp"
#include "spans.hpp"

namespace uccl_ep {

// What a wait is for; goes into the verdict when it fails.
struct Awaited {
    Phase phase;
    uint32_t peer;
    uint32_t signal;
    uint64_t expected;
    bool can_leave_out = false;  // the operation goes on without a peer that is gone or late
};

UCCL_EP_DEVICE ControlHeader *control_header(const Group &group) {
    return reinterpret_cast<ControlHeader *>(group.control + Layout::header_offset());
}

// One thread records the first failure of this launch and ends all other waits of this rank.
UCCL_EP_DEVICE_SELDOM void fail(const Group &group, Reason reason, const Awaited &awaited, uint64_t seen,
                                uint64_t elapsed_ns) {
    KernelStatus *status = group.status;
    if (device::compare_exchange_system(&status->failed, 0, 1)) {
        status->verdict.culprit = awaited.peer;
        status->verdict.reason = static_cast<uint32_t>(reason);
        status->verdict.phase = static_cast<uint32_t>(awaited.phase);
        status->verdict.reporter = group.rank;
        status->verdict.signal = awaited.signal;
        status->verdict.expected = awaited.expected;
        status->verdict.seen = seen;
        status->verdict.operation = group.operation;
        status->verdict.elapsed_ns = elapsed_ns;
        device::store_release_system(&status->ready, 1);
    }
    device::store_release_system(&control_header(group)->aborted, 1);
    device::store_release_device(Counters::at(group, SingleCounter::kAborted), 1);
}

// Whether a kernel of this rank has seen a failure. The word that others set lies in host memory, where a
// thousand threads would wait for each other's reads; only long waits look at it, and copy it here.
UCCL_EP_DEVICE bool aborted(const Group &group) {
    return device::load_acquire_device(Counters::at(group, SingleCounter::kAborted)) != 0;
}

UCCL_EP_DEVICE bool aborted_by_others(const Group &group) {
    if (device::load_relaxed_system(&control_header(group)->aborted) == 0) return false;
    device::store_release_device(Counters::at(group, SingleCounter::kAborted), 1);
    return true;
}

// Called first by all threads of a kernel that goes by what an earlier one wrote: whether it may. A kernel that fails
// leaves counts and offsets unwritten, and the host, far ahead on its stream, has launched what reads them; this word is
// set before such a kernel ends. One answer for the whole block, whose warps meet at barriers.
UCCL_EP_DEVICE bool may_begin(const Group &group) {
    return device::sync_block_all(device::warp_in_block() != 0 || device::lane() != 0 || !aborted(group));
}

// Whether a rank was found gone where the group goes on without such (enable_shrink).
UCCL_EP_DEVICE bool is_gone(const Group &group, uint32_t peer) {
    if (device::load_relaxed_system(&control_header(group)->gone) == 0) return false;
    const auto *notice = reinterpret_cast<const PeerNotice *>(group.control + group.layout.notice_offset(peer));
    return device::load_relaxed_system(&notice->gone) != 0;
}

// The limit of one wait; used by one thread.
class WaitLimit {
  public:
    UCCL_EP_DEVICE WaitLimit(const Group &group, const Awaited &awaited) : group_(group), awaited_(awaited) {}
    UCCL_EP_DEVICE ~WaitLimit() {
        // After a failure it stands: whoever waited for this rank looks there for the culprit behind it.
        if (announced_) announce(ended_by_failure_ ? 1 + uint64_t{awaited_.peer} : 0);
        if (polls_ != 0) device::wait_ended();
    }

    // Called between looks at what is awaited, `seen` being the last; lets others run. False: somebody
    // failed, or the time is up (which is recorded).
    UCCL_EP_DEVICE bool keep_waiting(uint64_t seen) {
        device::relax();
        if (++polls_ % 16 != 0) return true;
        ended_by_failure_ = aborted(group_);
        if (ended_by_failure_) return false;
        const uint64_t now = device::now_ns();
        if (start_ == 0) start_ = now;
        const uint64_t elapsed = now - start_;
        // All blocks may wait here, and their reads of host memory would queue up for longer than most waits last.
        bool gone = false;
        if (elapsed >= next_look_) {
            next_look_ = elapsed + 1000000;
            ended_by_failure_ = aborted_by_others(group_);
            if (ended_by_failure_) return false;
            gone = is_gone(group_, awaited_.peer);
        }
        if (device::interrupted()) {
            fail(group_, Reason::kInterrupted, {awaited_.phase, group_.rank, awaited_.signal, awaited_.expected}, seen,
                 elapsed);
            return false;
        }
        if (gone || elapsed > limit_ns()) {
            if (!awaited_.can_leave_out) fail(group_, gone ? Reason::kDead : Reason::kTimeout, awaited_, seen, elapsed);
            return false;
        }
        // 1 ms: worth telling whoever waits for this rank; a wait for another of its warps tells them nothing.
        if (!announced_ && elapsed > 1000000 && awaited_.peer != group_.rank) {
            device::store_relaxed_system(&control_header(group_)->phase, static_cast<uint64_t>(awaited_.phase));
            announce(1 + uint64_t{awaited_.peer});
            announced_ = true;
        }
        return true;
    }

  private:
    // Other blocks of this launch are late by their own waits, which have limits: one for each rank and half, in turn,
    // and where ranks can be left out such a wait ends well when its time is up.
    UCCL_EP_DEVICE uint64_t limit_ns() const {
        return awaited_.phase == Phase::kNone ? group_.timeout_ns * (2 * group_.num_ranks() + 1) : group_.timeout_ns;
    }
    UCCL_EP_DEVICE void announce(uint64_t waiting_for) {
        device::store_relaxed_system(&control_header(group_)->waiting_for, waiting_for);
    }

    const Group &group_;
    Awaited awaited_;
    uint64_t start_ = 0;
    uint64_t next_look_ = 200000 + device::block_index() * 4000;  // ns, since the start, at the word that others set
    uint32_t polls_ = 0;
    bool announced_ = false, ended_by_failure_ = false;
};

// Wait until `read()` is at least `awaited.expected`; called by one thread. False: see keep_waiting.
template <class Read>
UCCL_EP_DEVICE bool wait_at_least(const Group &group, const Awaited &awaited, Read read) {
    uint64_t seen = read();
    if (seen >= awaited.expected) return true;
    WaitLimit limit(group, awaited);
    while (seen < awaited.expected) {
        if (!limit.keep_waiting(seen)) return false;
        seen = read();
    }
    return true;
}

UCCL_EP_DEVICE_SELDOM bool wait_for_word(const Group &group, const Awaited &awaited, const uint64_t *address) {
    return wait_at_least(group, awaited, [address] { return device::load_acquire_system(address); });
}

// The same of a word in device memory that another block of this rank stores.
UCCL_EP_DEVICE_SELDOM bool wait_for_own_word(const Group &group, const Awaited &awaited, const uint64_t *address) {
    return wait_at_least(group, awaited, [address] { return device::load_acquire_device(address); });
}

// The same of a word that others store, acquired. What is there already costs one look.
UCCL_EP_DEVICE bool wait_at_least(const Group &group, const Awaited &awaited, const uint64_t *address) {
    return device::load_acquire_system(address) >= awaited.expected || wait_for_word(group, awaited, address);
}

// Where a rank of my domain (or this one) keeps a signal that a rank of the domain raises.
UCCL_EP_DEVICE uint64_t *local_signal(const Group &group, uint32_t owner, uint32_t index) {
    return reinterpret_cast<uint64_t *>(group.peer_data[owner] + group.layout.local_signal_offset(index));
}

// Where a signal that `raiser` raises for me lies.
UCCL_EP_DEVICE const uint64_t *signal_address(const Group &group, uint32_t raiser, uint32_t signal) {
    return group.is_local(raiser)
               ? local_signal(group, group.rank, signal)
               : reinterpret_cast<const uint64_t *>(group.control + group.layout.signal_offset(signal));
}

// Wait for a signal that `awaited.peer` raises for me; called by one thread.
UCCL_EP_DEVICE bool wait_signal(const Group &group, const Awaited &awaited) {
    return wait_at_least(group, awaited, signal_address(group, awaited.peer, awaited.signal));
}

// The same where `masked` is given, the table of ranks that are left out: a peer that is gone or late is put into it,
// and true returned. All blocks of a launch take a message or leave it out alike: the first one decides, in a word
// that belongs to this half of the operation and this peer. One thread.
UCCL_EP_DEVICE bool wait_or_leave_out(const Group &group, Awaited awaited, int32_t *masked, LowLatencyHalf half,
                                      uint64_t number) {
    if (masked == nullptr) return wait_signal(group, awaited);
    awaited.can_leave_out = true;
    uint64_t *decision = Counters::decision(group, half, awaited.peer);
    for (;;) {
        const bool came = wait_signal(group, awaited);
        if (!came && aborted(group)) return false;
        bool taken = came;
        for (;;) {
            const uint64_t seen = device::load_acquire_device(decision);
            if (seen / 2 == number) {
                taken = seen % 2 != 0;
                break;
            }
            if (device::compare_exchange_system(decision, seen, number * 2 + (came ? 1 : 0))) break;
        }
        if (!taken) masked[awaited.peer] = 1;
        if (!taken || came) return true;
        // Another block has seen the message: so will this one.
    }
}

// wait_signal, called by a whole warp: every lane gets the answer, and sees what the signal promised.
UCCL_EP_DEVICE bool wait_signal_warp(const Group &group, const Awaited &awaited) {
    uint32_t ok = 1;
    if (device::lane() == 0) ok = wait_signal(group, awaited);
    ok = device::broadcast(ok);
    device::sync_warp();
    return ok != 0;
}

// A barrier of all threads of all blocks of this launch, which must all be running at once.
// False on every thread of a block that saw a failure.
UCCL_EP_DEVICE bool sync_grid(const Group &group) {
    const Span span(group, Activity::kMeetsBlocks);
    device::sync_block();
    const bool leader = device::warp_in_block() == 0 && device::lane() == 0;
    if (device::num_blocks() > 1 && leader) {
        uint64_t *arrived = Counters::at(group, SingleCounter::kGridArrived);
        uint64_t *round = Counters::at(group, SingleCounter::kGridRound);
        const uint64_t passed = device::load_acquire_device(round);  // before arriving: it cannot advance until then
        if (device::fetch_add_device(arrived, 1) + 1 == device::num_blocks()) {
            device::store_release_device(arrived, 0);
            device::store_release_device(round, passed + 1);
        } else {
            const Awaited awaited{Phase::kNone, group.rank, 0, passed + 1};
            wait_at_least(group, awaited, [round] { return device::load_acquire_device(round); });
        }
    }
    // One answer for the whole block: a thread that left alone would be missed at the next barrier.
    return device::sync_block_all(!leader || !aborted(group));
}

// Called once by every block when it has done its part: true, on all threads, for the last one, which then sees what
// all others wrote; a signal that it raises carries that to whoever waits.
UCCL_EP_DEVICE bool last_block(const Group &group) {
    const Span span(group, Activity::kMeetsBlocks);
    device::sync_block();
    bool last = true;
    if (device::warp_in_block() == 0 && device::lane() == 0) {
        uint64_t *done = Counters::at(group, SingleCounter::kBlocksDone);
        last = device::fetch_add_device(done, 1) + 1 == device::num_blocks();
        if (last) device::store_release_device(done, 0);
    }
    return device::sync_block_all(last);
}

}  // namespace uccl_ep
