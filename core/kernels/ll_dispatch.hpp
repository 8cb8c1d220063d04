// Low-latency dispatch: one packed message per destination rank, whole in the receiver's inbox, so that
// the send half never waits for the receive half. Two inboxes (parities) alternate; credits keep a
// sender from reusing one that is not expanded yet.
//
// Deterministic: within an expert, rows lie in the order (source rank, index on the source rank).
#pragma once

#include "block_memory.hpp"
#include "numerics.hpp"
#include "stream.hpp"

namespace uccl_ep {

// Header words of a low-latency dispatch message (MessageHeader.words).
enum LowLatencyWord : uint32_t {
    kWordMaxTokens = 0,
    kWordNumTopk = 1,
    kWordNumExperts = 2,
    kWordQuantization = 3,
    kWordCombineBase = 4,  // first row of the receiver's experts in the sender's combine inbox
    kWordPayloadType = 5,  // of the caller's tensor, which is also that of the combine
};

// Sum of `value` over the lanes below this one, and over all lanes; values are counts of tokens. A ballot a bit
// costs less than as many dependent loads would.
UCCL_EP_DEVICE uint32_t sum_below(uint32_t value, uint32_t *total) {
    uint32_t below = 0;
    *total = 0;
    for (uint32_t bit = 0; bit < kLowLatencyTokenBits; ++bit) {
        const device::LaneMask mask = device::ballot((value >> bit & 1) != 0);
        below += device::population_count(mask & device::lanes_below()) << bit;
        *total += device::population_count(mask) << bit;
    }
    return below;
}

UCCL_EP_DEVICE uint8_t *ll_message(const Group &group, uint32_t destination, uint32_t parity) {
    return group.is_local(destination)
               ? group.peer_data[destination] + group.layout.ll_dispatch_inbox(parity, group.rank)
               : group.data + group.layout.ll_dispatch_outbox(parity, destination);
}

UCCL_EP_DEVICE int64_t ll_expert(const LowLatencyDispatchParameters &p, uint32_t entry, uint32_t local_experts) {
    const int64_t expert = load_index(p.topk_idx, p.index_bytes, entry);
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
        const int64_t earlier = load_index(p.topk_idx, p.index_bytes, other);
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

// The whole block.
UCCL_EP_DEVICE void ll_place_rows(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &at, uint32_t parity) {
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
        }
    }
    device::sync_block();
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
}

// Where rows come home, and the heads of all messages. The last warp of a block, while the others write rows.
UCCL_EP_DEVICE void ll_place_home(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &at, uint64_t number) {
    const uint32_t topk = p.shape.num_topk, blocks = device::num_blocks(), block = device::block_index();
    const uint32_t ranks = p.group.num_ranks(), local_experts = p.shape.num_experts / ranks;
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
    for (uint32_t rank = blocks - 1 - block; rank < ranks; rank += blocks) {
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
                               static_cast<uint32_t>(at.begin[rank * local_experts]), p.shape.payload_type}};
        }
    }
}

// Where a row of this block goes: the message to a rank, and what is known of its fields.
struct LowLatencyRow {
    uint8_t *message;
    LowLatencyRows at;
    uint32_t rank, row;
};

UCCL_EP_DEVICE LowLatencyRow ll_row(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &placing,
                                    uint32_t entry) {
    const uint32_t ranks = p.group.num_ranks();
    const uint32_t rank = static_cast<uint32_t>(placing.expert[entry]) / (p.shape.num_experts / ranks);
    return {placing.message[rank],
            LowLatencyRows::of(p.shape, ranks, static_cast<uint32_t>(placing.total[placing.experts + rank])), rank,
            static_cast<uint32_t>(placing.row[entry])};
}

