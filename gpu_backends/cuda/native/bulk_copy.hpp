// Copies by the bulk copy engine (compute capability 9.0 and later): lane 0 of a warp has pieces of
// the source fetched into stages of shared memory and stored from there, so a copy costs no registers
// and few instructions, and more bytes are in flight than loads of a warp could hold.
//
// The engine works through another memory proxy than ordinary loads and stores. What orders the two:
//   - before a copy, each lane fences, so that the engine reads what was written before;
//   - a stage is filled again only after the engine has read it (wait_group.read);
//   - `drain` waits until all stores are done, which makes them visible to this thread; a signal
//     released after that carries them. sync_warp drains, so a copy is complete where the contract
//     of copy() says so, and until then its source must stay as it is.
#pragma once

#include "stage_pipeline.hpp"
#include "staging.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace uccl_ep::device::detail {

inline constexpr uint64_t kBulkLeast = 4096;  // bytes; below, ordinary loads have the data sooner

__device__ __forceinline__ WarpStages *warp_stages() { return reinterpret_cast<WarpStages *>(staging_of_warp()); }

__device__ __forceinline__ uint32_t stage_bytes() {
    return (staging_bytes_of_warp() - static_cast<uint32_t>(sizeof(WarpStages))) / kStages / 128 * 128;
}

// The engine that stage_pipeline.hpp drives, by lane 0.
struct BulkEngine {
    // Wait until the stages of all but the last kAllowed stores have been read.
    template <uint32_t kAllowed>
    __device__ __forceinline__ static void wait_stages_read() {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
    }

    __device__ __forceinline__ static void fetch(void *stage, uint64_t *filled, const void *source, uint32_t bytes) {
        const uint32_t barrier = shared_address(filled);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(stage)),
                     "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                     : "memory");
    }

    // Ends when the engine has delivered; it always does, or the launch ends with an address error.
    __device__ __forceinline__ static void wait_filled(uint64_t *filled, uint32_t phase) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}" ::"r"(shared_address(filled)),
            "r"(phase)
            : "memory");
    }

    __device__ __forceinline__ static void store(void *destination, const void *stage, uint32_t bytes) {
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(destination)),
            "r"(shared_address(stage)), "r"(bytes)
            : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ static void wait_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
};

__device__ __forceinline__ void begin_block() {
    if (lane() == 0) {
        WarpStages *stages = warp_stages();
        for (uint32_t i = 0; i < kStages; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&stages->filled[i])) : "memory");
        }
        stages->fetched = stages->stored = 0;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
}

// Lane 0. Not inlined: sync_warp is everywhere, and seldom has anything to store.
static __device__ __noinline__ void store_all(WarpStages *stages) { store_fetched<BulkEngine>(stages, stage_bytes()); }

// The whole warp: finish the copies of this warp. What they wrote is then visible to lane 0, and to the
// warp when it has met.
__device__ __forceinline__ void drain() {
    if (lane() == 0) {
        WarpStages *stages = warp_stages();
        if (stages->stored != stages->fetched) store_all(stages);
        BulkEngine::wait_stored();
    }
}

// The whole warp. Copies all but the last few bytes and returns how many; 0 where the addresses need
// ordinary loads.
__device__ __forceinline__ uint64_t staged_copy(uint8_t *destination, const uint8_t *source, uint64_t bytes) {
    const uint64_t addresses = reinterpret_cast<uint64_t>(destination) | reinterpret_cast<uint64_t>(source);
    if (bytes < kBulkLeast || (addresses & 15) != 0 || !is_global(destination)) return 0;
    const bool from_shared = is_shared(source);
    if (!from_shared && !is_global(source)) return 0;
    const uint64_t whole = bytes & ~uint64_t{15};
    // Each of the memory of its own: the fence of all memory also waits until what this warp stored is out there.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    if (from_shared) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane() == 0) {
        if (from_shared) {
            BulkEngine::store(destination, source, static_cast<uint32_t>(whole));
        } else {
            fetch_row<BulkEngine>(warp_stages(), stage_bytes(), destination, source, whole);
        }
    }
    __syncwarp();
    return whole;
}

}  // namespace uccl_ep::device::detail

#endif
