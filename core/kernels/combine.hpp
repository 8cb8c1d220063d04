// High-throughput combine: every rank sends each row back to the row's source, which sums.
//
// Sums are taken biases first, in float32 (float64 for float64), and rounded once: the same bits whatever the
// domains are. So rows cross unreduced; docs/decisions/ says what that costs. The order is that of the ranks, or
// the one that the caller lists (CombineParameters::term_ranks).
#pragma once

#include "block_memory.hpp"
#include "dispatch.hpp"
#include "sums.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE RowFormat row_format(const CombineParameters &p) { return {p.row_bytes, 0, p.num_topk, p.payload_type}; }

// Role: send this channel's rows of `source` home.
UCCL_EP_DEVICE bool combine_send(const CombineParameters &p, Team team, uint32_t source, uint32_t channel) {
    const Group &group = p.group;
    const uint32_t index = source * group.layout.num_channels + channel;
    const uint32_t total = static_cast<uint32_t>(p.receive_rows[index]);
    const uint64_t first = static_cast<uint64_t>(p.receive_offset[index]);
    const uint32_t capacity = CombineRows::capacity(p);
    StreamSender sender(group, direct_to(group, source, channel), Phase::kCombine, team);
    bool ok = true;
    for (uint32_t sent = 0; sent < total && ok;) {
        const uint32_t rows = total - sent < capacity ? total - sent : capacity;
        uint8_t *slot = sender.acquire();
        ok = slot != nullptr;
        if (!ok) break;
        const CombineRows at = CombineRows::of(p, rows);
        if (team.leads()) write_message_header(group, slot, OperationKind::kCombine, rows, row_format(p), group.rank);
        copy_shared_out(team, slot + at.payload, p.x + (first + sent) * p.row_bytes, uint64_t{rows} * p.row_bytes);
        if (p.num_topk != 0) {
            copy_shared_out(team, slot + at.topk_weights,
                            reinterpret_cast<const uint8_t *>(p.topk_weights + (first + sent) * p.num_topk),
                            uint64_t{rows} * p.num_topk * 4);
        }
        ok = sender.commit(at.end);
        sent += rows;
    }
    sender.finish();
    return ok;
}

// The rows that come home from one rank over one channel.
struct IncomingRows {
    const CombineParameters &p;
    StreamPlace place;
    uint32_t rank, total, capacity;
    uint64_t received;

    UCCL_EP_DEVICE static IncomingRows of(const CombineParameters &p, const CombineProgress &progress, uint32_t rank,
                                          uint32_t channel) {
        return {p,
                direct_from(p.group, rank, channel),
                rank,
                static_cast<uint32_t>(p.send_rows[rank * p.group.layout.num_channels + channel]),
                CombineRows::capacity(p),
                progress.received[rank]};
    }
    UCCL_EP_DEVICE uint32_t rows_of_message(uint32_t message) const {
        return total - message * capacity < capacity ? total - message * capacity : capacity;
    }
    // Messages that bring `rows` rows, and those that are empty when as many have been taken.
    UCCL_EP_DEVICE uint32_t messages_with(uint32_t rows) const { return (rows + capacity - 1) / capacity; }
    UCCL_EP_DEVICE uint32_t messages_emptied(uint32_t rows) const {
        return rows == total ? messages_with(rows) : rows / capacity;
    }
    UCCL_EP_DEVICE CombineTerm term(uint32_t row) const {
        const uint32_t message = row / capacity;
        const uint8_t *slot = slot_at(p.group, place, received + message);
        const CombineRows at = CombineRows::of(p, rows_of_message(message));
        const uint32_t within = row - message * capacity;
        return {slot + at.payload + uint64_t{within} * p.row_bytes,
                reinterpret_cast<const float *>(slot + at.topk_weights) + uint64_t{within} * p.num_topk, rank, 0};
    }
    // Wait until rows below `rows` are here; those below `before` were. One thread.
    UCCL_EP_DEVICE bool wait(uint32_t before, uint32_t rows) const {
        const uint32_t messages = messages_with(rows);
        if (messages == messages_with(before)) return true;
        if (!wait_signal(p.group, {Phase::kCombine, rank, place.data_signal, received + messages})) return false;
        for (uint32_t message = messages_with(before); message < messages; ++message) {
            if (!check_message(p.group, place, Phase::kCombine, received + message, OperationKind::kCombine,
                               row_format(p)))
                return false;
            const uint32_t brings =
                reinterpret_cast<const MessageHeader *>(slot_at(p.group, place, received + message))->rows;
            if (brings != rows_of_message(message)) {
                refuse_rows(p.group, place, Phase::kCombine, rank, brings, rows_of_message(message),
                            OperationKind::kCombine);
                return false;
            }
        }
        return true;
    }
};