// Cast a token and write it into the messages of all its ranks, groups of a scale dealt to the warps of the block;
// several groups are in flight in a warp, since a load takes longer than all the rest.
UCCL_EP_DEVICE void ll_write_cast(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &placing,
                                  uint32_t first_entry, uint32_t token) {
    constexpr uint32_t kGroups = device::kWarpSize == 1 ? 1 : 5;  // in flight: 60 in a block of 12 warps
    const LowLatencyShape &shape = p.shape;
    const auto type = static_cast<PayloadType>(shape.payload_type);
    const uint8_t *x = p.x + uint64_t{token} * shape.hidden * (type == PayloadType::kFloat32 ? 4 : 2);
    const bool power_of_two = shape.quantization != static_cast<uint32_t>(Quantization::kFloat8);
    const uint32_t warps = device::warps_per_block(), groups = scale_groups(shape.hidden);
    for (uint32_t base = device::warp_in_block(); base < groups; base += kGroups * warps) {
        GroupCast casts[kGroups];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kGroups; ++i) {
            const uint32_t group = base + i * warps;
            if (group >= groups) break;
            if (type == PayloadType::kBfloat16) {
                casts[i].load<Bfloat16>(x, shape.hidden, group);
            } else if (type == PayloadType::kFloat16) {
                casts[i].load<Float16>(x, shape.hidden, group);
            } else {
                casts[i].load<Float32>(x, shape.hidden, group);
            }
        }
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kGroups; ++i) {
            if (base + i * warps < groups) casts[i].cast(power_of_two);
        }
        for (uint32_t k = 0; k < shape.num_topk; ++k) {
            if (placing.row[first_entry + k] < 0) continue;
            const LowLatencyRow to = ll_row(p, placing, first_entry + k);
            uint8_t *payload = to.message + to.at.payload + uint64_t{to.row} * shape.row_bytes;
            auto *scales = reinterpret_cast<float *>(to.message + to.at.scales + uint64_t{to.row} * shape.scale_bytes);
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kGroups; ++i) {
                const uint32_t group = base + i * warps;
                if (group >= groups) break;
                casts[i].store(payload, shape.hidden, group);
                if (device::lane() == 0) scales[group] = casts[i].scale();
            }
        }
    }
}

// Write a token into the messages of all its ranks. The whole block.
UCCL_EP_DEVICE void ll_write_token(const LowLatencyDispatchParameters &p, const LowLatencyPlacing &placing,
                                   uint32_t first_entry, uint32_t token) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block(), topk = shape.num_topk;
    if (shape.quantization == static_cast<uint32_t>(Quantization::kNone)) {
        const uint64_t piece = align_up((shape.row_bytes + warps - 1) / warps, 512);
        const uint64_t begin = piece * warp;
        const uint64_t bytes = begin >= shape.row_bytes          ? 0
                               : shape.row_bytes - begin < piece ? shape.row_bytes - begin
                                                                 : piece;
        for (uint32_t k = 0; k < topk && bytes != 0; ++k) {
            if (placing.row[first_entry + k] < 0) continue;
            const LowLatencyRow to = ll_row(p, placing, first_entry + k);
            if (to.rank == group.rank && p.own_in_place != 0) continue;
            device::copy(to.message + to.at.payload + uint64_t{to.row} * shape.row_bytes + begin,
                         p.x + uint64_t{token} * shape.row_bytes + begin, bytes);
        }
    } else {
        ll_write_cast(p, placing, first_entry, token);
    }
    const uint32_t local_experts = shape.num_experts / group.num_ranks();
    uint32_t destination = 0;
    for (uint32_t k = 0; k < topk; ++k) {
        if (placing.row[first_entry + k] < 0) continue;
        if (destination++ % warps != warp) continue;
        const LowLatencyRow to = ll_row(p, placing, first_entry + k);
        auto *experts = reinterpret_cast<int32_t *>(to.message + to.at.expert) + uint64_t{to.row} * topk;
        auto *places = reinterpret_cast<int32_t *>(to.message + to.at.place) + uint64_t{to.row} * topk;
        for (uint32_t i = device::lane(); i < topk; i += device::kWarpSize) {
            const int32_t local = placing.expert[first_entry + i] - static_cast<int32_t>(to.rank * local_experts);
            const bool here = local >= 0 && static_cast<uint32_t>(local) < local_experts;
            experts[i] = here ? local : -1;
            places[i] = placing.place[first_entry + i];
        }
        if (device::lane() == 0)
            reinterpret_cast<int32_t *>(to.message + to.at.source)[to.row] = static_cast<int32_t>(token);
    }
}

