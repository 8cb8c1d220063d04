// Direct low-latency dispatch. A rank writes the picks of all its tokens to every other rank at once, and each row,
// cast where that was asked for, once to every rank that it goes to. The receiver finds out from the picks where the
// row belongs: behind the rows of the same expert from ranks before and of tokens before. While the picks travel, so
// do the rows.
#pragma once

#include "ll_direct.hpp"
#include "ll_dispatch_receive.hpp"
#include "ll_dispatch_send.hpp"

namespace uccl_ep {

// Write the head for a peer: the header, and the picks. The whole warp.
UCCL_EP_DEVICE void direct_send_picks(const LowLatencyDispatchParameters &p, uint32_t peer, uint64_t number) {
    const Group &group = p.group;
    uint8_t *inbox =
        group.peer_data[peer] + group.layout.ll_dispatch_inbox(static_cast<uint32_t>(number & 1), group.rank);
    auto *picks = reinterpret_cast<int32_t *>(inbox + DirectDispatchInbox::of(p.shape).picks);
    const auto load = [&](uint32_t i) { return static_cast<int32_t>(load_index(p.topk_idx, p.index_bytes, i)); };
    const auto has_room = [&] {
        return direct_wait_head_room(group, Phase::kLowLatencyDispatchSend, DirectFlag::kDispatchRead,
                                     SignalKind::kLowLatencyDispatchCredit, peer, number);
    };
    if (!direct_write_head(picks, p.num_tokens * p.shape.num_topk, load, has_room)) return;
    if (device::lane() == 0) {
        *reinterpret_cast<MessageHeader *>(inbox) =
            MessageHeader{number,
                          static_cast<uint32_t>(OperationKind::kLowLatencyDispatch),
                          p.num_tokens,
                          p.shape.row_bytes,
                          group.rank,
                          {p.shape.max_tokens, p.shape.num_topk, p.shape.num_experts, p.shape.quantization, 0,
                           p.shape.payload_type, static_cast<uint32_t>(LowLatencyPath::kDirect)}};
    }
    direct_raise_head(group, DirectFlag::kDispatchRows, peer, number);
}

// Write a token to the ranks that it goes to, once `ready()`. The whole block.
template <class Ready>
UCCL_EP_DEVICE void direct_write_token(const LowLatencyDispatchParameters &p, const PeerWindows &windows,
                                       uint32_t token, uint32_t parity, Ready ready) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t local_experts = shape.num_experts / group.num_ranks();
    const DirectDispatchInbox at = DirectDispatchInbox::of(shape);
    const auto inbox_of = [&](uint32_t rank) {
        return windows[rank] + group.layout.ll_dispatch_inbox(parity, group.rank);
    };
    const TokenPicks pick(p.topk_idx, p.index_bytes, shape.num_topk, token);
    const uint64_t row = uint64_t{token} * shape.row_bytes;
    if (shape.quantization != static_cast<uint32_t>(Quantization::kNone)) {
        cast_token(shape, p.x, token, ready, [&](auto store) {
            for_each_rank_of(pick, shape.num_topk, local_experts, [&](uint32_t rank) {
                uint8_t *inbox = inbox_of(rank);
                store(inbox + at.payload + row,
                      reinterpret_cast<float *>(inbox + at.scales + uint64_t{token} * shape.scale_bytes));
            });
        });
        return;
    }
    const SharedRun run = SharedRun::of(shape.row_bytes);
    if (run.bytes == 0 || !ready()) return;
    for_each_rank_of(pick, shape.num_topk, local_experts, [&](uint32_t rank) {
        if (rank == group.rank && p.own_in_place != 0) return;
        device::copy(inbox_of(rank) + at.payload + row + run.begin, p.x + row + run.begin, run.bytes);
    });
}

