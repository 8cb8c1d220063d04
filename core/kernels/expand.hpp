// The expanded layout of v2, a row for each pick: what one rank does with its own memory. No warp waits for another.
#pragma once

#include "block_memory.hpp"
#include "sums.hpp"

namespace uccl_ep {

// The rows that this warp works: every so many.
struct RowsOfWarp {
    uint32_t first, step;

    UCCL_EP_DEVICE static RowsOfWarp of() {
        const uint32_t warps = device::warps_per_block();
        return {device::block_index() * warps + device::warp_in_block(), device::num_blocks() * warps};
    }
};

UCCL_EP_KERNEL(uccl_ep_gather, GatherParameters) {
    const GatherParameters &p = parameters;
    const RowsOfWarp mine = RowsOfWarp::of();
    for (uint32_t row = mine.first; row < p.num_rows; row += mine.step) {
        const int32_t from = p.source_rows[row];
        uint8_t *to = p.out + uint64_t{row} * p.row_bytes;
        if (from >= 0) {
            device::copy(to, p.x + uint64_t{static_cast<uint32_t>(from)} * p.row_bytes, p.row_bytes);
        } else if (p.zero_padding != 0) {
            for (uint32_t i = device::lane(); i < p.row_bytes; i += device::kWarpSize) to[i] = 0;
        }
    }
}

UCCL_EP_KERNEL(uccl_ep_fold, FoldParameters) {
    const FoldParameters &p = parameters;
    const RowsOfWarp mine = RowsOfWarp::of();
    const uint8_t **terms = FoldTerms::in(device::shared_memory(), device::warp_in_block(), p.num_terms);
    for (uint32_t row = mine.first; row < p.num_rows; row += mine.step) {
        device::sync_warp();  // the terms of the row before have been read
        uint32_t count = 0;
        for (const uint8_t *bias : p.bias) {
            if (bias == nullptr) continue;
            if (device::lane() == 0) terms[count] = bias + uint64_t{row} * p.row_bytes;
            ++count;
        }
        for (uint32_t base = 0; base < p.num_terms; base += device::kWarpSize) {
            const uint32_t k = base + device::lane();
            const int32_t slot = k < p.num_terms ? p.slots[uint64_t{row} * p.num_terms + k] : -1;
            const device::LaneMask there = device::ballot(slot >= 0);
            if (slot >= 0) {
                terms[count + device::population_count(there & device::lanes_below())] =
                    p.x + uint64_t{static_cast<uint32_t>(slot)} * p.row_bytes;
            }
            count += device::population_count(there);
        }
        device::sync_warp();
        sum_payload<false>(
            p.payload_type, p.out + uint64_t{row} * p.row_bytes, 0, p.hidden, count,
            [&](uint32_t j) { return terms[j]; }, [](uint32_t) { return 1.0f; });
    }
}

}  // namespace uccl_ep