// Complete a low-latency message to a peer and raise its signal to `number`. One thread.
UCCL_EP_DEVICE bool ll_send(const Group &group, uint32_t peer, SignalKind kind, uint64_t local_offset,
                            uint64_t remote_offset, uint64_t bytes, uint64_t number, Phase phase, uint64_t *ticket) {
    const uint32_t signal = group.layout.signal_index(kind, group.rank, 0);
    if (group.is_local(peer)) return raise_signal(group, peer, signal, number, phase);
    for (uint64_t sent = 0;;) {
        const uint64_t piece = bytes - sent < kMaxWriteBytes ? bytes - sent : kMaxWriteBytes;
        const bool last = sent + piece == bytes;
        const Command command{last ? Operation::kWriteSignal : Operation::kWrite,
                              peer,
                              signal,
                              piece,
                              local_offset + sent,
                              remote_offset + sent,
                              number};
        if (!push(group, command, phase, ticket)) return false;
        sent += piece;
        if (last) return true;
    }
}

// Whether this block looks for itself at what `peer` says: what a transport brings lies in host memory, where the reads
// of all blocks would queue up, so that one block asks and the others wait for it at a barrier.
UCCL_EP_DEVICE bool looks_at(const Group &group, uint32_t peer) {
    return group.is_local(peer) || device::block_index() == 0;
}

// The barrier behind such looks; called by all blocks.
UCCL_EP_DEVICE bool all_have_looked(const Group &group, bool ok) {
    return group.layout.has_remote ? sync_grid(group) : device::sync_block_all(ok);
}

// Wait until the messages of two operations ago have been read, so that their places can be filled again: inboxes by
// the credits of the peers, outboxes by the completions of the transport. The whole block; false on failure.
UCCL_EP_DEVICE bool ll_wait_room(const Group &group, SignalKind credit, SignalKind data, uint64_t number,
                                 const uint64_t *tickets, Phase phase, int32_t *masked, LowLatencyHalf half) {
    const Layout &layout = group.layout;
    bool ok = true;
    for (uint32_t peer = device::warp_in_block(); peer < group.num_ranks(); peer += device::warps_per_block()) {
        if (peer == group.rank || !looks_at(group, peer) || (masked != nullptr && masked[peer] != 0) ||
            device::lane() != 0)
            continue;
        if (number > 2) {
            ok = ok && wait_or_leave_out(group, {phase, peer, layout.signal_index(credit, peer, 0), number - 2}, masked,
                                         half, number);
        }
        if (!group.is_local(peer) && ok && tickets[peer] != 0) {
            ok = wait_completed(group, peer, layout.signal_index(data, group.rank, 0), tickets[peer] - 1, phase);
        }
    }
    return all_have_looked(group, ok);
}