// The tree of v2 sums the terms of each scale-up domain, which are neighbours, and rounds before the domains are
// summed; returns how many terms are left. The whole warp.
UCCL_EP_DEVICE uint32_t sum_domains(const CombineParameters &p, CombineTerm *terms, uint32_t num_terms) {
    const uint32_t per_domain = p.group.layout.ranks_per_domain;
    uint32_t left = 0;
    for (uint32_t begin = 0, end; begin < num_terms; begin = end) {
        // The sum replaces a row that another rank sent: my own rows are the caller's.
        CombineTerm sum = terms[begin];
        for (end = begin + 1; end < num_terms && terms[end].rank / per_domain == sum.rank / per_domain; ++end) {
            if (sum.rank == p.group.rank) sum = terms[end];
        }
        if (end - begin > 1) {
            // A lane reads each element of all rows before it writes that element: summing in place is safe.
            sum_payload<false>(
                p.payload_type, const_cast<uint8_t *>(sum.payload), 0, p.hidden, end - begin,
                [&](uint32_t j) { return terms[begin + j].payload; }, [](uint32_t) { return 1.0f; });
        }
        device::sync_warp();  // all lanes have read the terms up to `end`
        if (device::lane() == 0) terms[left] = sum;
        ++left;
        device::sync_warp();
    }
    return left;
}

// Sum one token; `rows` are the numbers of its rows by rank. The whole warp.
UCCL_EP_DEVICE void combine_sum(const CombineParameters &p, const CombineProgress &progress, uint32_t channel,
                                uint32_t token, const int32_t *rows, CombineTerm *list) {
    const Group &group = p.group;
    const uint64_t own = static_cast<uint64_t>(p.receive_offset[group.rank * group.layout.num_channels + channel]);
    const uint32_t num_biases = (p.bias[0] != nullptr) + (p.bias[1] != nullptr);
    device::sync_warp();  // the terms of the token before have been read
    if (device::lane() == 0 && num_biases != 0) {
        list[0] = {(p.bias[0] != nullptr ? p.bias[0] : p.bias[1]) + uint64_t{token} * p.row_bytes, nullptr, 0, 0};
        if (num_biases == 2) list[1] = {p.bias[1] + uint64_t{token} * p.row_bytes, nullptr, 0, 0};
    }
    CombineTerm *terms = list + num_biases;
    uint32_t num_terms = 0;
    const uint32_t candidates = p.term_ranks == nullptr ? group.num_ranks() : p.max_terms;
    for (uint32_t base = 0; base < candidates; base += device::kWarpSize) {
        const uint32_t i = base + device::lane();
        int32_t rank = -1;
        if (i < candidates)
            rank = p.term_ranks == nullptr ? static_cast<int32_t>(i) : p.term_ranks[uint64_t{token} * p.max_terms + i];
        const int32_t row = rank < 0 ? -1 : rows[rank];
        const device::LaneMask there = device::ballot(row >= 0);
        if (row >= 0) {
            const auto number = static_cast<uint32_t>(row), from = static_cast<uint32_t>(rank);
            terms[num_terms + device::population_count(there & device::lanes_below())] =
                from == group.rank
                    ? CombineTerm{p.x + (own + number) * p.row_bytes,
                                  p.num_topk == 0 ? nullptr : p.topk_weights + (own + number) * p.num_topk, from, 0}
                    : IncomingRows::of(p, progress, from, channel).term(number);
        }
        num_terms += device::population_count(there);
    }
    device::sync_warp();
    for (uint32_t k = device::lane(); k < p.num_topk; k += device::kWarpSize) {
        float sum = 0.0f;
        for (uint32_t j = 0; j < num_terms; ++j) sum += terms[j].topk_weights[k];
        p.out_topk_weights[uint64_t{token} * p.num_topk + k] = sum;
    }
    if (p.domains_first != 0) num_terms = sum_domains(p, terms, num_terms);
    sum_token(p.payload_type, p.out + uint64_t{token} * p.row_bytes, p.hidden, num_biases + num_terms,
              [&](uint32_t j) { return list[j].payload; });
}

