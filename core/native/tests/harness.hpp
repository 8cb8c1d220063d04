// One rank's windows, channel and engine, for tests of the proxy.
#pragma once

#include <sched.h>

#include <memory>
#include <vector>

#include "check.hpp"
#include "clock.hpp"
#include "engine.hpp"
#include "uccl_ep/shared_memory.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {

inline Layout test_layout(uint32_t num_ranks, uint32_t num_channels) {
    Layout layout{};
    layout.num_ranks = num_ranks;
    layout.ranks_per_domain = 1;
    layout.num_channels = num_channels;
    layout.num_slots = 8;
    layout.slot_bytes = 1024;
    layout.has_remote = 1;
    layout.ll_parts = 1;
    layout.arrange();
    return layout;
}

struct Host {
    Host(uint32_t rank_of_host, const Layout &shape, const uccl_ep_transport_ops *ops, PlanKind plan,
         const TransportLimits &limits, uint32_t num_proxies, uint32_t num_rings, uint64_t capacity,
         const EngineOptions &options = {})
        : rank(rank_of_host),
          layout(shape),
          data(SharedMemory::create(layout.data_bytes(), false)),
          control(SharedMemory::create(layout.control_bytes(), false)),
          ring_memory(SharedMemory::create(Channel::host_bytes(num_rings, capacity), false)),
          state_memory(SharedMemory::create(Channel::state_bytes(num_rings), false)),
          shared(std::make_shared<EngineShared>()) {
        shared->rank = rank;
        shared->layout = layout;
        shared->control = control.pointer();
        shared->ops = ops;
        shared->plan = plan;
        shared->limits = limits;
        shared->options = options;
        for (uint32_t peer = 0; peer < layout.num_ranks; ++peer) {
            if (peer != rank) {
                shared->remote_peers.push_back(peer);
            }
        }
        shared->channel = std::make_shared<Channel>(num_rings, capacity, ring_memory.pointer(), ring_memory.pointer(),
                                                    state_memory.pointer());
        shared->verdicts = std::make_shared<Verdicts>(rank, layout, control.pointer(), std::vector<uint64_t>{});
        shared->num_proxies = num_proxies;
    }

    uint64_t push(uint32_t ring, const Command &command) {
        return ring_push<StdAtomics>(shared->channel->view(ring), command, [&] {
            sched_yield();
            return !shared->verdicts->aborted();
        });
    }
    uint64_t signal(uint32_t index) const {
        return StdAtomics::load_acquire_system(
            reinterpret_cast<const uint64_t *>(control.pointer() + layout.signal_offset(index)));
    }
    uint32_t data_signal(uint32_t from, uint32_t channel) const {
        return layout.signal_index(SignalKind::kDirectData, from, channel);
    }
    uint64_t *words(uint64_t offset) const { return reinterpret_cast<uint64_t *>(data.pointer() + offset); }

    uint32_t rank;
    Layout layout;
    SharedMemory data;
    SharedMemory control;
    SharedMemory ring_memory;
    SharedMemory state_memory;
    std::shared_ptr<EngineShared> shared;
    std::unique_ptr<Engine> engine;
};

// Wait for a condition, with a limit.
template <class Condition>
bool eventually(Condition &&condition, double limit_s = 60) {
    const uint64_t start = now_ns();
    while (!condition()) {
        if (now_ns() - start > static_cast<uint64_t>(limit_s * 1e9)) {
            return false;
        }
        sched_yield();
    }
    return true;
}

}  // namespace uccl_ep