// The send half. The whole grid.
UCCL_EP_DEVICE void ll_dispatch_send(const LowLatencyDispatchParameters &p) {
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const uint32_t ranks = group.num_ranks();
    const uint32_t blocks = device::num_blocks(), block = device::block_index();
    uint64_t *sent = Counters::at(group, SingleCounter::kLowLatencyDispatchSent);
    const uint64_t number = *sent + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    const LowLatencyPlacing placing =
        LowLatencyPlacing::in(device::shared_memory(), p.shape.num_experts, ranks, p.num_chunks,
                              (p.num_tokens + blocks - 1) / blocks * p.shape.num_topk);
    const auto wait_room = [&] {
        return ll_wait_room(group, SignalKind::kLowLatencyDispatchCredit, SignalKind::kLowLatencyDispatch, number,
                            Counters::ticket(group, parity, 0), Phase::kLowLatencyDispatchSend, p.masked,
                            LowLatencyHalf::kDispatchSend);
    };
    // A rank that the wait leaves out must be known before rows are placed; without a mask, placing costs no time while
    // credits are on their way.
    bool ok = p.masked == nullptr || wait_room();
    ll_place_rows(p, placing, parity);
    if (p.masked == nullptr) ok = wait_room();
    if (ok) {
        if (device::warp_in_block() == device::warps_per_block() - 1) ll_place_home(p, placing, number);
        for (uint32_t token = block; token < p.num_tokens; token += blocks) {
            ll_write_token(p, placing, token / blocks * p.shape.num_topk, token);
        }
    }
    // The last block has seen the others' arrival, so its signals carry their rows too.
    if (!last_block(group) || aborted(group)) return;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    for (uint32_t i = thread; i < ranks; i += device::warps_per_block() * device::kWarpSize) {
        const uint32_t rank = (group.rank + i) % ranks;
        if (masked(rank)) continue;
        const LowLatencyRows at =
            LowLatencyRows::of(p.shape, ranks, static_cast<uint32_t>(placing.total[placing.experts + rank]));
        uint64_t ticket = 0;
        ll_send(group, rank, SignalKind::kLowLatencyDispatch,
                layout.has_remote ? layout.ll_dispatch_outbox(parity, rank) : 0,
                layout.ll_dispatch_inbox(parity, group.rank), at.end, number, Phase::kLowLatencyDispatchSend, &ticket);
        if (!group.is_local(rank)) *Counters::ticket(group, parity, rank) = ticket + 1;
    }
    if (thread == 0) *sent = number;
}

// Check a message against this rank's own call. One thread.
UCCL_EP_DEVICE bool ll_check(const LowLatencyDispatchParameters &p, const MessageHeader &header, uint32_t source,
                             uint64_t number) {
    const LowLatencyShape &shape = p.shape;
    constexpr Phase kPhase = Phase::kLowLatencyDispatchReceive;
    const auto *words = header.words;
    if (header.operation != number || header.kind != static_cast<uint32_t>(OperationKind::kLowLatencyDispatch)) {
        uint64_t *detail = p.group.status->detail;
        detail[0] = header.operation;
        detail[1] = header.kind;
        detail[2] = header.row_bytes;
        detail[3] = shape.row_bytes;
        fail(p.group, Reason::kMismatch, {kPhase, source, 0, static_cast<uint64_t>(OperationKind::kLowLatencyDispatch)},
             number, 0);
    } else if (words[kWordPayloadType] != shape.payload_type) {
        fail_difference(p.group, kPhase, source, Difference::kDtype, words[kWordPayloadType], shape.payload_type);
    } else if (words[kWordQuantization] != shape.quantization) {
        fail_difference(p.group, kPhase, source, Difference::kQuantization, words[kWordQuantization],
                        shape.quantization);
    } else if (header.row_bytes != shape.row_bytes) {
        fail_difference(p.group, kPhase, source, Difference::kRowBytes, header.row_bytes, shape.row_bytes);
    } else if (words[kWordMaxTokens] != shape.max_tokens) {
        fail_difference(p.group, kPhase, source, Difference::kMaxTokens, words[kWordMaxTokens], shape.max_tokens);
    } else if (words[kWordNumTopk] != shape.num_topk) {
        fail_difference(p.group, kPhase, source, Difference::kTopk, words[kWordNumTopk], shape.num_topk);
    } else if (words[kWordNumExperts] != shape.num_experts) {
        fail_difference(p.group, kPhase, source, Difference::kExperts, words[kWordNumExperts], shape.num_experts);
    } else {
        return true;
    }
    return false;
}

