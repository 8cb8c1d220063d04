// The receive half of a low-latency dispatch: messages are waited for, checked, and expanded expert by expert.
#pragma once

#include "block_memory.hpp"
#include "float8.hpp"
#include "ll_room.hpp"
#include "tokens.hpp"

namespace uccl_ep {

// Check a message against this rank's own call. One thread.
UCCL_EP_DEVICE bool ll_check(const LowLatencyDispatchParameters &p, const MessageHeader &header, uint32_t source,
                             uint64_t number, LowLatencyPath path = LowLatencyPath::kPacked) {
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
    } else if (words[kWordPath] != static_cast<uint32_t>(path)) {
        fail_difference(p.group, kPhase, source, Difference::kPath, words[kWordPath], static_cast<uint32_t>(path));
    } else {
        return true;
    }
    return false;
}

// Where a message to this rank lies. My own never left: it is read where it was written, which is no host memory.
UCCL_EP_DEVICE const uint8_t *ll_inbox(const Group &group, uint32_t parity, uint32_t source) {
    return source == group.rank ? ll_own_message(group, parity)
                                : group.data + group.layout.ll_dispatch_inbox(parity, source);
}

// How many rows a message brings, and how many of them are for an expert of mine. Those of a rank that block 0 has asked
// for all (ll_hand_on_head) lie in device memory, where the other blocks find them sooner than over the bus.
UCCL_EP_DEVICE uint32_t ll_rows_of(const Group &group, uint32_t parity, uint32_t source) {
    return group.layout.has_remote && source != group.rank
               ? static_cast<uint32_t>(*Counters::rows(group, source))
               : reinterpret_cast<const MessageHeader *>(ll_inbox(group, parity, source))->rows;
}
UCCL_EP_DEVICE const int32_t *ll_count(const LowLatencyDispatchParameters &p, uint32_t parity, uint32_t source,
                                       uint32_t expert) {
    const Group &group = p.group;
    if (group.layout.has_remote && source != group.rank) return p.count + expert * group.num_ranks() + source;
    return reinterpret_cast<const int32_t *>(ll_inbox(group, parity, source) + sizeof(MessageHeader)) + expert;
}

// Check the head of a message that came, and put it where all blocks read it. Everything of it is loaded together, since
// each load from host memory takes 1.3 us. The whole warp; false on failure.
UCCL_EP_DEVICE bool ll_hand_on_head(const LowLatencyDispatchParameters &p, uint32_t parity, uint32_t source,
                                    uint64_t number, RoomAhead &room) {
    const Group &group = p.group;
    const Span span(group, Activity::kReadsHeads, device::lane() == 0, source);
    const uint32_t ranks = group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    const uint8_t *message = ll_inbox(group, parity, source);
    const auto *counts = reinterpret_cast<const int32_t *>(message + sizeof(MessageHeader));
    const MessageHeader header = *reinterpret_cast<const MessageHeader *>(message);
    constexpr uint32_t kAtOnce = device::kWarpSize == 1 ? 1 : 8;
    for (uint32_t base = 0; base < local_experts; base += kAtOnce * device::kWarpSize) {
        int32_t rows[kAtOnce];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t e = base + i * device::kWarpSize + device::lane();
            rows[i] = e < local_experts ? counts[e] : 0;
        }
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t e = base + i * device::kWarpSize + device::lane();
            if (e < local_experts) p.count[e * ranks + source] = rows[i];
        }
    }
    bool ok = true;
    if (device::lane() == 0) {
        ok = ll_check(p, header, source, number);
        p.combine_base[source] = static_cast<int32_t>(header.words[kWordCombineBase]);
        *Counters::rows(group, source) = header.rows;
        room.read(header);
    }
    return device::broadcast(static_cast<uint32_t>(ok)) != 0;
}

