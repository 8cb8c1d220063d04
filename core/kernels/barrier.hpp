// A barrier of all ranks, through the same signals as everything else.
#pragma once

#include "stream.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_barrier, BarrierParameters) {
    const Group &group = parameters.group;
    const KernelSpan kernel(group, TracedKernel::kBarrier);
    if (device::block_index() != 0 || device::warp_in_block() != 0 || device::lane() != 0) return;
    uint64_t *count = Counters::at(group, SingleCounter::kBarrier);
    const uint64_t number = *count + 1;
    const Layout &layout = group.layout;
    for (uint32_t i = 1; i < group.num_ranks(); ++i) {
        const uint32_t peer = (group.rank + i) % group.num_ranks();
        if (!raise_signal(group, peer, layout.signal_index(SignalKind::kBarrier, group.rank, 0), number,
                          Phase::kBarrier))
            return;
    }
    for (uint32_t i = 1; i < group.num_ranks(); ++i) {
        const uint32_t peer = (group.rank + i) % group.num_ranks();
        if (!wait_signal(group, {Phase::kBarrier, peer, layout.signal_index(SignalKind::kBarrier, peer, 0), number}))
            return;
    }
    *count = number;
}

}  // namespace uccl_ep
