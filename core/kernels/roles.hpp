// How many teams of warps the roles of one channel need. Roles wait for each other, so all of them run at once, but for
// the last of a dispatch: it waits for nobody, and a team may do it before another role. Python asks through the bindings
// how large a grid that is. Nothing in it needs a device.
#pragma once

#include "uccl_ep/layout.hpp"

namespace uccl_ep {

// A receiver for each other rank, a sender for each of the domain and for each other domain, a forwarder for each other
// domain, and last one for the rows that stay.
UCCL_EP_DEVICE uint32_t dispatch_roles(const Layout &layout) {
    return (layout.num_ranks - 1) + (layout.ranks_per_domain - 1) + 2 * (layout.num_domains() - 1) + 1;
}

// One that sums, and a sender for each other rank.
UCCL_EP_DEVICE uint32_t combine_roles(const Layout &layout) { return layout.num_ranks; }

// Which roles of which channel the team of a warp takes: role `first` and each `count`-th after it. A block works for one
// channel. Neighbouring roles go to different blocks, so that each block gets of every kind: receivers are the first roles,
// and the rows that stay the last.
struct ChannelTeams {
    uint32_t channel, first, count;

    // A grid of whole blocks for each channel, of whole teams each.
    UCCL_EP_DEVICE static ChannelTeams of(uint32_t team_warps, uint32_t channels, uint32_t block, uint32_t num_blocks,
                                          uint32_t warp, uint32_t num_warps) {
        const uint32_t blocks = num_blocks / channels;
        return {block % channels, warp / team_warps * blocks + block / channels, num_warps / team_warps * blocks};
    }
};

}  // namespace uccl_ep
