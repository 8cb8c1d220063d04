// High-throughput combine: every rank sends each row back to the row's source, which sums.
//
// Sums are taken biases first, in float32 (float64 for float64), and rounded once: the same bits whatever the
// domains are. So rows cross unreduced; docs/decisions/ says what that costs. The order is that of the ranks, or
// the one that the caller lists (CombineParameters::term_ranks).
#pragma once

#include "block_memory.hpp"
#include "sums.hpp"
#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE RowFormat row_format(const CombineParameters &p) { return {p.row_bytes, 0, p.num_topk, p.payload_type}; }

// Role: send this channel's rows of `source` home.
UCCL_EP_DEVICE bool combine_send(const CombineParameters &p, Team team, uint32_t source, uint32_t channel) {
    const Group &group = p.group;
    const Span role(group, Activity::kSends, team.leads(), source);
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
        Span step(group, Activity::kCopies, team.leads());
        copy_shared_out(team, slot + at.payload, p.x + (first + sent) * p.row_bytes, uint64_t{rows} * p.row_bytes);
        if (p.num_topk != 0) {
            copy_shared_out(team, slot + at.topk_weights,
                            reinterpret_cast<const uint8_t *>(p.topk_weights + (first + sent) * p.num_topk),
                            uint64_t{rows} * p.num_topk * 4);
        }
        step.end();
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
    uint32_t rank, first_slot, total, capacity;
    uint64_t received;

    UCCL_EP_DEVICE static IncomingRows of(const CombineParameters &p, const CombineProgress &progress, uint32_t rank,
                                          uint32_t channel) {
        return {p,
                direct_from(p.group, rank, channel),
                rank,
                progress.slot()[rank],
                progress.total()[rank],
                CombineRows::capacity(p),
                progress.received()[rank]};
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
        // As slot_at() has it, without a division of 64 bits for each token.
        const Layout &layout = p.group.layout;
        const uint32_t number = (first_slot + message) % layout.num_slots;
        const uint8_t *slot = p.group.data + place.remote_ring + number * layout.slot_bytes;
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
            sum_all(p.payload_type, const_cast<uint8_t *>(sum.payload), 0, p.hidden, end - begin,
                    CombinePayloads{terms + begin});
        }
        device::sync_warp();  // all lanes have read the terms up to `end`
        if (device::lane() == 0) terms[left] = sum;
        ++left;
        device::sync_warp();
    }
    return left;
}

// Sum one token; `rows` are the numbers of its rows by rank, and `own` is the first of my own rows. The whole warp.
UCCL_EP_DEVICE void combine_sum(const CombineParameters &p, const CombineProgress &progress, uint32_t channel,
                                uint64_t own, uint32_t token, const int32_t *rows, CombineTerm *list) {
    const Group &group = p.group;
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
              CombinePayloads{list});
}

// Sums of a channel's tokens, some of them a round. While the team sums a round, a warp for each rank numbers the rows of
// the next and waits for them, another gives back the slots that the round before emptied; all meet once a round.
class CombineRounds {
  public:
    UCCL_EP_DEVICE CombineRounds(const CombineParameters &p, Team team, uint32_t channel)
        : p_(p),
          team_(team),
          channel_(channel),
          range_(TokenRange::of(p.num_tokens, channel, p.group.layout.num_channels)),
          progress_{device::shared_memory(), team.size, p.group.num_ranks()},
          most_(CombineProgress::tokens(team.size, p.group.num_ranks(), p.group.layout.num_slots,
                                        CombineRows::capacity(p))) {
        const uint32_t channels = p.group.layout.num_channels;
        for (uint32_t rank = team.thread(); rank < ranks(); rank += team.threads()) {
            const uint64_t received = *Counters::at(p.group, MessageCounter::kDirectReceived, rank, channel);
            progress_.received()[rank] = received;
            progress_.slot()[rank] = static_cast<uint32_t>(received % p.group.layout.num_slots);
            progress_.total()[rank] = static_cast<uint32_t>(p.send_rows[rank * channels + channel]);
            progress_.emptied()[rank] = 0;
            after(kBeforeFirst)[rank] = 0;
        }
        team_.sync();
    }

