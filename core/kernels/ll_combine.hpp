// Low-latency combine: each (token, expert) row goes home to a row that its source has named in the
// dispatch; there the rows of a token are weighted and summed in increasing k.
#pragma once

#include "block_memory.hpp"
#include "ll_room.hpp"
#include "sums.hpp"
#include "tokens.hpp"

namespace uccl_ep {

// The send half. The whole grid.
UCCL_EP_DEVICE void ll_combine_send(const LowLatencyCombineParameters &p) {
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), local_experts = shape.num_experts / ranks;
    const uint64_t number = ll_done(group, LowLatencyHalf::kCombineSend) + 1;
    const bool knows_room = ll_knows_room<PackedCombine>(group, p.masked, number);
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    // After an earlier failure, what the kernels before should have left is not there.
    const bool ok = knows_room ? may_begin(group) : ll_wait_room<PackedCombine>(group, number, p.masked);
    const uint64_t rows_per_expert = uint64_t{ranks} * shape.max_tokens;
    // Offset, in the outbox, of the rows for a destination that a transport reaches.
    const auto outbox_of = [&](uint32_t destination) {
        uint64_t offset = layout.ll_combine_outbox(parity);
        for (uint32_t rank = 0; rank < destination; ++rank) {
            if (!group.is_local(rank))
                offset += align_up(static_cast<uint64_t>(p.rows_home[rank]) * shape.row_bytes, 64);
        }
        return offset;
    };
    // Rows of one expert for one destination lie together at both ends. Several warps share them where there are
    // more warps than such pairs, by rows and by pieces of rows, so that a crowded expert is not one warp's work.
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    const uint32_t pairs = ok ? local_experts * ranks : 0;
    const uint32_t sharers = warps > pairs && pairs != 0 ? warps / pairs : 1;
    for (uint32_t item = warp; item < pairs * sharers; item += warps) {
        const uint32_t pair = item / sharers, share = item % sharers;
        const uint32_t destination = pair % ranks;
        const uint32_t rows = static_cast<uint32_t>(p.count[pair]);
        if (rows == 0 || masked(destination) || (destination == group.rank && p.own_in_place != 0)) continue;
        const uint64_t first = pair / ranks * rows_per_expert + static_cast<uint32_t>(p.begin[pair]);
        uint8_t *to = group.is_local(destination)
                          ? group.peer_data[destination] + layout.ll_combine_inbox(parity) +
                                static_cast<uint64_t>(p.combine_base[destination]) * shape.row_bytes
                          : group.data + outbox_of(destination);
        to += static_cast<uint64_t>(p.rows_before[pair]) * shape.row_bytes;
        const uint8_t *from = p.x + first * shape.row_bytes;
        if (sharers == 1) {
            device::copy(to, from, uint64_t{rows} * shape.row_bytes);
            continue;
        }
        const uint32_t wanted = rows >= sharers ? 1 : sharers / rows;
        const uint64_t piece = align_up((shape.row_bytes + wanted - 1) / wanted, 512);
        const uint32_t pieces = static_cast<uint32_t>((shape.row_bytes + piece - 1) / piece);
        for (uint32_t unit = share; unit < rows * pieces; unit += sharers) {
            const uint64_t begin = unit % pieces * piece, at = uint64_t{unit / pieces} * shape.row_bytes + begin;
            device::copy(to + at, from + at, shape.row_bytes - begin < piece ? shape.row_bytes - begin : piece);
        }
    }
    if (ll_all_written(group, device::num_blocks(), ok)) {
        ll_send_all<PackedCombine>(group, number, p.masked, [&](uint32_t destination) -> LowLatencyMessage {
            return {group.is_local(destination) ? 0 : outbox_of(destination),
                    layout.ll_combine_inbox(parity) +
                        static_cast<uint64_t>(p.combine_base[destination]) * shape.row_bytes,
                    static_cast<uint64_t>(p.rows_home[destination]) * shape.row_bytes};
        });
        if (ll_credits_travel(group, p.masked)) ll_tell<PackedCombine>(group);
    }
    if (device::warp_in_block() == 0 && device::lane() == 0) {
        *Counters::packed(group, LowLatencyHalf::kCombineSend, device::block_index()) = number;
    }
}

