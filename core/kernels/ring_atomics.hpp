// The ring algorithm's atomics, as primitives of the device; for the kernels, and for programs that time the channel
// without a group of ranks around it.
#pragma once

#include "uccl_ep/command.hpp"

namespace uccl_ep {

// What ring.hpp asks of `Atomics`.
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

}  // namespace uccl_ep
