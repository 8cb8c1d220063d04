// Which row of which message each pick of a low-latency dispatch gets, and where its row comes home. Every block works
// it out for itself from the indices of all tokens.
//
// Deterministic: within an expert, rows lie in the order (source rank, index on the source rank).
#pragma once

#include "block_memory.hpp"
#include "ll_exchange.hpp"
#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE uint8_t *ll_message(const Group &group, uint32_t destination, uint32_t parity) {
    if (destination == group.rank) return ll_own_message(group, parity);
    return group.is_local(destination)
               ? group.peer_data[destination] + group.layout.ll_dispatch_inbox(parity, group.rank)
               : group.data + group.layout.ll_dispatch_outbox(parity, destination);
}

// The expert of an entry, -1 where that is none, or one of a rank that is left out.
UCCL_EP_DEVICE int64_t ll_expert(const LowLatencyDispatchParameters &p, uint32_t entry, uint32_t local_experts) {
    const int64_t expert = load_index(p.topk_idx, p.index_bytes, entry);
    if (is_refused(expert, p.shape.num_experts)) {
        refuse_index(p.group, Phase::kLowLatencyDispatchSend, expert, p.shape.num_experts);
        return -1;
    }
    return expert >= 0 && p.masked != nullptr && p.masked[static_cast<uint32_t>(expert) / local_experts] != 0 ? -1
                                                                                                              : expert;
}

// Each lane with a key takes the next number of that key, lower lanes first. Whole warp.
UCCL_EP_DEVICE uint32_t take_numbers(uint16_t *next, uint32_t key, bool has_key) {
    const device::LaneMask same = device::match(has_key ? key : ~uint32_t{0});
    const uint32_t below = device::population_count(same & device::lanes_below());
    uint32_t number = 0;
    if (has_key) number = next[key] + below;
    device::sync_lanes();  // all lanes have read the numbers
    if (has_key && below == 0) next[key] = static_cast<uint16_t>(next[key] + device::population_count(same));
    device::sync_lanes();
    return number;
}

// Whether an entry is the first of its token for its rank. Whole warp; `group` lanes hold whole tokens.
UCCL_EP_DEVICE bool is_first_for_rank(const LowLatencyDispatchParameters &p, uint32_t entry, bool valid, uint32_t rank,
                                      uint32_t local_experts, bool whole_tokens) {
    const uint32_t topk = p.shape.num_topk;
    if (whole_tokens) {
        const uint32_t key = (entry / topk) * p.group.num_ranks() + rank;
        const device::LaneMask same = device::match(valid ? key : ~uint32_t{0});
        return valid && (same & device::lanes_below()) == 0;
    }
    bool first = valid;
    for (uint32_t other = entry - entry % topk; other < entry && first; ++other) {
        const int64_t earlier = load_pick(p.topk_idx, p.index_bytes, other, p.shape.num_experts);
        first = earlier < 0 || static_cast<uint32_t>(earlier) / local_experts != rank;
    }
    return first;
}

// Number the entries of a chunk in order, and keep the numbers of this block's tokens. Whole warp.
UCCL_EP_DEVICE void ll_walk_chunk(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &at, uint32_t chunk) {
    const uint32_t topk = p.shape.num_topk, experts = p.shape.num_experts;
    const uint32_t local_experts = experts / p.group.num_ranks();
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    const uint32_t begin = static_cast<uint32_t>(uint64_t{p.num_tokens} * chunk / at.chunks) * topk;
    const uint32_t end = static_cast<uint32_t>(uint64_t{p.num_tokens} * (chunk + 1) / at.chunks) * topk;
    uint16_t *next = at.before + chunk * at.keys;
    const bool whole_tokens = topk <= device::kWarpSize;
    const uint32_t step = whole_tokens ? device::kWarpSize / topk * topk : device::kWarpSize;
    for (uint32_t base = begin; base < end; base += step) {
        const uint32_t entry = base + device::lane();
        const bool inside = entry < end && device::lane() < step;
        const int64_t expert = inside ? ll_expert(p, entry, local_experts) : -1;
        const uint32_t key = expert < 0 ? 0 : static_cast<uint32_t>(expert), rank = key / local_experts;
        const bool first = is_first_for_rank(p, entry, expert >= 0, rank, local_experts, whole_tokens);
        const uint32_t place = take_numbers(next, key, expert >= 0);
        const uint32_t row = take_numbers(next, experts + rank, first);
        const uint32_t token = entry / topk;
        if (inside && token % blocks == block) {
            const uint32_t mine = token / blocks * topk + entry % topk;
            at.expert[mine] = static_cast<int32_t>(expert);
            at.place[mine] = expert < 0 ? -1 : static_cast<int32_t>(place);
            at.row[mine] = first ? static_cast<int32_t>(row) : -1;
            at.chunk[mine] = chunk;
        }
    }
}

