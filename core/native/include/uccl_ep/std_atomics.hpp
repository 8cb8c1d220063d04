// The atomics policy of ring.hpp on the CPU: every scope is the machine.
#pragma once

#include <atomic>

#include "uccl_ep/command.hpp"

// ThreadSanitizer does not understand fences; there the words themselves carry the order.
#if defined(__SANITIZE_THREAD__)
#define UCCL_EP_ORDER_IN_WORDS 1
#else
#define UCCL_EP_ORDER_IN_WORDS 0
#endif

namespace uccl_ep {

struct StdAtomics {
    static uint64_t fetch_add_device(uint64_t *word, uint64_t n) {
        return std::atomic_ref<uint64_t>(*word).fetch_add(n, std::memory_order_relaxed);
    }
    static uint64_t load_relaxed_device(const uint64_t *word) { return load_relaxed_system(word); }
    static uint64_t load_acquire_device(const uint64_t *word) { return load(word, std::memory_order_acquire); }
    static void store_release_device(uint64_t *word, uint64_t value) { store(word, value, std::memory_order_release); }
    static uint64_t load_acquire_system(const uint64_t *word) { return load(word, std::memory_order_acquire); }
    static void store_release_system(uint64_t *word, uint64_t value) { store(word, value, std::memory_order_release); }
    static uint64_t load_relaxed_system(const uint64_t *word) {
        return load(word, UCCL_EP_ORDER_IN_WORDS ? std::memory_order_acquire : std::memory_order_relaxed);
    }
    static void store_relaxed_system(uint64_t *word, uint64_t value) {
        store(word, value, UCCL_EP_ORDER_IN_WORDS ? std::memory_order_release : std::memory_order_relaxed);
    }
    static void acquire_fence_system() {
#if !UCCL_EP_ORDER_IN_WORDS
        std::atomic_thread_fence(std::memory_order_acquire);
#endif
    }
    static void release_fence_system() {
#if !UCCL_EP_ORDER_IN_WORDS
        std::atomic_thread_fence(std::memory_order_release);
#endif
    }
    static void fence_system() {
#if !UCCL_EP_ORDER_IN_WORDS
        std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
    }
    static void store_slot(PackedCommand *slot, const PackedCommand &packed) {
        for (int i = 0; i < 4; ++i) {
            store_relaxed_system(&slot->word[i], packed.word[i]);
        }
    }

  private:
    static uint64_t load(const uint64_t *word, std::memory_order order) {
        return std::atomic_ref<uint64_t>(*const_cast<uint64_t *>(word)).load(order);
    }
    static void store(uint64_t *word, uint64_t value, std::memory_order order) {
        std::atomic_ref<uint64_t>(*word).store(value, order);
    }
};

}  // namespace uccl_ep
