// High-throughput dispatch: rows stream through rings of slots.
//
// A token crosses a transport once per destination domain: it goes to the rank at the sender's own
// place there (its rail peer), which takes it if it wants it, and forwards it inside the domain. Output rows
// lie in the order (source rank, index on the source rank).
//
// Each channel is worked by the teams of the blocks with the same index modulo num_channels. A team
// runs one role at a time and roles wait for each other, so there must be a team for every role but the last.
#pragma once

#include "dispatch_forward.hpp"

namespace uccl_ep {

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
