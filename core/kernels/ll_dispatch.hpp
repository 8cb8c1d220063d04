// Low-latency dispatch: one packed message per destination rank, whole in the receiver's inbox, so that
// the send half never waits for the receive half. Two inboxes (parities) alternate; credits keep a
// sender from reusing one that is not expanded yet.
//
// Deterministic: within an expert, rows lie in the order (source rank, index on the source rank).
#pragma once

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

// A message: header, rows per local expert, then the fields of all rows, each together.
struct LowLatencyRows {
    uint64_t counts, payload, scales, expert, place, source, end;

    UCCL_EP_DEVICE static LowLatencyRows of(const LowLatencyShape &shape, uint32_t num_ranks, uint32_t rows) {
        LowLatencyRows at;
        at.counts = sizeof(MessageHeader);
        at.payload = align_up(at.counts + uint64_t{shape.num_experts / num_ranks} * 4, 64);
        at.scales = align_up(at.payload + uint64_t{rows} * shape.row_bytes, 16);
        at.expert = align_up(at.scales + uint64_t{rows} * shape.scale_bytes, 16);
        at.place = at.expert + uint64_t{rows} * shape.num_topk * 4;   // local expert of each k, -1: elsewhere
        at.source = at.place + uint64_t{rows} * shape.num_topk * 4;   // the row's place among mine of that expert
        at.end = align_up(at.source + uint64_t{rows} * 4, 64);
        return at;
    }
};

// Sum of `value` over the lanes below this one, and over all lanes; values are below 2^16. Sixteen ballots
// cost less than as many dependent loads would.
UCCL_EP_DEVICE uint32_t sum_below(uint32_t value, uint32_t *total) {
    uint32_t below = 0;
    *total = 0;
    for (uint32_t bit = 0; bit < 16; ++bit) {
        const device::LaneMask mask = device::ballot((value >> bit & 1) != 0);
        below += device::population_count(mask & device::lanes_below()) << bit;
        *total += device::population_count(mask) << bit;
    }
    return below;
}

// Shared memory of the placing warp: rows per expert, then rows per rank.
UCCL_EP_DEVICE constexpr uint64_t ll_placing_bytes(uint32_t num_experts, uint32_t num_ranks) {
    return align_up((uint64_t{num_experts} + num_ranks) * 4, 64);
}

