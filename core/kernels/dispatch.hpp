// High-throughput dispatch: rows stream through rings of slots.
//
// A token crosses a transport once per destination domain: it goes to the rank at the sender's own
// place there (its rail peer), which takes it if it wants it, and forwards it inside the domain. Output rows
// lie in the order (source rank, index on the source rank).
//
// Each channel is worked by the teams of the blocks with the same index modulo num_channels. A team
// runs one role at a time and roles wait for each other, so there must be a team for every role but the last.
#pragma once

#include "tokens.hpp"

namespace uccl_ep {

// One thread.
UCCL_EP_DEVICE void write_message_header(const Group &group, uint8_t *slot, OperationKind kind, uint32_t rows,
                                         const RowFormat &format, uint32_t source) {
    *reinterpret_cast<MessageHeader *>(slot) = MessageHeader{group.operation,
                                                             static_cast<uint32_t>(kind),
                                                             rows,
                                                             format.row_bytes,
                                                             source,
                                                             {format.scale_bytes, format.num_topk, format.dtype}};
}

UCCL_EP_DEVICE TeamOfWarp team_of_warp(uint64_t team_ends) {
    return TeamOfWarp::of(team_ends, device::warp_in_block(), device::warps_per_block());
}

UCCL_EP_DEVICE RowFormat row_format(const DispatchShape &shape) {
    return {shape.row_bytes, shape.scale_bytes, shape.num_topk, shape.dtype};
}

// Copy what belongs to a run's tokens beside payload, and the payload first: the copies of rows are on their way
// meanwhile. `payload(row)`, `scales(row)` are where those go. The whole team.
template <class Payload, class Scales>
UCCL_EP_DEVICE void copy_rows(const DispatchParameters &p, Team team, const TokenRun &run, Payload payload,
                              Scales scales) {
    const DispatchShape &shape = p.shape;
    run.for_each_of_warp(team, [&](uint32_t token, uint32_t row) {
        device::copy(payload(row), p.x + uint64_t{token} * shape.row_bytes, shape.row_bytes);
    });
    if (shape.scale_bytes % 4 == 0) {
        run.for_each_of_thread(team, shape.scale_bytes / 4, [&](uint32_t token, uint32_t row, uint32_t i) {
            reinterpret_cast<uint32_t *>(scales(row))[i] =
                reinterpret_cast<const uint32_t *>(p.scales + uint64_t{token} * shape.scale_bytes)[i];
        });
    } else {
        run.for_each_of_warp(team, [&](uint32_t token, uint32_t row) {
            device::copy(scales(row), p.scales + uint64_t{token} * shape.scale_bytes, shape.scale_bytes);
        });
    }
}

// A pick of a token: the expert's index and the weight.
struct Pick {
    int64_t expert;
    float weight;