// What combine needs to know, and the caller's counts. One block.
UCCL_EP_DEVICE void ll_write_counts(const LowLatencyDispatchParameters &p, const LowLatencyArrivals &arrivals,
                                    uint32_t parity) {
    const Group &group = p.group;
    const Span span(group, Activity::kCounts);
    const uint32_t ranks = group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    const uint32_t warps = device::warps_per_block(), warp = device::warp_in_block();
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    const uint32_t thread = warp * device::kWarpSize + device::lane();
    for (uint32_t e = thread; e < local_experts; e += warps * device::kWarpSize) {
        int32_t sum = 0;
        for (uint32_t source = 0; source < ranks; ++source) {
            const int32_t rows = masked(source) ? 0 : *ll_count(p, parity, source, e);
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
        if (masked(source)) {
            p.combine_base[source] = 0;
        } else if (!group.layout.has_remote || source == group.rank) {  // else it was handed on
            const auto *header = reinterpret_cast<const MessageHeader *>(ll_inbox(group, parity, source));
            p.combine_base[source] = static_cast<int32_t>(header->words[kWordCombineBase]);
        }
    }
    // Where my experts' rows for each source begin in its combine inbox: a warp a source.
    for (uint32_t source = warp; source < ranks; source += warps) {
        uint32_t sum = 0;
        for (uint32_t base = 0; base < local_experts; base += device::kWarpSize) {
            const uint32_t e = base + device::lane();
            const uint32_t rows =
                e < local_experts && !masked(source) ? static_cast<uint32_t>(*ll_count(p, parity, source, e)) : 0;
            uint32_t total;
            const uint32_t before = sum + sum_below(rows, &total);
            if (e < local_experts) p.rows_before[e * ranks + source] = static_cast<int32_t>(before);
            sum += total;
        }
        if (device::lane() == 0) p.rows_home[source] = static_cast<int32_t>(sum);
    }
}

// Copy piece `piece` of `pieces` of a row to its places in the experts of this rank, which `list` has as
// local expert << 32 | row there, once find() has filled it and said how many they are. The whole warp.
template <class Find>
UCCL_EP_DEVICE void ll_copy_payload_found(const LowLatencyDispatchParameters &p, const uint64_t *list, Find find,
                                          const uint8_t *payload, uint32_t piece, uint32_t pieces) {
    const LowLatencyShape &shape = p.shape;
    const uint64_t rows_per_expert = uint64_t{p.group.num_ranks()} * shape.max_tokens;
    const auto out_row = [&](uint32_t i) { return (list[i] >> 32) * rows_per_expert + static_cast<uint32_t>(list[i]); };
    const uint64_t bytes = align_up((shape.row_bytes + pieces - 1) / pieces, 512);
    const uint64_t begin = bytes * piece < shape.row_bytes ? bytes * piece : shape.row_bytes;
    device::copy_to_found(
        find, [&](uint32_t i) { return p.receive_x + out_row(i) * shape.row_bytes + begin; }, payload + begin,
        shape.row_bytes - begin < bytes ? shape.row_bytes - begin : bytes);
}

// Say which token of its source a row is. The whole warp.
UCCL_EP_DEVICE void ll_store_source(const LowLatencyDispatchParameters &p, const uint64_t *list, uint32_t outputs,
                                    uint32_t token) {
    const uint64_t rows_per_expert = uint64_t{p.group.num_ranks()} * p.shape.max_tokens;
    for (uint32_t i = device::lane(); i < outputs; i += device::kWarpSize)
        p.source_index[(list[i] >> 32) * rows_per_expert + static_cast<uint32_t>(list[i])] =
            static_cast<int32_t>(token);
}

// The first scale of a row that this lane copies: loaded before it is known where it goes.
UCCL_EP_DEVICE uint32_t ll_first_scale(const LowLatencyShape &shape, const uint8_t *row_scales, uint32_t piece) {
    const uint32_t first = piece * device::kWarpSize + device::lane();
    return shape.scale_bytes != 0 && first < scale_groups(shape.hidden)
               ? reinterpret_cast<const uint32_t *>(row_scales)[first]
               : 0;
}

// Copy a piece of its scales, where it has some. The whole warp.
UCCL_EP_DEVICE void ll_copy_scales_out(const LowLatencyDispatchParameters &p, const uint64_t *list, uint32_t outputs,
                                       const uint8_t *row_scales, uint32_t first_scale, uint32_t piece,
                                       uint32_t pieces) {
    const LowLatencyShape &shape = p.shape;
    const uint64_t rows_per_expert = uint64_t{p.group.num_ranks()} * shape.max_tokens;
    const uint32_t step = pieces * device::kWarpSize, first = piece * device::kWarpSize + device::lane();
    const auto *scales = reinterpret_cast<const uint32_t *>(row_scales);
    const uint32_t groups = scale_groups(shape.hidden);
    if (shape.quantization == static_cast<uint32_t>(Quantization::kFloat8Exponent)) {
        // [L, groups / 4, rows] words of four exponents each
        for (uint32_t g = first; g < align_up(groups, 4); g += step) {
            const uint32_t scale = g == first ? first_scale : g < groups ? scales[g] : 0;
            const auto exponent = static_cast<uint8_t>(scale >> 23);
            for (uint32_t i = 0; i < outputs; ++i) {
                auto *to = p.receive_scales + (list[i] >> 32) * align_up(groups, 4) * rows_per_expert;
                to[(uint64_t{g / 4} * rows_per_expert + static_cast<uint32_t>(list[i])) * 4 + g % 4] = exponent;
            }
        }
    } else if (shape.scale_bytes != 0) {
        for (uint32_t g = first; g < groups; g += step) {
            const uint32_t scale = g == first ? first_scale : scales[g];
            for (uint32_t i = 0; i < outputs; ++i) {
                auto *to = reinterpret_cast<uint32_t *>(p.receive_scales) + (list[i] >> 32) * groups * rows_per_expert;
                to[uint64_t{g} * rows_per_expert + static_cast<uint32_t>(list[i])] = scale;
            }
        }
    }
}

// Copy a piece of a row to its places in all experts of this rank. All loads of it from the message are under way before
// the first is waited for: each takes 1.3 us where that lies in host memory. The whole warp.
UCCL_EP_DEVICE void ll_expand_row(const LowLatencyDispatchParameters &p, const LowLatencyArrivals &arrivals,
                                  uint32_t parity, uint32_t source, uint32_t row, uint32_t piece, uint32_t pieces) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), topk = shape.num_topk;
    const uint64_t rows_per_expert = uint64_t{ranks} * shape.max_tokens;
    const LowLatencyRows at = LowLatencyRows::of(shape, ranks, 0);
    const uint8_t *fields = ll_inbox(group, parity, source) + at.row(row), *payload = fields;
    const auto *token_at = reinterpret_cast<const uint32_t *>(fields + at.source);
    if (source == group.rank && p.own_in_place != 0) payload = p.x + uint64_t{*token_at} * shape.row_bytes;
    const uint32_t first_scale = ll_first_scale(shape, fields + at.scales, piece);
    uint64_t *list = arrivals.list + device::warp_in_block() * topk;
    uint32_t *list_k = arrivals.list_k + device::warp_in_block() * topk;
    uint32_t outputs = 0, token = 0;
    device::sync_warp();  // the list of the row before has been read
    const auto find = [&] {
        token = *token_at;
        const auto *experts = reinterpret_cast<const int32_t *>(fields + at.expert);
        const auto *places = reinterpret_cast<const int32_t *>(fields + at.place);
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
        return outputs;
    };
    ll_copy_payload_found(p, list, find, payload, piece, pieces);
    ll_copy_scales_out(p, list, outputs, fields + at.scales, first_scale, piece, pieces);
    if (piece != 0) return;
    ll_store_source(p, list, outputs, token);
    if (source != group.rank) return;
    for (uint32_t i = device::lane(); i < outputs; i += device::kWarpSize) {
        p.own_row[uint64_t{token} * topk + list_k[i]] =
            static_cast<int32_t>((list[i] >> 32) * rows_per_expert + static_cast<uint32_t>(list[i]));
    }
}