// The send half. The whole grid.
UCCL_EP_DEVICE void direct_dispatch_send(const LowLatencyDispatchParameters &p) {
    const Group &group = p.group;
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    uint64_t *sent = Counters::direct(group, LowLatencyHalf::kDispatchSend, block);
    const uint64_t number = *sent + 1;
    for_each_head_of_block(group, [&](uint32_t peer) { direct_send_picks(p, peer, number); });
    const PeerWindows windows(group);
    bool asked = false, ok = false;
    const auto ready = [&] {
        if (!asked) {
            ok = direct_wait_room(group, Phase::kLowLatencyDispatchSend, DirectFlag::kDispatchRead,
                                  SignalKind::kLowLatencyDispatchCredit, number);
        }
        asked = true;
        return ok;
    };
    for (uint32_t token = block; token < p.num_tokens; token += blocks)
        direct_write_token(p, windows, token, static_cast<uint32_t>(number & 1), ready);
    direct_raise(group, DirectFlag::kDispatchRows, number);
    if (device::warp_in_block() == 0 && device::lane() == 0) *sent = number;
}

// How many of ids [begin, end) are `id`. The whole warp.
UCCL_EP_DEVICE uint32_t count_picks(const int16_t *ids, uint32_t begin, uint32_t end, int16_t id) {
    constexpr uint32_t kAtOnce = 8;
    uint32_t mine = 0;
    for (uint32_t base = begin; base < end; base += kAtOnce * device::kWarpSize) {
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t at = base + i * device::kWarpSize + device::lane();
            mine += at < end && ids[at] == id ? 1 : 0;
        }
    }
    uint32_t total;
    sum_below(mine, &total);
    return total;
}

// The picks of all tokens of all sources, into the block's memory; returns how many there are. The whole block.
UCCL_EP_DEVICE uint32_t direct_gather_picks(const LowLatencyDispatchParameters &p, const DirectPlacing &placing,
                                            uint32_t parity) {
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks(), topk = p.shape.num_topk;
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    const uint64_t offset = DirectDispatchInbox::of(p.shape).picks;
    uint32_t entries = 0;
    for (uint32_t source = 0; source < ranks; ++source) entries += placing.tokens[source] * topk;
    constexpr uint32_t kAtOnce = 8;  // loads in flight
    for (uint32_t base = thread; base < entries; base += kAtOnce * threads) {
        int32_t loaded[kAtOnce];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            uint32_t entry = base + i * threads, source = 0;
            loaded[i] = -1;
            if (entry >= entries) continue;
            while (entry >= placing.tokens[source] * topk) entry -= placing.tokens[source++] * topk;
            loaded[i] = source == group.rank
                            ? static_cast<int32_t>(load_index(p.topk_idx, p.index_bytes, entry))
                            : reinterpret_cast<const int32_t *>(
                                  group.data + group.layout.ll_dispatch_inbox(parity, source) + offset)[entry];
        }
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (base + i * threads < entries) placing.picks[base + i * threads] = static_cast<int16_t>(loaded[i]);
        }
    }
    return entries;
}

