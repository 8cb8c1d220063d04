// Direct low-latency combine. Each rank tells the others its weights; a rank weighs and sums the rows that its experts
// made of a token, in increasing k and unrounded, so that one sum a rank crosses instead of a row an expert; the
// token's own rank adds the sums up in the order of ranks, and rounds once.
#pragma once

#include "ll_direct.hpp"
#include "partial_sums.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE uint8_t *direct_combine_inbox(const Group &group, uint8_t *window, uint64_t number) {
    return window + group.layout.ll_combine_inbox(static_cast<uint32_t>(number & 1));
}

// Tell a peer this rank's weights. The whole warp.
UCCL_EP_DEVICE void direct_send_weights(const LowLatencyCombineParameters &p, uint32_t peer, uint64_t number) {
    const Group &group = p.group;
    auto *weights =
        reinterpret_cast<float *>(direct_combine_inbox(group, group.peer_data[peer], number) +
                                  group.rank * DirectCombineInbox::of(p.shape, group.num_ranks()).weights_bytes);
    const auto load = [&](uint32_t i) { return p.topk_weights[i]; };
    const auto has_room = [&] {
        return direct_wait_head_room(group, Phase::kLowLatencyCombineSend, DirectFlag::kCombineRead,
                                     SignalKind::kLowLatencyCombineCredit, peer, number);
    };
    if (!direct_write_head(weights, p.num_tokens * p.shape.num_topk, load, has_room)) return;
    direct_raise_head(group, DirectFlag::kCombineRows, peer, number);
}

// Pieces of a row that the warps of a block sum, of whole runs.
UCCL_EP_DEVICE uint32_t sum_pieces(const LowLatencyShape &shape, uint32_t *elements) {
    const uint32_t warps = device::warps_per_block();
    *elements = static_cast<uint32_t>(
        align_up((shape.hidden + warps - 1) / warps, partial_step(shape.row_bytes / shape.hidden)));
    return (shape.hidden + *elements - 1) / *elements;
}

// Weigh and sum elements [begin, end) of the rows made here of a source's token, into its place at that source. False
// on failure. The whole warp.
UCCL_EP_DEVICE bool direct_sum_rows(const LowLatencyCombineParameters &p, uint32_t source, uint32_t token,
                                    uint32_t begin, uint32_t end, uint64_t number, WeightedRow *terms) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t topk = shape.num_topk;
    const DirectCombineInbox at = DirectCombineInbox::of(shape, group.num_ranks());
    const int32_t *picks = p.picks + (uint64_t{source} * shape.max_tokens + token) * (topk + 1);
    const auto place = static_cast<uint32_t>(picks[topk]);
    uint8_t *window = group.peer_data[source];  // now: a sum that is ready should not wait for it
    // Calls `keep(term, k)` where pick k was made here. The whole warp, as a lane each.
    const auto for_each_term = [&](auto keep) {
        uint32_t num_terms = 0;
        for (uint32_t base = 0; base < topk; base += device::kWarpSize) {
            const uint32_t k = base + device::lane();
            const int32_t row = k < topk ? picks[k] : -1;
            const device::LaneMask here = device::ballot(row >= 0);
            if (row >= 0) keep(&terms[num_terms + device::population_count(here & device::lanes_below())], k, row);
            num_terms += device::population_count(here);
        }
        return num_terms;
    };
    device::sync_lanes();  // the list of the token before has been read
    const uint32_t num_terms = for_each_term([&](WeightedRow *term, uint32_t, int32_t row) {
        term->row = p.x + static_cast<uint64_t>(row) * shape.row_bytes;
    });
    device::sync_lanes();
    if (num_terms == 0) return true;
    bool asked = false, ok = true;
    // The weights, while the first rows are on their way.
    const auto ready = [&] {
        if (asked) return ok;
        asked = true;
        const float *weights = p.topk_weights;
        if (source != group.rank) {
            if (device::lane() == 0) {
                ok = wait_flag(group, Phase::kLowLatencyCombineSend, DirectFlag::kCombineRows,
                               SignalKind::kLowLatencyCombine, source, kDirectHead, number);
            }
            ok = device::ballot(!ok) == 0;
            if (!ok) return false;
            device::sync_lanes();  // a ballot orders no memory
            weights = reinterpret_cast<const float *>(direct_combine_inbox(group, group.data, number) +
                                                      source * at.weights_bytes);
        }
        for_each_term(
            [&](WeightedRow *term, uint32_t k, int32_t) { term->weight = weights[uint64_t{token} * topk + k]; });
        device::sync_lanes();
        return true;
    };
    uint8_t *to =
        direct_combine_inbox(group, window, number) + at.sums + (uint64_t{token} * at.places + place) * at.sum_bytes;
    with_element(shape.payload_type, [&](auto element) {
        weigh_rows<decltype(element)>(
            to, begin, end, num_terms, ready, [&](uint32_t j) { return terms[j].row; },
            [&](uint32_t j) { return terms[j].weight; });
    });
    return ok;
}

