// What a rank tells its transport peers besides data: verdicts, that it is alive, that it closed. And
// what it watches for: peers that the transport calls dead, or that fell silent. Proxy 0 does it all.
#pragma once

#include <functional>
#include <vector>

#include "engine_types.hpp"
#include "outbound.hpp"

namespace uccl_ep {

class Notices {
  public:
    // `on_lost` is told of a peer that the transport calls dead, before its verdict is reported.
    Notices(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats,
            std::function<void(uint32_t)> on_lost);

    // About once a millisecond.
    void tick(uint64_t now_ns);
    // A notice was written, or its write failed.
    void completed(const Op &op);
    // Tell every peer that this rank closed its buffer in order. False: no room now, call again.
    bool tell_closed();
    bool told() const { return in_flight_ == 0; }

  private:
    void forward_verdicts();
    void watch_states();
    void heartbeats(uint64_t now_ns);
    void died(uint32_t peer, uint64_t silent_ns);
    void tell(uint32_t peer, uint64_t field, uint64_t value);

    EngineShared &shared_;
    uint32_t lane_;
    Outbound &outbound_;
    ProxyStats &stats_;
    bool active_;                       // this is proxy 0, and there are peers
    bool beats_;                        // the transport cannot tell that a peer died
    uint64_t beat_interval_ns_;
    uint64_t beat_timeout_ns_;
    uint64_t last_beat_ns_ = 0;
    uint64_t watched_ns_ = 0;           // when heartbeats were last looked at
    uint64_t beat_ = 0;
    uint64_t in_flight_ = 0;
    uint64_t next_peer_ = 0;            // whose state is asked next
    std::function<void(uint32_t)> on_lost_;
    std::vector<uint8_t> forwarded_;    // by reporter
    std::vector<uint8_t> beat_in_flight_;  // by rank
    std::vector<uint64_t> seen_beat_;   // by rank
    std::vector<uint64_t> silent_ns_;
    std::vector<uint8_t> dead_looks_;   // by rank: how often the transport called it dead
    std::vector<uint8_t> given_up_;     // by rank: dead, nothing is posted to it any more
    uint64_t told_closed_ = 0;          // peers told so far
};

}  // namespace uccl_ep
