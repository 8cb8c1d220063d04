// The send half of a low-latency dispatch: rows are cast where that was asked for, and written into one message a rank.
#pragma once

#include "float8.hpp"
#include "ll_placing.hpp"
#include "ll_room.hpp"

namespace uccl_ep {

// Where a row of this block goes.
struct LowLatencyRow {
    uint8_t *fields;  // in the message to its rank
    LowLatencyRows at;
    uint32_t rank;
};

UCCL_EP_DEVICE LowLatencyRow ll_row(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &placing,
                                    uint32_t entry) {
    const uint32_t ranks = p.group.num_ranks();
    const uint32_t rank = static_cast<uint32_t>(placing.expert[entry]) / (p.shape.num_experts / ranks);
    const LowLatencyRows at = LowLatencyRows::of(p.shape, ranks, 0);
    return {placing.message[rank] + at.row(static_cast<uint32_t>(placing.row[entry])), at, rank};
}

// The groups of a token that this warp casts, `kAtOnce` of them in flight, since a load takes longer than all the rest.
template <uint32_t kAtOnce, bool kWhole, class Storage, class ToFloat, class Ready, class Write>
UCCL_EP_DEVICE void cast_groups(const Storage *x, const LowLatencyShape &shape, uint32_t warps, ToFloat to_float,
                                Ready ready, Write write) {
    const uint32_t groups = scale_groups(shape.hidden);
    for (uint32_t first = device::warp_in_block(); first < groups; first += kAtOnce * warps) {
        GroupCasts<Storage, kAtOnce, kWhole> casts(shape.hidden, first, warps);
        casts.load(x);
        if (!ready()) return;
        casts.cast(to_float, shape.quantization != static_cast<uint32_t>(Quantization::kFloat8));
        write([&](uint8_t *payload, float *scales) { casts.store(payload, scales); });
    }
}

// Cast a token, groups of a scale dealt to the first `warps` warps of the block, which call this. `ready()` is called while
// loads are under way, and says whether to go on; `write(store)` calls store(payload row, its scales) for each place.
template <class Ready, class Write>
UCCL_EP_DEVICE void cast_token(const LowLatencyShape &shape, const uint8_t *tokens, uint32_t token, uint32_t warps,
                               Ready ready, Write write) {
    const uint64_t first = uint64_t{token} * shape.hidden;
    const auto type = static_cast<PayloadType>(shape.payload_type);
    if (type == PayloadType::kFloat32) {
        const auto *x = reinterpret_cast<const float *>(tokens) + first;
        cast_groups<1, false>(x, shape, warps, [](float value) { return value; }, ready, write);
        return;
    }
    // One loop for both types: each loop costs registers by the addresses that the compiler works out before them.
    const auto *x = reinterpret_cast<const uint16_t *>(tokens) + first;
    const auto to_float = [half = type == PayloadType::kFloat16](uint16_t bits) {
        return half ? device::half_to_float(bits) : bfloat16_to_float(bits);
    };
    constexpr uint32_t kAtOnce = device::kWarpSize == 1 ? 1 : 5;  // 60 in a block of 12 warps
    if (GroupCasts<uint16_t, kAtOnce, true>::is_whole(x, shape.hidden)) {
        cast_groups<kAtOnce, true>(x, shape, warps, to_float, ready, write);
    } else {
        cast_groups<1, false>(x, shape, warps, to_float, ready, write);
    }
}

// The part of a row that this warp copies where the first `warps` warps of a block share it.
struct SharedRun {
    uint64_t begin, bytes;