// One warp finds, for each (token, k), its place among this rank's rows of that expert; for each (token,
// rank) its row in the message to that rank; and the counts. A warp takes one entry a lane in a step, in order.
UCCL_EP_DEVICE void ll_place_rows(const LowLatencyDispatchParameters &p) {
    const uint32_t ranks = p.group.num_ranks(), topk = p.shape.num_topk, experts = p.shape.num_experts;
    const uint32_t local_experts = experts / ranks;
    auto *expert_rows = reinterpret_cast<int32_t *>(device::shared_memory());
    int32_t *rank_rows = expert_rows + experts;
    for (uint32_t i = device::lane(); i < experts + ranks; i += device::kWarpSize) expert_rows[i] = 0;
    device::sync_warp();
    const uint32_t entries = p.num_tokens * topk;
    for (uint32_t base = 0; base < entries; base += device::kWarpSize) {
        const uint32_t i = base + device::lane();
        int64_t expert = i < entries ? load_index(p.topk_idx, p.index_bytes, i) : -1;
        if (expert >= 0 && p.masked != nullptr && p.masked[static_cast<uint32_t>(expert) / local_experts] != 0)
            expert = -1;
        const device::LaneMask same = device::match(expert < 0 ? ~uint32_t{0} : static_cast<uint32_t>(expert));
        const uint32_t before = device::population_count(same & device::lanes_below());
        int32_t place = -1;
        if (expert >= 0) place = expert_rows[expert] + static_cast<int32_t>(before);
        device::sync_warp();  // all lanes have read the counts
        if (expert >= 0 && before == 0) expert_rows[expert] += static_cast<int32_t>(device::population_count(same));
        device::sync_warp();
        if (i < entries) p.place_in_expert[i] = place;
    }
    for (uint32_t base = 0; base < p.num_tokens; base += device::kWarpSize) {
        const uint32_t token = base + device::lane();
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            bool goes = false;
            if (token < p.num_tokens) {
                for (uint32_t k = 0; k < topk; ++k) {
                    const int64_t expert = load_index(p.topk_idx, p.index_bytes, uint64_t{token} * topk + k);
                    goes |= expert >= 0 && static_cast<uint32_t>(expert) / local_experts == rank;
                }
            }
            if (p.masked != nullptr && p.masked[rank] != 0) goes = false;
            const device::LaneMask selected = device::ballot(goes);
            const int32_t row =
                rank_rows[rank] + static_cast<int32_t>(device::population_count(selected & device::lanes_below()));
            if (token < p.num_tokens) p.row_in_rank[uint64_t{token} * ranks + rank] = goes ? row : -1;
            device::sync_warp();
            if (device::lane() == 0) rank_rows[rank] += static_cast<int32_t>(device::population_count(selected));
            device::sync_warp();
        }
    }
    for (uint32_t rank = device::lane(); rank < ranks; rank += device::kWarpSize) p.rank_rows[rank] = rank_rows[rank];
    // Rows come home in the order (expert, token): the sums of counts before each expert.
    uint32_t sum = 0;
    for (uint32_t base = 0; base < experts; base += device::kWarpSize) {
        const uint32_t e = base + device::lane();
        const uint32_t rows = e < experts ? static_cast<uint32_t>(expert_rows[e]) : 0;
        uint32_t total;
        const uint32_t begin = sum + sum_below(rows, &total);
        sum += total;
        device::sync_warp();  // the count has been read: its place now holds the sum
        if (e < experts) {
            if (rows > p.shape.max_tokens) {  // some token names e more than once: its rows would not fit
                fail_difference(p.group, Phase::kLowLatencyDispatchSend, p.group.rank, Difference::kExpertRows, rows,
                                p.shape.max_tokens);
            }
            p.expert_rows[e] = static_cast<int32_t>(rows);
            p.expert_begin[e] = expert_rows[e] = static_cast<int32_t>(begin);
        }
    }
    device::sync_warp();
    for (uint32_t i = device::lane(); i < entries; i += device::kWarpSize) {
        const int32_t place = p.place_in_expert[i];
        p.combine_row[i] = place < 0 ? -1 : expert_rows[load_index(p.topk_idx, p.index_bytes, i)] + place;
        p.own_row[i] = -1;
    }
}

UCCL_EP_DEVICE uint8_t *ll_message(const Group &group, uint32_t destination, uint32_t parity) {
    return group.is_local(destination)
               ? group.peer_data[destination] + group.layout.ll_dispatch_inbox(parity, group.rank)
               : group.data + group.layout.ll_dispatch_outbox(parity, destination);
}

