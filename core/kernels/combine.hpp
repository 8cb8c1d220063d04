// High-throughput combine: every rank sends each row back to the row's source, which sums.
//
// Sums are taken in rank order, biases first, in float32 (float64 for float64), and rounded once: the
// same bits whatever the domains are. So rows cross unreduced; docs/decisions/ says what that costs.
#pragma once

#include "dispatch.hpp"
#include "numerics.hpp"

namespace uccl_ep {

struct CombineRows {
    uint64_t payload, topk_weights, end;

    UCCL_EP_DEVICE static CombineRows of(const CombineParameters &p, uint32_t rows) {
        CombineRows at;
        at.payload = sizeof(MessageHeader);
        at.topk_weights = align_up(at.payload + uint64_t{rows} * p.row_bytes, 16);
        at.end = align_up(at.topk_weights + uint64_t{rows} * p.num_topk * 4, 64);
        return at;
    }
    UCCL_EP_DEVICE static uint32_t capacity(const CombineParameters &p) {
        const uint64_t fixed = sizeof(MessageHeader) + 16 + 64;
        const uint64_t row = uint64_t{p.row_bytes} + uint64_t{p.num_topk} * 4;
        return static_cast<uint32_t>((p.group.layout.slot_bytes - fixed) / row);
    }
};

UCCL_EP_DEVICE RowFormat row_format(const CombineParameters &p) { return {p.row_bytes, 0, p.num_topk, p.payload_type}; }

// Role: send this channel's rows of `source` home.
UCCL_EP_DEVICE bool combine_send(const CombineParameters &p, uint32_t source, uint32_t channel) {
    const Group &group = p.group;
    const uint32_t index = source * group.layout.num_channels + channel;
    const uint32_t total = static_cast<uint32_t>(p.receive_rows[index]);
    const uint64_t first = static_cast<uint64_t>(p.receive_offset[index]);
    const uint32_t capacity = CombineRows::capacity(p);
    StreamSender sender(group, direct_to(group, source, channel), Phase::kCombine);
    bool ok = true;
    for (uint32_t sent = 0; sent < total && ok;) {
        const uint32_t rows = total - sent < capacity ? total - sent : capacity;
        uint8_t *slot = sender.acquire();
        ok = slot != nullptr;
        if (!ok) break;
        const CombineRows at = CombineRows::of(p, rows);
        write_message_header(group, slot, OperationKind::kCombine, rows, row_format(p), group.rank);
        device::copy(slot + at.payload, p.x + (first + sent) * p.row_bytes, uint64_t{rows} * p.row_bytes);
        if (p.num_topk != 0) {
            device::copy(slot + at.topk_weights, p.topk_weights + (first + sent) * p.num_topk,
                         uint64_t{rows} * p.num_topk * 4);
        }
        ok = sender.commit(at.end);
        sent += rows;
    }
    sender.finish();
    return ok;
}

// Where the reducer stands in the rows that come home from one rank.
struct IncomingRows {
    const uint8_t *payload;     // current message, or my own rows
    const float *topk_weights;
    uint32_t next, rows;        // next row of the message, rows in it
};

// Role: sum this channel's tokens.
UCCL_EP_DEVICE bool combine_reduce(const CombineParameters &p, uint32_t channel, IncomingRows *incoming) {
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks(), channels = group.layout.num_channels;
    const TokenRange range = TokenRange::of(p.num_tokens, channel, channels);
    for (uint32_t rank = device::lane(); rank < ranks; rank += device::kWarpSize)
        incoming[rank] = {nullptr, nullptr, 0, 0};
    device::sync_warp();  // another lane clears the entry that lane 0 fills next
    if (device::lane() == 0) {
        const uint64_t own = static_cast<uint64_t>(p.receive_offset[group.rank * channels + channel]);
        incoming[group.rank] = {p.x + own * p.row_bytes, p.num_topk == 0 ? nullptr : p.topk_weights + own * p.num_topk,
                                0, range.end - range.begin};
    }
    device::sync_warp();
    for (uint32_t token = range.begin; token < range.end; ++token) {
        const uint8_t *in_rank = p.is_token_in_rank + uint64_t{token} * ranks;
        // Have a row of every rank that holds one.
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            if (in_rank[rank] == 0 || rank == group.rank || incoming[rank].payload != nullptr) continue;
            StreamReceiver receiver(group, direct_from(group, rank, channel), Phase::kCombine);
            const uint8_t *slot = receiver.acquire(OperationKind::kCombine, row_format(p));
            if (slot == nullptr) return false;
            if (device::lane() == 0) {
                const uint32_t rows = reinterpret_cast<const MessageHeader *>(slot)->rows;
                const CombineRows at = CombineRows::of(p, rows);
                incoming[rank] = {slot + at.payload, reinterpret_cast<const float *>(slot + at.topk_weights), 0, rows};
            }
            device::sync_warp();
        }
        // Terms in order: biases, then ranks. A cursor walks the ranks of this token, so that no list
        // of terms needs room.
        uint32_t num_biases = (p.bias[0] != nullptr) + (p.bias[1] != nullptr);
        uint32_t num_terms = num_biases;
        for (uint32_t rank = 0; rank < ranks; ++rank) num_terms += in_rank[rank];
        uint32_t rank_of_term = 0;
        const auto row_of = [&](uint32_t rank) {
            return incoming[rank].payload + uint64_t{incoming[rank].next} * p.row_bytes;
        };
        sum_payload<false>(
            p.payload_type, p.out + uint64_t{token} * p.row_bytes, p.hidden, num_terms,
            [&](uint32_t j) -> const uint8_t * {
                if (j < num_biases)
                    return (p.bias[0] != nullptr && j == 0 ? p.bias[0] : p.bias[1]) + uint64_t{token} * p.row_bytes;
                if (j == num_biases) {
                    rank_of_term = 0;
                } else {
                    ++rank_of_term;
                }
                while (in_rank[rank_of_term] == 0) ++rank_of_term;
                return row_of(rank_of_term);
            },
            [](uint32_t) { return 1.0f; });
        for (uint32_t k = device::lane(); k < p.num_topk; k += device::kWarpSize) {
            float sum = 0.0f;
            for (uint32_t rank = 0; rank < ranks; ++rank) {
                if (in_rank[rank] != 0)
                    sum += incoming[rank].topk_weights[uint64_t{incoming[rank].next} * p.num_topk + k];
            }
            p.out_topk_weights[uint64_t{token} * p.num_topk + k] = sum;
        }
        device::sync_warp();  // the rows have been read: slots may go back
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            if (in_rank[rank] == 0) continue;
            const bool last = incoming[rank].next + 1 == incoming[rank].rows && rank != group.rank;
            device::sync_warp();
            if (device::lane() == 0) {
                ++incoming[rank].next;
                if (last) incoming[rank].payload = nullptr;
            }
            if (last) {
                StreamReceiver receiver(group, direct_from(group, rank, channel), Phase::kCombine);
                if (!receiver.release()) return false;
                receiver.finish();
            }
        }
        device::sync_warp();
    }
    return true;
}

UCCL_EP_DEVICE uint32_t combine_roles(const Layout &layout) { return layout.num_ranks; }

UCCL_EP_KERNEL(uccl_ep_combine, CombineParameters) {
    const CombineParameters &p = parameters;
    const Group &group = p.group;
    const uint32_t channels = group.layout.num_channels, ranks = group.num_ranks();
    const uint32_t channel = device::block_index() % channels;
    const uint32_t warp = device::block_index() / channels * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() / channels * device::warps_per_block();
    for (uint32_t role = warp; role < combine_roles(group.layout); role += warps) {
        if (role == 0) {
            combine_reduce(p, channel, reinterpret_cast<IncomingRows *>(device::shared_memory()));
        } else {
            combine_send(p, (group.rank + role) % ranks, channel);
        }
    }
}

}  // namespace uccl_ep