// Where the picks of token `token` of every source belong, and, once a launch, how many rows the experts of this block
// get. A warp a question. The whole block.
UCCL_EP_DEVICE void direct_find_places(const LowLatencyDispatchParameters &p, const DirectPlacing &placing,
                                       uint32_t token, bool counts) {
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks(), topk = p.shape.num_topk, local_experts = p.shape.num_experts / ranks;
    const int32_t first_expert = static_cast<int32_t>(group.rank * local_experts);
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    const uint32_t warps = device::warps_per_block();
    const uint64_t rows_per_expert = uint64_t{ranks} * p.shape.max_tokens;
    const uint32_t of_token = topk + 1, questions = ranks * of_token;
    const uint32_t experts = counts && local_experts > block ? (local_experts - block + blocks - 1) / blocks : 0;
    for (uint32_t question = device::warp_in_block(); question < questions + experts; question += warps) {
        if (question < questions) {
            const uint32_t source = question / of_token, k = question % of_token;
            int32_t *out = p.picks + (uint64_t{source} * p.shape.max_tokens + token) * of_token;
            if (token >= placing.tokens[source]) {
                if (k < topk && device::lane() == 0) {
                    placing.place[source * topk + k] = DirectPlacing::kNowhere;
                    if (token < p.shape.max_tokens) out[k] = -1;
                }
                continue;
            }
            uint32_t begin = 0;
            for (uint32_t other = 0; other < source; ++other) begin += placing.tokens[other] * topk;
            const int16_t *row = placing.picks + begin + token * topk;
            if (k == topk) {
                int32_t before = 0;
                for_each_rank_of([&](uint32_t i) { return int32_t{row[i]}; }, topk, local_experts,
                                 [&](uint32_t rank) { before += rank < group.rank ? 1 : 0; });
                if (device::lane() == 0) out[topk] = before;
                continue;
            }
            const int32_t local = row[k] - first_expert;
            const bool here = local >= 0 && local < static_cast<int32_t>(local_experts);
            const uint32_t place = here ? count_picks(placing.picks, 0, begin + token * topk + k, row[k]) : 0;
            const bool fits = here && place < rows_per_expert;  // else the count of that expert is refused below
            if (device::lane() == 0) {
                placing.place[source * topk + k] =
                    fits ? static_cast<uint64_t>(static_cast<uint32_t>(local)) << 32 | place : DirectPlacing::kNowhere;
                out[k] = fits ? static_cast<int32_t>(static_cast<uint64_t>(local) * rows_per_expert + place) : -1;
            }
            continue;
        }
        const uint32_t expert = block + (question - questions) * blocks;
        uint32_t begin = 0, sum = 0;
        for (uint32_t source = 0; source < ranks; ++source) {
            const uint32_t end = begin + placing.tokens[source] * topk;
            const uint32_t rows = count_picks(placing.picks, begin, end,
                                              static_cast<int16_t>(first_expert + static_cast<int32_t>(expert)));
            if (device::lane() == 0 && p.layout_range != nullptr)
                p.layout_range[expert * ranks + source] = static_cast<int64_t>(sum) << 32 | rows;
            if (device::lane() == 0 && rows > p.shape.max_tokens) {  // a token names it more than once
                fail_difference(group, Phase::kLowLatencyDispatchReceive, source, Difference::kExpertRows, rows,
                                p.shape.max_tokens);
            }
            begin = end;
            sum += rows;
        }
        if (device::lane() == 0) {
            p.receive_count[expert] = static_cast<int32_t>(sum);
            if (p.statistics != nullptr) p.statistics[expert] += static_cast<int32_t>(sum);
        }
    }
}

// Copy piece `piece` of `pieces` of a row to its places; the piece behind the last is its scales. The whole warp.
UCCL_EP_DEVICE void direct_expand_row(const LowLatencyDispatchParameters &p, const DirectPlacing &placing,
                                      uint32_t source, uint32_t token, uint32_t parity, uint32_t piece,
                                      uint32_t pieces) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const DirectDispatchInbox at = DirectDispatchInbox::of(shape);
    const uint8_t *inbox = group.data + group.layout.ll_dispatch_inbox(parity, source);
    const uint64_t *place = placing.place + source * shape.num_topk;
    uint64_t *list = placing.list + device::warp_in_block() * shape.num_topk;
    device::sync_lanes();  // the list of the row before has been read
    uint32_t outputs = 0;
    for (uint32_t base = 0; base < shape.num_topk; base += device::kWarpSize) {
        const uint32_t k = base + device::lane();
        const uint64_t to = k < shape.num_topk ? place[k] : DirectPlacing::kNowhere;
        const device::LaneMask here = device::ballot(to != DirectPlacing::kNowhere);
        if (to != DirectPlacing::kNowhere) list[outputs + device::population_count(here & device::lanes_below())] = to;
        outputs += device::population_count(here);
    }
    device::sync_lanes();
    if (outputs == 0) return;
    if (piece == pieces) {
        ll_copy_scales_out(p, list, outputs, inbox + at.scales + uint64_t{token} * shape.scale_bytes, 0, 1);
        return;
    }
    const uint64_t row = uint64_t{token} * shape.row_bytes;
    ll_copy_payload_out(p, list, outputs,
                        source == group.rank && p.own_in_place != 0 ? p.x + row : inbox + at.payload + row, token,
                        piece, pieces);
}