// Write a token's payload, once cast where asked, into the messages of all its ranks. Whole warp.
UCCL_EP_DEVICE void ll_write_token(const LowLatencyDispatchParameters &p, uint32_t token, uint32_t parity,
                                   uint8_t *staging) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), local_experts = shape.num_experts / ranks;
    const uint8_t *payload = nullptr;
    const uint8_t *scales = nullptr;
    for (uint32_t i = 0; i < ranks; ++i) {
        const uint32_t rank = (group.rank + i) % ranks;
        const int32_t row = p.row_in_rank[uint64_t{token} * ranks + rank];
        if (row < 0) continue;
        if (payload == nullptr) {
            if (shape.quantization == static_cast<uint32_t>(Quantization::kNone)) {
                payload = p.x + uint64_t{token} * shape.row_bytes;
            } else {
                const uint64_t element = static_cast<PayloadType>(shape.payload_type) == PayloadType::kFloat32 ? 4 : 2;
                scales = staging + align_up(shape.row_bytes, 16);
                device::sync_warp();  // the staging of the token before has been copied
                quantize_row(shape.payload_type, p.x + uint64_t{token} * shape.hidden * element, shape.hidden,
                             shape.quantization != static_cast<uint32_t>(Quantization::kFloat8), staging,
                             reinterpret_cast<float *>(staging + align_up(shape.row_bytes, 16)));
                device::sync_warp();
                payload = staging;
            }
        }
        uint8_t *message = ll_message(group, rank, parity);
        const LowLatencyRows at = LowLatencyRows::of(shape, ranks, static_cast<uint32_t>(p.rank_rows[rank]));
        if (rank != group.rank || p.own_in_place == 0) {
            device::copy(message + at.payload + uint64_t{static_cast<uint32_t>(row)} * shape.row_bytes, payload,
                         shape.row_bytes);
        }
        if (shape.scale_bytes != 0) {
            device::copy(message + at.scales + uint64_t{static_cast<uint32_t>(row)} * shape.scale_bytes, scales,
                         shape.scale_bytes);
        }
        auto *experts =
            reinterpret_cast<int32_t *>(message + at.expert) + uint64_t{static_cast<uint32_t>(row)} * shape.num_topk;
        auto *places =
            reinterpret_cast<int32_t *>(message + at.place) + uint64_t{static_cast<uint32_t>(row)} * shape.num_topk;
        for (uint32_t k = device::lane(); k < shape.num_topk; k += device::kWarpSize) {
            const uint64_t entry = uint64_t{token} * shape.num_topk + k;
            const int64_t local = load_index(p.topk_idx, p.index_bytes, entry) - int64_t{rank} * local_experts;
            const bool here = local >= 0 && local < local_experts;
            experts[k] = here ? static_cast<int32_t>(local) : -1;
            places[k] = p.place_in_expert[entry];
        }
        if (device::lane() == 0) reinterpret_cast<int32_t *>(message + at.source)[row] = static_cast<int32_t>(token);
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

UCCL_EP_KERNEL(uccl_ep_ll_dispatch_send, LowLatencyDispatchParameters) {
    const LowLatencyDispatchParameters &p = parameters;
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const uint32_t ranks = group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    uint64_t *sent = Counters::at(group, SingleCounter::kLowLatencyDispatchSent);
    const uint64_t number = *sent + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    if (warp == 0) {
        ll_place_rows(p);
        // The inboxes of two messages ago must be expanded, and the outboxes read.
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            if (peer == group.rank || (p.masked != nullptr && p.masked[peer] != 0)) continue;
            const uint32_t credit = layout.signal_index(SignalKind::kLowLatencyDispatchCredit, peer, 0);
            if (number > 2 && !wait_signal_warp(group, {Phase::kLowLatencyDispatchSend, peer, credit, number - 2}))
                break;
            if (!group.is_local(peer) && device::lane() == 0) {
                const uint64_t ticket = *Counters::ticket(group, parity, peer);
                const uint32_t signal = layout.signal_index(SignalKind::kLowLatencyDispatch, group.rank, 0);
                if (ticket != 0) wait_completed(group, peer, signal, ticket - 1, Phase::kLowLatencyDispatchSend);
            }
        }
    }
    if (!sync_grid(group)) return;
    uint8_t *staging = device::shared_memory() + ll_placing_bytes(p.shape.num_experts, ranks) +
                       device::warp_in_block() * align_up(align_up(p.shape.row_bytes, 16) + p.shape.scale_bytes, 64);
    for (uint32_t token = warp; token < p.num_tokens; token += warps) ll_write_token(p, token, parity, staging);
    // The barrier orders the rows before the signals below: their release covers what the barrier made visible.
    if (!sync_grid(group)) return;
    for (uint32_t i = warp; i < ranks; i += warps) {
        const uint32_t rank = (group.rank + i) % ranks;
        if (p.masked != nullptr && p.masked[rank] != 0) continue;
        uint8_t *message = ll_message(group, rank, parity);
        const LowLatencyRows at = LowLatencyRows::of(p.shape, ranks, static_cast<uint32_t>(p.rank_rows[rank]));
        auto *counts = reinterpret_cast<int32_t *>(message + at.counts);
        for (uint32_t e = device::lane(); e < local_experts; e += device::kWarpSize) {
            counts[e] = p.expert_rows[rank * local_experts + e];
        }
        if (device::lane() == 0) {
            *reinterpret_cast<MessageHeader *>(message) =
                MessageHeader{number,
                              static_cast<uint32_t>(OperationKind::kLowLatencyDispatch),
                              static_cast<uint32_t>(p.rank_rows[rank]),
                              p.shape.row_bytes,
                              group.rank,
                              {p.shape.max_tokens, p.shape.num_topk, p.shape.num_experts, p.shape.quantization,
                               static_cast<uint32_t>(p.expert_begin[rank * local_experts]), p.shape.payload_type}};
        }
        device::sync_warp();
        if (device::lane() == 0 && rank != group.rank) {
            uint64_t ticket = 0;
            ll_send(group, rank, SignalKind::kLowLatencyDispatch,
                    layout.has_remote ? layout.ll_dispatch_outbox(parity, rank) : 0,
                    layout.ll_dispatch_inbox(parity, group.rank), at.end, number, Phase::kLowLatencyDispatchSend,
                    &ticket);
            if (!group.is_local(rank)) *Counters::ticket(group, parity, rank) = ticket + 1;
        }
    }
    // All blocks have read the counter at their start; the grid barriers lie between.
    if (warp == 0 && device::lane() == 0) *sent = number;
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

UCCL_EP_KERNEL(uccl_ep_ll_dispatch_receive, LowLatencyDispatchParameters) {
    const LowLatencyDispatchParameters &p = parameters;
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), local_experts = shape.num_experts / ranks;
    uint64_t *received = Counters::at(group, SingleCounter::kLowLatencyDispatchReceived);
    const uint64_t number = *received + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    const auto message_of = [&](uint32_t source) -> const uint8_t * {
        // My own message never left: where I wrote it is where it is read.
        return group.data + layout.ll_dispatch_inbox(parity, source);
    };
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };

    for (uint32_t i = warp; i < ranks; i += warps) {
        const uint32_t source = (group.rank + i) % ranks;
        if (source == group.rank || masked(source)) continue;
        if (device::lane() == 0) {
            const uint64_t start = p.wait_cost != nullptr ? device::now_ns() : 0;
            const uint32_t signal = layout.signal_index(SignalKind::kLowLatencyDispatch, source, 0);
            if (wait_signal(group, {Phase::kLowLatencyDispatchReceive, source, signal, number})) {
                ll_check(p, *reinterpret_cast<const MessageHeader *>(message_of(source)), source, number);
            }
            if (p.wait_cost != nullptr) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
        }
    }
    if (!sync_grid(group)) return;
    // Where each source's rows begin within each expert.
    const uint32_t thread = warp * device::kWarpSize + device::lane();
    for (uint32_t e = thread; e < local_experts; e += warps * device::kWarpSize) {
        int32_t sum = 0;
        for (uint32_t source = 0; source < ranks; ++source) {
            int32_t rows = 0;
            if (!masked(source)) {
                const uint8_t *message = message_of(source);
                rows = reinterpret_cast<const int32_t *>(message + sizeof(MessageHeader))[e];
            }
            p.begin[e * ranks + source] = sum;
            p.count[e * ranks + source] = rows;
            sum += rows;
        }
        p.receive_count[e] = sum;
        if (p.statistics != nullptr) p.statistics[e] += sum;
    }
    for (uint32_t source = thread; source < ranks; source += warps * device::kWarpSize) {
        p.combine_base[source] =
            masked(source) ? 0
                           : static_cast<int32_t>(
                                 reinterpret_cast<const MessageHeader *>(message_of(source))->words[kWordCombineBase]);
    }
    // Where my experts' rows for each source begin in its combine inbox: a warp a source.
    for (uint32_t source = warp; source < ranks; source += warps) {
        const auto *counts = reinterpret_cast<const int32_t *>(message_of(source) + sizeof(MessageHeader));
        uint32_t sum = 0;
        for (uint32_t base = 0; base < local_experts; base += device::kWarpSize) {
            const uint32_t e = base + device::lane();
            const uint32_t rows = e < local_experts && !masked(source) ? static_cast<uint32_t>(counts[e]) : 0;
            uint32_t total;
            const uint32_t before = sum + sum_below(rows, &total);
            if (e < local_experts) p.rows_before[e * ranks + source] = static_cast<int32_t>(before);
            sum += total;
        }
        if (device::lane() == 0) p.rows_home[source] = static_cast<int32_t>(sum);
    }
    if (!sync_grid(group)) return;
    const uint64_t rows_per_expert = uint64_t{ranks} * shape.max_tokens;
    const uint32_t groups = scale_groups(shape.hidden);
    for (uint32_t i = 0; i < ranks; ++i) {
        const uint32_t source = (group.rank + i) % ranks;
        if (masked(source)) continue;
        const uint8_t *message = message_of(source);
        const uint32_t rows = reinterpret_cast<const MessageHeader *>(message)->rows;
        const LowLatencyRows at = LowLatencyRows::of(shape, ranks, rows);
        for (uint32_t row = warp; row < rows; row += warps) {
            const auto *experts =
                reinterpret_cast<const int32_t *>(message + at.expert) + uint64_t{row} * shape.num_topk;
            const auto *places = reinterpret_cast<const int32_t *>(message + at.place) + uint64_t{row} * shape.num_topk;
            const auto *scales =
                reinterpret_cast<const uint32_t *>(message + at.scales + uint64_t{row} * shape.scale_bytes);
            const int32_t token = reinterpret_cast<const int32_t *>(message + at.source)[row];
            const uint8_t *payload = source == group.rank && p.own_in_place != 0
                                         ? p.x + uint64_t{static_cast<uint32_t>(token)} * shape.row_bytes
                                         : message + at.payload + uint64_t{row} * shape.row_bytes;
            for (uint32_t k = 0; k < shape.num_topk; ++k) {
                const int32_t e = experts[k];
                if (e < 0) continue;
                const uint64_t to =
                    static_cast<uint64_t>(p.begin[static_cast<uint32_t>(e) * ranks + source] + places[k]);
                const uint64_t out = static_cast<uint64_t>(e) * rows_per_expert + to;
                device::copy(p.receive_x + out * shape.row_bytes, payload, shape.row_bytes);
                if (device::lane() == 0) {
                    p.source_index[out] = token;
                    if (source == group.rank) {
                        p.own_row[uint64_t{static_cast<uint32_t>(token)} * shape.num_topk + k] =
                            static_cast<int32_t>(out);
                    }
                }
                if (shape.quantization == static_cast<uint32_t>(Quantization::kFloat8Exponent)) {
                    // [L, groups / 4, rows] words of four exponents each
                    auto *bytes = p.receive_scales + static_cast<uint64_t>(e) * align_up(groups, 4) * rows_per_expert;
                    for (uint32_t g = device::lane(); g < align_up(groups, 4); g += device::kWarpSize) {
                        bytes[(uint64_t{g / 4} * rows_per_expert + to) * 4 + g % 4] =
                            g < groups ? static_cast<uint8_t>(scales[g] >> 23) : 0;
                    }
                } else if (shape.scale_bytes != 0) {
                    auto *words = reinterpret_cast<uint32_t *>(p.receive_scales) +
                                  static_cast<uint64_t>(e) * groups * rows_per_expert;
                    for (uint32_t g = device::lane(); g < groups; g += device::kWarpSize) {
                        words[uint64_t{g} * rows_per_expert + to] = scales[g];
                    }
                }
            }
        }
    }
    if (!sync_grid(group)) return;
    for (uint32_t source = thread; source < ranks; source += warps * device::kWarpSize) {
        if (source == group.rank || masked(source)) continue;
        raise_signal(group, source, layout.signal_index(SignalKind::kLowLatencyDispatchCredit, group.rank, 0), number,
                     Phase::kLowLatencyDispatchReceive);
    }
    if (thread == 0) *received = number;
}

}  // namespace uccl_ep
