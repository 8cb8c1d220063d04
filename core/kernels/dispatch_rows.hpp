// The rows of high-throughput dispatch messages: written from tokens, and taken into the output.
#pragma once

#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE RowFormat row_format(const DispatchShape &shape) {
    return {shape.row_bytes, shape.scale_bytes, shape.num_topk, shape.dtype};
}

// Copy what belongs to a run's tokens beside payload, and the payload first: the copies of rows are on their way
// meanwhile. `payload(row)`, `scales(row)` are where those go. The whole team.
template <class Payload, class Scales>
UCCL_EP_DEVICE void copy_rows(const DispatchParameters &p, Team team, const TokenRun &run, Payload payload,
                              Scales scales) {
    const DispatchShape &shape = p.shape;
    run.for_each_of_warp(team, [&](uint32_t token, uint32_t row) {
        device::copy(payload(row), p.x + uint64_t{token} * shape.row_bytes, shape.row_bytes);
    });
    if (shape.scale_bytes % 4 == 0) {
        run.for_each_of_thread(team, shape.scale_bytes / 4, [&](uint32_t token, uint32_t row, uint32_t i) {
            reinterpret_cast<uint32_t *>(scales(row))[i] =
                reinterpret_cast<const uint32_t *>(p.scales + uint64_t{token} * shape.scale_bytes)[i];
        });
    } else {
        run.for_each_of_warp(team, [&](uint32_t token, uint32_t row) {
            device::copy(scales(row), p.scales + uint64_t{token} * shape.scale_bytes, shape.scale_bytes);
        });
    }
}

// A pick of a token: the expert's index and the weight.
struct Pick {
    int64_t expert;
    float weight;

    UCCL_EP_DEVICE static Pick of(const DispatchParameters &p, uint32_t token, uint32_t k) {
        const uint64_t from = uint64_t{token} * p.shape.num_topk + k;
        return {load_pick(p.topk_idx, p.index_bytes, from, p.shape.num_experts),
                p.topk_weights == nullptr ? 0.0f : p.topk_weights[from]};
    }
    // To place `at` of the output, which has local indices, and picks of other ranks' experts left out.
    UCCL_EP_DEVICE void receive(const DispatchParameters &p, uint64_t at) const {
        const uint32_t local_experts = p.shape.num_experts / p.group.num_ranks();
        const int64_t local = expert - int64_t{p.group.rank} * local_experts;
        const bool here = local >= 0 && local < local_experts;
        store_index(p.receive_topk_idx, p.index_bytes, at, here ? local : -1);
        p.receive_topk_weights[at] = here ? weight : 0.0f;
    }
};

// Fill rows of a message. The whole team.
UCCL_EP_DEVICE void write_rows(const DispatchParameters &p, Team team, const TokenRun &run, uint8_t *slot,
                               const DispatchRows &at) {
    const DispatchShape &shape = p.shape;
    copy_rows(
        p, team, run, [&](uint32_t row) { return slot + at.payload + uint64_t{row} * shape.row_bytes; },
        [&](uint32_t row) { return slot + at.scales + uint64_t{row} * shape.scale_bytes; });
    auto *experts = reinterpret_cast<int32_t *>(slot + at.topk_idx);
    auto *weights = reinterpret_cast<float *>(slot + at.topk_weights);
    run.for_each_of_thread(team, shape.num_topk, [&](uint32_t token, uint32_t row, uint32_t k) {
        const Pick pick = Pick::of(p, token, k);
        experts[row * shape.num_topk + k] = static_cast<int32_t>(pick.expert);
        weights[row * shape.num_topk + k] = pick.weight;
    });
    run.for_each_of_thread(team, 1, [&](uint32_t token, uint32_t row, uint32_t) {
        reinterpret_cast<int32_t *>(slot + at.source)[row] = static_cast<int32_t>(token);
    });
}

UCCL_EP_DEVICE void write_masks(const DispatchParameters &p, Team team, const TokenRun &run, uint8_t *slot,
                                const DispatchRows &at, uint32_t first_rank) {
    constexpr uint32_t kWords = kMaxRanksPerDomain / 64;
    auto *masks = reinterpret_cast<uint64_t *>(slot + at.mask);
    run.for_each_of_thread(team, kWords, [&](uint32_t token, uint32_t row, uint32_t word) {
        const uint8_t *in_rank = p.is_token_in_rank + uint64_t{token} * p.group.num_ranks() + first_rank + word * 64;
        uint64_t mask = 0;
        for (uint32_t i = 0; i < 64 && word * 64 + i < p.group.layout.ranks_per_domain; ++i)
            mask |= uint64_t{in_rank[i] != 0 ? 1u : 0u} << i;
        masks[row * kWords + word] = mask;
    });
}

// Take the rows of one message into the output, starting at row `first`. Called by the whole team.
UCCL_EP_DEVICE void take_rows(const DispatchParameters &p, Team team, const uint8_t *slot, const DispatchRows &at,
                              uint32_t rows, uint64_t first) {
    const Span span(p.group, Activity::kCopies, team.leads());
    const DispatchShape &shape = p.shape;
    copy_shared_out(team, p.receive_x + first * shape.row_bytes, slot + at.payload, uint64_t{rows} * shape.row_bytes);
    if (shape.scale_bytes != 0) {
        copy_shared_out(team, p.receive_scales + first * shape.scale_bytes, slot + at.scales,
                        uint64_t{rows} * shape.scale_bytes);
    }
    const auto *experts = reinterpret_cast<const int32_t *>(slot + at.topk_idx);
    const auto *weights = reinterpret_cast<const float *>(slot + at.topk_weights);
    const auto *source = reinterpret_cast<const int32_t *>(slot + at.source);
    share_out(team, rows * shape.num_topk,
              [&](uint32_t i) { Pick{experts[i], weights[i]}.receive(p, first * shape.num_topk + i); });
    share_out(team, rows, [&](uint32_t i) { p.receive_source[first + i] = source[i]; });
}

}  // namespace uccl_ep
