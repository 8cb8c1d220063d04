// Which tokens a channel, a rank or a domain gets; their top-k indices, and sums of their counts.
#pragma once

#include "stream.hpp"

namespace uccl_ep {

// Tokens [begin, end) of a channel.
struct TokenRange {
    uint32_t begin, end;
    UCCL_EP_DEVICE static TokenRange of(uint32_t num_tokens, uint32_t channel, uint32_t num_channels) {
        return {static_cast<uint32_t>(uint64_t{num_tokens} * channel / num_channels),
                static_cast<uint32_t>(uint64_t{num_tokens} * (channel + 1) / num_channels)};
    }
};

// Whether a token goes to any rank of [first, first + count).
UCCL_EP_DEVICE bool goes_to(const uint8_t *is_token_in_rank, uint32_t num_ranks, uint32_t token, uint32_t first,
                            uint32_t count) {
    const uint8_t *row = is_token_in_rank + uint64_t{token} * num_ranks + first;
    for (uint32_t i = 0; i < count; ++i) {
        if (row[i] != 0) return true;
    }
    return false;
}

UCCL_EP_DEVICE int64_t load_index(const void *indices, uint32_t index_bytes, uint64_t i) {
    return index_bytes == 8 ? static_cast<const int64_t *>(indices)[i]
                            : int64_t{static_cast<const int32_t *>(indices)[i]};
}

// An expert that a token names, -1 for none. What names no expert counts as none, so that no kernel follows it out of a
// table; `is_refused` says of which values that is not what the caller meant.
UCCL_EP_DEVICE int64_t load_pick(const void *topk_idx, uint32_t index_bytes, uint64_t i, uint32_t num_experts) {
    const int64_t expert = load_index(topk_idx, index_bytes, i);
    return static_cast<uint64_t>(expert) < num_experts ? expert : -1;
}

UCCL_EP_DEVICE bool is_refused(int64_t index, uint32_t num_experts) {
    return static_cast<uint64_t>(index + 1) > num_experts;
}

// Refuse a call whose topk_idx holds `index`, in the name of this rank. One thread.
UCCL_EP_DEVICE_SELDOM void refuse_index(const Group &group, Phase phase, int64_t index, uint32_t num_experts) {
    fail_difference(group, phase, group.rank, Difference::kExpertIndex, static_cast<uint64_t>(index), num_experts);
}

UCCL_EP_DEVICE void store_index(void *indices, uint32_t index_bytes, uint64_t i, int64_t value) {
    if (index_bytes == 8) {
        static_cast<int64_t *>(indices)[i] = value;
    } else {
        static_cast<int32_t *>(indices)[i] = static_cast<int32_t>(value);
    }
}

// The lowest `count` set bits of a mask.
UCCL_EP_DEVICE device::LaneMask lowest_bits(device::LaneMask mask, uint32_t count) {
    if (device::population_count(mask) <= count) return mask;
    device::LaneMask rest = mask;
    for (uint32_t i = 0; i < count; ++i) rest &= rest - 1;
    return mask ^ rest;
}

// Calls `visit(base, mask)` on the whole warp for each window of as many tokens as a warp has lanes that holds any token
// for the ranks: bit i of the mask is token base + i. In order, until it returns false.
template <class Visit>
UCCL_EP_DEVICE bool for_each_window(const uint8_t *is_token_in_rank, uint32_t num_ranks, TokenRange range,
                                    uint32_t first_rank, uint32_t rank_count, Visit visit) {
    for (uint32_t base = range.begin; base < range.end; base += device::kWarpSize) {
        const uint32_t mine = base + device::lane();
        const device::LaneMask selected =
            device::ballot(mine < range.end && goes_to(is_token_in_rank, num_ranks, mine, first_rank, rank_count));
        if (selected != 0 && !visit(base, selected)) return false;
    }
    return true;
}

// Some tokens of one window of the warp's lanes: those of `mask`, which take neighbouring rows from `first` on.
struct TokenRun {
    uint32_t base;  // token of lane 0
    device::LaneMask mask;
    uint32_t first;

    UCCL_EP_DEVICE uint32_t row(uint32_t lane) const {
        return first + device::population_count(mask & ((device::LaneMask{1} << lane) - 1));
    }
    // Calls `visit(token, row)` for the rows whose turn it is for this warp. The whole warp.
    template <class Visit>
    UCCL_EP_DEVICE void for_each_of_warp(Team team, Visit visit) const {
        uint32_t next = first;
        for (device::LaneMask left = mask; left != 0; left &= left - 1, ++next) {
            if (next % team.size == team.index) visit(base + device::lowest_bit(left), next);
        }
    }
    // Calls `visit(token, row, i)` for i in [0, count) of each token, all of them shared out among the threads of the
    // team. Not by the warp.
    template <class Visit>
    UCCL_EP_DEVICE void for_each_of_thread(Team team, uint32_t count, Visit visit) const {
        share_out(team, count * device::kWarpSize, [&](uint32_t item) {
            const uint32_t lane = item / count;
            if ((mask >> lane & 1) != 0) visit(base + lane, row(lane), item % count);
        });
    }
};

// Sum of `value` over the lanes below this one, and over all lanes; values are counts of tokens. A ballot a bit
// costs less than as many dependent loads would.
UCCL_EP_DEVICE uint32_t sum_below(uint32_t value, uint32_t *total) {
    uint32_t below = 0;
    *total = 0;
    for (uint32_t bit = 0; bit < kLowLatencyTokenBits; ++bit) {
        const device::LaneMask mask = device::ballot((value >> bit & 1) != 0);
        below += device::population_count(mask & device::lanes_below()) << bit;
        *total += device::population_count(mask) << bit;
    }
    return below;
}

}  // namespace uccl_ep
