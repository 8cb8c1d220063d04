// The device's end of the command channel.
#pragma once

#include "uccl_ep/ring.hpp"
#include "wait.hpp"

namespace uccl_ep {

// Device-side atomics for the ring algorithm of ring.hpp.
struct DeviceAtomics {
    UCCL_EP_DEVICE static uint64_t fetch_add_device(uint64_t *word, uint64_t n) {
        return device::fetch_add_relaxed_device(word, n);
    }
    UCCL_EP_DEVICE static uint64_t load_relaxed_device(const uint64_t *word) {
        return device::load_relaxed_system(word);
    }
    UCCL_EP_DEVICE static void store_release_device(uint64_t *word, uint64_t value) {
        device::store_release_device(word, value);
    }
    UCCL_EP_DEVICE static uint64_t load_acquire_system(const uint64_t *word) {
        return device::load_acquire_system(word);
    }
    UCCL_EP_DEVICE static void release_fence_system() { device::fence_system(); }
    UCCL_EP_DEVICE static void fence_system() { device::fence_system(); }
    UCCL_EP_DEVICE static void store_slot(PackedCommand *slot, const PackedCommand &packed) {
        device::store_command(slot->word, packed.word);
    }
};

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