// What combine needs to know, and the caller's counts. One block.
UCCL_EP_DEVICE void ll_write_counts(const LowLatencyDispatchParameters &p, const LowLatencyArrivals &arrivals,
                                    uint32_t parity) {
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    const uint32_t warps = device::warps_per_block(), warp = device::warp_in_block();
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    const auto counts_of = [&](uint32_t source) {
        return reinterpret_cast<const int32_t *>(group.data + group.layout.ll_dispatch_inbox(parity, source) +
                                                 sizeof(MessageHeader));
    };
    const uint32_t thread = warp * device::kWarpSize + device::lane();
    for (uint32_t e = thread; e < local_experts; e += warps * device::kWarpSize) {
        int32_t sum = 0;
        for (uint32_t source = 0; source < ranks; ++source) {
            const int32_t rows = masked(source) ? 0 : counts_of(source)[e];
            p.begin[e * ranks + source] = arrivals.begin[e * ranks + source];
            p.count[e * ranks + source] = rows;
            if (p.layout_range != nullptr) {
                p.layout_range[e * ranks + source] =
                    static_cast<int64_t>(arrivals.begin[e * ranks + source]) << 32 | rows;
            }
            sum += rows;
        }
        p.receive_count[e] = sum;
        if (p.statistics != nullptr) p.statistics[e] += sum;
    }
    for (uint32_t source = thread; source < ranks; source += warps * device::kWarpSize) {
        const auto *header =
            reinterpret_cast<const MessageHeader *>(group.data + group.layout.ll_dispatch_inbox(parity, source));
        p.combine_base[source] = masked(source) ? 0 : static_cast<int32_t>(header->words[kWordCombineBase]);
    }
    // Where my experts' rows for each source begin in its combine inbox: a warp a source.
    for (uint32_t source = warp; source < ranks; source += warps) {
        uint32_t sum = 0;
        for (uint32_t base = 0; base < local_experts; base += device::kWarpSize) {
            const uint32_t e = base + device::lane();
            const uint32_t rows =
                e < local_experts && !masked(source) ? static_cast<uint32_t>(counts_of(source)[e]) : 0;
            uint32_t total;
            const uint32_t before = sum + sum_below(rows, &total);
            if (e < local_experts) p.rows_before[e * ranks + source] = static_cast<int32_t>(before);
            sum += total;
        }
        if (device::lane() == 0) p.rows_home[source] = static_cast<int32_t>(sum);
    }
}