// Sum elements [begin, end) of a token. The whole warp.
UCCL_EP_DEVICE void ll_sum_token(const LowLatencyCombineParameters &p, const uint8_t *inbox, uint32_t token,
                                 uint32_t begin, uint32_t end, WeightedRow *terms) {
    const LowLatencyShape &shape = p.shape;
    const uint64_t first = uint64_t{token} * shape.num_topk;
    uint32_t num_terms = 0;
    device::sync_warp();  // the list of the token before has been read
    for (uint32_t base = 0; base < shape.num_topk; base += device::kWarpSize) {
        const uint32_t k = base + device::lane();
        const bool inside = k < shape.num_topk;
        int32_t row = inside ? p.combine_row[first + k] : -1;
        if (row >= 0 && p.masked != nullptr) {  // a rank that was left out since the dispatch has sent nothing
            const auto expert = static_cast<uint32_t>(load_index(p.topk_idx, p.index_bytes, first + k));
            if (p.masked[expert / (shape.num_experts / p.group.num_ranks())] != 0) row = -1;
        }
        const int32_t own = inside ? p.own_row[first + k] : -1;
        const float weight = inside ? p.topk_weights[first + k] : 0.0f;
        const device::LaneMask taken = device::ballot(row >= 0);
        if (row >= 0) {
            const bool in_place = p.own_in_place != 0 && own >= 0;
            terms[num_terms + device::population_count(taken & device::lanes_below())] = {
                in_place ? p.x + static_cast<uint64_t>(own) * shape.row_bytes
                         : inbox + static_cast<uint64_t>(row) * shape.row_bytes,
                weight, 0};
        }
        num_terms += device::population_count(taken);
    }
    device::sync_warp();
    sum_payload<true>(
        shape.payload_type, p.out + uint64_t{token} * shape.row_bytes, begin, end, num_terms,
        [&](uint32_t j) { return terms[j].row; }, [&](uint32_t j) { return terms[j].weight; });
}

// The receive half. The whole grid.
UCCL_EP_DEVICE void ll_combine_receive(const LowLatencyCombineParameters &p) {
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint64_t number = ll_done(group, LowLatencyHalf::kCombineReceive) + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    if (ll_wait_all<PackedCombine>(group, number, p.masked, p.wait_cost, [](uint32_t) { return true; })) {
        const uint8_t *inbox = group.data + layout.ll_combine_inbox(parity);
        auto *terms =
            reinterpret_cast<WeightedRow *>(device::shared_memory()) + device::warp_in_block() * shape.num_topk;
        // Few tokens: several warps share one.
        const uint32_t wanted = warps > p.num_tokens && p.num_tokens != 0 ? warps / p.num_tokens : 1;
        const auto piece = static_cast<uint32_t>(
            align_up((shape.hidden + wanted - 1) / wanted, sum_step(shape.row_bytes / shape.hidden)));
        const uint32_t pieces = (shape.hidden + piece - 1) / piece;
        for (uint32_t item = warp; item < p.num_tokens * pieces; item += warps) {
            const uint32_t begin = item % pieces * piece;
            ll_sum_token(p, inbox, item / pieces, begin, shape.hidden - begin < piece ? shape.hidden : begin + piece,
                         terms);
        }
    }
    if (!ll_credits_travel(group, p.masked) && last_block(group) && !aborted(group)) {
        ll_tell_at_once<PackedCombine>(group, number);
    }
    // All threads of the block have read the count: they have met since.
    if (device::warp_in_block() == 0 && device::lane() == 0) {
        *Counters::packed(group, LowLatencyHalf::kCombineReceive, device::block_index()) = number;
    }
}

UCCL_EP_KERNEL(uccl_ep_ll_combine_send, LowLatencyCombineParameters) { ll_combine_send(parameters); }

UCCL_EP_KERNEL(uccl_ep_ll_combine_receive, LowLatencyCombineParameters) { ll_combine_receive(parameters); }

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_combine, LowLatencyCombineParameters) {
    ll_combine_send(parameters);
    device::sync_block();  // the halves share the block's memory
    ll_combine_receive(parameters);
}

}  // namespace uccl_ep