// The whole block. False, on all threads, where any of them says so (`ok`) or an expert gets too many rows.
UCCL_EP_DEVICE bool ll_place_rows(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &at, uint32_t parity,
                                  bool ok) {
    const Span span(p.group, Activity::kPlaces);
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    const uint32_t threads = warps * device::kWarpSize, thread = warp * device::kWarpSize + device::lane();
    const uint32_t local_experts = p.shape.num_experts / p.group.num_ranks();
    for (uint32_t i = thread; i < at.chunks * at.keys; i += threads) at.before[i] = 0;
    for (uint32_t rank = thread; rank < p.group.num_ranks(); rank += threads)
        at.message[rank] = ll_message(p.group, rank, parity);
    device::sync_block();
    if (warp < at.chunks) ll_walk_chunk(p, at, warp);
    device::sync_block();
    for (uint32_t key = thread; key < at.keys; key += threads) {
        uint32_t sum = 0;
        for (uint32_t chunk = 0; chunk < at.chunks; ++chunk) {
            uint16_t &count = at.before[chunk * at.keys + key];
            const uint32_t rows = count;
            count = static_cast<uint16_t>(sum);
            sum += rows;
        }
        at.total[key] = static_cast<int32_t>(sum);
        if (key < at.experts && sum > p.shape.max_tokens) {  // a token names it more than once: no room for its rows
            fail_difference(p.group, Phase::kLowLatencyDispatchSend, p.group.rank, Difference::kExpertRows, sum,
                            p.shape.max_tokens);
            ok = false;
        }
    }
    ok = device::sync_block_all(ok);
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    const uint32_t mine = p.num_tokens > block ? (p.num_tokens - block + blocks - 1) / blocks * p.shape.num_topk : 0;
    for (uint32_t i = thread; i < mine; i += threads) {
        if (at.expert[i] < 0) continue;
        const uint32_t expert = static_cast<uint32_t>(at.expert[i]);
        const uint16_t *before = at.before + at.chunk[i] * at.keys;
        at.place[i] += before[expert];
        if (at.row[i] >= 0) at.row[i] += before[at.experts + expert / local_experts];
    }
    device::sync_block();
    return ok;
}

// Where rows come home, and the heads of all messages. The last warp of each of `writers` blocks, while the others write
// rows.
UCCL_EP_DEVICE void ll_place_home(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &at, uint64_t number,
                                  uint32_t writers) {
    const uint32_t topk = p.shape.num_topk, blocks = device::num_blocks(), block = device::block_index();
    const uint32_t ranks = p.group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    const auto dispatches_read = static_cast<uint32_t>(ll_done(p.group, LowLatencyHalf::kDispatchReceive));
    const auto combines_read = static_cast<uint32_t>(ll_done(p.group, LowLatencyHalf::kCombineReceive));
    uint32_t sum = 0;
    for (uint32_t base = 0; base < at.experts; base += device::kWarpSize) {
        const uint32_t expert = base + device::lane();
        uint32_t total;
        const uint32_t below = sum_below(expert < at.experts ? static_cast<uint32_t>(at.total[expert]) : 0, &total);
        if (expert < at.experts) at.begin[expert] = static_cast<int32_t>(sum + below);
        sum += total;
    }
    device::sync_warp();
    for (uint32_t token = block, mine = 0; token < p.num_tokens; token += blocks, mine += topk) {
        for (uint32_t k = device::lane(); k < topk; k += device::kWarpSize) {
            const int32_t expert = at.expert[mine + k];
            const uint64_t to = uint64_t{token} * topk + k;
            p.combine_row[to] = expert < 0 ? -1 : at.begin[expert] + at.place[mine + k];
            p.own_row[to] = -1;
        }
    }
    // The blocks at the end have the fewest tokens.
    for (uint32_t rank = writers - 1 - block; rank < ranks; rank += writers) {
        if (p.masked != nullptr && p.masked[rank] != 0) continue;
        uint8_t *message = at.message[rank];
        auto *counts = reinterpret_cast<int32_t *>(message + sizeof(MessageHeader));
        for (uint32_t e = device::lane(); e < local_experts; e += device::kWarpSize) {
            counts[e] = at.total[rank * local_experts + e];
        }
        if (device::lane() == 0) {
            *reinterpret_cast<MessageHeader *>(message) =
                MessageHeader{number,
                              static_cast<uint32_t>(OperationKind::kLowLatencyDispatch),
                              static_cast<uint32_t>(at.total[at.experts + rank]),
                              p.shape.row_bytes,
                              p.group.rank,
                              {p.shape.max_tokens, p.shape.num_topk, p.shape.num_experts, p.shape.quantization,
                               static_cast<uint32_t>(at.begin[rank * local_experts]), p.shape.payload_type,
                               static_cast<uint32_t>(LowLatencyPath::kPacked), dispatches_read, combines_read}};
        }
    }
}

}  // namespace uccl_ep
