// How many teams of warps the roles of one channel need. Roles wait for each other, so all of them run at once, but for
// the last of a dispatch: it waits for nobody, and a team may do it before another role. Python asks through the bindings
// how large a grid that is. Nothing in it needs a device.
#pragma once

#include "uccl_ep/layout.hpp"

namespace uccl_ep {

// One for each other rank but those at my own place in their domains: their rows are taken where they come in, by a
// forwarder.
UCCL_EP_DEVICE uint32_t dispatch_receivers(const Layout &layout) { return layout.num_ranks - layout.num_domains(); }

// Receivers, a sender for each of the domain and for each other domain, a forwarder for each other domain, and last one
// for the rows that stay.
UCCL_EP_DEVICE uint32_t dispatch_roles(const Layout &layout) {
    return dispatch_receivers(layout) + (layout.ranks_per_domain - 1) + 2 * (layout.num_domains() - 1) + 1;
}

// One that sums, and a sender for each other rank.
UCCL_EP_DEVICE uint32_t combine_roles(const Layout &layout) { return layout.num_ranks; }

// The team that a warp belongs to. The warps of a block are divided as `team_ends` says: byte i is the first warp behind
// its team i, and 0 where there is no such team. Without any, each warp is a team. So a block has at most kMostTeams of
// several warps, and they need not be equal.
struct TeamOfWarp {
    uint32_t team, teams;  // which of its block, and of how many
    uint32_t first_warp, size;  // in warps

    static constexpr uint32_t kMostTeams = 8;

    UCCL_EP_DEVICE static TeamOfWarp of(uint64_t team_ends, uint32_t warp, uint32_t num_warps) {
        if (team_ends == 0) return {warp, num_warps, warp, 1};
        TeamOfWarp at{0, 0, 0, 0};
        for (; at.teams < kMostTeams; ++at.teams) {
            const auto end = static_cast<uint32_t>(team_ends >> 8 * at.teams & 0xff);
            if (end == 0) break;
            if (warp >= end) {
                at.team = at.teams + 1;
                at.first_warp = end;
            } else if (at.size == 0) {
                at.size = end - at.first_warp;
            }
        }
        return at;
    }
};

// Which roles of which channel the team of a warp takes: role `first` and each `count`-th after it. A block works for one
// channel. Neighbouring roles go to different blocks, so that each block gets of every kind: receivers are the first roles,
// and the rows that stay the last. So where a channel has one block, its first team takes the first role, and so on.
struct ChannelTeams {
    uint32_t channel, first, count;

    // A grid of whole blocks for each channel.
    UCCL_EP_DEVICE static ChannelTeams of(const TeamOfWarp &at, uint32_t channels, uint32_t block,
                                          uint32_t num_blocks) {
        const uint32_t blocks = num_blocks / channels;
        return {block % channels, at.team * blocks + block / channels, at.teams * blocks};
    }
};

}  // namespace uccl_ep