    UCCL_EP_DEVICE static Pick of(const DispatchParameters &p, uint32_t token, uint32_t k) {
        const uint64_t from = uint64_t{token} * p.shape.num_topk + k;
        return {load_pick(p.topk_idx, p.index_bytes, from, p.shape.num_experts),
                p.topk_weights == nullptr ? 0.0f : p.topk_weights[from]};
    }
    // To place `at` of the output, which has local indices, and picks of other ranks' experts left out.
    UCCL_EP_DEVICE void receive(const DispatchParameters &p, uint64_t at) const {
        const uint32_t local_experts = p.shape.num_experts / p.group.num_ranks();
        const int64_t local = expert - int64_t{p.group.rank} * local_experts;
        const bool here = local >= 0 && local < local_experts;
        store_index(p.receive_topk_idx, p.index_bytes, at, here ? local : -1);
        p.receive_topk_weights[at] = here ? weight : 0.0f;
    }
};

// Fill rows of a message. The whole team.
UCCL_EP_DEVICE void write_rows(const DispatchParameters &p, Team team, const TokenRun &run, uint8_t *slot,
                               const DispatchRows &at) {
    const DispatchShape &shape = p.shape;
    copy_rows(
        p, team, run, [&](uint32_t row) { return slot + at.payload + uint64_t{row} * shape.row_bytes; },
        [&](uint32_t row) { return slot + at.scales + uint64_t{row} * shape.scale_bytes; });
    auto *experts = reinterpret_cast<int32_t *>(slot + at.topk_idx);
    auto *weights = reinterpret_cast<float *>(slot + at.topk_weights);
    run.for_each_of_thread(team, shape.num_topk, [&](uint32_t token, uint32_t row, uint32_t k) {
        const Pick pick = Pick::of(p, token, k);
        experts[row * shape.num_topk + k] = static_cast<int32_t>(pick.expert);
        weights[row * shape.num_topk + k] = pick.weight;
    });
    run.for_each_of_thread(team, 1, [&](uint32_t token, uint32_t row, uint32_t) {
        reinterpret_cast<int32_t *>(slot + at.source)[row] = static_cast<int32_t>(token);
    });
}

UCCL_EP_DEVICE void write_masks(const DispatchParameters &p, Team team, const TokenRun &run, uint8_t *slot,
                                const DispatchRows &at, uint32_t first_rank) {
    constexpr uint32_t kWords = kMaxRanksPerDomain / 64;
    auto *masks = reinterpret_cast<uint64_t *>(slot + at.mask);
    run.for_each_of_thread(team, kWords, [&](uint32_t token, uint32_t row, uint32_t word) {
        const uint8_t *in_rank = p.is_token_in_rank + uint64_t{token} * p.group.num_ranks() + first_rank + word * 64;
        uint64_t mask = 0;
        for (uint32_t i = 0; i < 64 && word * 64 + i < p.group.layout.ranks_per_domain; ++i)
            mask |= uint64_t{in_rank[i] != 0 ? 1u : 0u} << i;
        masks[row * kWords + word] = mask;
    });
}

// Role: send this channel's tokens that go to ranks [first_rank, first_rank + rank_count).
UCCL_EP_DEVICE bool dispatch_send(const DispatchParameters &p, Team team, const StreamPlace &place, uint32_t first_rank,
                                  uint32_t rank_count, uint32_t total, bool on_rail) {
    const Group &group = p.group;
    const Span role(group, Activity::kSends, team.leads(), place.peer);
    // Inside a domain as many for each warp, where more than one a warp fit: a warp without a row would wait for the rest.
    const uint32_t most = DispatchRows::capacity(p.shape, group.layout.slot_bytes, on_rail);
    const bool even = most > team.size && group.is_local(place.peer);
    const uint32_t capacity = even ? most - most % team.size : most;
    StreamSender sender(group, place, Phase::kDispatch, team);
    Span step(group, team.leads());
    uint32_t left = total, filled = 0, rows = 0;
    uint8_t *slot = nullptr;
    DispatchRows at{};
    const auto send = [&](uint32_t base, device::LaneMask selected) {
        while (selected != 0) {
            if (left == 0 && slot == nullptr) return false;  // the mask changed since the counts were announced
            if (slot == nullptr) {
                rows = left < capacity ? left : capacity;
                slot = sender.acquire();
                if (slot == nullptr) return false;
                step.next(Activity::kCopies);
                at = DispatchRows::of(p.shape, rows, on_rail);
                if (team.leads())
                    write_message_header(group, slot, OperationKind::kDispatch, rows, row_format(p.shape), group.rank);
            }
            const device::LaneMask fitting = lowest_bits(selected, rows - filled);
            const TokenRun run{base, fitting, filled};
            write_rows(p, team, run, slot, at);
            if (on_rail) write_masks(p, team, run, slot, at, first_rank);
            selected ^= fitting;
            filled += device::population_count(fitting);
            if (filled != rows) continue;
            step.end();
            if (!sender.commit(at.end)) return false;
            left -= rows;
            filled = 0;
            slot = nullptr;
        }
        return true;
    };
    const bool ok = for_each_window(p.is_token_in_rank, group.num_ranks(),
                                    TokenRange::of(p.num_tokens, place.channel, group.layout.num_channels), first_rank,
                                    rank_count, send);
    sender.finish();
    return ok;
}

// Copy bytes that lie together, a piece for each warp of the team.
UCCL_EP_DEVICE void copy_shared_out(Team team, uint8_t *to, const uint8_t *from, uint64_t bytes) {
    const uint64_t piece = team.size == 1 ? bytes : align_up((bytes + team.size - 1) / team.size, 512);
    const uint64_t begin = piece * team.index;
    if (begin >= bytes) return;
    device::copy(to + begin, from + begin, bytes - begin < piece ? bytes - begin : piece);
}

// Take the rows of one message into the output, starting at row `first`. Called by the whole team.
UCCL_EP_DEVICE void take_rows(const DispatchParameters &p, Team team, const uint8_t *slot, const DispatchRows &at,
                              uint32_t rows, uint64_t first) {
    const Span span(p.group, Activity::kCopies, team.leads());
    const DispatchShape &shape = p.shape;
    copy_shared_out(team, p.receive_x + first * shape.row_bytes, slot + at.payload, uint64_t{rows} * shape.row_bytes);
    if (shape.scale_bytes != 0) {
        copy_shared_out(team, p.receive_scales + first * shape.scale_bytes, slot + at.scales,
                        uint64_t{rows} * shape.scale_bytes);
    }
    const auto *experts = reinterpret_cast<const int32_t *>(slot + at.topk_idx);
    const auto *weights = reinterpret_cast<const float *>(slot + at.topk_weights);
    const auto *source = reinterpret_cast<const int32_t *>(slot + at.source);
    share_out(team, rows * shape.num_topk,
              [&](uint32_t i) { Pick{experts[i], weights[i]}.receive(p, first * shape.num_topk + i); });
    share_out(team, rows, [&](uint32_t i) { p.receive_source[first + i] = source[i]; });
}

// Role: receive this channel's rows of `source`.
UCCL_EP_DEVICE bool dispatch_receive(const DispatchParameters &p, Team team, const StreamPlace &place,
                                     uint32_t source) {
    const Span role(p.group, Activity::kReceives, team.leads(), source);
    const uint32_t index = source * p.group.layout.num_channels + place.channel;
    const uint32_t total = static_cast<uint32_t>(p.receive_rows[index]);
    const uint64_t first = static_cast<uint64_t>(p.receive_offset[index]);
    StreamReceiver receiver(p.group, place, Phase::kDispatch, team);
    bool ok = true;
    for (uint32_t taken = 0; taken < total && ok;) {
        const uint8_t *slot = receiver.acquire(OperationKind::kDispatch, row_format(p.shape));
        ok = slot != nullptr;
        if (!ok) break;
        const uint32_t rows = reinterpret_cast<const MessageHeader *>(slot)->rows;
        if (rows > total - taken) {  // of another handle than this rank's: they would not fit the output
            receiver.refuse(source, rows, total - taken, OperationKind::kDispatch);
            ok = false;
            break;
        }
        take_rows(p, team, slot, DispatchRows::of(p.shape, rows, false), rows, first + taken);
        taken += rows;
        ok = receiver.release();
    }
    receiver.finish();
    return ok;
}

// Role: my own tokens that stay here go straight to the output.
UCCL_EP_DEVICE void dispatch_keep(const DispatchParameters &p, Team team, uint32_t channel) {
    const Group &group = p.group;
    const Span role(group, Activity::kKeeps, team.leads());
    const DispatchShape &shape = p.shape;
    const uint32_t channels = group.layout.num_channels, topk = shape.num_topk;
    const auto first = static_cast<uint64_t>(p.receive_offset[group.rank * channels + channel]);
    uint32_t kept = 0;
    for_each_window(p.is_token_in_rank, group.num_ranks(), TokenRange::of(p.num_tokens, channel, channels), group.rank,
                    1, [&](uint32_t base, device::LaneMask selected) {
                        const TokenRun run{base, selected, kept};
                        kept += device::population_count(selected);
                        copy_rows(
                            p, team, run, [&](uint32_t row) { return p.receive_x + (first + row) * shape.row_bytes; },
                            [&](uint32_t row) { return p.receive_scales + (first + row) * shape.scale_bytes; });
                        run.for_each_of_thread(team, topk, [&](uint32_t token, uint32_t row, uint32_t k) {
                            Pick::of(p, token, k).receive(p, (first + row) * topk + k);
                        });
                        run.for_each_of_thread(team, 1, [&](uint32_t token, uint32_t row, uint32_t) {
                            p.receive_source[first + row] = static_cast<int32_t>(token);
                        });
                        return true;
                    });
}

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

UCCL_EP_KERNEL(uccl_ep_dispatch, DispatchParameters) {
    const DispatchParameters &p = parameters;
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const uint32_t channels = layout.num_channels, per_domain = layout.ranks_per_domain;
    const uint32_t receivers = dispatch_receivers(layout);
    const KernelSpan kernel(group, TracedKernel::kDispatch);
    if (!may_begin(group)) return;
    const TeamOfWarp mine = team_of_warp(p.team_ends);
    const ChannelTeams teams = ChannelTeams::of(mine, channels, device::block_index(), device::num_blocks());
    const Team team = Team::of(mine);
    const uint32_t channel = teams.channel;
    // Where the last role has no team of its own, the first does it, before its own: what comes meanwhile fills slots,
    // and nobody waits for it until they are full.
    const uint32_t roles = dispatch_roles(layout), own_teams = teams.count < roles ? roles - 1 : roles;
    if (own_teams < roles && teams.first == 0) dispatch_keep(p, team, channel);
    for (uint32_t role = teams.first; role < own_teams; role += teams.count) {
        uint32_t i = role;
        if (i < receivers) {  // a neighbour first, so that not all senders face the same rank
            const uint32_t others = per_domain - 1, domain = (group.domain() + i / others) % layout.num_domains();
            const uint32_t source = domain * per_domain + (group.place() + 1 + i % others) % per_domain;
            dispatch_receive(
                p, team,
                group.is_local(source) ? direct_from(group, source, channel) : forward_from(group, source, channel),
                source);
            continue;
        }
        i -= receivers;
        if (i < per_domain - 1) {
            const uint32_t destination = group.domain() * per_domain + (group.place() + 1 + i) % per_domain;
            dispatch_send(p, team, direct_to(group, destination, channel), destination, 1,
                          static_cast<uint32_t>(p.send_rows[destination * channels + channel]), false);
            continue;
        }
        i -= per_domain - 1;
        if (i < layout.num_domains() - 1) {
            const uint32_t domain = (group.domain() + 1 + i) % layout.num_domains();
            dispatch_send(p, team, rail_to(group, domain, channel), domain * per_domain, per_domain,
                          static_cast<uint32_t>(p.rail_send_rows[domain * channels + channel]), true);
            continue;
        }
        i -= layout.num_domains() - 1;
        if (i < layout.num_domains() - 1) {
            dispatch_forward(p, team, (group.domain() + 1 + i) % layout.num_domains(), channel);
            continue;
        }
        dispatch_keep(p, team, channel);
    }
}

}  // namespace uccl_ep
