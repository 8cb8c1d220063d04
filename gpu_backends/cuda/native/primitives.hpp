// The device primitives of the CUDA backend, for compute capability 8.0 and later. Names and meanings
// are those of every backend (gpu_backends/host/native/primitives.hpp states them); what is said here
// is how this one gives them. Compiler built-ins and inline PTX only: NVRTC has no header to include.
#pragma once

// Most threads of a block: leaves each 168 registers, which the largest kernel needs (make kernels).
// uccl_ep_cuda/build.py has the same figure.
#define UCCL_EP_MAX_THREADS 384

#define UCCL_EP_DEVICE __device__ __forceinline__
// What is seldom called stays out of line, and out of the way of the instructions that always run.
#define UCCL_EP_DEVICE_SELDOM static __device__ __noinline__
#define UCCL_EP_UNROLL _Pragma("unroll")
// An entry point: the parameter struct stays in constant memory, and a block sets up its staging first
// and leaves nothing in flight, whichever way the body returns.
#define UCCL_EP_KERNEL(name, Parameters)                                              \
    static __device__ __forceinline__ void name##_body(const Parameters &parameters); \
    extern "C" __global__ void __launch_bounds__(UCCL_EP_MAX_THREADS, 1)              \
        name(const __grid_constant__ Parameters parameters) {                         \
        ::uccl_ep::device::detail::begin_block();                                     \
        name##_body(parameters);                                                      \
        ::uccl_ep::device::detail::drain();                                           \
    }                                                                                 \
    static __device__ __forceinline__ void name##_body(const Parameters &parameters)

#include "uccl_ep/integers.hpp"

#include "async_copy.hpp"
#include "bulk_copy.hpp"
#include "staging.hpp"
#include "vector_copy.hpp"

// Rows on their way at once in core/kernels/partial_sums.hpp: the code of 10.x needs the registers of a third.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define UCCL_EP_DEVICE_ROWS_AT_ONCE 2
#endif

// How core/kernels/sums.hpp sums.
#define UCCL_EP_DEVICE_RUN ::uccl_ep::device::LongRun
#define UCCL_EP_DEVICE_MIDDLE_RUN ::uccl_ep::device::MiddleRun
#define UCCL_EP_DEVICE_SHORT_RUN ::uccl_ep::device::ShortRun
#define UCCL_EP_DEVICE_PIECE_RUN ::uccl_ep::device::PieceRun

// nvcc parses this once for the CPU side, where there is no architecture and nothing is called.
#ifndef __CUDA_ARCH__
namespace uccl_ep::device::detail {
__device__ void begin_block();
__device__ void drain();
__device__ uint64_t staged_copy(uint8_t *destination, const uint8_t *source, uint64_t bytes);
}  // namespace uccl_ep::device::detail
#endif

