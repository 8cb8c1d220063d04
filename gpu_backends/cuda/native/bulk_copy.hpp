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

#include "staging.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace uccl_ep::device::detail {

inline constexpr uint32_t kStages = 4;
inline constexpr uint64_t kBulkLeast = 512;  // bytes; below, ordinary loads have the data sooner

struct StagedPiece {
    uint64_t destination;
    uint64_t bytes;
};

// Lane 0 of the warp alone works with it.
struct alignas(128) WarpStages {
    uint64_t filled[kStages];     // mbarriers, one phase a fetch
    StagedPiece piece[kStages];   // what each stage holds, or will
    uint32_t fetched, stored;     // pieces, ever; those between the two are on their way into a stage
};
static_assert(sizeof(WarpStages) == 128, "stages behind it stay aligned");

__device__ __forceinline__ WarpStages *warp_stages() { return reinterpret_cast<WarpStages *>(staging_of_warp()); }

__device__ __forceinline__ uint32_t stage_bytes() {
    return (staging_bytes_of_warp() - static_cast<uint32_t>(sizeof(WarpStages))) / kStages / 128 * 128;
}

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

__device__ __forceinline__ void fence_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Wait until the engine has read the stages of all but the last kAllowed stores.
template <uint32_t kAllowed>
__device__ __forceinline__ void wait_stages_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
}

__device__ __forceinline__ void fetch(uint32_t stage, uint32_t barrier, const void *source, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Ends when the engine has delivered; it always does, or the launch ends with an address error.
__device__ __forceinline__ void wait_filled(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void store(void *destination, uint32_t stage, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(destination)),
        "r"(stage), "r"(bytes)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Lane 0: the oldest fetched piece goes on to its destination.
__device__ __forceinline__ void store_oldest(WarpStages *stages, uint32_t bytes_of_stage) {
    const uint32_t place = stages->stored % kStages;
    const StagedPiece piece = stages->piece[place];
    wait_filled(shared_address(&stages->filled[place]), stages->stored / kStages & 1);
    store(reinterpret_cast<void *>(piece.destination), shared_address(stages + 1) + place * bytes_of_stage,
          static_cast<uint32_t>(piece.bytes));
    ++stages->stored;
}

// Lane 0: fetch a piece; it is stored when a later piece needs the room, or by drain(). So copies that
// follow one another overlap, and a warp has three pieces on their way whatever the size of a row.
__device__ __forceinline__ void fetch_piece(WarpStages *stages, uint32_t bytes_of_stage, uint8_t *destination,
                                            const uint8_t *source, uint32_t bytes) {
    if (stages->fetched - stages->stored == kStages - 1) store_oldest(stages, bytes_of_stage);
    // The stage was last read by the store of piece fetched - kStages. Of the stores since, as many are
    // newer as there are stages neither on their way nor this one; other stores only add to the newer.
    switch (stages->fetched - stages->stored) {
        case 0:
            wait_stages_read<3>();
            break;
        case 1:
            wait_stages_read<2>();
            break;
        default:
            wait_stages_read<1>();
            break;
    }
    static_assert(kStages == 4, "the waits above are written out, since their count must be a constant");
    const uint32_t place = stages->fetched % kStages;
    stages->piece[place] = {reinterpret_cast<uint64_t>(destination), bytes};
    fetch(shared_address(stages + 1) + place * bytes_of_stage, shared_address(&stages->filled[place]), source, bytes);
    ++stages->fetched;
}

// Lane 0. Not inlined: sync_warp is everywhere, and seldom has anything to store.
static __device__ __noinline__ void store_all(WarpStages *stages) {
    const uint32_t bytes_of_stage = stage_bytes();
    while (stages->stored != stages->fetched) store_oldest(stages, bytes_of_stage);
}

// The whole warp: finish the copies of this warp. What they wrote is then visible to lane 0, and to the
// warp when it has met.
__device__ __forceinline__ void drain() {
    if (lane() == 0) {
        WarpStages *stages = warp_stages();
        if (stages->stored != stages->fetched) store_all(stages);
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
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
    fence_proxies();
    __syncwarp();
    if (lane() == 0) {
        if (from_shared) {
            store(destination, shared_address(source), static_cast<uint32_t>(whole));
        } else {
            WarpStages *stages = warp_stages();
            const uint32_t bytes_of_stage = stage_bytes();
            for (uint64_t at = 0; at < whole; at += bytes_of_stage) {
                const uint64_t rest = whole - at;
                fetch_piece(stages, bytes_of_stage, destination + at, source + at,
                            static_cast<uint32_t>(rest < bytes_of_stage ? rest : bytes_of_stage));
            }
        }
    }
    __syncwarp();
    return whole;
}

}  // namespace uccl_ep::device::detail

#endif
