// Copies by the bulk copy engine (compute capability 9.0 and later): lane 0 of a warp has pieces of
// the source fetched into stages of shared memory and stored from there, so a copy costs no registers
// and few instructions, and more bytes are in flight than loads of a warp could hold.
//
// The engine works through another memory proxy than ordinary loads and stores. What orders the two:
//   - before a copy, each lane fences, so that the engine reads what was written before;
//   - a stage is filled again only after the engine has read it (wait_group.read);
//   - `drain` waits until all stores are done, which makes them visible to this thread; a signal
//     released after that carries them. sync_warp drains, so a copy is complete where the contract
//     of copy() says so.
#pragma once

#include "staging.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace uccl_ep::device::detail {

inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kLookahead = kStages - 1;  // fetches in flight
inline constexpr uint64_t kBulkLeast = 512;          // bytes; below, ordinary loads have the data sooner

struct alignas(128) WarpStages {
    uint64_t filled[kStages];  // mbarriers, one phase a fetch
    uint32_t next;             // pieces fetched ever by this warp; lane 0 only
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
        stages->next = 0;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
}

// Wait until all stores of this thread are done. Immediate where there were none.
__device__ __forceinline__ void drain() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

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

// Lane 0: the whole pipeline of one copy. Addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy_pieces(uint8_t *destination, const uint8_t *source, uint64_t bytes) {
    WarpStages *stages = warp_stages();
    const uint32_t stage_0 = shared_address(stages + 1), filled_0 = shared_address(stages->filled);
    const uint32_t piece = stage_bytes();
    const uint32_t first = stages->next;
    const uint32_t count = static_cast<uint32_t>((bytes + piece - 1) / piece);
    const auto size_of = [&](uint32_t i) {
        const uint64_t rest = bytes - uint64_t{i} * piece;
        return static_cast<uint32_t>(rest < piece ? rest : piece);
    };
    const auto fetch_piece = [&](uint32_t i) {
        const uint32_t place = (first + i) % kStages;
        fetch(stage_0 + place * piece, filled_0 + place * 8, source + uint64_t{i} * piece, size_of(i));
    };
    // Stage of piece j was last read by the store of piece j - kStages. Stores committed so far are all
    // before `first`, so with piece i of this copy next, kStages - 1 - i of them are newer than that one.
    static_assert(kStages == 4, "the waits below are written out, since their count must be a constant");
    wait_stages_read<3>();
    fetch_piece(0);
    if (count > 1) {
        wait_stages_read<2>();
        fetch_piece(1);
    }
    if (count > 2) {
        wait_stages_read<1>();
        fetch_piece(2);
    }
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t place = (first + i) % kStages;
        wait_filled(filled_0 + place * 8, (first + i) / kStages & 1);
        store(destination + uint64_t{i} * piece, stage_0 + place * piece, size_of(i));
        if (i + kLookahead < count) {
            wait_stages_read<1>();  // all but the store above: piece i - 1 has left the stage that comes next
            fetch_piece(i + kLookahead);
        }
    }
    stages->next = first + count;
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
            bulk_copy_pieces(destination, source, whole);
        }
    }
    __syncwarp();
    return whole;
}

}  // namespace uccl_ep::device::detail

#endif
