// The send half of a direct low-latency dispatch: a rank tells every other rank the picks of all its tokens at once, in
// words that need no flag, and writes each row, cast where that was asked for, once to every rank that it goes to. While
// the picks travel, so do the rows.
#pragma once

#include "ll_direct_words.hpp"
#include "ll_dispatch_send.hpp"

namespace uccl_ep {

using DirectDispatchCounts = DirectCounts<DirectDispatch>;

UCCL_EP_DEVICE uint8_t *direct_dispatch_inbox(const Group &group, uint8_t *window, uint32_t source, uint64_t number) {
    return window + group.layout.ll_dispatch_inbox(static_cast<uint32_t>(number & 1), source);
}

// Word `i` of the picks of a token of mine; the tokens behind the last have no picks.
UCCL_EP_DEVICE uint64_t direct_picks_word(const LowLatencyDispatchParameters &p, uint32_t token, uint32_t i,
                                          uint64_t number) {
    if (token >= p.num_tokens) return PicksWord::empty(number);
    const uint64_t first = uint64_t{token} * p.shape.num_topk;
    return PicksWord::of(number, i * PicksWord::kPicks, p.shape.num_topk, [&](uint32_t k) {
        return load_pick(p.topk_idx, p.index_bytes, first + k, p.shape.num_experts);
    });
}

// Tell the peers whose header this block writes, the last ones, which have the fewest tokens, what this call is. The
// whole warp.
UCCL_EP_DEVICE void direct_send_headers(const LowLatencyDispatchParameters &p, uint64_t number) {
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks(), blocks = device::num_blocks();
    if (device::lane() != 0) return;
    for (uint32_t i = blocks - 1 - device::block_index(); i + 1 < ranks; i += blocks) {
        const uint32_t peer = (group.rank + 1 + i) % ranks;
        *reinterpret_cast<MessageHeader *>(direct_dispatch_inbox(group, group.peer_data[peer], group.rank, number)) =
            MessageHeader{number,
                          static_cast<uint32_t>(OperationKind::kLowLatencyDispatch),
                          p.num_tokens,
                          p.shape.row_bytes,
                          group.rank,
                          {p.shape.max_tokens, p.shape.num_topk, p.shape.num_experts, p.shape.quantization, 0,
                           p.shape.payload_type, static_cast<uint32_t>(LowLatencyPath::kDirect)}};
        device::store_release_system(direct_flag(group, peer, DirectDispatch::kRows, group.rank, kDirectHead), number);
    }
}

// Write a token to the ranks that it goes to, once `ready()`. The whole block.
template <class Ready>
UCCL_EP_DEVICE void direct_write_token(const LowLatencyDispatchParameters &p, const PeerWindows &windows,
                                       uint32_t token, uint64_t number, Ready ready) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t local_experts = shape.num_experts / group.num_ranks();
    const DirectDispatchInbox at = DirectDispatchInbox::of(shape);
    const auto inbox_of = [&](uint32_t rank) {
        return direct_dispatch_inbox(group, windows[rank], group.rank, number);
    };
    const TokenPicks pick(p.topk_idx, p.index_bytes, shape, token);
    const uint64_t row = uint64_t{token} * shape.row_bytes;
    if (shape.quantization != static_cast<uint32_t>(Quantization::kNone)) {
        cast_token(shape, p.x, token, device::warps_per_block(), ready, [&](auto store) {
            for_each_rank_of(pick, shape.num_topk, local_experts, [&](uint32_t rank) {
                uint8_t *inbox = inbox_of(rank);
                store(inbox + at.payload + row,
                      reinterpret_cast<float *>(inbox + at.scales + uint64_t{token} * shape.scale_bytes));
            });
        });
        return;
    }
    const SharedRun run = SharedRun::of(shape.row_bytes, device::warps_per_block());
    if (run.bytes == 0 || !ready()) return;
    for_each_rank_of(pick, shape.num_topk, local_experts, [&](uint32_t rank) {
        if (rank == group.rank && p.own_in_place != 0) return;
        run.copy(inbox_of(rank) + at.payload + row, p.x + row);
    });
}

// The send half. The whole grid.
UCCL_EP_DEVICE void direct_dispatch_send(const LowLatencyDispatchParameters &p, const DirectDispatchCounts &counts) {
    const Group &group = p.group;
    const Span half(group, Activity::kSends);
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    const uint64_t number = counts.sent + 1;
    bool asked = false, ok = false;
    if (is_herald()) {
        ok = direct_send_words<DirectDispatch, PicksWord>(
            group, counts, p.shape.max_tokens, PicksWord::of_token(p.shape.num_topk),
            [&](uint32_t token, uint32_t i) { return direct_picks_word(p, token, i, number); });
        asked = true;
        if (ok) direct_send_headers(p, number);
    }
    const PeerWindows windows(group);
    const auto ready = [&] {
        if (!asked) ok = direct_wait_room(group, counts);
        asked = true;
        return ok;
    };
    Span step(group, Activity::kCopies);
    for (uint32_t token = block; token < p.num_tokens; token += blocks)
        direct_write_token(p, windows, token, number, ready);
    step.end();
    direct_raise(group, counts);
    // By who has waited for the other warps: all of them have read the count.
    if (is_herald() && device::lane() == 0) *Counters::direct(group, DirectDispatch::kSent, block) = number;
}

}  // namespace uccl_ep