// Sum what was made here of sources [first, first + count), counted from this rank, in tokens of this block.
UCCL_EP_DEVICE void direct_sum_sources(const LowLatencyCombineParameters &p, uint32_t first, uint32_t count,
                                       uint64_t number, WeightedRow *terms) {
    const uint32_t ranks = p.group.num_ranks(), blocks = device::num_blocks(), block = device::block_index();
    uint32_t elements;
    const uint32_t pieces = sum_pieces(p.shape, &elements);
    for (uint32_t token = block; token < p.shape.max_tokens; token += blocks) {
        for (uint32_t item = device::warp_in_block(); item < count * pieces; item += device::warps_per_block()) {
            const uint32_t source = (p.group.rank + first + item / pieces) % ranks, begin = item % pieces * elements;
            if (!direct_sum_rows(p, source, token, begin,
                                 p.shape.hidden - begin < elements ? p.shape.hidden : begin + elements, number, terms))
                return;
        }
    }
}

// The send half. The whole grid.
UCCL_EP_DEVICE void direct_combine_send(const LowLatencyCombineParameters &p) {
    const Group &group = p.group;
    const uint32_t warp = device::warp_in_block(), ranks = group.num_ranks();
    uint64_t *sent = Counters::direct(group, LowLatencyHalf::kCombineSend, device::block_index());
    const uint64_t number = *sent + 1;
    for_each_head_of_block(group, [&](uint32_t peer) { direct_send_weights(p, peer, number); });
    const bool ok = direct_wait_room(group, Phase::kLowLatencyCombineSend, DirectFlag::kCombineRead,
                                     SignalKind::kLowLatencyCombineCredit, number);
    auto *terms = reinterpret_cast<WeightedRow *>(device::shared_memory()) + warp * p.shape.num_topk;
    // The others' tokens first; this rank's own while those sums travel.
    for (uint32_t own = 0; own < 2; ++own) {
        if (ok) direct_sum_sources(p, own == 0 ? 1 : 0, own == 0 ? ranks - 1 : 1, number, terms);
        if (own == 0) direct_raise(group, DirectFlag::kCombineRows, number);
    }
    if (warp == 0 && device::lane() == 0) *sent = number;
}

// The receive half. The whole grid.
UCCL_EP_DEVICE void direct_combine_receive(const LowLatencyCombineParameters &p) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), topk = shape.num_topk, local_experts = shape.num_experts / ranks;
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    uint64_t *received = Counters::direct(group, LowLatencyHalf::kCombineReceive, block);
    const uint64_t number = *received + 1;
    const DirectCombineInbox at = DirectCombineInbox::of(shape, ranks);
    const uint8_t *sums = direct_combine_inbox(group, group.data, number) + at.sums;
    uint32_t elements;
    const uint32_t pieces = sum_pieces(shape, &elements);
    bool ok = !aborted(group);
    for (uint32_t token = block; token < p.num_tokens; token += blocks) {
        const TokenPicks pick(p.topk_idx, p.index_bytes, topk, token);
        uint32_t num_sums = 0;
        for_each_rank_of(pick, topk, local_experts, [&](uint32_t source) {
            ++num_sums;
            if (source == group.rank || device::lane() != 0) return;
            const bool timed = p.wait_cost != nullptr && block == 0 && warp == 0;
            const uint64_t start = timed ? device::now_ns() : 0;
            ok = ok && wait_flag(group, Phase::kLowLatencyCombineReceive, DirectFlag::kCombineRows,
                                 SignalKind::kLowLatencyCombine, source, block, number);
            if (timed) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
        });
        if (device::ballot(!ok) != 0) break;
        device::sync_lanes();  // what one lane has seen is there for all: a ballot orders no memory
        for (uint32_t piece = warp; piece < pieces; piece += warps) {
            const uint32_t begin = piece * elements;
            with_element(shape.payload_type, [&](auto element) {
                add_sums<decltype(element)>(
                    p.out + uint64_t{token} * shape.row_bytes, begin,
                    shape.hidden - begin < elements ? shape.hidden : begin + elements, num_sums,
                    [&](uint32_t j) { return sums + (uint64_t{token} * at.places + j) * at.sum_bytes; });
            });
        }
    }
    direct_raise(group, DirectFlag::kCombineRead, number);
    if (warp == 0 && device::lane() == 0) *received = number;
}

UCCL_EP_KERNEL(uccl_ep_ll_direct_combine_send, LowLatencyCombineParameters) { direct_combine_send(parameters); }

UCCL_EP_KERNEL(uccl_ep_ll_direct_combine_receive, LowLatencyCombineParameters) { direct_combine_receive(parameters); }

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_direct_combine, LowLatencyCombineParameters) {
    direct_combine_send(parameters);
    device::sync_block();  // the halves share the block's memory
    direct_combine_receive(parameters);
}

}  // namespace uccl_ep
