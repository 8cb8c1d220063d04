// Low-latency combine: each (token, expert) row goes home to a row that its source has named in the
// dispatch; there the rows of a token are weighted and summed in increasing k.
#pragma once

#include "block_memory.hpp"
#include "ll_room.hpp"
#include "sums.hpp"
#include "tokens.hpp"

namespace uccl_ep {

// Which row of x is row `row` of those that go home to a rank: they lie there in the order of experts. The whole warp.
UCCL_EP_DEVICE uint64_t ll_row_to_return(const LowLatencyCombineParameters &p, uint32_t destination, uint32_t row) {
    const uint32_t ranks = p.group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    // The last expert before whose rows there are no more than `row`. Loads of several rounds are under way at once.
    constexpr uint32_t kAtOnce = device::kWarpSize == 1 ? 1 : 4;
    uint32_t expert = 0;
    for (uint32_t base = 0; base < local_experts; base += kAtOnce * device::kWarpSize) {
        int32_t before[kAtOnce];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t e = base + i * device::kWarpSize + device::lane();
            before[i] = e < local_experts ? p.rows_before[e * ranks + destination] : 0x7fffffff;
        }
        uint32_t begun = 0;
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            begun += device::population_count(device::ballot(before[i] <= static_cast<int32_t>(row)));
        }
        if (begun == 0) break;
        expert = base + begun - 1;
        if (begun != kAtOnce * device::kWarpSize) break;
    }
    const uint32_t pair = expert * ranks + destination;
    return expert * (uint64_t{ranks} * p.shape.max_tokens) + static_cast<uint32_t>(p.begin[pair]) + row -
           static_cast<uint32_t>(p.rows_before[pair]);
}

// The send half. The whole grid. Returns, alike on all threads of a block, whether it is the one that has yet to tell the
// others what this rank has read (ll_tell).
UCCL_EP_DEVICE bool ll_combine_send(const LowLatencyCombineParameters &p) {
    const Group &group = p.group;
    const Span half(group, Activity::kSends);
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks();
    const uint64_t number = ll_done(group, LowLatencyHalf::kCombineSend) + 1;
    const bool knows_room = ll_knows_room<PackedCombine>(group, p.masked, number);
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    // After an earlier failure, what the kernels before should have left is not there.
    const bool ok = knows_room ? may_begin(group) : ll_wait_room<PackedCombine>(group, number, p.masked);
    const auto rows_to = [&](uint32_t destination) {
        const bool none = masked(destination) || (destination == group.rank && p.own_in_place != 0);
        return none ? 0 : static_cast<uint32_t>(p.rows_home[destination]);
    };
    // Offset, in the outbox, of the rows for a destination that a transport reaches.
    const auto outbox_of = [&](uint32_t destination) {
        uint64_t offset = layout.ll_combine_outbox(parity);
        for (uint32_t rank = 0; rank < destination; ++rank) {
            if (!group.is_local(rank))
                offset += align_up(static_cast<uint64_t>(p.rows_home[rank]) * shape.row_bytes, 64);
        }
        return offset;
    };
    const auto message_to = [&](uint32_t destination) {
        return group.is_local(destination) ? group.peer_data[destination] + layout.ll_combine_inbox(parity) +
                                                 static_cast<uint64_t>(p.combine_base[destination]) * shape.row_bytes
                                           : group.data + outbox_of(destination);
    };
    uint32_t total = 0;
    for (uint32_t rank = 0; rank < ranks; ++rank) total += rows_to(rank);
    // All rows are dealt to all warps, so that a crowded expert is not one warp's work; few rows in pieces.
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    const uint32_t wanted = total != 0 && warps > total ? warps / total : 1;
    const uint64_t piece = align_up((shape.row_bytes + wanted - 1) / wanted, 512);
    const auto pieces = static_cast<uint32_t>((shape.row_bytes + piece - 1) / piece);
    Span step(group, Activity::kCopies);
    for (uint32_t item = warp; ok && item < total * pieces; item += warps) {
        uint32_t row = item / pieces, destination = 0;
        for (uint32_t rows = rows_to(0); row >= rows; rows = rows_to(++destination)) row -= rows;
        const uint64_t from = ll_row_to_return(p, destination, row) * shape.row_bytes;
        const uint64_t to = uint64_t{row} * shape.row_bytes, begin = item % pieces * piece;
        device::copy(message_to(destination) + to + begin, p.x + from + begin,
                     shape.row_bytes - begin < piece ? shape.row_bytes - begin : piece);
    }
    step.end();
    const bool last = ll_all_written(group, device::num_blocks(), ok);
    if (last) {
        ll_send_all<PackedCombine>(group, number, p.masked, [&](uint32_t destination) -> LowLatencyMessage {
            return {
                group.is_local(destination) ? 0 : outbox_of(destination),
                layout.ll_combine_inbox(parity) + static_cast<uint64_t>(p.combine_base[destination]) * shape.row_bytes,
                static_cast<uint64_t>(p.rows_home[destination]) * shape.row_bytes};
        });
    }
    if (device::warp_in_block() == 0 && device::lane() == 0) {
        *Counters::packed(group, LowLatencyHalf::kCombineSend, device::block_index()) = number;
    }
    return last && ll_credits_travel(group, p.masked);
}

