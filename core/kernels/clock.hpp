// The device's clock beside the host's, so that spans of kernels and events of proxies share a time line. A thread of
// the host answers each question with its clock; the shortest way there and back tells the difference best.
#pragma once

#include "parameters.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_clock, ClockParameters) {
    const ClockParameters &p = parameters;
    if (device::block_index() != 0 || device::warp_in_block() != 0 || device::lane() != 0) return;
    uint64_t last = device::load_acquire_system(p.answer);
    for (uint32_t round = 1; round <= p.rounds; ++round) {
        const uint64_t before = device::now_ns();
        device::store_release_system(p.question, round);
        uint64_t host = last, after = before;
        while (host == last && after - before <= p.timeout_ns) {
            host = device::load_acquire_system(p.answer);
            after = device::now_ns();
            if (host == last) device::relax();
        }
        if (host == last) return;
        p.samples[round - 1] = {before, host, after};
        last = host;
    }
    device::wait_ended();
}

}  // namespace uccl_ep
