// Direct low-latency combine. Each rank tells the others its weights, in words that need no flag; a rank weighs and sums the rows that its experts
// made of a token, in increasing k and unrounded, so that one sum a rank crosses instead of a row an expert; the
// token's own rank adds the sums up in the order of ranks, and rounds once.
#pragma once

#include "ll_direct_words.hpp"
#include "partial_sums.hpp"

namespace uccl_ep {

using DirectCombineCounts = DirectCounts<DirectCombine>;

UCCL_EP_DEVICE uint8_t *direct_combine_inbox(const Group &group, uint8_t *window, uint64_t number) {
    return window + group.layout.ll_combine_inbox(static_cast<uint32_t>(number & 1));
}

// Pieces of a row that the warps of a block sum, of whole runs.
UCCL_EP_DEVICE uint32_t sum_pieces(const LowLatencyShape &shape, uint32_t *elements) {
    const uint32_t warps = device::warps_per_block();
    *elements = static_cast<uint32_t>(
        align_up((shape.hidden + warps - 1) / warps, partial_step(shape.row_bytes / shape.hidden)));
    return (shape.hidden + *elements - 1) / *elements;
}

UCCL_EP_DEVICE_SELDOM uint64_t direct_wait_weight(const Group &group, uint32_t source, uint64_t number,
                                                  const uint64_t *address) {
    return direct_wait_word<DirectCombine, WeightWord>(group, DirectCombine::kSend, source, number, address, [] {});
}

// Weigh and sum elements [begin, end) of the rows made here of a source's token, into its place at that source, once
// `has_room()`. False on failure. The whole warp.
template <class HasRoom>
UCCL_EP_DEVICE bool direct_sum_rows(const LowLatencyCombineParameters &p, uint32_t source, uint32_t token,
                                    uint32_t begin, uint32_t end, uint64_t number, WeightedRow *terms,
                                    HasRoom has_room) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t topk = shape.num_topk;
    const DirectCombineInbox at = DirectCombineInbox::of(shape, group.num_ranks());
    const int32_t *picks = p.picks + (uint64_t{source} * shape.max_tokens + token) * (topk + 1);
    const auto place = static_cast<uint32_t>(picks[topk]);
    uint8_t *window = group.peer_data[source];  // now: a sum that is ready should not wait for it
    device::sync_lanes();  // the list of the token before has been read
    uint32_t num_terms = 0;
    for (uint32_t base = 0; base < topk; base += device::kWarpSize) {
        const uint32_t k = base + device::lane();
        const int32_t row = k < topk ? picks[k] : -1;
        const device::LaneMask here = device::ballot(row >= 0);  // those whose row was made on this rank
        if (row >= 0) {
            WeightedRow &term = terms[num_terms + device::population_count(here & device::lanes_below())];
            term.row = p.x + static_cast<uint64_t>(row) * shape.row_bytes;
            term.pick = k;
        }
        num_terms += device::population_count(here);
    }
    device::sync_lanes();
    if (num_terms == 0) return true;
    bool asked = false, ok = true;
    // Room and weights, while the first rows are on their way.
    const auto ready = [&] {
        if (asked) return ok;
        asked = true;
        // A first look, which may be under way while room is looked for. To wait comes after that: it may tell a rank what
        // it needs before it sends its weights.
        const bool own = source == group.rank;
        const uint32_t first = token * topk;
        const auto word_of = [&](uint32_t k) {
            return direct_word<DirectCombine>(group, group.rank, number, source, first + k);
        };
        const auto look = [&](uint32_t k) {
            return own ? WeightWord::of(number, p.topk_weights[first + k]) : device::load_relaxed_system(word_of(k));
        };
        const uint64_t looked = device::lane() < num_terms ? look(terms[device::lane()].pick) : 0;
        if (!has_room()) return ok = false;
        for (uint32_t j = device::lane(); j < num_terms; j += device::kWarpSize) {
            const uint32_t k = terms[j].pick;
            uint64_t word = j == device::lane() ? looked : look(k);
            if (!WeightWord::is_of(word, number)) word = direct_wait_weight(group, source, number, word_of(k));
            terms[j].weight = WeightWord::weight(word);
            ok = WeightWord::is_of(word, number) && ok;
        }
        ok = device::ballot(!ok) == 0;
        device::sync_lanes();
        return ok;
    };
    uint8_t *to = direct_combine_inbox(group, window, number) + at.sum(token, place);
    with_element(shape.payload_type, [&](auto element) {
        weigh_rows<decltype(element)>(
            to, begin, end, num_terms, ready, [&](uint32_t j) { return terms[j].row; },
            [&](uint32_t j) { return terms[j].weight; });
    });
    return ok;
}

// Sum what was made here of sources [first, first + count), counted from this rank, in tokens of this block.
template <class HasRoom>
UCCL_EP_DEVICE void direct_sum_sources(const LowLatencyCombineParameters &p, uint32_t first, uint32_t count,
                                       uint64_t number, WeightedRow *terms, HasRoom has_room) {
    const uint32_t ranks = p.group.num_ranks(), blocks = device::num_blocks(), block = device::block_index();
    uint32_t elements;
    const uint32_t pieces = sum_pieces(p.shape, &elements);
    for (uint32_t token = block; token < p.shape.max_tokens; token += blocks) {
        for (uint32_t item = device::warp_in_block(); item < count * pieces; item += device::warps_per_block()) {
            const uint32_t source = (p.group.rank + first + item / pieces) % ranks, begin = item % pieces * elements;
            if (!direct_sum_rows(p, source, token, begin,
                                 p.shape.hidden - begin < elements ? p.shape.hidden : begin + elements, number, terms,
                                 has_room))
                return;
        }
    }
}

