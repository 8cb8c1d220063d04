// The device's end of the command channel.
#pragma once

#include "ring_atomics.hpp"
#include "uccl_ep/ring.hpp"
#include "wait.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE const RingView &ring_of(const Group &group, uint32_t peer, uint32_t signal) {
    return group.rings[group.layout.ring_index(peer, signal, group.num_rings)];
}

// Push a command; called by one thread. The staged bytes it names were written by this thread, or by
// lanes of its warp before a sync_warp. False when the wait for room failed.
UCCL_EP_DEVICE bool push(const Group &group, const Command &command, Phase phase, uint64_t *ticket) {
    WaitLimit limit(group, {phase, command.peer, command.signal, command.value});
    const RingView &ring = ring_of(group, command.peer, command.signal);
    *ticket = ring_push<DeviceAtomics>(ring, command, [&limit] { return limit.keep_waiting(0); });
    return *ticket != kNoTicket;
}

// Wait until the local bytes of a pushed command may be reused; called by one thread.
UCCL_EP_DEVICE bool wait_completed(const Group &group, uint32_t peer, uint32_t signal, uint64_t ticket, Phase phase) {
    WaitLimit limit(group, {phase, peer, signal, ticket + 1});
    const RingView &ring = ring_of(group, peer, signal);
    return ring_wait_completed<DeviceAtomics>(ring, ticket, [&limit] { return limit.keep_waiting(0); });
}

}  // namespace uccl_ep
