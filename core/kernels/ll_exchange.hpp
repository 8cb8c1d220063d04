// What low-latency dispatch and combine have in common: how a message is completed, and how a sender waits until the one
// of two operations ago, whose place it takes, has been read.
#pragma once

#include "stream.hpp"

namespace uccl_ep {

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

// Complete part `part` of a low-latency message to a peer and raise its signal to `number`; a part may be empty. Where
// all blocks meet before they read (all_have_looked), my own message needs none. One thread.
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

// Whether this block looks for itself at what other ranks say. Where a transport is in play, signals lie in host memory,
// also those of this domain where the data window does: there the looks of all blocks at one word queue up for 3 us a
// block, so one block looks and the others wait for it at a barrier.
UCCL_EP_DEVICE bool looks(const Group &group) { return !group.layout.has_remote || device::block_index() == 0; }

// The barrier behind such looks; called by all blocks.
UCCL_EP_DEVICE bool all_have_looked(const Group &group, bool ok) {
    return group.layout.has_remote ? sync_grid(group) : device::sync_block_all(ok);
}

// Wait until all parts of a message have come, each lane for one; as wait_or_leave_out where `masked` is given. The
// whole warp gets the answer, and sees what the signals promised.
UCCL_EP_DEVICE bool ll_wait_message(const Group &group, const Awaited &first, int32_t *masked, LowLatencyHalf half) {
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

// Wait until the messages of two operations ago have been read, so that their places can be filled again: inboxes by
// the credits of the peers, outboxes by the completions of the transport. `tickets`: [peer][channel], 0: none. All words
// are looked at together, a lane each. The whole block; false on failure.
UCCL_EP_DEVICE bool ll_wait_room(const Group &group, SignalKind credit, SignalKind data, uint64_t number,
                                 const uint64_t *tickets, Phase phase, int32_t *masked, LowLatencyHalf half) {
    const Layout &layout = group.layout;
    // After an earlier failure, what the kernels before should have left is not there.
    bool ok = device::warp_in_block() + 1 != device::warps_per_block() || device::lane() != 0 || !aborted(group);
    for (uint32_t peer = device::warp_in_block(); peer < group.num_ranks(); peer += device::warps_per_block()) {
        if (peer == group.rank || !looks(group) || (masked != nullptr && masked[peer] != 0)) continue;
        const uint32_t credit_signal = layout.signal_index(credit, peer, 0);
        const uint32_t words = group.is_local(peer) ? 1 : 1 + layout.ll_parts;
        for (uint32_t word = device::lane(); word < words && ok; word += device::kWarpSize) {
            if (word == 0 && masked != nullptr) {
                ok = number <= 2 ||
                     wait_or_leave_out(group, {phase, peer, credit_signal, number - 2}, masked, half, number);
                continue;
            }
            const uint64_t *address = word == 0 ? signal_address(group, peer, credit_signal) : nullptr;
            Awaited awaited{phase, peer, credit_signal, number > 2 ? number - 2 : 0};
            if (word != 0) {
                awaited.signal = layout.signal_index(data, group.rank, word - 1);
                awaited.expected = tickets[peer * layout.num_channels + word - 1];
                address = ring_of(group, peer, awaited.signal).completed;
            }
            ok = awaited.expected == 0 || wait_at_least(group, awaited, address);
        }
    }
    return all_have_looked(group, ok);
}

}  // namespace uccl_ep