// The send half. The whole grid.
UCCL_EP_DEVICE void direct_combine_send(const LowLatencyCombineParameters &p, const DirectCombineCounts &counts) {
    const Group &group = p.group;
    const Span half(group, Activity::kSends);
    const uint32_t warp = device::warp_in_block(), ranks = group.num_ranks(), topk = p.shape.num_topk;
    const uint64_t number = counts.sent + 1;
    bool asked = false, ok = false;
    if (is_herald()) {
        ok = direct_send_words<DirectCombine, WeightWord>(
            group, counts, p.num_tokens, topk, [&](uint32_t token, uint32_t k) {
                return WeightWord::of(number, p.topk_weights[uint64_t{token} * topk + k]);
            });
        asked = true;
    }
    const auto has_room = [&] {
        if (!asked) ok = direct_wait_room(group, counts);
        asked = true;
        return ok;
    };
    auto *terms = reinterpret_cast<WeightedRow *>(device::shared_memory()) + warp * topk;
    // The others' tokens first; this rank's own while those sums travel, and while the herald waits for its fence.
    for (uint32_t own = 0; own < 2; ++own) {
        Span step(group, own == 0 ? Activity::kAddsUp : Activity::kAddsUpOwn);
        // Where the dispatch failed, `picks` may name any rows. The whole warp goes the same way.
        if (device::ballot(counts.failed) == 0)
            direct_sum_sources(p, own == 0 ? 1 : 0, own == 0 ? ranks - 1 : 1, counts.sent + 1, terms, has_room);
        step.end();
        if (own == 0) direct_raise(group, counts);
    }
    // By who has waited for the other warps: all of them have read the count.
    if (is_herald() && device::lane() == 0)
        *Counters::direct(group, DirectCombine::kSent, device::block_index()) = number;
}

// The receive half. The whole grid. A warp adds the pieces that it summed of its rank's own rows, so it meets no other
// before.
UCCL_EP_DEVICE void direct_combine_receive(const LowLatencyCombineParameters &p, const DirectCombineCounts &counts) {
    const Group &group = p.group;
    const Span half(group, Activity::kReceives);
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), topk = shape.num_topk, local_experts = shape.num_experts / ranks;
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    const uint64_t number = counts.received + 1;
    const DirectCombineInbox at = DirectCombineInbox::of(shape, ranks);
    const uint8_t *sums = direct_combine_inbox(group, group.data, number);
    uint32_t elements;
    const uint32_t pieces = sum_pieces(shape, &elements);
    bool ok = !counts.failed;
    const auto wait_rows = [&] {  // a rank a lane, so that their looks are under way together
        const Span span(group, Activity::kWaitsForRows);
        for (uint32_t i = device::lane(); i < ranks; i += device::kWarpSize) {
            const uint32_t source = (group.rank + i) % ranks;
            if (i == 0) continue;
            const bool timed = p.wait_cost != nullptr && block == 0 && warp == 0;
            const uint64_t start = timed ? device::now_ns() : 0;
            ok = ok && direct_wait_rows<DirectCombine>(group, source, block, number);
            if (timed) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
        }
        device::sync_lanes();  // what one lane has seen is there for all: a ballot orders no memory
        ok = device::ballot(!ok) == 0;
        return ok;
    };
    for (uint32_t token = block; token < p.num_tokens; token += blocks) {
        const TokenPicks pick(p.topk_idx, p.index_bytes, shape, token);
        uint32_t num_sums = 0;
        for_each_rank_of(pick, topk, local_experts, [&](uint32_t) { ++num_sums; });
        if (token == block && !wait_rows()) break;
        const Span step(group, Activity::kAddsUp);
        const uint8_t *token_sums = sums + at.sum(token, 0);
        for (uint32_t piece = warp; piece < pieces; piece += warps) {
            const uint32_t begin = piece * elements;
            with_element(shape.payload_type, [&](auto element) {
                add_sums<decltype(element)>(p.out + uint64_t{token} * shape.row_bytes, begin,
                                            shape.hidden - begin < elements ? shape.hidden : begin + elements, num_sums,
                                            [&](uint32_t j) { return token_sums + j * at.sum_bytes; });
            });
        }
    }
    device::sync_block();  // all warps have read the count
    if (warp == 0 && device::lane() == 0) *Counters::direct(group, DirectCombine::kReceived, block) = number;
}

UCCL_EP_KERNEL(uccl_ep_ll_direct_combine_send, LowLatencyCombineParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kDirectCombineSend);
    direct_combine_send(parameters, DirectCombineCounts::of(parameters.group));
}

UCCL_EP_KERNEL(uccl_ep_ll_direct_combine_receive, LowLatencyCombineParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kDirectCombineReceive);
    direct_combine_receive(parameters, DirectCombineCounts::of(parameters.group));
}

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_direct_combine, LowLatencyCombineParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kDirectCombine);
    const auto counts = DirectCombineCounts::of(parameters.group);
    direct_combine_send(parameters, counts);
    direct_combine_receive(parameters, counts);
}

}  // namespace uccl_ep
