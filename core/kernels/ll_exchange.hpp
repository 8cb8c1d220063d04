// What packed low-latency dispatch and combine have in common: how a message is completed and pushed, and how the blocks
// of a launch learn that all messages have come.
#pragma once

#include "stream.hpp"

namespace uccl_ep {

// The two packed operations: what each raises, counts, and waits for.
struct PackedDispatch {
    static constexpr SignalKind kRows = SignalKind::kLowLatencyDispatch;
    static constexpr SignalKind kCredit = SignalKind::kLowLatencyDispatchCredit;
    static constexpr Phase kSend = Phase::kLowLatencyDispatchSend, kReceive = Phase::kLowLatencyDispatchReceive;
    static constexpr LowLatencyHalf kSent = LowLatencyHalf::kDispatchSend;
    static constexpr LowLatencyHalf kReceived = LowLatencyHalf::kDispatchReceive;
    static constexpr SingleCounter kRoom = SingleCounter::kLowLatencyDispatchRoom;
    static constexpr SingleCounter kTold = SingleCounter::kLowLatencyDispatchTold;
    static constexpr SingleCounter kWritten = SingleCounter::kLowLatencyDispatchWritten;
    static constexpr SingleCounter kArrived = SingleCounter::kLowLatencyDispatchArrived;
    UCCL_EP_DEVICE static uint64_t *ticket(const Group &group, uint64_t number, uint32_t peer, uint32_t part) {
        return Counters::ticket(group, static_cast<uint32_t>(number & 1), peer, part);
    }
};
struct PackedCombine {
    static constexpr SignalKind kRows = SignalKind::kLowLatencyCombine;
    static constexpr SignalKind kCredit = SignalKind::kLowLatencyCombineCredit;
    static constexpr Phase kSend = Phase::kLowLatencyCombineSend, kReceive = Phase::kLowLatencyCombineReceive;
    static constexpr LowLatencyHalf kSent = LowLatencyHalf::kCombineSend;
    static constexpr LowLatencyHalf kReceived = LowLatencyHalf::kCombineReceive;
    static constexpr SingleCounter kRoom = SingleCounter::kLowLatencyCombineRoom;
    static constexpr SingleCounter kTold = SingleCounter::kLowLatencyCombineTold;
    static constexpr SingleCounter kWritten = SingleCounter::kLowLatencyCombineWritten;
    static constexpr SingleCounter kArrived = SingleCounter::kLowLatencyCombineArrived;
    UCCL_EP_DEVICE static uint64_t *ticket(const Group &group, uint64_t number, uint32_t peer, uint32_t part) {
        return Counters::combine_ticket(group, static_cast<uint32_t>(number & 1), peer, part);
    }
};

// Operations of the packed path that this rank has done, by this block's own count: all blocks count alike, and none
// has to wait until the others have read a common one.
UCCL_EP_DEVICE uint64_t ll_done(const Group &group, LowLatencyHalf half) {
    return *Counters::packed(group, half, device::block_index());
}

// Where my low-latency dispatch message to myself is written and read: device memory, also where the inboxes lie in host
// memory, for a transport.
UCCL_EP_DEVICE uint8_t *ll_own_message(const Group &group, uint32_t parity) {
    return group.own_messages != nullptr ? group.own_messages + parity * group.layout.ll_dispatch_bytes
                                         : group.data + group.layout.ll_dispatch_inbox(parity, group.rank);
}

// Into how many parts a message to or from a peer is divided. A thread of the host copies a fifth of what a bus brings
// meanwhile, so each part goes through the ring of another proxy and raises a signal of its own: that of the channel of
// the same number.
UCCL_EP_DEVICE uint32_t ll_parts(const Group &group, uint32_t peer) {
    return group.is_local(peer) ? 1 : group.layout.ll_parts;
}

inline constexpr uint64_t kLeastPart = 2048;  // bytes; below, another proxy costs more than its copying saves

// Complete part `part` of a low-latency message to a peer and raise its signal to `number`; a part may be empty. Where a
// transport is in play, my own message needs none: ll_send_all says that it is written. One thread.
UCCL_EP_DEVICE bool ll_send(const Group &group, uint32_t peer, uint32_t part, SignalKind kind, uint64_t local_offset,
                            uint64_t remote_offset, uint64_t bytes, uint64_t number, Phase phase, uint64_t *ticket) {
    if (peer == group.rank && group.layout.has_remote) return true;
    const uint32_t signal = group.layout.signal_index(kind, group.rank, part);
    if (group.is_local(peer)) return raise_signal(group, peer, signal, number, phase);
    const uint64_t even = (bytes + group.layout.ll_parts - 1) / group.layout.ll_parts;
    const uint64_t part_bytes = align_up(even < kLeastPart ? kLeastPart : even, kCacheLine);
    const uint64_t begin = part * part_bytes < bytes ? part * part_bytes : bytes;
    const uint64_t end = begin + part_bytes < bytes ? begin + part_bytes : bytes;
    for (uint64_t sent = begin;;) {
        const uint64_t piece = end - sent < kMaxWriteBytes ? end - sent : kMaxWriteBytes;
        const bool last = sent + piece == end;
        const Command command{last ? Operation::kWriteSignal : Operation::kWrite,
                              peer,
                              signal,
                              piece,
                              local_offset + sent,
                              remote_offset + sent,
                              number};
        if (!push(group, command, phase, ticket)) return false;
        sent += piece;
        if (last) return true;
    }
}

// A message to a peer, as offsets into the windows: where it was written, in the outbox, and where it goes.
struct LowLatencyMessage {
    uint64_t local_offset, remote_offset, bytes;
};

// Complete the messages to all ranks; `message(rank)` says where each lies. The whole block, the last of those that have
// written them (ll_all_written); `rank`s left out get none.
template <class Op, class Message>
UCCL_EP_DEVICE void ll_send_all(const Group &group, uint64_t number, const int32_t *masked, Message message) {
    const Layout &layout = group.layout;
    const Span span(group, Activity::kHandsOver);
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    for (uint32_t i = thread; i < group.num_ranks() * layout.ll_parts; i += threads) {
        const uint32_t rank = (group.rank + i / layout.ll_parts) % group.num_ranks(), part = i % layout.ll_parts;
        if ((masked != nullptr && masked[rank] != 0) || part >= ll_parts(group, rank)) continue;
        const LowLatencyMessage at = message(rank);
        uint64_t ticket = 0;
        ll_send(group, rank, part, Op::kRows, at.local_offset, at.remote_offset, at.bytes, number, Op::kSend, &ticket);
        if (!group.is_local(rank)) *Op::ticket(group, number, rank, part) = ticket + 1;
    }
    // For the blocks that go on to receive in this launch; by the thread that is the last to get anything to push.
    if (thread == threads - 1) device::store_release_device(Counters::at(group, Op::kWritten), number);
}

// Called by each of the first `writers` blocks, and no other, when it has written its rows, or could not (`ok`, equal on
// all of its threads): true, on all threads of the last one, where all could. It then sees what all have written, so the
// signals that it raises carry that. A lone writer needs no count and no fence beside that of its push.
UCCL_EP_DEVICE bool ll_all_written(const Group &group, uint32_t writers, bool ok) {
    constexpr uint64_t kCouldNot = uint64_t{1} << 32;  // added to the count: so a failure needs no look at another word
    const Span span(group, Activity::kMeetsBlocks);
    device::sync_block();
    if (writers == 1) return ok;
    bool all = true;
    if (device::warp_in_block() == 0 && device::lane() == 0) {
        uint64_t *written = Counters::at(group, SingleCounter::kBlocksWritten);
        const uint64_t before = device::fetch_add_device(written, ok ? 1 : 1 + kCouldNot);
        const bool last = before % kCouldNot + 1 == writers;
        if (last) device::store_release_device(written, 0);  // for the next launch
        all = last && ok && before < kCouldNot;
    }
    return device::sync_block_all(all);
}

// Whether this block looks for itself at what other ranks say. Where a transport is in play, signals lie in host memory,
// also those of this domain where the data window does: there the looks of all blocks at one word queue up for 3 us a
// block, so one block looks and tells the others in device memory.
UCCL_EP_DEVICE bool looks(const Group &group) { return !group.layout.has_remote || device::block_index() == 0; }

// Wait for a word of this rank's own device memory, which one of its blocks raises; one thread, for a block. That block
// is late by waits of its own, which have limits.
UCCL_EP_DEVICE bool ll_wait_own(const Group &group, SingleCounter counter, uint64_t number) {
    const uint64_t *word = Counters::at(group, counter);
    return device::load_acquire_device(word) >= number ||
           wait_for_own_word(group, {Phase::kNone, group.rank, 0, number}, word);
}

// Wait until all parts of a message have come, each lane for one; as wait_or_leave_out where `masked` is given. The
// whole warp gets the answer, and sees what the signals promised.
UCCL_EP_DEVICE bool ll_wait_message(const Group &group, const Awaited &first, int32_t *masked, LowLatencyHalf half) {
    const Span span(group, Activity::kWaitsForRows, device::lane() == 0, first.peer);
    const uint32_t parts = ll_parts(group, first.peer);
    bool ok = true;
    if (parts == 1) {
        if (device::lane() == 0) ok = wait_or_leave_out(group, first, masked, half, first.expected);
    } else {
        for (uint32_t part = device::lane(); part < parts; part += device::kWarpSize) {
            ok = ok &&
                 wait_signal(group, {first.phase, first.peer, first.signal + part, first.expected, masked != nullptr});
        }
        // Only this block looks, so no other one has to decide alike.
        if (masked != nullptr && device::ballot(!ok) != 0) {
            ok = !aborted(group);
            if (ok && device::lane() == 0) masked[first.peer] = 1;
        }
    }
    ok = device::ballot(!ok) == 0;
    device::sync_warp();
    return ok;
}

// Wait until the messages of all ranks have come. `came(source)` is called by a whole warp for each that this block
// looks at, also where that was left out meanwhile, and says whether to go on. The whole grid; false on failure.
//
// Where block 0 looks for all, its threads acquire what the signals promise, it meets, and one thread releases a word in
// device memory that a thread of each other block acquires before that one meets: what any thread of block 0 saw, all
// threads of all blocks see. My own message is part of that: block 0 has acquired that its writers are done.
template <class Op, class Came>
UCCL_EP_DEVICE bool ll_wait_all(const Group &group, uint64_t number, int32_t *masked, int64_t *wait_cost, Came came) {
    const Layout &layout = group.layout;
    const uint32_t ranks = group.num_ranks();
    const bool leader = device::warp_in_block() == 0 && device::lane() == 0;
    if (!looks(group)) {
        const Span span(group, Activity::kMeetsBlocks);
        return device::sync_block_all(!leader || ll_wait_own(group, Op::kArrived, number));
    }
    bool ok = true;
    for (uint32_t i = device::warp_in_block(); i < ranks; i += device::warps_per_block()) {
        const uint32_t source = (group.rank + i) % ranks;
        if (source == group.rank && layout.has_remote) {
            if (device::lane() == 0) ok = ok && ll_wait_own(group, Op::kWritten, number);
            ok = device::ballot(!ok) == 0;
            continue;
        }
        if (masked != nullptr && masked[source] != 0) continue;
        const bool timed =
            wait_cost != nullptr && device::block_index() == 0 && device::lane() == 0 && source != group.rank;
        const uint64_t start = timed ? device::now_ns() : 0;
        const uint32_t signal = layout.signal_index(Op::kRows, source, 0);
        ok = ok && ll_wait_message(group, {Op::kReceive, source, signal, number}, masked, Op::kReceived);
        if (timed) wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
        ok = ok && came(source);
    }
    ok = device::sync_block_all(ok);
    if (ok && leader && layout.has_remote) device::store_release_device(Counters::at(group, Op::kArrived), number);
    return ok;
}

}  // namespace uccl_ep
