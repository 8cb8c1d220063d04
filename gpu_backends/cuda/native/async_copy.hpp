// Copies through shared memory by asynchronous loads (compute capability 8.x): a lane has several
// 16-byte loads in flight without a register for each. A lane reads only what it fetched itself, so
// its own wait is all the order that is needed.
#pragma once

#include "staging.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

namespace uccl_ep::device::detail {

inline constexpr uint32_t kAsyncStages = 2;
inline constexpr uint32_t kAsyncDeepest = 8;     // 16-byte loads of a lane in one stage
inline constexpr uint64_t kAsyncLeast = 2048;    // bytes; below, ordinary loads do

struct alignas(16) Quad {
    uint32_t x, y, z, w;
};

__device__ __forceinline__ void begin_block() {}
__device__ __forceinline__ void drain() {}

__device__ __forceinline__ void fetch_quad(uint32_t stage, const uint8_t *source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(stage), "l"(__cvta_generic_to_global(source))
                 : "memory");
}

// The whole warp. Copies all but the last few bytes and returns how many; 0 where the addresses need
// ordinary loads.
__device__ __forceinline__ uint64_t staged_copy(uint8_t *destination, const uint8_t *source, uint64_t bytes) {
    const uint64_t addresses = reinterpret_cast<uint64_t>(destination) | reinterpret_cast<uint64_t>(source);
    if (bytes < kAsyncLeast || (addresses & 15) != 0 || !is_global(source)) return 0;
    const uint64_t whole = bytes & ~uint64_t{15};
    const uint32_t room = staging_bytes_of_warp() / (kAsyncStages * 32 * 16);
    const uint32_t depth = room < kAsyncDeepest ? room : kAsyncDeepest;
    uint8_t *stages = staging_of_warp() + lane() * 16;
    const uint64_t step = uint64_t{depth} * 32 * 16;
    const auto fetch_step = [&](uint64_t base, uint32_t parity) {
        for (uint32_t i = 0; i < depth; ++i) {
            const uint64_t at = base + (uint64_t{i} * 32 + lane()) * 16;
            if (at < whole) fetch_quad(shared_address(stages + (parity * depth + i) * 32 * 16), source + at);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    fetch_step(0, 0);
    uint32_t parity = 0;
    for (uint64_t base = 0; base < whole; base += step, parity ^= 1) {
        fetch_step(base + step, parity ^ 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        for (uint32_t i = 0; i < depth; ++i) {
            const uint64_t at = base + (uint64_t{i} * 32 + lane()) * 16;
            if (at < whole) {
                *reinterpret_cast<Quad *>(destination + at) =
                    *reinterpret_cast<const Quad *>(stages + (parity * depth + i) * 32 * 16);
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    return whole;
}

}  // namespace uccl_ep::device::detail

#endif
