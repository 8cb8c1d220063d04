// What a rank does with the messages of its rail peers: takes the rows that are for itself, and forwards the others inside
// its domain.
#pragma once

#include "dispatch_rows.hpp"

namespace uccl_ep {

// Rows of a message of my rail peer, each of which goes to some ranks of my domain.
class RailRows {
  public:
    UCCL_EP_DEVICE RailRows(const DispatchShape &shape, const uint8_t *slot)
        : slot_(slot),
          rows_(reinterpret_cast<const MessageHeader *>(slot)->rows),
          at_(DispatchRows::of(shape, rows_, true)) {}

    UCCL_EP_DEVICE uint32_t rows() const { return rows_; }
    UCCL_EP_DEVICE const DispatchRows &at() const { return at_; }
    // How many go to the rank at `place`. The whole warp.
    UCCL_EP_DEVICE uint32_t count(uint32_t place) const {
        uint32_t sum = 0;
        for (uint32_t base = 0; base < rows_; base += device::kWarpSize) {
            const uint32_t row = base + device::lane();
            sum += device::population_count(device::ballot(row < rows_ && goes(row, place)));
        }
        return sum;
    }
    // Calls `visit(row, number)` for the rows that go there whose turn it is for this warp. The whole warp.
    template <class Visit>
    UCCL_EP_DEVICE void for_each_of_warp(Team team, uint32_t place, Visit visit) const {
        uint32_t next = 0;
        for (uint32_t row = 0; row < rows_; ++row) {
            if (!goes(row, place)) continue;
            const uint32_t number = next++;
            if (number % team.size == team.index) visit(row, number);
        }
    }

  private:
    UCCL_EP_DEVICE bool goes(uint32_t row, uint32_t place) const {
        const auto *masks = reinterpret_cast<const uint64_t *>(slot_ + at_.mask);
        return (masks[row * (kMaxRanksPerDomain / 64) + place / 64] >> (place % 64) & 1) != 0;
    }

    const uint8_t *slot_;
    uint32_t rows_;
    DispatchRows at_;
};

// Take the `count` rows of a rail peer's message that are for this rank into the output, starting at row `first`. The
// whole team.
UCCL_EP_DEVICE void take_rail_rows(const DispatchParameters &p, Team team, const uint8_t *slot, const RailRows &rail,
                                   uint32_t count, uint64_t first) {
    if (count == rail.rows()) {  // always so in a domain of one rank
        take_rows(p, team, slot, rail.at(), count, first);
        return;
    }
    const Span span(p.group, Activity::kCopies, team.leads());
    const DispatchShape &shape = p.shape;
    const DispatchRows &at = rail.at();
    const auto *experts = reinterpret_cast<const int32_t *>(slot + at.topk_idx);
    const auto *weights = reinterpret_cast<const float *>(slot + at.topk_weights);
    const auto *source = reinterpret_cast<const int32_t *>(slot + at.source);
    rail.for_each_of_warp(team, p.group.place(), [&](uint32_t row, uint32_t number) {
        const uint64_t to = first + number;
        device::copy(p.receive_x + to * shape.row_bytes, slot + at.payload + uint64_t{row} * shape.row_bytes,
                     shape.row_bytes);
        device::copy(p.receive_scales + to * shape.scale_bytes, slot + at.scales + uint64_t{row} * shape.scale_bytes,
                     shape.scale_bytes);
        for (uint32_t k = device::lane(); k < shape.num_topk; k += device::kWarpSize) {
            const uint32_t from = row * shape.num_topk + k;
            Pick{experts[from], weights[from]}.receive(p, to * shape.num_topk + k);
        }
        if (device::lane() == 0) p.receive_source[to] = source[row];
    });
}

// Send the `count` rows of a rail peer's message that are for the rank at `place` on to it. The whole team.
UCCL_EP_DEVICE bool forward_rail_rows(const DispatchParameters &p, Team team, const uint8_t *slot, const RailRows &rail,
                                      uint32_t count, uint32_t source, uint32_t place, uint32_t channel) {
    const Group &group = p.group;
    const DispatchShape &shape = p.shape;
    const DispatchRows &from = rail.at();
    StreamSender sender(group, forward_to(group, source / group.layout.ranks_per_domain, place, channel),
                        Phase::kForward, team);
    uint8_t *out = sender.acquire();
    bool ok = out != nullptr;
    if (ok) {
        Span step(group, Activity::kCopies, team.leads());
        const DispatchRows at = DispatchRows::of(shape, count, false);
        if (team.leads()) write_message_header(group, out, OperationKind::kDispatch, count, row_format(shape), source);
        const auto copy_field = [&](uint64_t to, uint64_t from_field, uint32_t number, uint32_t row, uint64_t bytes) {
            device::copy(out + to + number * bytes, slot + from_field + row * bytes, bytes);
        };
        rail.for_each_of_warp(team, place, [&](uint32_t row, uint32_t number) {
            copy_field(at.payload, from.payload, number, row, shape.row_bytes);
            copy_field(at.scales, from.scales, number, row, shape.scale_bytes);
            copy_field(at.topk_idx, from.topk_idx, number, row, uint64_t{shape.num_topk} * 4);
            copy_field(at.topk_weights, from.topk_weights, number, row, uint64_t{shape.num_topk} * 4);
            copy_field(at.source, from.source, number, row, 4);
        });
        step.end();
        ok = sender.commit(at.end);
    }
    sender.finish();
    return ok;
}

// Role: take this channel's rows of my rail peer in `source_domain`, and forward them to the other ranks of my domain.
UCCL_EP_DEVICE bool dispatch_forward(const DispatchParameters &p, Team team, uint32_t source_domain, uint32_t channel) {
    const Group &group = p.group;
    const Span role(group, Activity::kForwards, team.leads(), rail_peer(group, source_domain));
    const uint32_t source = rail_peer(group, source_domain), channels = group.layout.num_channels;
    const uint32_t total = static_cast<uint32_t>(p.rail_rows[source_domain * channels + channel]);
    const uint32_t total_here = static_cast<uint32_t>(p.receive_rows[source * channels + channel]);
    const auto first = static_cast<uint64_t>(p.receive_offset[source * channels + channel]);
    StreamReceiver receiver(group, rail_from(group, source_domain, channel), Phase::kForward, team);
    bool ok = true;
    uint32_t taken_here = 0;
    for (uint32_t taken = 0; taken < total && ok;) {
        const uint8_t *slot = receiver.acquire(OperationKind::kDispatch, row_format(p.shape));
        ok = slot != nullptr;
        if (!ok) break;
        const RailRows rail(p.shape, slot);
        for (uint32_t place = 0; place < group.layout.ranks_per_domain && ok; ++place) {
            const uint32_t count = rail.count(place);
            if (count == 0) continue;
            if (place != group.place()) {
                ok = forward_rail_rows(p, team, slot, rail, count, source, place, channel);
            } else if (count > total_here - taken_here) {  // of another handle than this rank's: no room in the output
                receiver.refuse(source, count, total_here - taken_here, OperationKind::kDispatch);
                ok = false;
            } else {
                take_rail_rows(p, team, slot, rail, count, first + taken_here);
                taken_here += count;
            }
        }
        taken += rail.rows();
        if (ok) ok = receiver.release();
    }
    if (ok && taken_here != total_here) {  // of another handle: rows of the output would stay as they were
        receiver.refuse(source, taken_here, total_here, OperationKind::kDispatch);
        ok = false;
    }
    receiver.finish();
    return ok;
}

}  // namespace uccl_ep
