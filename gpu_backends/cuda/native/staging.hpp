// Shared memory that copies pass through: the last part of each block's dynamic shared memory, a
// piece for each warp. The launch adds `kStagingBytes` to what the kernel asked for
// (uccl_ep_cuda/build.py has the same figures), so algorithms need not know of it.
#pragma once

#include "uccl_ep/integers.hpp"

namespace uccl_ep::device::detail {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
inline constexpr uint32_t kStagingBytes = 192 << 10;  // of 227 KiB that a block can have
#else
inline constexpr uint32_t kStagingBytes = 64 << 10;  // of 99 KiB on 8.6, 8.9 and 12.x, which run this code too
#endif

__device__ __forceinline__ uint32_t lane() {
    uint32_t value;
    asm("mov.u32 %0, %%laneid;" : "=r"(value));
    return value;
}
__device__ __forceinline__ uint32_t warp_in_block() { return threadIdx.x / 32; }
__device__ __forceinline__ uint32_t warps_per_block() { return blockDim.x / 32; }

__device__ __forceinline__ uint8_t *dynamic_shared() {
    extern __shared__ __align__(128) uint8_t uccl_ep_dynamic_shared[];
    return uccl_ep_dynamic_shared;
}

// A multiple of 128, so that the pieces stay aligned.
__device__ __forceinline__ uint32_t staging_bytes_of_warp() {
    const uint32_t warps = warps_per_block();
    const uint32_t sharers = warps <= 2 ? 2 : warps <= 4 ? 4 : warps <= 8 ? 8 : 12;
    return kStagingBytes / sharers / 128 * 128;
}

__device__ __forceinline__ uint8_t *staging_of_warp() {
    uint32_t total;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(total));
    return dynamic_shared() + (total - kStagingBytes) + warp_in_block() * staging_bytes_of_warp();
}

// ---- kinds of address ----
__device__ __forceinline__ bool is_global(const void *address) {
    uint32_t answer;
    asm("{ .reg .pred p; isspacep.global p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(answer) : "l"(address));
    return answer != 0;
}
__device__ __forceinline__ bool is_shared(const void *address) {
    uint32_t answer;
    asm("{ .reg .pred p; isspacep.shared p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(answer) : "l"(address));
    return answer != 0;
}
__device__ __forceinline__ uint32_t shared_address(const void *address) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

}  // namespace uccl_ep::device::detail