namespace uccl_ep::device {

inline constexpr uint32_t kWarpSize = 32;
using LaneMask = uint64_t;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// ---- where am I ----
UCCL_EP_DEVICE uint32_t lane() { return detail::lane(); }
UCCL_EP_DEVICE uint32_t warp_in_block() { return detail::warp_in_block(); }
UCCL_EP_DEVICE uint32_t warps_per_block() { return detail::warps_per_block(); }
UCCL_EP_DEVICE uint32_t block_index() { return blockIdx.x; }
UCCL_EP_DEVICE uint32_t num_blocks() { return gridDim.x; }

UCCL_EP_DEVICE uint8_t *shared_memory() { return detail::dynamic_shared(); }

// ---- convergence. Copies of this warp are complete when it returns ----
UCCL_EP_DEVICE void sync_warp() {
    detail::drain();
    __syncwarp();
}
// The same where no copy is under way: only the lanes meet.
UCCL_EP_DEVICE void sync_lanes() { __syncwarp(); }
UCCL_EP_DEVICE void sync_block() {
    detail::drain();
    __syncthreads();
}

// Whether all threads of the block say so.
UCCL_EP_DEVICE bool sync_block_all(bool predicate) {
    detail::drain();
    return __syncthreads_and(predicate) != 0;
}

// By one of the barriers that a block has besides its own, which is number 0; the last is that of sync_block_for.
inline constexpr bool kPartsMeet = true;
static_assert(UCCL_EP_MAX_THREADS / kWarpSize < 15, "a barrier for whichever warp is the first");
UCCL_EP_DEVICE void sync_block_for(bool waits) {
    detail::drain();
    __syncwarp();
    if (waits) {
        asm volatile("barrier.cta.sync.aligned 15, %0;" ::"r"(blockDim.x) : "memory");
    } else {
        __threadfence_block();
        asm volatile("barrier.cta.arrive.aligned 15, %0;" ::"r"(blockDim.x) : "memory");
    }
}
UCCL_EP_DEVICE void sync_warps(uint32_t first, uint32_t count) {
    detail::drain();
    __syncwarp();
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(1 + first), "r"(count * kWarpSize) : "memory");
}
UCCL_EP_DEVICE bool sync_warps_all(uint32_t first, uint32_t count, bool predicate) {
    detail::drain();
    __syncwarp();
    uint32_t all;
    asm volatile(
        "{\n"
        ".reg .pred mine, all;\n"
        "setp.ne.u32 mine, %3, 0;\n"
        "barrier.cta.red.and.pred.aligned all, %1, %2, mine;\n"
        "selp.u32 %0, 1, 0, all;\n"
        "}"
        : "=r"(all)
        : "r"(1 + first), "r"(count * kWarpSize), "r"(static_cast<uint32_t>(predicate))
        : "memory");
    return all != 0;
}

// ---- warp collectives ----
UCCL_EP_DEVICE LaneMask ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }

template <class T>
UCCL_EP_DEVICE T broadcast(T value, uint32_t source = 0) {
    static_assert(sizeof(T) <= 8, "two shuffles carry 64 bits");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    uint32_t low = static_cast<uint32_t>(bits), high = static_cast<uint32_t>(bits >> 32);
    low = __shfl_sync(kAllLanes, low, source);
    if constexpr (sizeof(T) > 4) high = __shfl_sync(kAllLanes, high, source);
    bits = (uint64_t{high} << 32) | low;
    T result;
    memcpy(&result, &bits, sizeof(T));
    return result;
}

UCCL_EP_DEVICE LaneMask match(uint32_t value) { return __match_any_sync(kAllLanes, value); }

UCCL_EP_DEVICE uint32_t reduce_max(uint32_t value) { return __reduce_max_sync(kAllLanes, value); }
UCCL_EP_DEVICE uint32_t reduce_sum(uint32_t value) { return __reduce_add_sync(kAllLanes, value); }

