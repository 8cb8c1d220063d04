// The rows of one high-throughput dispatch message. Each field of all rows lies together, so that the
// receiver takes a message into its output in one copy a field, whatever the row count.
#pragma once

#include "stream.hpp"

namespace uccl_ep {

inline constexpr uint32_t kMaxRanksPerDomain = 128;  // bits of a row's target mask

struct DispatchRows {
    uint64_t payload, scales, topk_idx, topk_weights, source, mask, end;  // byte offsets into the slot

    UCCL_EP_DEVICE static DispatchRows of(const DispatchShape &shape, uint32_t rows, bool on_rail) {
        DispatchRows at;
        at.payload = sizeof(MessageHeader);
        at.scales = align_up(at.payload + uint64_t{rows} * shape.row_bytes, 16);
        at.topk_idx = align_up(at.scales + uint64_t{rows} * shape.scale_bytes, 16);
        at.topk_weights = at.topk_idx + uint64_t{rows} * shape.num_topk * 4;
        at.source = at.topk_weights + uint64_t{rows} * shape.num_topk * 4;
        at.mask = align_up(at.source + uint64_t{rows} * 4, 16);
        at.end = align_up(at.mask + (on_rail ? uint64_t{rows} * (kMaxRanksPerDomain / 8) : 0), 64);
        return at;
    }

    // Rows that fit a slot; at least 1 (the communicator refuses shapes for which it would be 0).
    UCCL_EP_DEVICE static uint32_t capacity(const DispatchShape &shape, uint64_t slot_bytes, bool on_rail) {
        const uint64_t row = uint64_t{shape.row_bytes} + shape.scale_bytes + uint64_t{shape.num_topk} * 8 + 4 +
                             (on_rail ? kMaxRanksPerDomain / 8 : 0);
        const uint64_t fixed = sizeof(MessageHeader) + 3 * 16 + 64;  // header and alignment
        return slot_bytes <= fixed ? 0 : static_cast<uint32_t>((slot_bytes - fixed) / row);
    }
};

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

UCCL_EP_DEVICE void store_index(void *indices, uint32_t index_bytes, uint64_t i, int64_t value) {
    if (index_bytes == 8) {
        static_cast<int64_t *>(indices)[i] = value;
    } else {
        static_cast<int32_t *>(indices)[i] = static_cast<int32_t>(value);
    }
}

// Calls `visit(token)` on the whole warp for each token of the range that goes to any of the ranks,
// in order, until it returns false.
template <class Visit>
UCCL_EP_DEVICE bool for_each_token(const uint8_t *is_token_in_rank, uint32_t num_ranks, TokenRange range,
                                   uint32_t first_rank, uint32_t rank_count, Visit visit) {
    for (uint32_t base = range.begin; base < range.end; base += device::kWarpSize) {
        const uint32_t mine = base + device::lane();
        device::LaneMask selected =
            device::ballot(mine < range.end && goes_to(is_token_in_rank, num_ranks, mine, first_rank, rank_count));
        while (selected != 0) {
            const uint32_t token = base + device::lowest_bit(selected);
            selected &= selected - 1;
            if (!visit(token)) return false;
        }
    }
    return true;
}

}  // namespace uccl_ep
