// The device primitives of the HIP backend: CDNA (wave64) and RDNA (wave32). Names and meanings are
// those of every backend (gpu_backends/host/native/primitives.hpp states them); what is said here is
// how this one gives them. Compiler built-ins only, so that a bare clang compiles the kernels.
#pragma once

// Run-time compilers of some releases declare 64-bit integers of their own, as `long long`.
#if defined(__HIPCC_RTC__)
#define int64_t uccl_ep_int64
#define uint64_t uccl_ep_uint64
#endif

// Most threads of a block; uccl_ep_hip/build.py has the same figure.
#define UCCL_EP_MAX_THREADS 512

#define UCCL_EP_HIP_DEVICE __attribute__((device))
#define UCCL_EP_HIP_SHARED __attribute__((shared))
// Also for the CPU side, which is never compiled, because functions there call shared ones.
#define UCCL_EP_DEVICE __attribute__((host)) UCCL_EP_HIP_DEVICE inline __attribute__((always_inline))
#define UCCL_EP_DEVICE_SELDOM UCCL_EP_DEVICE  // a call would cost the caller registers and a stack
#define UCCL_EP_UNROLL _Pragma("unroll")
// An entry point. The parameters are read where the launch put them: through a reference to a by-value
// argument each thread would copy them to its stack first.
#define UCCL_EP_KERNEL(name, Parameters)                                                                            \
    static UCCL_EP_HIP_DEVICE __attribute__((always_inline)) void name##_body(const Parameters &parameters);        \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, UCCL_EP_MAX_THREADS))) void name(Parameters) { \
        const void *arguments = (const void *)__builtin_amdgcn_kernarg_segment_ptr();                               \
        name##_body(*static_cast<const Parameters *>(arguments));                                                   \
    }                                                                                                               \
    static UCCL_EP_HIP_DEVICE void name##_body(const Parameters &parameters)

#include "uccl_ep/integers.hpp"

#include "vector_copy.hpp"

// How core/kernels/sums.hpp sums.
#define UCCL_EP_DEVICE_RUN ::uccl_ep::device::LongRun
#define UCCL_EP_DEVICE_MIDDLE_RUN ::uccl_ep::device::MiddleRun
#define UCCL_EP_DEVICE_SHORT_RUN ::uccl_ep::device::ShortRun
#define UCCL_EP_DEVICE_PIECE_RUN ::uccl_ep::device::PieceRun

namespace uccl_ep::device {

inline constexpr uint32_t kWarpSize = detail::kWavefront;
using LaneMask = uint64_t;

// ---- where am I ----
UCCL_EP_DEVICE uint32_t lane() { return detail::lane(); }
// Equal in all lanes, which the compiler does not know of a quotient of the thread's index.
UCCL_EP_DEVICE uint32_t warp_in_block() {
    return __builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x() / kWarpSize);
}
UCCL_EP_DEVICE uint32_t warps_per_block() { return __builtin_amdgcn_workgroup_size_x() / kWarpSize; }
UCCL_EP_DEVICE uint32_t block_index() { return __builtin_amdgcn_workgroup_id_x(); }
UCCL_EP_DEVICE uint32_t num_blocks() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }

namespace detail {
extern UCCL_EP_HIP_SHARED uint8_t dynamic_shared[] __attribute__((aligned(128)));
}
UCCL_EP_DEVICE uint8_t *shared_memory() { return detail::dynamic_shared; }

