#include "lane_renewal.hpp"

#include <cstddef>

#include "clock.hpp"

namespace uccl_ep {
namespace {

constexpr uint64_t kMostInVain = 8;

}  // namespace

bool can_renew(const uccl_ep_transport_ops &ops) {
    return ops.size >= offsetof(uccl_ep_transport_ops, renew_lane) + sizeof ops.renew_lane && ops.renew_lane != nullptr;
}

LaneRenewal::LaneRenewal(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats, LaneFaults &faults)
    : shared_(shared),
      lane_(lane),
      outbound_(outbound),
      stats_(stats),
      faults_(faults),
      renewable_(can_renew(*shared.ops)) {}

bool LaneRenewal::takes(const uccl_ep_completion &completion, uint32_t peer) {
    down_ = down_ || renewable_;
    if (!can_retry(peer)) {
        return false;
    }
    failed_.push_back({completion.token, peer, completion.status});
    again_.push_back(completion.token);
    return true;
}

bool LaneRenewal::can_retry(uint32_t peer) const {
    if (!renewable_ || in_vain_ >= kMostInVain || shared_.verdicts->aborted() || shared_.verdicts->peer_closed(peer) ||
        shared_.verdicts->gone(peer)) {
        return false;
    }
    return shared_.ops->peer_state == nullptr ||
           shared_.ops->peer_state(shared_.ops->context, peer) != UCCL_EP_PEER_DEAD;
}

void LaneRenewal::renew() {
    if (outbound_.posted() != failed_.size()) {
        return;
    }
    const uint64_t now = now_ns();
    if (deadline_ns_ == 0) {
        deadline_ns_ = now + static_cast<uint64_t>(shared_.options.timeout_s * 1e9);
    }
    const int64_t result = shared_.ops->renew_lane(shared_.ops->context, lane_);
    if (result > 0) {
        outbound_.repost(again_);
        down_ = false;
        stats_.lane_generations.add(1);
        stats_.retried.add(failed_.size());
        ++in_vain_;
    } else if (result < 0 || now >= deadline_ns_) {
        renewable_ = down_ = false;
        if (!failed_.empty()) {
            faults_.lane_broke(failed_[0].status, failed_[0].peer, "a write failed, and its lane could not be renewed");
        }
    } else {
        return;
    }
    failed_.clear();
    again_.clear();
    deadline_ns_ = 0;
}

}  // namespace uccl_ep
