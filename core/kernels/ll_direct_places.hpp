// Where the rows of a direct low-latency dispatch belong. The receiver finds out from the picks of all ranks: behind the
// rows of the same expert from ranks before and of tokens before.
#pragma once

#include "ll_direct_dispatch_send.hpp"
#include "ll_dispatch_receive.hpp"

namespace uccl_ep {

// The top bit of each of two halves that is zero.
UCCL_EP_DEVICE uint32_t zero_halves(uint32_t word) {
    return ~(((word & 0x7fff7fffu) + 0x7fff7fffu) | word) & 0x80008000u;
}

// How many of ids [begin, end) are `id`, four a load: `ids` lies at 8 bytes. The whole warp.
UCCL_EP_DEVICE uint32_t count_picks(const int16_t *ids, uint32_t begin, uint32_t end, int16_t id) {
    constexpr uint32_t kAtOnce = 4, kOfLoad = 4;
    const auto *words = reinterpret_cast<const uint64_t *>(ids);
    const uint32_t both = static_cast<uint16_t>(id) * 0x10001u;
    uint32_t mine = 0;
    for (uint32_t base = begin / kOfLoad; base * kOfLoad < end; base += kAtOnce * device::kWarpSize) {
        uint32_t found = 0;  // a bit for each pick of these loads
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t first = (base + i * device::kWarpSize + device::lane()) * kOfLoad;
            if (first >= end) continue;
            const uint64_t word = words[first / kOfLoad];
            uint32_t low = zero_halves(static_cast<uint32_t>(word) ^ both);
            uint32_t high = zero_halves(static_cast<uint32_t>(word >> 32) ^ both);
            if (first < begin || end - first < kOfLoad) {  // not all of it counts
                uint64_t counts = ~uint64_t{0};
                if (first < begin) counts <<= 16 * (begin - first);
                if (end - first < kOfLoad) counts &= (uint64_t{1} << 16 * (end - first)) - 1;
                low &= static_cast<uint32_t>(counts);
                high &= static_cast<uint32_t>(counts >> 32);
            }
            found |= low >> (2 * i) | high >> (2 * i + 1);
        }
        mine += device::population_count(found);
    }
    return device::reduce_sum(mine);
}

// The header of a source, once it is there; one thread. False on failure.
UCCL_EP_DEVICE_SELDOM bool direct_check_header(const LowLatencyDispatchParameters &p, uint32_t source,
                                               uint64_t number) {
    const Group &group = p.group;
    return direct_wait_rows<DirectDispatch>(group, source, kDirectHead, number) &&
           ll_check(p,
                    *reinterpret_cast<const MessageHeader *>(direct_dispatch_inbox(group, group.data, source, number)),
                    source, number, LowLatencyPath::kDirect);
}

// A source whose words do not come may go the other way: its message is packed, or it waits at the barrier that stands
// before a change to that (where all that it had sent before has come). Both would wait until the time is up; here it
// is a difference of calls. `came()` looks once more. One thread.
template <class Came>
UCCL_EP_DEVICE void direct_refuse_packed(const LowLatencyDispatchParameters &p, uint32_t source, Came came) {
    const Group &group = p.group;
    const auto signal = [&](SignalKind kind) {
        return device::load_acquire_system(local_signal(group, group.rank, group.layout.signal_index(kind, source, 0)));
    };
    const uint64_t packed = *Counters::packed(group, LowLatencyHalf::kDispatchReceive, 0) + 1;
    if (signal(SignalKind::kLowLatencyDispatch) >= packed) {
        ll_check(p, *reinterpret_cast<const MessageHeader *>(direct_dispatch_inbox(group, group.data, source, packed)),
                 source, packed, LowLatencyPath::kDirect);
    } else if (signal(SignalKind::kBarrier) > *Counters::at(group, SingleCounter::kBarrier) && !came()) {
        fail_difference(group, DirectDispatch::kReceive, source, Difference::kPath,
                        static_cast<uint64_t>(LowLatencyPath::kPacked), static_cast<uint64_t>(LowLatencyPath::kDirect));
    }
}