// How many rows each message brings, and where those of each source begin within each expert of this rank. The whole
// block, when all messages have come.
UCCL_EP_DEVICE void ll_find_arrivals(const LowLatencyDispatchParameters &p, const LowLatencyArrivals &arrivals,
                                     uint32_t parity) {
    const uint32_t ranks = p.group.num_ranks(), local_experts = p.shape.num_experts / ranks;
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    const auto masked = [&](uint32_t rank) { return p.masked != nullptr && p.masked[rank] != 0; };
    for (uint32_t source = thread; source < ranks; source += threads) {
        arrivals.rows[source] = masked(source) ? 0 : ll_rows_of(p.group, parity, source);
    }
    for (uint32_t e = thread; e < local_experts; e += threads) {
        int32_t sum = 0;
        constexpr uint32_t kAtOnce = 8;  // loads in flight
        for (uint32_t base = 0; base < ranks; base += kAtOnce) {
            int32_t rows[kAtOnce];
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                rows[i] = base + i < ranks && !masked(base + i) ? *ll_count(p, parity, base + i, e) : 0;
            }
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (base + i < ranks) arrivals.begin[e * ranks + base + i] = sum;
                sum += rows[i];
            }
        }
    }
    device::sync_block();
}

// The receive half. The whole grid.
UCCL_EP_DEVICE void ll_dispatch_receive(const LowLatencyDispatchParameters &p) {
    const Group &group = p.group;
    const Span half(group, Activity::kReceives);
    const Layout &layout = group.layout;
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), block = device::block_index();
    const uint64_t number = ll_done(group, LowLatencyHalf::kDispatchReceive) + 1;
    const uint32_t parity = static_cast<uint32_t>(number & 1);
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    const LowLatencyArrivals arrivals = LowLatencyArrivals::in(device::shared_memory(), ranks, warps, shape.num_topk);
    RoomAhead room(group, p.masked, number);
    const bool ok = ll_wait_all<PackedDispatch>(group, number, p.masked, p.wait_cost, [&](uint32_t source) {
        if (p.masked != nullptr && p.masked[source] != 0) return true;  // left out, just now
        if (layout.has_remote) return ll_hand_on_head(p, parity, source, number, room);
        const auto *header = reinterpret_cast<const MessageHeader *>(ll_inbox(group, parity, source));
        return device::broadcast(static_cast<uint32_t>(device::lane() != 0 || ll_check(p, *header, source, number))) !=
               0;
    });
    if (ok) {
        Span step(group, Activity::kPlaces);
        ll_find_arrivals(p, arrivals, parity);
        uint32_t total = 0;
        for (uint32_t source = 0; source < ranks; ++source) total += arrivals.rows[source];
        // Few rows: several warps share one. And over a bus none takes more of one than its lanes load at once.
        const uint32_t all_warps = device::num_blocks() * warps;
        const uint32_t most = (shape.row_bytes + 511) / 512;
        constexpr uint32_t kAtOnce = 2048;  // bytes, as device::copy_to_found has them under way
        const uint32_t least =
            layout.has_remote != 0 && device::kWarpSize > 1 ? (shape.row_bytes + kAtOnce - 1) / kAtOnce : 1;
        uint32_t pieces = total == 0 ? 1 : all_warps / total;
        pieces = pieces > least ? pieces : least;
        pieces = pieces < most ? pieces : most;
        step.next(Activity::kCopies);
        for (uint32_t item = block * warps + warp; item < total * pieces; item += all_warps) {
            uint32_t row = item / pieces, source = 0;
            while (row >= arrivals.rows[source]) row -= arrivals.rows[source++];
            ll_expand_row(p, arrivals, parity, source, row, item % pieces, pieces);
        }
        step.end();
        if (block == device::num_blocks() - 1) ll_write_counts(p, arrivals, parity);
    }
    if (ll_credits_travel(group, p.masked)) {
        if (ok && block == 0) room.note(group);
    } else if (last_block(group) && !aborted(group)) {
        ll_tell_at_once<PackedDispatch>(group, number);
    }
    // All threads of the block have read the count: they have met since.
    if (warp == 0 && device::lane() == 0) *Counters::packed(group, LowLatencyHalf::kDispatchReceive, block) = number;
}

}  // namespace uccl_ep