// Whether any pick of the token at hand of a source belongs here.
UCCL_EP_DEVICE bool direct_has_row(const DirectPlacing &placing, uint32_t topk, uint32_t source) {
    for (uint32_t k = 0; k < topk; ++k) {
        if (placing.place[source * topk + k] != DirectPlacing::kNowhere) return true;
    }
    return false;
}

// The receive half. The whole grid.
UCCL_EP_DEVICE void direct_dispatch_receive(const LowLatencyDispatchParameters &p) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    constexpr Phase kPhase = Phase::kLowLatencyDispatchReceive;
    const uint32_t ranks = group.num_ranks(), topk = shape.num_topk, block = device::block_index();
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    uint64_t *received = Counters::direct(group, LowLatencyHalf::kDispatchReceive, block);
    const uint64_t number = *received + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const DirectPlacing placing = DirectPlacing::in(device::shared_memory(), ranks, warps, topk);
    const auto timed = [&](uint32_t source, auto wait) {
        const bool counts = p.wait_cost != nullptr && block == 0;
        const uint64_t start = counts ? device::now_ns() : 0;
        const bool came = wait();
        if (counts) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
        return came;
    };
    bool ok = true;
    for (uint32_t i = warp; i < ranks; i += warps) {
        const uint32_t source = (group.rank + i) % ranks;
        if (device::lane() != 0) continue;
        uint32_t tokens = p.num_tokens;
        if (i == 0) {
            ok = !aborted(group);
        } else {
            const auto *header =
                reinterpret_cast<const MessageHeader *>(group.data + group.layout.ll_dispatch_inbox(parity, source));
            ok = ok &&
                 timed(source,
                       [&] {
                           return wait_flag(group, kPhase, DirectFlag::kDispatchRows, SignalKind::kLowLatencyDispatch,
                                            source, kDirectHead, number);
                       }) &&
                 ll_check(p, *header, source, number, LowLatencyPath::kDirect);
            tokens = ok ? header->rows : 0;
        }
        placing.tokens[source] = tokens;
    }
    if (!device::sync_block_all(ok)) return;
    direct_gather_picks(p, placing, parity);
    const uint64_t wanted = align_up((shape.row_bytes + warps - 1) / warps, 512);
    const uint32_t pieces = static_cast<uint32_t>((shape.row_bytes + wanted - 1) / wanted);
    const uint32_t units = pieces + (shape.scale_bytes != 0 ? 1 : 0);
    for (uint32_t token = block, round = 0; token < shape.max_tokens || round == 0;
         token += device::num_blocks(), ++round) {
        device::sync_block();  // picks are there, and places of the round before have been read
        direct_find_places(p, placing, token, round == 0);
        device::sync_block();
        for (uint32_t unit = warp; unit < units; unit += warps)
            direct_expand_row(p, placing, group.rank, token, parity, unit, pieces);
        for (uint32_t i = warp + 1; i < ranks; i += warps) {
            const uint32_t source = (group.rank + i) % ranks;
            if (device::lane() != 0 || !direct_has_row(placing, topk, source)) continue;
            ok = ok && timed(source, [&] {
                     return wait_flag(group, kPhase, DirectFlag::kDispatchRows, SignalKind::kLowLatencyDispatch, source,
                                      block, number);
                 });
        }
        if (!device::sync_block_all(ok)) return;
        for (uint32_t item = warp; item < (ranks - 1) * units; item += warps) {
            direct_expand_row(p, placing, (group.rank + 1 + item / units) % ranks, token, parity, item % units, pieces);
        }
    }
    direct_raise(group, DirectFlag::kDispatchRead, number);
    if (warp == 0 && device::lane() == 0) *received = number;
}

UCCL_EP_KERNEL(uccl_ep_ll_direct_dispatch_send, LowLatencyDispatchParameters) { direct_dispatch_send(parameters); }

UCCL_EP_KERNEL(uccl_ep_ll_direct_dispatch_receive, LowLatencyDispatchParameters) {
    direct_dispatch_receive(parameters);
}

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_direct_dispatch, LowLatencyDispatchParameters) {
    direct_dispatch_send(parameters);
    device::sync_block();  // the halves share the block's memory
    direct_dispatch_receive(parameters);
}

}  // namespace uccl_ep