// Copy a piece of a row to its places in all experts of this rank. The whole warp.
UCCL_EP_DEVICE void ll_expand_row(const LowLatencyDispatchParameters &p, const LowLatencyArrivals &arrivals,
                                  uint32_t parity, uint32_t source, uint32_t row, uint32_t piece, uint32_t pieces) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), topk = shape.num_topk;
    const uint64_t rows_per_expert = uint64_t{ranks} * shape.max_tokens;
    const uint8_t *message = group.data + group.layout.ll_dispatch_inbox(parity, source);
    const LowLatencyRows at = LowLatencyRows::of(shape, ranks, arrivals.rows[source]);
    const auto *experts = reinterpret_cast<const int32_t *>(message + at.expert) + uint64_t{row} * topk;
    const auto *places = reinterpret_cast<const int32_t *>(message + at.place) + uint64_t{row} * topk;
    const int32_t token = reinterpret_cast<const int32_t *>(message + at.source)[row];
    uint64_t *list = arrivals.list + device::warp_in_block() * topk;
    uint32_t *list_k = arrivals.list_k + device::warp_in_block() * topk;
    uint32_t outputs = 0;
    device::sync_warp();  // the list of the row before has been read
    for (uint32_t base = 0; base < topk; base += device::kWarpSize) {
        const uint32_t k = base + device::lane();
        const int32_t expert = k < topk ? experts[k] : -1;
        const int32_t place = k < topk ? places[k] : 0;
        const device::LaneMask here = device::ballot(expert >= 0);
        if (expert >= 0) {
            const uint32_t i = outputs + device::population_count(here & device::lanes_below());
            const auto within =
                static_cast<uint32_t>(arrivals.begin[static_cast<uint32_t>(expert) * ranks + source] + place);
            list[i] = static_cast<uint64_t>(expert) << 32 | within;
            list_k[i] = k;
        }
        outputs += device::population_count(here);
    }
    device::sync_warp();
    const auto out_row = [&](uint32_t i) { return (list[i] >> 32) * rows_per_expert + static_cast<uint32_t>(list[i]); };
    const uint64_t bytes = align_up((shape.row_bytes + pieces - 1) / pieces, 512), begin = bytes * piece;
    if (begin < shape.row_bytes) {
        const uint8_t *payload = source == group.rank && p.own_in_place != 0
                                     ? p.x + uint64_t{static_cast<uint32_t>(token)} * shape.row_bytes
                                     : message + at.payload + uint64_t{row} * shape.row_bytes;
        device::copy_to_many([&](uint32_t i) { return p.receive_x + out_row(i) * shape.row_bytes + begin; }, outputs,
                             payload + begin, shape.row_bytes - begin < bytes ? shape.row_bytes - begin : bytes);
    }
    const uint32_t step = pieces * device::kWarpSize, first = piece * device::kWarpSize + device::lane();
    const auto *scales = reinterpret_cast<const uint32_t *>(message + at.scales + uint64_t{row} * shape.scale_bytes);
    const uint32_t groups = scale_groups(shape.hidden);
    if (shape.quantization == static_cast<uint32_t>(Quantization::kFloat8Exponent)) {
        // [L, groups / 4, rows] words of four exponents each
        for (uint32_t g = first; g < align_up(groups, 4); g += step) {
            const uint8_t exponent = g < groups ? static_cast<uint8_t>(scales[g] >> 23) : 0;
            for (uint32_t i = 0; i < outputs; ++i) {
                auto *to = p.receive_scales + (list[i] >> 32) * align_up(groups, 4) * rows_per_expert;
                to[(uint64_t{g / 4} * rows_per_expert + static_cast<uint32_t>(list[i])) * 4 + g % 4] = exponent;
            }
        }
    } else if (shape.scale_bytes != 0) {
        for (uint32_t g = first; g < groups; g += step) {
            const uint32_t scale = scales[g];
            for (uint32_t i = 0; i < outputs; ++i) {
                auto *to = reinterpret_cast<uint32_t *>(p.receive_scales) + (list[i] >> 32) * groups * rows_per_expert;
                to[uint64_t{g} * rows_per_expert + static_cast<uint32_t>(list[i])] = scale;
            }
        }
    }
    if (piece != 0) return;
    for (uint32_t i = device::lane(); i < outputs; i += device::kWarpSize) {
        const uint64_t out = out_row(i);
        p.source_index[out] = token;
        if (source == group.rank)
            p.own_row[uint64_t{static_cast<uint32_t>(token)} * topk + list_k[i]] = static_cast<int32_t>(out);
    }
}