UCCL_EP_DEVICE uint32_t population_count(LaneMask mask) { return __popcll(mask); }
UCCL_EP_DEVICE uint32_t lowest_bit(LaneMask mask) { return __ffsll(static_cast<long long>(mask)) - 1; }
UCCL_EP_DEVICE LaneMask lanes_below() {
    uint32_t mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

// ---- memory order ----
UCCL_EP_DEVICE uint64_t load_acquire_system(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
UCCL_EP_DEVICE uint64_t load_relaxed_system(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
UCCL_EP_DEVICE void store_release_system(uint64_t *address, uint64_t value) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
UCCL_EP_DEVICE void store_relaxed_system(uint64_t *address, uint64_t value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
UCCL_EP_DEVICE uint64_t load_acquire_device(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
UCCL_EP_DEVICE void store_release_device(uint64_t *address, uint64_t value) {
    asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
UCCL_EP_DEVICE uint64_t fetch_add_device(uint64_t *address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.add.acq_rel.gpu.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}
UCCL_EP_DEVICE uint64_t fetch_add_relaxed_device(uint64_t *address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.add.relaxed.gpu.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}
UCCL_EP_DEVICE void add_device(int32_t *address, int32_t value) {
    asm volatile("red.add.relaxed.gpu.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Also on pinned host memory: it is atomic among GPUs, and no CPU writes such a word while kernels run.
UCCL_EP_DEVICE bool compare_exchange_system(uint64_t *address, uint64_t expected, uint64_t desired) {
    uint64_t before;
    asm volatile("atom.cas.acq_rel.sys.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(desired)
                 : "memory");
    return before == expected;
}
UCCL_EP_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Two 16-byte stores: a vector store may be seen in halves, and each half says for itself if it is new.
UCCL_EP_DEVICE void store_command(uint64_t *slot, const uint64_t *words) {
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(slot), "l"(words[0]), "l"(words[1]) : "memory");
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(slot + 2), "l"(words[2]), "l"(words[3]) : "memory");
}

// ---- waiting ----
UCCL_EP_DEVICE uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#ifdef UCCL_EP_TRACE_KERNELS
UCCL_EP_DEVICE uint64_t stamp_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
// core/uccl_ep_core/device_runtime/backend.py leaves room for it.
UCCL_EP_DEVICE uint32_t &span_count() {
    __shared__ uint32_t counts[UCCL_EP_MAX_THREADS / kWarpSize];
    return counts[warp_in_block()];
}
#endif
UCCL_EP_DEVICE void relax() { asm volatile("nanosleep.u32 16;"); }
UCCL_EP_DEVICE void wait_ended() {}
// Whether the process that launched the kernel wants it to end; a GPU's kernels are ended by a verdict instead.
UCCL_EP_DEVICE constexpr bool interrupted() { return false; }

// ---- copies. Not inlined: kernels call it at dozens of places, and a call is nothing beside a copy ----
static __device__ __noinline__ void copy(void *destination, const void *source, uint64_t bytes) {
    auto *to = static_cast<uint8_t *>(destination);
    const auto *from = static_cast<const uint8_t *>(source);
    const uint64_t staged = detail::staged_copy(to, from, bytes);
    detail::vector_copy(to + staged, from + staged, bytes - staged);
}

// The same bytes to several places, for pieces of rows, which loads have sooner than the engine: the first of these are
// under way while find() says how many places there are; to(i) is each.
template <class Find, class To>
UCCL_EP_DEVICE void copy_to_found(Find find, To to, const void *source, uint64_t bytes) {
    detail::vector_copy_to_found(find, to, static_cast<const uint8_t *>(source), bytes);
}
template <class To>
UCCL_EP_DEVICE void copy_to_many(To to, uint32_t count, const void *source, uint64_t bytes) {
    copy_to_found([count] { return count; }, to, source, bytes);
}

// ---- floating point ----
UCCL_EP_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
UCCL_EP_DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
UCCL_EP_DEVICE float half_to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
UCCL_EP_DEVICE uint16_t float_to_half(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// To e4m3, round to nearest even, saturating, a NaN to 0x7f: the low byte is of `low`.
#define UCCL_EP_DEVICE_FLOAT8_PAIR ::uccl_ep::device::floats_to_float8
UCCL_EP_DEVICE uint16_t floats_to_float8(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// To bfloat16 as core/kernels/numerics.hpp rounds, `low` to the low half. The conversion makes 0x7fff of a NaN, the
// contract 0x7fc0: all other results are less than that as signed numbers, so the lesser of the two is right.
#define UCCL_EP_DEVICE_BFLOAT16_PAIR ::uccl_ep::device::floats_to_bfloat16
UCCL_EP_DEVICE uint32_t floats_to_bfloat16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("min.s16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x7fc07fc0u));
    return pair;
}
#endif

// What registers hold, as something else of the same size.
template <class To, class From>
UCCL_EP_DEVICE void copy_bits(To &to, const From &from) {
    static_assert(sizeof(To) == sizeof(From), "all bits have a place");
    memcpy(&to, &from, sizeof(to));
}

}  // namespace uccl_ep::device

#include "vector_run.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#include "sum_of_two.hpp"
// How core/kernels/sums.hpp sums two rows of bfloat16.
#define UCCL_EP_DEVICE_SUM_OF_TWO ::uccl_ep::device::sum_of_two
#endif