// Role: sum this channel's tokens, some of them a round: their rows are waited for together, and go back together.
UCCL_EP_DEVICE bool combine_reduce(const CombineParameters &p, Team team, uint32_t channel) {
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks(), channels = group.layout.num_channels;
    const TokenRange range = TokenRange::of(p.num_tokens, channel, channels);
    const CombineProgress progress = CombineProgress::in(device::shared_memory(), team.size, ranks);
    const uint32_t most = CombineProgress::tokens(team.size, ranks, group.layout.num_slots, CombineRows::capacity(p));
    for (uint32_t rank = team.index * device::kWarpSize + device::lane(); rank < ranks;
         rank += team.size * device::kWarpSize) {
        progress.received[rank] = *Counters::at(group, MessageCounter::kDirectReceived, rank, channel);
        progress.next[rank] = 0;
    }
    team.sync();
    bool ok = true;
    for (uint32_t first = range.begin; first < range.end; first += most) {
        const uint32_t tokens = range.end - first < most ? range.end - first : most;
        for (uint32_t rank = team.index; rank < ranks; rank += team.size) {
            uint32_t next = progress.next[rank];
            for (uint32_t base = 0; base < tokens; base += device::kWarpSize) {
                const uint32_t i = base + device::lane();
                const bool there = i < tokens && p.is_token_in_rank[uint64_t{first + i} * ranks + rank] != 0;
                const device::LaneMask mask = device::ballot(there);
                if (i < tokens) {
                    progress.row[i * ranks + rank] =
                        there ? static_cast<int32_t>(next + device::population_count(mask & device::lanes_below()))
                              : -1;
                }
                next += device::population_count(mask);
            }
            if (device::lane() == 0) {
                progress.after[rank] = next;
                const bool here = rank == group.rank || next == progress.next[rank];
                ok = ok && (here || IncomingRows::of(p, progress, rank, channel).wait(progress.next[rank], next));
            }
        }
        ok = team.all(ok);
        if (!ok) break;
        for (uint32_t i = team.index; i < tokens; i += team.size) {
            combine_sum(p, progress, channel, first + i, progress.row + i * ranks,
                        progress.terms + team.index * (ranks + 2));
        }
        team.sync();  // the rows have been read: slots may go back
        for (uint32_t rank = team.index; rank < ranks; rank += team.size) {
            if (device::lane() != 0) continue;
            const uint32_t before = progress.next[rank], after = progress.after[rank];
            progress.next[rank] = after;  // of this warp alone
            if (rank == group.rank || before == after) continue;
            const IncomingRows rows = IncomingRows::of(p, progress, rank, channel);
            if (rows.messages_emptied(before) == rows.messages_emptied(after)) continue;
            const uint64_t emptied = rows.received + rows.messages_emptied(after);
            ok = ok && raise_signal(group, rank, rows.place.credit_signal, emptied, Phase::kCombine);
            *rows.place.counter = emptied;
        }
        device::sync_lanes();  // the others learn of a failure when they meet again
    }
    return ok;
}

UCCL_EP_KERNEL(uccl_ep_combine, CombineParameters) {
    const CombineParameters &p = parameters;
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks();
    if (!may_begin(group)) return;
    const TeamOfWarp mine = team_of_warp(p.team_ends);
    const ChannelTeams teams =
        ChannelTeams::of(mine, group.layout.num_channels, device::block_index(), device::num_blocks());
    const Team team = Team::of(mine);
    for (uint32_t role = teams.first; role < combine_roles(group.layout); role += teams.count) {
        if (role == 0) {
            combine_reduce(p, team, teams.channel);
        } else {
            combine_send(p, team, (group.rank + role) % ranks, teams.channel);
        }
    }
}

}  // namespace uccl_ep