// The receive half. The whole grid.
UCCL_EP_DEVICE void ll_dispatch_receive(const LowLatencyDispatchParameters &p) {
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), local_experts = shape.num_experts / ranks;
    uint64_t *received = Counters::at(group, SingleCounter::kLowLatencyDispatchReceived);
    const uint64_t number = *received + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    const LowLatencyArrivals arrivals = LowLatencyArrivals::in(device::shared_memory(), ranks, warps, shape.num_topk);
    // My own message never left: where I wrote it is where it is read. It has a signal all the same, since other
    // blocks of this launch may be writing it.
    const auto message_of = [&](uint32_t source) -> const uint8_t * {
        return group.data + layout.ll_dispatch_inbox(parity, source);
    };
    bool ok = true;
    for (uint32_t i = warp; i < ranks; i += warps) {
        const uint32_t source = (group.rank + i) % ranks;
        if (device::lane() != 0 || !looks_at(group, source)) continue;
        const auto *header = reinterpret_cast<const MessageHeader *>(message_of(source));
        if (!masked(source)) {
            const bool timed = p.wait_cost != nullptr && device::block_index() == 0 && source != group.rank;
            const uint64_t start = timed ? device::now_ns() : 0;
            const uint32_t signal = layout.signal_index(SignalKind::kLowLatencyDispatch, source, 0);
            ok = ok &&
                 wait_or_leave_out(group, {Phase::kLowLatencyDispatchReceive, source, signal, number}, p.masked,
                                   LowLatencyHalf::kDispatchReceive, number) &&
                 (masked(source) || ll_check(p, *header, source, number));
            if (timed) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
        }
        arrivals.rows[source] = masked(source) ? 0 : header->rows;
    }
    ok = all_have_looked(group, ok);
    for (uint32_t source = warp * device::kWarpSize + device::lane(); source < ranks && ok;
         source += warps * device::kWarpSize) {
        if (looks_at(group, source)) continue;
        arrivals.rows[source] = masked(source) ? 0 : reinterpret_cast<const MessageHeader *>(message_of(source))->rows;
    }
    if (ok) {
        for (uint32_t e = warp * device::kWarpSize + device::lane(); e < local_experts;
             e += warps * device::kWarpSize) {
            int32_t sum = 0;
            constexpr uint32_t kAtOnce = 8;  // loads in flight
            for (uint32_t base = 0; base < ranks; base += kAtOnce) {
                int32_t rows[kAtOnce];
                UCCL_EP_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    rows[i] = base + i < ranks && !masked(base + i)
                                  ? reinterpret_cast<const int32_t *>(message_of(base + i) + sizeof(MessageHeader))[e]
                                  : 0;
                }
                UCCL_EP_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    if (base + i < ranks) arrivals.begin[e * ranks + base + i] = sum;
                    sum += rows[i];
                }
            }
        }
        device::sync_block();
        uint32_t total = 0;
        for (uint32_t source = 0; source < ranks; ++source) total += arrivals.rows[source];
        // Few rows: several warps share one.
        const uint32_t all_warps = device::num_blocks() * warps;
        const uint32_t most = (shape.row_bytes + 511) / 512;
        uint32_t pieces = total == 0 || all_warps <= total ? 1 : all_warps / total;
        pieces = pieces < most ? pieces : most;
        for (uint32_t item = device::block_index() * warps + warp; item < total * pieces; item += all_warps) {
            uint32_t row = item / pieces, source = 0;
            while (row >= arrivals.rows[source]) row -= arrivals.rows[source++];
            ll_expand_row(p, arrivals, parity, source, row, item % pieces, pieces);
        }
        if (device::block_index() == device::num_blocks() - 1) ll_write_counts(p, arrivals, parity);
    }
    if (!last_block(group) || aborted(group)) return;
    const uint32_t thread = warp * device::kWarpSize + device::lane();
    for (uint32_t source = thread; source < ranks; source += warps * device::kWarpSize) {
        if (source == group.rank) continue;  // one that is left out may be taken in again, and needs its credits then
        raise_signal(group, source, layout.signal_index(SignalKind::kLowLatencyDispatchCredit, group.rank, 0), number,
                     Phase::kLowLatencyDispatchReceive);
    }
    if (thread == 0) *received = number;
}

UCCL_EP_KERNEL(uccl_ep_ll_dispatch_send, LowLatencyDispatchParameters) { ll_dispatch_send(parameters); }

UCCL_EP_KERNEL(uccl_ep_ll_dispatch_receive, LowLatencyDispatchParameters) { ll_dispatch_receive(parameters); }

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_dispatch, LowLatencyDispatchParameters) {
    ll_dispatch_send(parameters);
    device::sync_block();  // the halves share the block's memory
    ll_dispatch_receive(parameters);
}

}  // namespace uccl_ep
