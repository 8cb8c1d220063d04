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

// A sender for each other rank, and one that sums.
UCCL_EP_DEVICE uint32_t combine_roles(const Layout &layout) { return layout.num_ranks; }

}  // namespace uccl_ep
