// All lanes of one transport object, and the C function table over them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "lane.hpp"

namespace uccl_ep::ibverbs {

// Handles that pyverbs made, taken from its objects by address. Two independent facts vouch for
// each: the number that pyverbs reports, and what the objects say of one another.
struct Handles {
    uint64_t queue_pair;
    uint64_t protection_domain;
    uint32_t qp_num;
};

class Plane {
  public:
    Plane(uint32_t num_ranks, uint64_t max_message, bool immediates, bool signals, bool renewals);

    void add_lane(LaneSettings settings, uint64_t send_queue, uint64_t receive_queue);

    // Throws std::invalid_argument where the handles contradict each other: then pyverbs lays its
    // objects out differently from what uccl_ep_ibverbs.raw expects.
    void add_pair(uint32_t lane, uint32_t peer, const Handles &handles, PairSettings settings);

    // A new queue pair, initialised and not yet connected, in place of one that has drained. Throws like add_pair.
    void prepare_pair(uint32_t lane, uint32_t peer, const Handles &handles);

    const uccl_ep_transport_ops *ops() const { return &ops_; }
    const Statistics &statistics(uint32_t lane) const { return lanes_.at(lane)->statistics(); }
    Lane *lane(uint32_t index) { return index < lanes_.size() ? lanes_[index].get() : nullptr; }
    int32_t peer_state(uint32_t peer) const;

  private:
    ibv_qp *checked(uint32_t lane, const Handles &handles) const;

    struct Queues {
        ibv_cq *send;
        ibv_cq *receive;
    };

    uint32_t num_ranks_;
    uint64_t max_message_;  // bytes
    std::unique_ptr<std::atomic<uint8_t>[]> dead_;
    std::vector<Queues> queues_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    uccl_ep_transport_ops ops_;
};

}  // namespace uccl_ep::ibverbs
