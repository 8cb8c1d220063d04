// High-throughput dispatch: rows stream through rings of slots.
//
// A token crosses a transport once per destination domain: it goes to the rank at the sender's own
// place there (its rail peer), which forwards it inside the domain. Output rows lie in the order
// (source rank, index on the source rank).
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
        run.for_each_of_thread(
            team, shape.scale_bytes / 4,
            [&](uint32_t token, uint32_t i) {
                return reinterpret_cast<const uint32_t *>(p.scales + uint64_t{token} * shape.scale_bytes)[i];
            },
            [&](uint32_t row, uint32_t i, uint32_t scale) { reinterpret_cast<uint32_t *>(scales(row))[i] = scale; });
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
    run.for_each_of_thread(
        team, shape.num_topk, [&](uint32_t token, uint32_t k) { return Pick::of(p, token, k); },
        [&](uint32_t row, uint32_t k, const Pick &pick) {
            experts[row * shape.num_topk + k] = static_cast<int32_t>(pick.expert);
            weights[row * shape.num_topk + k] = pick.weight;
        });
    run.for_each_of_thread(
        team, 1, [&](uint32_t token, uint32_t) { return static_cast<int32_t>(token); },
        [&](uint32_t row, uint32_t, int32_t token) { reinterpret_cast<int32_t *>(slot + at.source)[row] = token; });
}

