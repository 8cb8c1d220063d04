// Low-latency combine: each (token, expert) row goes home to a row that its source has named in the
// dispatch; there the rows of a token are weighted and summed in increasing k.
#pragma once

#include "ll_dispatch.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_ll_combine_send, LowLatencyCombineParameters) {
    const LowLatencyCombineParameters &p = parameters;
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), local_experts = shape.num_experts / ranks;
    uint64_t *sent = Counters::at(group, SingleCounter::kLowLatencyCombineSent);
    const uint64_t number = *sent + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    if (warp == 0) {
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            if (peer == group.rank || masked(peer)) continue;
            const uint32_t credit = layout.signal_index(SignalKind::kLowLatencyCombineCredit, peer, 0);
            if (number > 2 && !wait_signal_warp(group, {Phase::kLowLatencyCombineSend, peer, credit, number - 2}))
                break;
            if (!group.is_local(peer) && device::lane() == 0) {
                const uint64_t ticket = *Counters::combine_ticket(group, parity, peer);
                const uint32_t signal = layout.signal_index(SignalKind::kLowLatencyCombine, group.rank, 0);
                if (ticket != 0) wait_completed(group, peer, signal, ticket - 1, Phase::kLowLatencyCombineSend);
            }
        }
    }
    if (!sync_grid(group)) return;
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
    // more warps than such pairs, row by row, so that a crowded expert is not one warp's work.
    const uint32_t pairs = local_experts * ranks;
    const uint32_t sharers = warps > pairs ? warps / pairs : 1;
    for (uint32_t item = warp; item < pairs * sharers; item += warps) {
        const uint32_t pair = item / sharers, share = item % sharers;
        const uint32_t destination = pair % ranks;
        const uint32_t rows = static_cast<uint32_t>(p.count[pair]);
        if (rows == 0 || (destination == group.rank && p.own_in_place != 0)) continue;
        const uint64_t first = pair / ranks * rows_per_expert + static_cast<uint32_t>(p.begin[pair]);
        uint8_t *to = group.is_local(destination)
                          ? group.peer_data[destination] + layout.ll_combine_inbox(parity) +
                                static_cast<uint64_t>(p.combine_base[destination]) * shape.row_bytes
                          : group.data + outbox_of(destination);
        to += static_cast<uint64_t>(p.rows_before[pair]) * shape.row_bytes;
        const uint32_t run = sharers == 1 ? rows : 1;
        for (uint32_t row = share * run; row < rows; row += sharers * run) {
            device::copy(to + uint64_t{row} * shape.row_bytes, p.x + (first + row) * shape.row_bytes,
                         uint64_t{run} * shape.row_bytes);
        }
    }
    // The barrier orders the rows before the signals below: their release covers what the barrier made visible.
    if (!sync_grid(group)) return;
    for (uint32_t destination = warp; destination < ranks; destination += warps) {
        if (device::lane() != 0 || destination == group.rank || masked(destination)) continue;
        uint64_t ticket = 0;
        ll_send(group, destination, SignalKind::kLowLatencyCombine,
                group.is_local(destination) ? 0 : outbox_of(destination),
                layout.ll_combine_inbox(parity) + static_cast<uint64_t>(p.combine_base[destination]) * shape.row_bytes,
                static_cast<uint64_t>(p.rows_home[destination]) * shape.row_bytes, number,
                Phase::kLowLatencyCombineSend, &ticket);
        if (!group.is_local(destination)) *Counters::combine_ticket(group, parity, destination) = ticket + 1;
    }
    if (warp == 0 && device::lane() == 0) *sent = number;
}

UCCL_EP_KERNEL(uccl_ep_ll_combine_receive, LowLatencyCombineParameters) {
    const LowLatencyCombineParameters &p = parameters;
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks();
    uint64_t *received = Counters::at(group, SingleCounter::kLowLatencyCombineReceived);
    const uint64_t number = *received + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    for (uint32_t i = warp; i < ranks; i += warps) {
        const uint32_t source = (group.rank + i) % ranks;
        if (source == group.rank || masked(source) || device::lane() != 0) continue;
        const uint64_t start = p.wait_cost != nullptr ? device::now_ns() : 0;
        const uint32_t signal = layout.signal_index(SignalKind::kLowLatencyCombine, source, 0);
        wait_signal(group, {Phase::kLowLatencyCombineReceive, source, signal, number});
        if (p.wait_cost != nullptr) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
    }
    if (!sync_grid(group)) return;
    const uint8_t *inbox = group.data + layout.ll_combine_inbox(parity);
    for (uint32_t token = warp; token < p.num_tokens; token += warps) {
        const int32_t *rows = p.combine_row + uint64_t{token} * shape.num_topk;
        const int32_t *own_rows = p.own_row + uint64_t{token} * shape.num_topk;
        const float *weights = p.topk_weights + uint64_t{token} * shape.num_topk;
        uint32_t num_terms = 0;
        for (uint32_t k = 0; k < shape.num_topk; ++k) num_terms += rows[k] >= 0;
        uint32_t k = 0;  // the k of the current term: terms are asked for in order
        sum_payload<true>(
            shape.payload_type, p.out + uint64_t{token} * shape.row_bytes, shape.hidden, num_terms,
            [&](uint32_t j) -> const uint8_t * {
                k = j == 0 ? 0 : k + 1;
                while (rows[k] < 0) ++k;
                if (p.own_in_place != 0 && own_rows[k] >= 0) {
                    return p.x + static_cast<uint64_t>(own_rows[k]) * shape.row_bytes;
                }
                return inbox + static_cast<uint64_t>(rows[k]) * shape.row_bytes;
            },
            [&](uint32_t) { return weights[k]; });
    }
    if (!sync_grid(group)) return;
    const uint32_t thread = warp * device::kWarpSize + device::lane();
    for (uint32_t source = thread; source < ranks; source += warps * device::kWarpSize) {
        if (source == group.rank || masked(source)) continue;
        raise_signal(group, source, layout.signal_index(SignalKind::kLowLatencyCombineCredit, group.rank, 0), number,
                     Phase::kLowLatencyCombineReceive);
    }
    if (thread == 0) *received = number;
}

}  // namespace uccl_ep