// A word of picks that has not come yet; another one on failure. One thread.
UCCL_EP_DEVICE_SELDOM uint64_t direct_wait_picks(const LowLatencyDispatchParameters &p, uint32_t source, uint32_t index,
                                                 uint64_t number) {
    const Group &group = p.group;
    const uint64_t *header = direct_flag(group, group.rank, DirectDispatch::kRows, source, kDirectHead);
    const uint64_t *word = direct_word<DirectDispatch>(group, group.rank, number, source, index);
    return direct_wait_word<DirectDispatch, PicksWord>(group, DirectDispatch::kReceive, source, number, word, [&] {
        // A call of another shape has fewer words, or none: its header says so.
        if (device::load_acquire_system(header) >= number) {
            direct_check_header(p, source, number);
        } else {
            direct_refuse_packed(p, source,
                                 [&] { return PicksWord::is_of(device::load_relaxed_system(word), number); });
        }
    });
}

// The picks of a token of this rank, into the block's memory; an index that is no expert's is refused. One thread.
UCCL_EP_DEVICE void direct_own_picks(const LowLatencyDispatchParameters &p, uint32_t token, int16_t *picks) {
    constexpr uint32_t kAtOnce = 8;  // loads in flight
    const uint32_t topk = p.shape.num_topk, experts = p.shape.num_experts;
    for (uint32_t base = 0; base < topk; base += kAtOnce) {
        int64_t loaded[kAtOnce];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const bool there = base + i < topk && token < p.num_tokens;
            loaded[i] = there ? load_index(p.topk_idx, p.index_bytes, uint64_t{token} * topk + base + i) : -1;
        }
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (base + i >= topk) continue;
            const bool refused = is_refused(loaded[i], experts);
            if (refused) refuse_index(p.group, Phase::kLowLatencyDispatchReceive, loaded[i], experts);
            picks[base + i] = refused ? int16_t{-1} : static_cast<int16_t>(loaded[i]);
        }
    }
}

// The picks of all tokens of all sources, into the block's memory, a thread a token. False, on some threads, on failure.
// The warps of `team`.
UCCL_EP_DEVICE bool direct_gather_picks(const LowLatencyDispatchParameters &p, const DirectPlacing &placing, Team team,
                                        uint64_t number) {
    const Group &group = p.group;
    const Span span(group, Activity::kGathersPicks);
    const uint32_t topk = p.shape.num_topk, of_token = PicksWord::of_token(topk), most = p.shape.max_tokens;
    for (uint32_t item = team.thread(); item < group.num_ranks() * most; item += team.threads()) {
        const uint32_t source = item / most, token = item % most;
        int16_t *picks = placing.picks + item * topk;
        if (source == group.rank) {
            direct_own_picks(p, token, picks);
            continue;
        }
        const uint64_t *from = direct_word<DirectDispatch>(group, group.rank, number, source, token * of_token);
        constexpr uint32_t kAtOnce = 4;  // loads in flight
        for (uint32_t base = 0; base < of_token; base += kAtOnce) {
            uint64_t words[kAtOnce];
            const auto for_each = [&](auto visit) {
                UCCL_EP_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    if (base + i < of_token) visit(base + i, words[i]);
                }
            };
            for_each([&](uint32_t i, uint64_t &word) { word = device::load_relaxed_system(from + i); });
            bool ok = true;
            for_each([&](uint32_t i, uint64_t &word) {
                if (PicksWord::is_of(word, number)) return;
                word = direct_wait_picks(p, source, token * of_token + i, number);
                ok = ok && PicksWord::is_of(word, number);
            });
            if (!ok) return false;
            for_each([&](uint32_t i, uint64_t word) {
                UCCL_EP_UNROLL
                for (uint32_t k = 0; k < PicksWord::kPicks; ++k) {
                    const uint32_t to = i * PicksWord::kPicks + k;
                    if (to < topk) picks[to] = PicksWord::pick(word, k);
                }
            });
        }
    }
    return true;
}

