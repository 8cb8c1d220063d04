// Sums of rows that the bulk copy engine fetches ahead (compute capability 9.0 and later); sum_pipeline.hpp has the
// order. 12 warps have four stages of about 4 KB each on their way, which covers a memory latency of 1 us at more than
// 100 GB/s a multiprocessor; loads of their own, in registers, are a third of that and end before each addition.
//
// What orders the memory proxies here:
//   - rows were written by other threads, here or in a peer, by stores or by its engine, and this block acquired them:
//     each lane fences before the engine is told to read them, which also covers rows that this warp wrote itself;
//   - the engine fills a stage that lanes have read: each fences after its loads, and the warp meets before lane 0 or
//     another starts the fetch. The meeting alone would not do: it orders the lanes, and not their loads before what
//     the other proxy writes;
//   - lanes wait at the barrier of a stage themselves, so that what the engine wrote there is visible to each;
//   - copies of this warp use the same stages: they are complete before the first fetch of a sum, and a sum ends with
//     `finish` before the next copy.
#pragma once

#include "bulk_copy.hpp"
#include "sum_pipeline.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace uccl_ep::device::detail {

inline constexpr uint32_t kSumLeast = 2048;  // bytes of a row; below, a fetch is worth less than what it costs

// What sum_pipeline.hpp drives, by all lanes.
struct SumEngine : BulkEngine {
    static constexpr uint32_t kLanes = 32;
    __device__ __forceinline__ static uint32_t lane() { return detail::lane(); }
    __device__ __forceinline__ static void stages_read() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
    }
    __device__ __forceinline__ static void sync() { __syncwarp(); }
};

// The whole warp. Whether the rows are such that they are fetched; what an earlier call left is finished either way.
template <class Row, class Sum>
__device__ __forceinline__ bool staged_sum(uint8_t *out, uint32_t bytes, uint32_t num_terms, Row row, Sum sum,
                                           bool finish) {
    bool fits = num_terms != 0 && bytes >= kSumLeast && sum_piece_bytes(stage_bytes(), num_terms) != 0;
    uint64_t addresses = reinterpret_cast<uint64_t>(out) | bytes;
    if (fits) {
        for (uint32_t j = lane(); j < num_terms; j += 32) addresses |= reinterpret_cast<uint64_t>(row(j));
    }
    fits = __all_sync(0xffffffffu, fits && addresses % kSumUnit == 0) != 0;
    const WarpSums &ring = warp_stages()->sums;
    if (ring.fetched == ring.summed) drain();
    // Of global memory alone: the fence of all memory waits until what this warp stored is out there.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();
    sum_ahead<SumEngine>(warp_stages(), stage_bytes(), out, fits ? bytes : 0, num_terms, row, sum, finish);
    return fits;
}

}  // namespace uccl_ep::device::detail

#endif
