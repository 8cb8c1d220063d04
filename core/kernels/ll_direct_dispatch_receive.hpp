// The receive half of a direct low-latency dispatch: rows are copied to their places in the experts of this rank.
#pragma once

#include "ll_direct_places.hpp"

namespace uccl_ep {

// Copy piece `piece` of `pieces` of a row to its places; the piece behind the last is its scales. The whole warp.
UCCL_EP_DEVICE void direct_expand_row(const LowLatencyDispatchParameters &p, const DirectPlacing &placing,
                                      uint32_t source, uint32_t token, uint64_t number, uint32_t piece,
                                      uint32_t pieces) {
    const Group &group = p.group;
    const LowLatencyShape &shape = p.shape;
    const DirectDispatchInbox at = DirectDispatchInbox::of(shape);
    const uint8_t *inbox = direct_dispatch_inbox(group, group.data, source, number);
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
        const uint8_t *scales = inbox + at.scales + uint64_t{token} * shape.scale_bytes;
        ll_copy_scales_out(p, list, outputs, scales, ll_first_scale(shape, scales, 0), 0, 1);
        return;
    }
    const uint64_t row = uint64_t{token} * shape.row_bytes;
    ll_copy_payload_found(
        p, list, [outputs] { return outputs; },
        source == group.rank && p.own_in_place != 0 ? p.x + row : inbox + at.payload + row, piece, pieces);
    if (piece == 0) ll_store_source(p, list, outputs, token);
}

// Wait for what block b of the other ranks has written; a rank a lane, so that looks are under way together. What a rank
// says of its call is checked by one block, the last ones, which have the fewest tokens; if it differs, the others end
// by that failure. The whole warp. False on failure.
UCCL_EP_DEVICE bool direct_wait_sources(const LowLatencyDispatchParameters &p, uint64_t number) {
    const Group &group = p.group;
    const Span span(group, Activity::kWaitsForRows);
    bool ok = true;
    for (uint32_t i = device::lane(); i < group.num_ranks(); i += device::kWarpSize) {
        if (i == 0) continue;
        const uint32_t source = (group.rank + i) % group.num_ranks(), block = device::block_index();
        const bool timed = p.wait_cost != nullptr && block == 0;
        const uint64_t start = timed ? device::now_ns() : 0;
        if ((i - 1) % device::num_blocks() == device::num_blocks() - 1 - block)
            ok = ok && direct_check_header(p, source, number);
        ok = ok && direct_wait_rows<DirectDispatch>(group, source, block, number);
        if (timed) p.wait_cost[source] += static_cast<int64_t>(device::now_ns() - start);
    }
    return device::ballot(!ok) == 0;
}

// The receive half. The whole grid. While the herald waits for its own fence, and for the rows of the others, the rest of
// the block finds out where rows belong, and copies those of its own rank.
UCCL_EP_DEVICE void direct_dispatch_receive(const LowLatencyDispatchParameters &p, const DirectDispatchCounts &counts) {
    const Group &group = p.group;
    const Span half(group, Activity::kReceives);
    const LowLatencyShape &shape = p.shape;
    const uint32_t ranks = group.num_ranks(), topk = shape.num_topk, block = device::block_index();
    const uint32_t warp = device::warp_in_block(), warps = device::warps_per_block();
    const uint64_t number = counts.received + 1;
    const DirectPlacing placing = DirectPlacing::in(device::shared_memory(), ranks, warps, topk);
    const bool apart = device::kPartsMeet && warps > 1;  // else the herald works too, and waits then
    const Team workers{warp, apart ? warps - 1 : warps};
    const bool works = warp < workers.size;
    const uint64_t wanted = align_up((shape.row_bytes + workers.size - 1) / workers.size, 512);
    const uint32_t pieces = static_cast<uint32_t>((shape.row_bytes + wanted - 1) / wanted);
    const uint32_t units = pieces + (shape.scale_bytes != 0 ? 1 : 0);
    bool ok = !counts.failed;
    for (uint32_t token = block, round = 0; token < shape.max_tokens || round == 0;
         token += device::num_blocks(), ++round) {
        if (works) {
            if (round == 0) {
                ok = ok && direct_gather_picks(p, placing, workers, number);
                ok = device::sync_warps_all(0, workers.size, ok);
            }
            if (ok) direct_find_places(p, placing, workers, token);
            workers.sync();
            if (ok && round == 0) direct_count_rows(p, placing, workers);
        }
        for (uint32_t others = 0; others < 2; ++others) {  // one loop: its instructions are fetched once
            if (others != 0) {
                if (round == 0 && is_herald()) ok = direct_wait_sources(p, number) && ok;
                if (!device::sync_block_all(ok)) return;
            }
            const Span step(group, others != 0 ? Activity::kCopies : Activity::kCopiesOwn);
            const uint32_t items = others != 0 ? (ranks - 1) * units : works && ok ? units : 0;
            for (uint32_t item = warp; item < items; item += others != 0 ? warps : workers.size) {
                direct_expand_row(p, placing, (group.rank + others + item / units) % ranks, token, number, item % units,
                                  pieces);
            }
        }
        if (token + device::num_blocks() < shape.max_tokens) device::sync_block();  // places have been read
    }
    if (warp == 0 && device::lane() == 0) *Counters::direct(group, DirectDispatch::kReceived, block) = number;
}

}  // namespace uccl_ep