    UCCL_EP_DEVICE bool sum() {
        const Span role(p_.group, Activity::kSums, team_.leads());
        const uint64_t own =
            static_cast<uint64_t>(p_.receive_offset[p_.group.rank * p_.group.layout.num_channels + channel_]);
        const uint32_t rounds = (range_.end - range_.begin + most_ - 1) / most_;
        bool ok = rounds == 0 || number(0);
        for (uint32_t round = 0; round < rounds; ++round) {
            Span step(p_.group, Activity::kWaitsForRows, team_.leads());
            ok = team_.all(ok);  // the rows of this round are here, and those of the one before have been read
            step.end();
            if (!ok) return false;
            if (round > 0) ok = give_back(round - 1);
            step.next(Activity::kAddsUp);
            const uint32_t begin = first_token(round), tokens = first_token(round + 1) - begin;
            for (uint32_t i = team_.index; i < tokens; i += team_.size) {
                combine_sum(p_, progress_, channel_, own, begin + i, rows(round) + i * ranks(),
                            progress_.terms() + team_.index * (ranks() + 2));
            }
            step.end();
            if (round + 1 < rounds) ok = number(round + 1) && ok;
            device::sync_lanes();  // the others learn of a failure when they meet again
        }
        team_.sync();
        return rounds == 0 || give_back(rounds - 1);
    }

  private:
    static constexpr uint32_t kBeforeFirst = 2;  // as good as any third round

    UCCL_EP_DEVICE uint32_t ranks() const { return p_.group.num_ranks(); }
    UCCL_EP_DEVICE uint32_t first_token(uint32_t round) const {
        return range_.end - range_.begin < round * most_ ? range_.end : range_.begin + round * most_;
    }
    UCCL_EP_DEVICE int32_t *rows(uint32_t round) const { return progress_.row() + round % 2 * most_ * ranks(); }
    UCCL_EP_DEVICE uint32_t *after(uint32_t round) const { return progress_.after() + round % 3 * ranks(); }

    // Number the rows of a round, and wait for them; false on failure. Each warp some ranks.
    UCCL_EP_DEVICE bool number(uint32_t round) {
        const Span span(p_.group, Activity::kWaitsForRows, team_.leads());
        const uint32_t begin = first_token(round), tokens = first_token(round + 1) - begin;
        bool ok = true;
        for (uint32_t rank = team_.index; rank < ranks(); rank += team_.size) {
            const uint32_t before = after(round + kBeforeFirst)[rank];
            uint32_t next = before;
            for (uint32_t base = 0; base < tokens; base += device::kWarpSize) {
                const uint32_t i = base + device::lane();
                const bool there = i < tokens && p_.is_token_in_rank[uint64_t{begin + i} * ranks() + rank] != 0;
                const device::LaneMask mask = device::ballot(there);
                if (i < tokens) {
                    rows(round)[i * ranks() + rank] =
                        there ? static_cast<int32_t>(next + device::population_count(mask & device::lanes_below()))
                              : -1;
                }
                next += device::population_count(mask);
            }
            if (device::lane() == 0) {
                after(round)[rank] = next;
                const bool here = rank == p_.group.rank || next == before;
                ok = ok && (here || IncomingRows::of(p_, progress_, rank, channel_).wait(before, next));
            }
        }
        return ok;
    }

    // The rows of a round have been read: slots that are empty may go back; false on failure. Each warp some ranks, the
    // last warp the first of them: a release takes a GPU as long as a wait, and one warp should not have both.
    UCCL_EP_DEVICE bool give_back(uint32_t round) {
        const Span span(p_.group, Activity::kGivesBack, team_.leads());
        bool ok = true;
        for (uint32_t rank = team_.size - 1 - team_.index; rank < ranks(); rank += team_.size) {
            if (device::lane() != 0 || rank == p_.group.rank) continue;
            const IncomingRows rows = IncomingRows::of(p_, progress_, rank, channel_);
            const uint32_t emptied = rows.messages_emptied(after(round)[rank]);
            if (emptied == progress_.emptied()[rank]) continue;
            progress_.emptied()[rank] = emptied;
            ok = ok && raise_signal(p_.group, rank, rows.place.credit_signal, rows.received + emptied, Phase::kCombine);
            *rows.place.counter = rows.received + emptied;
        }
        return ok;
    }

    const CombineParameters &p_;
    Team team_;
    uint32_t channel_;
    TokenRange range_;
    CombineProgress progress_;
    uint32_t most_;  // tokens of a round
};

UCCL_EP_KERNEL(uccl_ep_combine, CombineParameters) {
    const CombineParameters &p = parameters;
    const Group &group = p.group;
    const uint32_t ranks = group.num_ranks();
    const KernelSpan kernel(group, TracedKernel::kCombine);
    if (!may_begin(group)) return;
    const TeamOfWarp mine = team_of_warp(p.team_ends);
    const ChannelTeams teams =
        ChannelTeams::of(mine, group.layout.num_channels, device::block_index(), device::num_blocks());
    const Team team = Team::of(mine);
    for (uint32_t role = teams.first; role < combine_roles(group.layout); role += teams.count) {
        if (role == 0) {
            CombineRounds(p, team, teams.channel).sum();
        } else {
            combine_send(p, team, (group.rank + role) % ranks, teams.channel);
        }
    }
}

}  // namespace uccl_ep
