#include "simulator.hpp"

#include <cerrno>
#include <chrono>

namespace uccl_ep::sim {
namespace {

Simulator *of(void *context) { return static_cast<Simulator *>(context); }

}  // namespace

Simulator::Simulator(const uccl_ep_transport_ops *inner, const Faults &faults, uint32_t rank, uint32_t num_ranks,
                     uint32_t num_lanes, std::vector<Region> regions, bool with_signals, bool with_immediates,
                     bool with_peer_state)
    : inner_(inner),
      faults_(faults),
      rank_(rank),
      num_ranks_(num_ranks),
      regions_(std::move(regions)),
      dead_(num_ranks),
      ops_{} {
    const uint64_t share = num_lanes != 0 ? regions_.back().bytes / num_lanes / 64 * 64 : 0;
    for (uint32_t lane = 0; lane < num_lanes; ++lane) {
        lanes_.push_back(std::make_unique<Lane>(*this, lane, Bounce(lane * share, share)));
    }
    ops_.magic = UCCL_EP_TRANSPORT_MAGIC;
    ops_.size = sizeof ops_;
    ops_.context = this;
    ops_.post_writes = [](void *context, uint32_t lane, const uccl_ep_write *writes, uint64_t count) -> int64_t {
        auto &lanes = of(context)->lanes_;
        return lane < lanes.size() ? lanes[lane]->post_writes(writes, count) : -EINVAL;
    };
    if (with_signals) {
        ops_.post_signals = [](void *context, uint32_t lane, const uccl_ep_signal *signals, uint64_t count) -> int64_t {
            auto &lanes = of(context)->lanes_;
            return lane < lanes.size() ? lanes[lane]->post_signals(signals, count) : -EINVAL;
        };
    }
    ops_.poll_completions = [](void *context, uint32_t lane, uccl_ep_completion *out, uint64_t capacity) -> int64_t {
        auto &lanes = of(context)->lanes_;
        return lane < lanes.size() ? lanes[lane]->poll_completions(out, capacity) : -EINVAL;
    };
    if (with_immediates) {
        ops_.poll_arrivals = [](void *context, uint32_t lane, uccl_ep_arrival *out, uint64_t capacity) -> int64_t {
            auto &lanes = of(context)->lanes_;
            return lane < lanes.size() ? lanes[lane]->poll_arrivals(out, capacity) : -EINVAL;
        };
    }
    if (with_peer_state) {
        ops_.peer_state = [](void *context, uint32_t peer) -> int32_t {
            const Simulator *self = of(context);
            if (peer >= self->num_ranks_) return -EINVAL;
            if (self->is_dead(peer)) return UCCL_EP_PEER_DEAD;
            const auto inner_state = self->inner_->peer_state;
            return inner_state != nullptr ? inner_state(self->inner_->context, peer) : UCCL_EP_PEER_ALIVE;
        };
    }
    if (faults_.break_every != 0) {
        ops_.renew_lane = [](void *context, uint32_t lane) -> int64_t {
            auto &lanes = of(context)->lanes_;
            return lane < lanes.size() ? lanes[lane]->renew() : -EINVAL;
        };
    }
    ops_.last_error = [](void *context, uint32_t lane) -> const char * {
        auto &lanes = of(context)->lanes_;
        return lane < lanes.size() ? lanes[lane]->last_error() : "sim: no such lane";
    };
}

Simulator::~Simulator() = default;

bool Simulator::drain(uint64_t limit_us) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::microseconds(limit_us);
    uccl_ep_completion nobody[64];
    for (const auto &lane : lanes_) {
        while (!lane->empty()) {
            if (lane->poll_completions(nobody, 64) < 0 || Clock::now() > end) return false;
        }
    }
    return true;
}

void Simulator::count_towards(uint32_t peer) {
    if (int64_t{peer} != faults_.kill_peer) return;
    if (towards_killed_.fetch_add(1, std::memory_order_relaxed) >= faults_.kill_after) {
        dead_[peer].store(true, std::memory_order_release);
    }
}

}  // namespace uccl_ep::sim
