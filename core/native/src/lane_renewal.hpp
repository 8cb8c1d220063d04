// New generations of a lane after an error of its own, not of a peer: operations that completed with an error are
// posted again, once nothing of them can land any more.
#pragma once

#include <vector>

#include "lane_faults.hpp"
#include "outbound.hpp"

namespace uccl_ep {

class LaneRenewal {
  public:
    LaneRenewal(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats, LaneFaults &faults);

    // An operation towards this peer completed with an error. True: it will be posted again.
    bool takes(const uccl_ep_completion &completion, uint32_t peer);
    void succeeded() { in_vain_ = 0; }
    // An operation failed: nothing is posted until the lane is renewed.
    bool down() const { return down_; }
    // While it is down: a new generation, when all that was posted under the old one has completed.
    void renew();

  private:
    bool can_retry(uint32_t peer) const;

    EngineShared &shared_;
    uint32_t lane_;
    Outbound &outbound_;
    ProxyStats &stats_;
    LaneFaults &faults_;
    bool renewable_;
    bool down_ = false;
    std::vector<uccl_ep_completion> failed_;
    std::vector<uint64_t> again_;  // their tokens
    uint64_t in_vain_ = 0;         // renewals one after another, without an operation that succeeded
    uint64_t deadline_ns_ = 0;     // of the renewal under way, 0: none
};

}  // namespace uccl_ep