// ---- convergence. Lanes of a wavefront run in step, so what is needed is order, not a wait ----
UCCL_EP_DEVICE void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
UCCL_EP_DEVICE void sync_lanes() { sync_warp(); }
UCCL_EP_DEVICE void sync_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
UCCL_EP_DEVICE bool sync_block_all(bool predicate) {
    static UCCL_EP_HIP_SHARED uint32_t objections;
    if (__builtin_amdgcn_workitem_id_x() == 0) objections = 0;
    sync_block();
    if (!predicate) __hip_atomic_fetch_add(&objections, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    sync_block();
    const bool all = objections == 0;
    sync_block();  // all have read it before the next call clears it
    return all;
}

inline constexpr bool kPartsMeet = false;
// The device has one barrier a block, so these are all warps of it: KernelLimits.block_teams is 1.
UCCL_EP_DEVICE void sync_block_for(bool) { sync_block(); }
UCCL_EP_DEVICE void sync_warps(uint32_t, uint32_t) { sync_block(); }
UCCL_EP_DEVICE bool sync_warps_all(uint32_t, uint32_t, bool predicate) { return sync_block_all(predicate); }

// ---- warp collectives ----
UCCL_EP_DEVICE LaneMask ballot(bool predicate) {
    if constexpr (kWarpSize == 64) return __builtin_amdgcn_ballot_w64(predicate);
    return __builtin_amdgcn_ballot_w32(predicate);
}

UCCL_EP_DEVICE uint32_t population_count(LaneMask mask) { return __builtin_popcountll(mask); }
UCCL_EP_DEVICE uint32_t lowest_bit(LaneMask mask) { return __builtin_ctzll(mask); }
UCCL_EP_DEVICE LaneMask lanes_below() { return (LaneMask{1} << lane()) - 1; }

template <class T>
UCCL_EP_DEVICE T broadcast(T value, uint32_t source = 0) {
    static_assert(sizeof(T) <= 8, "two reads of a lane carry 64 bits");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    const uint32_t from = __builtin_amdgcn_readfirstlane(source);
    const uint32_t low = __builtin_amdgcn_readlane(static_cast<uint32_t>(bits), from);
    uint32_t high = 0;
    if constexpr (sizeof(T) > 4) high = __builtin_amdgcn_readlane(static_cast<uint32_t>(bits >> 32), from);
    bits = (uint64_t{high} << 32) | low;
    T result;
    __builtin_memcpy(&result, &bits, sizeof(T));
    return result;
}

// No instruction finds equal lanes: a ballot for each distinct value, taken from the first lane left.
UCCL_EP_DEVICE LaneMask match(uint32_t value) {
    LaneMask mine = 0;
    LaneMask left = ballot(true);
    while (left != 0) {
        const uint32_t candidate = broadcast(value, lowest_bit(left));
        const LaneMask equal = ballot(value == candidate);
        if (value == candidate) mine = equal;
        left &= ~equal;
    }
    return mine;
}

template <class Combine>
UCCL_EP_DEVICE uint32_t reduce(uint32_t value, Combine combine) {
    for (uint32_t distance = kWarpSize / 2; distance != 0; distance /= 2) {
        const int from = static_cast<int>((lane() ^ distance) * 4);
        value = combine(value, static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(from, static_cast<int>(value))));
    }
    return value;
}
UCCL_EP_DEVICE uint32_t reduce_max(uint32_t value) {
    return reduce(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
UCCL_EP_DEVICE uint32_t reduce_sum(uint32_t value) {
    return reduce(value, [](uint32_t a, uint32_t b) { return a + b; });
}

// ---- memory order ----
UCCL_EP_DEVICE uint64_t load_acquire_system(const uint64_t *address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE uint64_t load_relaxed_system(const uint64_t *address) {
    return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// A release for the system writes the device's second-level cache back, and must wait until that is done.
// clang 22 leaves the wait out where this thread itself has stored nothing before, though the cache may hold
// what other threads stored and this one has observed; so it is written out.
UCCL_EP_DEVICE void release_fence_system() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
#if defined(__GFX9__)
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#endif
}
UCCL_EP_DEVICE void store_release_system(uint64_t *address, uint64_t value) {
    release_fence_system();
    __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE void store_relaxed_system(uint64_t *address, uint64_t value) {
    __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE uint64_t load_acquire_device(const uint64_t *address) {
    return __hip_atomic_load(address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE void store_release_device(uint64_t *address, uint64_t value) {
    __hip_atomic_store(address, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uint64_t fetch_add_device(uint64_t *address, uint64_t value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE uint64_t fetch_add_relaxed_device(uint64_t *address, uint64_t value) {
    return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
UCCL_EP_DEVICE void add_device(int32_t *address, int32_t value) {
    __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// On host memory it needs PCIe atomics where the link is PCIe, which ROCm demands of a system anyway.
UCCL_EP_DEVICE bool compare_exchange_system(uint64_t *address, uint64_t expected, uint64_t desired) {
    release_fence_system();
    return __hip_atomic_compare_exchange_strong(address, &expected, desired, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE,
                                                __HIP_MEMORY_SCOPE_SYSTEM);
}
UCCL_EP_DEVICE void fence_system() {
    release_fence_system();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}

UCCL_EP_DEVICE void store_command(uint64_t *slot, const uint64_t *words) {
    for (uint32_t i = 0; i < 4; ++i) store_relaxed_system(slot + i, words[i]);
}

// ---- waiting ----
// The steady counter runs at 100 MHz on all these devices.
UCCL_EP_DEVICE uint64_t now_ns() { return __builtin_readsteadycounter() * 10; }
#ifdef UCCL_EP_TRACE_KERNELS
UCCL_EP_DEVICE uint64_t stamp_ns() {
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "singlethread");  // for the compiler alone
    const uint64_t now = now_ns();
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "singlethread");
    return now;
}
UCCL_EP_DEVICE uint32_t &span_count() {
    static UCCL_EP_HIP_SHARED uint32_t counts[UCCL_EP_MAX_THREADS / 32];
    return counts[warp_in_block()];
}
#endif
UCCL_EP_DEVICE void relax() { __builtin_amdgcn_s_sleep(1); }  // 64 cycles
UCCL_EP_DEVICE void wait_ended() {}
// Whether the process that launched the kernel wants it to end; a GPU's kernels are ended by a verdict instead.
UCCL_EP_DEVICE constexpr bool interrupted() { return false; }

// ---- copies ----
UCCL_EP_DEVICE void copy(void *destination, const void *source, uint64_t bytes) {
    detail::vector_copy(static_cast<uint8_t *>(destination), static_cast<const uint8_t *>(source), bytes);
}

template <class Find, class To>
UCCL_EP_DEVICE void copy_to_found(Find find, To to, const void *source, uint64_t bytes) {
    detail::vector_copy_to_found(find, to, static_cast<const uint8_t *>(source), bytes);
}
template <class To>
UCCL_EP_DEVICE void copy_to_many(To to, uint32_t count, const void *source, uint64_t bytes) {
    copy_to_found([count] { return count; }, to, source, bytes);
}

// ---- floating point ----
UCCL_EP_DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
UCCL_EP_DEVICE uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
UCCL_EP_DEVICE float half_to_float(uint16_t bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
UCCL_EP_DEVICE uint16_t float_to_half(float value) {
    return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}

// What registers hold, as something else of the same size.
template <class To, class From>
UCCL_EP_DEVICE void copy_bits(To &to, const From &from) {
    static_assert(sizeof(To) == sizeof(From), "all bits have a place");
    __builtin_memcpy(&to, &from, sizeof(to));
}

}  // namespace uccl_ep::device

#include "vector_run.hpp"