// List the rows that a token's sum takes; returns how many. The whole warp.
UCCL_EP_DEVICE uint32_t ll_list_terms(const LowLatencyCombineParameters &p, const uint8_t *inbox, uint32_t token,
                                      WeightedRow *terms) {
    const LowLatencyShape &shape = p.shape;
    const uint64_t first = uint64_t{token} * shape.num_topk;
    uint32_t num_terms = 0;
    device::sync_warp();  // the list of the token before has been read
    for (uint32_t base = 0; base < shape.num_topk; base += device::kWarpSize) {
        const uint32_t k = base + device::lane();
        const bool inside = k < shape.num_topk;
        int32_t row = inside ? p.combine_row[first + k] : -1;
        if (row >= 0 && p.masked != nullptr) {  // a rank that was left out since the dispatch has sent nothing
            const int64_t expert = load_pick(p.topk_idx, p.index_bytes, first + k, shape.num_experts);
            const uint32_t local_experts = shape.num_experts / p.group.num_ranks();
            if (expert >= 0 && p.masked[static_cast<uint32_t>(expert) / local_experts] != 0) row = -1;
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
    return num_terms;
}

// The receive half. The whole grid.
UCCL_EP_DEVICE void ll_combine_receive(const LowLatencyCombineParameters &p) {
    const Group &group = p.group;
    const Span half(group, Activity::kReceives);
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint64_t number = ll_done(group, LowLatencyHalf::kCombineReceive) + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    const uint8_t *inbox = group.data + layout.ll_combine_inbox(parity);
    auto *terms = reinterpret_cast<WeightedRow *>(device::shared_memory()) + device::warp_in_block() * shape.num_topk;
    // Few tokens: several warps share one.
    const uint32_t wanted = warps > p.num_tokens && p.num_tokens != 0 ? warps / p.num_tokens : 1;
    const auto piece = static_cast<uint32_t>(
        align_up((shape.hidden + wanted - 1) / wanted, step_of<PieceRun>(shape.row_bytes / shape.hidden)));
    const uint32_t pieces = (shape.hidden + piece - 1) / piece, items = p.num_tokens * pieces;
    // What the first sum takes is known before the rows have come, unless a rank may be left out meanwhile.
    const bool listed = p.masked == nullptr && warp < items;
    uint32_t num_terms = listed ? ll_list_terms(p, inbox, warp / pieces, terms) : 0;
    if (ll_wait_all<PackedCombine>(group, number, p.masked, p.wait_cost, [](uint32_t) { return true; })) {
        const Span step(group, Activity::kAddsUp);
        for (uint32_t item = warp; item < items; item += warps) {
            const uint32_t token = item / pieces, begin = item % pieces * piece;
            if (item != warp || !listed) num_terms = ll_list_terms(p, inbox, token, terms);
            sum_payload<true, PieceRun>(
                shape.payload_type, p.out + uint64_t{token} * shape.row_bytes, begin,
                shape.hidden - begin < piece ? shape.hidden : begin + piece, num_terms,
                [&](uint32_t j) { return terms[j].row; }, [&](uint32_t j) { return terms[j].weight; });
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

UCCL_EP_KERNEL(uccl_ep_ll_combine_send, LowLatencyCombineParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kLowLatencyCombineSend);
    if (ll_combine_send(parameters)) ll_tell<PackedCombine>(parameters.group);
}

UCCL_EP_KERNEL(uccl_ep_ll_combine_receive, LowLatencyCombineParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kLowLatencyCombineReceive);
    ll_combine_receive(parameters);
}

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_combine, LowLatencyCombineParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kLowLatencyCombine);
    const bool tells = ll_combine_send(parameters);
    device::sync_block();  // the halves share the block's memory
    if (tells) ll_tell<PackedCombine>(parameters.group);
    ll_combine_receive(parameters);
}

}  // namespace uccl_ep