UCCL_EP_DEVICE void write_masks(const DispatchParameters &p, Team team, const TokenRun &run, uint8_t *slot,
                                const DispatchRows &at, uint32_t first_rank) {
    constexpr uint32_t kWords = kMaxRanksPerDomain / 64;
    auto *masks = reinterpret_cast<uint64_t *>(slot + at.mask);
    run.for_each_of_thread(
        team, kWords,
        [&](uint32_t token, uint32_t word) {
            const uint8_t *in_rank =
                p.is_token_in_rank + uint64_t{token} * p.group.num_ranks() + first_rank + word * 64;
            uint64_t mask = 0;
            for (uint32_t i = 0; i < 64 && word * 64 + i < p.group.layout.ranks_per_domain; ++i)
                mask |= uint64_t{in_rank[i] != 0 ? 1u : 0u} << i;
            return mask;
        },
        [&](uint32_t row, uint32_t word, uint64_t mask) { masks[row * kWords + word] = mask; });
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
UCCL_EP_DEVICE void take_rows(const DispatchParameters &p, Team team, const uint8_t *slot, uint32_t rows,
                              uint64_t first) {
    const Span span(p.group, Activity::kCopies, team.leads());
    const DispatchShape &shape = p.shape;
    const DispatchRows at = DispatchRows::of(shape, rows, false);
    copy_shared_out(team, p.receive_x + first * shape.row_bytes, slot + at.payload, uint64_t{rows} * shape.row_bytes);
    if (shape.scale_bytes != 0) {
        copy_shared_out(team, p.receive_scales + first * shape.scale_bytes, slot + at.scales,
                        uint64_t{rows} * shape.scale_bytes);
    }
    const auto *experts = reinterpret_cast<const int32_t *>(slot + at.topk_idx);
    const auto *weights = reinterpret_cast<const float *>(slot + at.topk_weights);
    const auto *source = reinterpret_cast<const int32_t *>(slot + at.source);
    share_out(
        team, rows * shape.num_topk, [&](uint32_t i) { return Pick{experts[i], weights[i]}; },
        [&](uint32_t i, const Pick &pick) { pick.receive(p, first * shape.num_topk + i); });
    share_out(
        team, rows, [&](uint32_t i) { return source[i]; },
        [&](uint32_t i, int32_t token) { p.receive_source[first + i] = token; });
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
        const uint8_t *slot = receiver.acquire(OperationKind::kDispatch, row_format(p.shape), source);
        ok = slot != nullptr;
        if (!ok) break;
        const uint32_t rows = reinterpret_cast<const MessageHeader *>(slot)->rows;
        if (rows > total - taken) {  // of another handle than this rank's: they would not fit the output
            receiver.refuse(source, rows, total - taken, OperationKind::kDispatch);
            ok = false;
            break;
        }
        take_rows(p, team, slot, rows, first + taken);
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
    for_each_window(
        p.is_token_in_rank, group.num_ranks(), TokenRange::of(p.num_tokens, channel, channels), group.rank, 1,
        [&](uint32_t base, device::LaneMask selected) {
            const TokenRun run{base, selected, kept};
            kept += device::population_count(selected);
            copy_rows(
                p, team, run, [&](uint32_t row) { return p.receive_x + (first + row) * shape.row_bytes; },
                [&](uint32_t row) { return p.receive_scales + (first + row) * shape.scale_bytes; });
            run.for_each_of_thread(
                team, topk, [&](uint32_t token, uint32_t k) { return Pick::of(p, token, k); },
                [&](uint32_t row, uint32_t k, const Pick &pick) { pick.receive(p, (first + row) * topk + k); });
            run.for_each_of_thread(
                team, 1, [&](uint32_t token, uint32_t) { return static_cast<int32_t>(token); },
                [&](uint32_t row, uint32_t, int32_t token) { p.receive_source[first + row] = token; });
            return true;
        });
}

// Role: forward this channel's rows of my rail peer in `source_domain` to the ranks of my domain.
UCCL_EP_DEVICE bool dispatch_forward(const DispatchParameters &p, Team team, uint32_t source_domain, uint32_t channel) {
    const Group &group = p.group;
    const Span role(group, Activity::kForwards, team.leads(), rail_peer(group, source_domain));
    const DispatchShape &shape = p.shape;
    const uint32_t source = rail_peer(group, source_domain);
    const uint32_t total = static_cast<uint32_t>(p.rail_rows[source_domain * group.layout.num_channels + channel]);
    StreamReceiver receiver(group, rail_from(group, source_domain, channel), Phase::kForward, team);
    bool ok = true;
    for (uint32_t taken = 0; taken < total && ok;) {
        const uint8_t *slot = receiver.acquire(OperationKind::kDispatch, row_format(shape), source);
        ok = slot != nullptr;
        if (!ok) break;
        const uint32_t rows = reinterpret_cast<const MessageHeader *>(slot)->rows;
        const DispatchRows from = DispatchRows::of(shape, rows, true);
        const auto *masks = reinterpret_cast<const uint64_t *>(slot + from.mask);
        const auto goes = [&](uint32_t row, uint32_t place) {
            return (masks[row * (kMaxRanksPerDomain / 64) + place / 64] >> (place % 64) & 1) != 0;
        };
        for (uint32_t place = 0; place < group.layout.ranks_per_domain && ok; ++place) {
            uint32_t count = 0;
            for (uint32_t base = 0; base < rows; base += device::kWarpSize) {
                const uint32_t row = base + device::lane();
                count += device::population_count(device::ballot(row < rows && goes(row, place)));
            }
            if (count == 0) continue;
            StreamSender sender(group, forward_to(group, source_domain, place, channel), Phase::kForward, team);
            uint8_t *out = sender.acquire();
            ok = out != nullptr;
            if (ok) {
                Span step(group, Activity::kCopies, team.leads());
                const DispatchRows at = DispatchRows::of(shape, count, false);
                if (team.leads())
                    write_message_header(group, out, OperationKind::kDispatch, count, row_format(shape), source);
                uint32_t next = 0;
                for (uint32_t row = 0; row < rows; ++row) {
                    if (!goes(row, place)) continue;
                    const uint32_t filled = next++;
                    if (filled % team.size != team.index) continue;
                    device::copy(out + at.payload + uint64_t{filled} * shape.row_bytes,
                                 slot + from.payload + uint64_t{row} * shape.row_bytes, shape.row_bytes);
                    device::copy(out + at.scales + uint64_t{filled} * shape.scale_bytes,
                                 slot + from.scales + uint64_t{row} * shape.scale_bytes, shape.scale_bytes);
                    device::copy(out + at.topk_idx + uint64_t{filled} * shape.num_topk * 4,
                                 slot + from.topk_idx + uint64_t{row} * shape.num_topk * 4,
                                 uint64_t{shape.num_topk} * 4);
                    device::copy(out + at.topk_weights + uint64_t{filled} * shape.num_topk * 4,
                                 slot + from.topk_weights + uint64_t{row} * shape.num_topk * 4,
                                 uint64_t{shape.num_topk} * 4);
                    device::copy(out + at.source + uint64_t{filled} * 4, slot + from.source + uint64_t{row} * 4, 4);
                }
                step.end();
                ok = sender.commit(at.end);
            }
            sender.finish();
        }
        taken += rows;
        if (ok) ok = receiver.release();
    }
    receiver.finish();
    return ok;
}

UCCL_EP_KERNEL(uccl_ep_dispatch, DispatchParameters) {
    const DispatchParameters &p = parameters;
    const Group &group = p.group;
    const Layout &layout = group.layout;
    const uint32_t channels = layout.num_channels, per_domain = layout.ranks_per_domain, ranks = layout.num_ranks;
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
        if (i < ranks - 1) {  // receive; a neighbour first, so that not all senders face the same rank
            const uint32_t source = (group.rank + 1 + i) % ranks;
            dispatch_receive(
                p, team,
                group.is_local(source) ? direct_from(group, source, channel) : forward_from(group, source, channel),
                source);
            continue;
        }
        i -= ranks - 1;
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
