// A proxy: the thread that drains its rings into its lane. proxy.cpp has its passes, how it idles between them and how
// it ends; command_staging.cpp what it does with commands. A pass allocates nothing.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine_types.hpp"
#include "lane_faults.hpp"
#include "lane_renewal.hpp"
#include "notices.hpp"
#include "outbound.hpp"
#include "plan.hpp"
#include "ring_reader.hpp"
#include "uccl_ep/look_away.hpp"

namespace uccl_ep {

class Proxy {
  public:
    Proxy(std::shared_ptr<EngineShared> shared, uint32_t lane);

    void run();  // the thread's body; returns at the engine's stop, at the latest at its deadline
    // One turn, for tests and for run(); returns how much was done. Without `look` no ring is looked at.
    uint64_t pass(bool look = true);

    const ProxyStats &stats() const { return stats_; }
    std::string error() const { return faults_.words(); }  // any thread
    // The function of the transport that the proxy is in, nullptr: in none. Any thread.
    const char *inside() const { return inside_.load(std::memory_order_relaxed); }
    // Passes so far, which go on while no function of the transport keeps the thread. Any thread.
    uint64_t passes() const { return passes_.load(std::memory_order_relaxed); }
    const TraceRecorder *recorder() const { return trace_.get(); }
    bool idle() const { return !have_open_ && outbound_.outstanding() == 0 && !plan_->pending(); }

  private:
    uint64_t poll_completions();
    bool flush();
    bool back_off(uint64_t empty_passes, uint64_t idle_ns);
    bool finished(uint64_t now);

    // In command_staging.cpp.
    struct Drained {
        uint64_t commands;         // steps done: commands, or pieces of one
        uint64_t rings_with_more;  // that were left before they were empty
    };
    Drained drain();  // a batch of each ring
    uint64_t drain_ring(RingReader &ring);
    bool stage(RingReader &ring);  // one step of the ring's current command; false: not now
    bool dropped(RingReader &ring);
    bool begin(RingReader &ring);
    bool open(RingReader &ring, uint64_t piece, bool last);
    bool check(const Command &command, uint32_t *key);
    void refuse(const Command &command, const char *wrong);
    bool under_caps(uint32_t peer, uint64_t bytes) const;
    void charge(uint32_t peer, uint64_t bytes, bool add) {
        if (capped_) {
            const uint64_t change = add ? bytes : uint64_t{0} - bytes;
            shared_->inflight_peer[peer].fetch_add(change, std::memory_order_relaxed);
            shared_->inflight_nic.fetch_add(change, std::memory_order_relaxed);
        }
    }
    void seal();

    std::shared_ptr<EngineShared> shared_;
    uint32_t lane_;
    ProxyStats stats_;
    Outbound outbound_;
    std::unique_ptr<Plan> plan_;
    Notices notices_;
    std::vector<RingReader> rings_;
    std::vector<uccl_ep_completion> completions_;
    std::unique_ptr<TraceRecorder> trace_;  // nullptr: off
    uint64_t max_write_;                    // bytes
    uint64_t cap_peer_;
    bool capped_;
    bool have_open_ = false;                // the write that the next command may still join: staged, not sealed
    Outbound::Staged open_{};
    struct {
        uint64_t commands, writes, merged, bytes;
    } tally_{};                             // of this pass, on its way to stats_
    // Of `shared_`, which checks and staging look at for every command.
    const EngineShared::SignalName *names_;
    SenderSignal *senders_;
    const uint8_t *is_remote_;
    uint64_t data_bytes_;
    uint64_t alignment_;
    uint32_t num_ranks_;
    uint32_t num_signals_;
    uint32_t outbox_entries_;
    uint32_t batch_;
    bool windowed_;
    bool some_gone_ = false;                // the group goes on without some rank: commands for it are dropped
    bool follows_completions_;
    LookAway look_away_;
    Drained looked_{};                      // what this pass found in the rings, or that it did not look at
    void (*wake_)(void *);                  // may be nullptr
    // From here on: what few passes touch.
    LaneFaults faults_;
    LaneRenewal renewal_;
    uint64_t last_tick_ns_ = 0;
    bool drained_told_ = false;
    uint64_t aborted_at_ns_ = 0;
    std::atomic<const char *> inside_{nullptr};
    std::atomic<uint64_t> passes_{0};       // written by the thread alone
};

}  // namespace uccl_ep
