// Notices at once, and without CPU time, that a process of this host is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "verdict.hpp"

namespace uccl_ep {

class PeerMonitor {
  public:
    // Bytes that name this process for good: pid, start time, pid namespace, boot.
    static std::string identity();

    // `identities[r]` is rank r's identity(), empty for ranks not to be watched. Those that cannot be
    // watched by a pidfd (old kernel, other pid namespace) but share their control window are watched by
    // heartbeats, silent for longer than `heartbeat_timeout_s`.
    PeerMonitor(std::shared_ptr<Verdicts> verdicts, const std::vector<std::string> &identities,
                double heartbeat_timeout_s);
    ~PeerMonitor();
    PeerMonitor(const PeerMonitor &) = delete;

    void start();
    void stop();
    std::vector<uint32_t> unwatched() const { return unwatched_; }  // by no means at all

  private:
    struct Watched {
        uint32_t rank;
        int pidfd;
    };
    struct Beat {
        uint32_t rank;
        uint64_t value;
        uint64_t silent_ns;
    };

    void run();
    void tick(uint64_t now_ns);
    void died(uint32_t rank, uint64_t silent_ns);

    std::shared_ptr<Verdicts> verdicts_;
    std::vector<Watched> watched_;
    std::vector<Beat> beats_;
    std::vector<uint32_t> unwatched_;
    uint64_t heartbeat_timeout_ns_;
    uint64_t closed_wait_ = 0;        // 1 + rank that is closed and waited for, else 0
    uint64_t closed_ns_ = 0;     // for how long
    uint64_t ticked_ns_ = 0;
    int wake_ = -1;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace uccl_ep
