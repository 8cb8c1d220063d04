// High-throughput combine: every rank sends each row back to the row's source, which sums.
//
// Sums are taken biases first, in float32 (float64 for float64), and rounded once: the same bits whatever the
// domains are. So rows cross unreduced; docs/decisions/ says what that costs. The order is that of the ranks, or
// the one that the caller lists (CombineParameters::term_ranks).
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

// The ranks whose rows a token sums, in that order. A place in it is a rank, or an entry of the token's list.
class Terms {
  public:
    UCCL_EP_DEVICE Terms(const CombineParameters &p, uint32_t token)
        : in_rank_(p.is_token_in_rank + uint64_t{token} * p.group.num_ranks()),
          list_(p.term_ranks == nullptr ? nullptr : p.term_ranks + uint64_t{token} * p.max_terms),
          end_(p.term_ranks == nullptr ? p.group.num_ranks() : p.max_terms) {}

    UCCL_EP_DEVICE bool goes_to(uint32_t rank) const { return in_rank_[rank] != 0; }
    UCCL_EP_DEVICE uint32_t first() const { return at_or_after(0); }
    UCCL_EP_DEVICE uint32_t next(uint32_t place) const { return at_or_after(place + 1); }
    UCCL_EP_DEVICE bool is_end(uint32_t place) const { return place >= end_; }
    UCCL_EP_DEVICE uint32_t rank(uint32_t place) const {
        return list_ == nullptr ? place : static_cast<uint32_t>(list_[place]);
    }

  private:
    UCCL_EP_DEVICE uint32_t at_or_after(uint32_t place) const {
        while (place < end_ && (list_ == nullptr ? in_rank_[place] == 0 : list_[place] < 0)) ++place;
        return place;
    }

    const uint8_t *in_rank_;
    const int32_t *list_;
    uint32_t end_;
};

// Neighbouring terms of one scale-up domain, which the tree of v2 sums and rounds before the domains are summed.
struct DomainTerms {
    uint32_t count, next;   // terms of the domain that begins at a place, and the first place behind them
    uint32_t representative;  // the rank whose row holds their sum

    // A domain's sum replaces the row of a rank that sent one: my own rows are the caller's.
    UCCL_EP_DEVICE static DomainTerms at(const CombineParameters &p, const Terms &terms, uint32_t place) {
        const uint32_t per_domain = p.group.layout.ranks_per_domain;
        const uint32_t domain = terms.rank(place) / per_domain;
        DomainTerms found{0, place, terms.rank(place)};
        for (; !terms.is_end(found.next) && terms.rank(found.next) / per_domain == domain;
             found.next = terms.next(found.next)) {
            if (found.representative == p.group.rank) found.representative = terms.rank(found.next);
            ++found.count;
        }
        return found;
    }
};

// Sum and round the rows of each domain into the row of its representative. Called by the whole warp.
template <class RowOf>
UCCL_EP_DEVICE void sum_domains(const CombineParameters &p, const Terms &terms, RowOf row_of) {
    for (uint32_t place = terms.first(); !terms.is_end(place);) {
        const DomainTerms domain = DomainTerms::at(p, terms, place);
        if (domain.count > 1) {
            uint32_t at = place;
            // A lane reads each element of all rows before it writes that element: summing in place is safe.
            sum_payload<false>(
                p.payload_type, const_cast<uint8_t *>(row_of(domain.representative)), p.hidden, domain.count,
                [&](uint32_t j) {
                    at = j == 0 ? place : terms.next(at);
                    return row_of(terms.rank(at));
                },
                [](uint32_t) { return 1.0f; });
        }
        place = domain.next;
    }
    device::sync_warp();
}

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
        const Terms terms(p, token);
        // Have a row of every rank that holds one.
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            if (!terms.goes_to(rank) || rank == group.rank || incoming[rank].payload != nullptr) continue;
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
        const auto row_of = [&](uint32_t rank) {
            return incoming[rank].payload + uint64_t{incoming[rank].next} * p.row_bytes;
        };
        const bool domains_first = p.domains_first != 0;
        if (domains_first) sum_domains(p, terms, row_of);
        // Biases, then ranks or domains. A cursor walks them, so that no list of terms needs room.
        const uint32_t num_biases = (p.bias[0] != nullptr) + (p.bias[1] != nullptr);
        uint32_t num_terms = num_biases;
        for (uint32_t at = terms.first(); !terms.is_end(at); ++num_terms)
            at = domains_first ? DomainTerms::at(p, terms, at).next : terms.next(at);
        uint32_t next = 0;
        sum_payload<false>(
            p.payload_type, p.out + uint64_t{token} * p.row_bytes, p.hidden, num_terms,
            [&](uint32_t j) -> const uint8_t * {
                if (j < num_biases)
                    return (p.bias[0] != nullptr && j == 0 ? p.bias[0] : p.bias[1]) + uint64_t{token} * p.row_bytes;
                const uint32_t at = j == num_biases ? terms.first() : next;
                if (domains_first) {
                    const DomainTerms domain = DomainTerms::at(p, terms, at);
                    next = domain.next;
                    return row_of(domain.representative);
                }
                next = terms.next(at);
                return row_of(terms.rank(at));
            },
            [](uint32_t) { return 1.0f; });
        for (uint32_t k = device::lane(); k < p.num_topk; k += device::kWarpSize) {
            float sum = 0.0f;
            for (uint32_t rank = 0; rank < ranks; ++rank) {
                if (terms.goes_to(rank))
                    sum += incoming[rank].topk_weights[uint64_t{incoming[rank].next} * p.num_topk + k];
            }
            p.out_topk_weights[uint64_t{token} * p.num_topk + k] = sum;
        }
        device::sync_warp();  // the rows have been read: slots may go back
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            if (!terms.goes_to(rank)) continue;
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