    UCCL_EP_DEVICE static SharedRun of(uint64_t row_bytes, uint32_t warps) {
        const uint64_t piece = align_up((row_bytes + warps - 1) / warps, 512), begin = piece * device::warp_in_block();
        return {begin, begin >= row_bytes ? 0 : row_bytes - begin < piece ? row_bytes - begin : piece};
    }
    // All loads of the part are under way before the first is stored. The whole warp.
    UCCL_EP_DEVICE void copy(uint8_t *to, const uint8_t *from) const {
        device::copy_to_many([&](uint32_t) { return to + begin; }, 1, from + begin, bytes);
    }
};

// Warps of each block that write rows. The last one writes heads, which takes it as long as one row takes the others.
UCCL_EP_DEVICE uint32_t ll_row_warps(const LowLatencyDispatchParameters &p) {
    const uint32_t warps = device::warps_per_block();
    return warps > 1 && p.num_tokens <= device::num_blocks() ? warps - 1 : warps;
}

// Write a token into the messages of all its ranks. The first `warps` warps of the block.
UCCL_EP_DEVICE void ll_write_token(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &placing,
                                   uint32_t warps, uint32_t first_entry, uint32_t token) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t warp = device::warp_in_block(), topk = shape.num_topk;
    if (shape.quantization == static_cast<uint32_t>(Quantization::kNone)) {
        const SharedRun run = SharedRun::of(shape.row_bytes, warps);
        for (uint32_t k = 0; k < topk && run.bytes != 0; ++k) {
            if (placing.row[first_entry + k] < 0) continue;
            const LowLatencyRow to = ll_row(p, placing, first_entry + k);
            if (to.rank == group.rank && p.own_in_place != 0) continue;
            run.copy(to.fields, p.x + uint64_t{token} * shape.row_bytes);
        }
    } else {
        cast_token(
            shape, p.x, token, warps, [] { return true; },
            [&](auto store) {
                for (uint32_t k = 0; k < topk; ++k) {
                    if (placing.row[first_entry + k] < 0) continue;
                    const LowLatencyRow to = ll_row(p, placing, first_entry + k);
                    store(to.fields, reinterpret_cast<float *>(to.fields + to.at.scales));
                }
            });
    }
    const uint32_t local_experts = shape.num_experts / group.num_ranks();
    uint32_t destination = 0;
    for (uint32_t k = 0; k < topk; ++k) {
        if (placing.row[first_entry + k] < 0) continue;
        if (destination++ % warps != warp) continue;
        const LowLatencyRow to = ll_row(p, placing, first_entry + k);
        auto *experts = reinterpret_cast<int32_t *>(to.fields + to.at.expert);
        auto *places = reinterpret_cast<int32_t *>(to.fields + to.at.place);
        for (uint32_t i = device::lane(); i < topk; i += device::kWarpSize) {
            const int32_t local = placing.expert[first_entry + i] - static_cast<int32_t>(to.rank * local_experts);
            const bool here = local >= 0 && static_cast<uint32_t>(local) < local_experts;
            experts[i] = here ? local : -1;
            places[i] = placing.place[first_entry + i];
        }
        if (device::lane() == 0) *reinterpret_cast<int32_t *>(to.fields + to.at.source) = static_cast<int32_t>(token);
    }
}

// Blocks that write anything: those that have tokens, and as many as the heads of all messages need.
UCCL_EP_DEVICE uint32_t ll_dispatch_writers(const LowLatencyDispatchParameters &p) {
    constexpr uint32_t kHeads = 4;  // that a block writes; a lone one may be the only writer, and then pushes at once
    const uint32_t blocks = device::num_blocks(), heads = (p.group.num_ranks() + kHeads - 1) / kHeads;
    const uint32_t wanted = p.num_tokens > heads ? p.num_tokens : heads;
    return wanted < blocks ? wanted : blocks;
}

// The send half. The whole grid. Returns, alike on all threads of a block, whether it is the one that has yet to tell the
// others what this rank has read (ll_tell).
UCCL_EP_DEVICE bool ll_dispatch_send(const LowLatencyDispatchParameters &p) {
    const Group &group = p.group;
    const Span half(group, Activity::kSends);
    const Layout &layout = group.layout;
    const uint32_t ranks = group.num_ranks();
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    const uint64_t number = ll_done(group, LowLatencyHalf::kDispatchSend) + 1;
    const bool knows_room = ll_knows_room<PackedDispatch>(group, p.masked, number);
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const LowLatencyPlacing placing =
        LowLatencyPlacing::in(device::shared_memory(), p.shape.num_experts, ranks, p.num_chunks,
                              (p.num_tokens + blocks - 1) / blocks * p.shape.num_topk);
    // After an earlier failure, what the kernels before should have left is not there.
    bool ok = device::warp_in_block() != 0 || device::lane() != 0 || !aborted(group);
    // A rank that the wait leaves out must be known before rows are placed; without a mask, placing costs no time while
    // credits are on their way.
    if (p.masked != nullptr) ok = ll_wait_room<PackedDispatch>(group, number, p.masked);
    ok = ll_place_rows(p, placing, parity, ok);
    if (p.masked == nullptr && !knows_room) ok = ll_wait_room<PackedDispatch>(group, number, p.masked) && ok;
    const uint32_t writers = ll_dispatch_writers(p);
    bool last = false;
    if (block < writers) {
        if (ok) {
            const Span step(group, Activity::kCopies);
            const uint32_t warp = device::warp_in_block(), row_warps = ll_row_warps(p);
            if (warp == device::warps_per_block() - 1) ll_place_home(p, placing, number, writers);
            for (uint32_t token = block; warp < row_warps && token < p.num_tokens; token += blocks) {
                ll_write_token(p, placing, row_warps, token / blocks * p.shape.num_topk, token);
            }
        }
        last = ll_all_written(group, writers, ok);
    }
    if (last) {
        ll_send_all<PackedDispatch>(group, number, p.masked, [&](uint32_t rank) -> LowLatencyMessage {
            const auto rows = static_cast<uint32_t>(placing.total[placing.experts + rank]);
            return {layout.has_remote ? layout.ll_dispatch_outbox(parity, rank) : 0,
                    layout.ll_dispatch_inbox(parity, group.rank), LowLatencyRows::of(p.shape, ranks, rows).end};
        });
    }
    // All threads of the block have read the count: they have met since.
    if (device::warp_in_block() == 0 && device::lane() == 0) {
        *Counters::packed(group, LowLatencyHalf::kDispatchSend, block) = number;
    }
    return last && ll_credits_travel(group, p.masked);
}

}  // namespace uccl_ep
