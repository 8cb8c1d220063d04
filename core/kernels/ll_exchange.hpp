// What low-latency dispatch and combine have in common: how a message is completed, and how a sender waits until the one
// of two operations ago, whose place it takes, has been read.
#pragma once

#include "stream.hpp"

namespace uccl_ep {

// Complete a low-latency message to a peer and raise its signal to `number`. One thread.
UCCL_EP_DEVICE bool ll_send(const Group &group, uint32_t peer, SignalKind kind, uint64_t local_offset,
                            uint64_t remote_offset, uint64_t bytes, uint64_t number, Phase phase, uint64_t *ticket) {
    const uint32_t signal = group.layout.signal_index(kind, group.rank, 0);
    if (group.is_local(peer)) return raise_signal(group, peer, signal, number, phase);
    for (uint64_t sent = 0;;) {
        const uint64_t piece = bytes - sent < kMaxWriteBytes ? bytes - sent : kMaxWriteBytes;
        const bool last = sent + piece == bytes;
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

// Whether this block looks for itself at what `peer` says: what a transport brings lies in host memory, where the reads
// of all blocks would queue up, so that one block asks and the others wait for it at a barrier.
UCCL_EP_DEVICE bool looks_at(const Group &group, uint32_t peer) {
    return group.is_local(peer) || device::block_index() == 0;
}

// The barrier behind such looks; called by all blocks.
UCCL_EP_DEVICE bool all_have_looked(const Group &group, bool ok) {
    return group.layout.has_remote ? sync_grid(group) : device::sync_block_all(ok);
}

// Wait until the messages of two operations ago have been read, so that their places can be filled again: inboxes by
// the credits of the peers, outboxes by the completions of the transport. The whole block; false on failure.
UCCL_EP_DEVICE bool ll_wait_room(const Group &group, SignalKind credit, SignalKind data, uint64_t number,
                                 const uint64_t *tickets, Phase phase, int32_t *masked, LowLatencyHalf half) {
    const Layout &layout = group.layout;
    // After an earlier failure, what the kernels before should have left is not there.
    bool ok = device::warp_in_block() + 1 != device::warps_per_block() || device::lane() != 0 || !aborted(group);
    for (uint32_t peer = device::warp_in_block(); peer < group.num_ranks(); peer += device::warps_per_block()) {
        if (peer == group.rank || !looks_at(group, peer) || (masked != nullptr && masked[peer] != 0) ||
            device::lane() != 0)
            continue;
        if (number > 2) {
            ok = ok && wait_or_leave_out(group, {phase, peer, layout.signal_index(credit, peer, 0), number - 2}, masked,
                                         half, number);
        }
        if (!group.is_local(peer) && ok && tickets[peer] != 0) {
            ok = wait_completed(group, peer, layout.signal_index(data, group.rank, 0), tickets[peer] - 1, phase);
        }
    }
    return all_have_looked(group, ok);
}

}  // namespace uccl_ep