// Where the picks of token `token` of every source belong, a warp a pick; and, of each source, how many ranks before this
// one the token goes to. The warps of `team`.
UCCL_EP_DEVICE void direct_find_places(const LowLatencyDispatchParameters &p, const DirectPlacing &placing, Team team,
                                       uint32_t token) {
    const Group &group = p.group;
    const Span span(group, Activity::kPlaces);
    const uint32_t ranks = group.num_ranks(), topk = p.shape.num_topk, local_experts = p.shape.num_experts / ranks;
    const int32_t first_expert = static_cast<int32_t>(group.rank * local_experts);
    const uint64_t rows_per_expert = uint64_t{ranks} * p.shape.max_tokens;
    const uint32_t of_token = topk + 1, questions = ranks * of_token;
    for (uint32_t question = team.index; question < questions; question += team.size) {
        const uint32_t source = question % ranks, k = topk - question / ranks;  // the longest first
        if (token >= p.shape.max_tokens) {  // the block has none; it counts for its experts
            if (k < topk && device::lane() == 0) placing.place[source * topk + k] = DirectPlacing::kNowhere;
            continue;
        }
        int32_t *out = p.picks + (uint64_t{source} * p.shape.max_tokens + token) * of_token;
        const uint32_t before = (source * p.shape.max_tokens + token) * topk;
        const int16_t *row = placing.picks + before;
        if (k == topk) {
            int32_t ranks_before = 0;
            for_each_rank_of([&](uint32_t i) { return int32_t{row[i]}; }, topk, local_experts,
                             [&](uint32_t rank) { ranks_before += rank < group.rank ? 1 : 0; });
            if (device::lane() == 0) out[topk] = ranks_before;
            continue;
        }
        const int32_t local = row[k] - first_expert;
        const bool here = local >= 0 && local < static_cast<int32_t>(local_experts);
        const uint32_t place = here ? count_picks(placing.picks, 0, before + k, row[k]) : 0;
        const bool fits = here && place < rows_per_expert;  // else the count of that expert is refused
        if (device::lane() == 0) {
            placing.place[source * topk + k] =
                fits ? static_cast<uint64_t>(static_cast<uint32_t>(local)) << 32 | place : DirectPlacing::kNowhere;
            out[k] = fits ? static_cast<int32_t>(static_cast<uint64_t>(local) * rows_per_expert + place) : -1;
        }
    }
}

// How many rows the experts of this block get, a warp an expert, those first that have the least of a row to copy. No
// row waits for it. The warps of `team`.
UCCL_EP_DEVICE void direct_count_rows(const LowLatencyDispatchParameters &p, const DirectPlacing &placing, Team team) {
    const Group &group = p.group;
    const Span span(group, Activity::kCounts);
    const uint32_t ranks = group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    const uint32_t blocks = device::num_blocks(), of_source = p.shape.max_tokens * p.shape.num_topk;
    for (uint32_t i = team.size - 1 - team.index;; i += team.size) {
        const uint32_t expert = device::block_index() + i * blocks;
        if (expert >= local_experts) return;
        uint32_t sum = 0;
        for (uint32_t source = 0; source < ranks; ++source) {
            const uint32_t rows = count_picks(placing.picks, source * of_source, (source + 1) * of_source,
                                              static_cast<int16_t>(group.rank * local_experts + expert));
            if (device::lane() == 0 && p.layout_range != nullptr)
                p.layout_range[expert * ranks + source] = static_cast<int64_t>(sum) << 32 | rows;
            if (device::lane() == 0 && rows > p.shape.max_tokens) {  // a token names it more than once
                fail_difference(group, Phase::kLowLatencyDispatchReceive, source, Difference::kExpertRows, rows,
                                p.shape.max_tokens);
            }
            sum += rows;
        }
        if (device::lane() == 0) {
            p.receive_count[expert] = static_cast<int32_t>(sum);
            if (p.statistics != nullptr) p.statistics[expert] += static_cast<int32_t>(sum);
        }
    }
}

}  // namespace uccl_ep
