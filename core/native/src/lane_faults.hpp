// What goes wrong on the lane of a proxy: words for this rank's exception, a verdict for the group.
#pragma once

#include <mutex>
#include <string>

#include "plan.hpp"

namespace uccl_ep {

class LaneFaults {
  public:
    LaneFaults(EngineShared &shared, uint32_t lane) : shared_(shared), lane_(lane) {}

    void fail(const Fault &fault);
    // An operation failed, and with it the lane: the transport is not called on it any more.
    void lane_broke(int64_t error, uint32_t peer, const char *what);
    // An operation towards this peer failed; the lane goes on, since its other peers may still take verdicts.
    // False: the group goes on too, without that peer.
    bool peer_failed(int64_t error, uint32_t peer, const char *what);
    // The transport calls a peer dead: its words go into the exception, where that is one for the group.
    void lost(uint32_t peer);

    bool broken() const { return broken_; }
    // The words of the first fault; empty: none. Any thread.
    std::string words() const;

  private:
    void remember(const std::string &words);
    const char *last_error() const;  // of the transport on this lane; never nullptr

    EngineShared &shared_;
    uint32_t lane_;
    bool broken_ = false;
    mutable std::mutex mutex_;
    std::string words_;
};

}  // namespace uccl_ep
