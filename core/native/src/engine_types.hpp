// What the proxies of one engine share: fixed at construction, except where a member says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "uccl_ep/channel.hpp"
#include "uccl_ep/layout.hpp"
#include "uccl_ep/transport.h"
#include "verdict.hpp"

namespace uccl_ep {

enum class PlanKind : uint32_t { kNative, kCounted, kFenced };

// The capabilities that the engine obeys (uccl_ep_core/capabilities.py has their meaning).
struct TransportLimits {
    uint32_t imm_bits = 0;
    uint32_t lanes = 1;
    bool exactly_once = false;
    bool placement_proof = false;  // delivery_complete or flush: WRITE_FENCED means something
    bool host_signals = false;     // native_signal in host memory
    uint64_t max_message = 16u << 20;
    uint64_t max_inflight = 0;        // bytes per peer
    uint64_t send_queue_depth = 1024; // per lane
    uint64_t remote_queue_depth = 0;  // immediates per lane of the receiver
    uint64_t alignment = 1;
};

struct EngineOptions {
    double timeout_s = 300;
    double heartbeat_timeout_s = 5;
    uint64_t max_inflight_peer = 0;  // bytes, 0: the transport's own limit
    uint64_t max_inflight_nic = 0;   // bytes of all peers together, 0: none
    uint32_t batch = 64;             // commands popped from one ring before the next one's turn
    // How long a proxy with nothing to do keeps looking before it backs off, where it has a core. A layer of a
    // decoding step sends every 0.1 to 0.5 ms, and each of its messages must be found at once; behind a longer
    // gap the 50 us of backing off are less than a twentieth of it.
    uint64_t look_ns = 1'000'000;
    bool crowded = false;            // more threads wait on this host than it has cores: look away soon
    bool over_bus = false;           // commands come from a device: look away from rings that were outrun
    bool pin = false;
    uint32_t first_cpu = 0;
    std::vector<uint32_t> cpus;      // where proxies may run, one of them each where `pin`; empty: anywhere
    uint64_t flush_function = 0;     // void (*)(void *): makes arrived payload visible to the device
    uint64_t flush_context = 0;
    uint64_t wake_function = 0;      // void (*)(void *): signals were raised or commands completed, waits look again
    uint64_t wake_context = 0;
    std::string trace_path;
};

// Whether lanes of the transport can begin a new generation after an error (see transport.h).
bool can_renew(const uccl_ep_transport_ops &ops);

// The sending side of one signal of one peer: touched by one proxy only (`owner` enforces that).
struct SenderSignal {
    uint64_t value = 0;         // of the message begun last
    uint64_t sealed = 0;        // of the message that the plan saw last (counted)
    uint32_t next_index = 0;    // of its next write (counted)
    std::atomic<uint8_t> owner{0};  // 1 + lane that the first command took
    bool open = false;          // the message begun last has not ended
};

struct EngineShared {
    uint32_t rank = 0;
    Layout layout{};
    uint64_t control = 0;
    uint64_t data_bytes = 0;
    uint64_t control_bytes = 0;
    const uccl_ep_transport_ops *ops = nullptr;
    PlanKind plan = PlanKind::kNative;
    TransportLimits limits;
    EngineOptions options;
    std::vector<uint32_t> remote_peers;
    std::vector<uint8_t> is_remote;  // by rank
    std::shared_ptr<Verdicts> verdicts;
    std::shared_ptr<Channel> channel;
    uint32_t num_proxies = 1;

    // Of every signal index, looked up where dividing would cost more than all other checks together.
    struct SignalName {
        uint32_t writer;  // rank
        uint32_t entry;   // of the outbox
    };
    std::vector<SignalName> signal_names;
    std::vector<SenderSignal> sender_signals;             // [rank][outbox entry]
    std::vector<std::atomic<uint64_t>> inflight_peer;     // bytes, all proxies; empty without a cap
    std::atomic<uint64_t> inflight_nic{0};
    std::atomic<bool> stop_requested{false};
    std::atomic<uint64_t> stop_deadline_ns{0};
    std::atomic<uint32_t> drained{0};  // proxies that have nothing left to send
    alignas(64) std::atomic<uint32_t> wake{0};  // futex word of idle proxies

    uint64_t *word(uint64_t control_offset) const { return reinterpret_cast<uint64_t *>(control + control_offset); }
    uint32_t signal_entry(uint32_t signal) const { return signal_names[signal].entry; }
    uint32_t signal_writer(uint32_t signal) const { return signal_names[signal].writer; }
    uint64_t notice_word(uint32_t at_rank, uint64_t field) const { return layout.notice_offset(at_rank) + field; }
};

// Written by one proxy, read by anyone: a counter without a locked instruction.
class Counter {
  public:
    void add(uint64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
    uint64_t get() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<uint64_t> value_{0};
};

struct ProxyStats {
    Counter commands;        // popped
    Counter writes;          // posted for commands
    Counter merged;          // commands that became part of the write before
    Counter split;           // further writes of commands above max_message
    Counter bytes;           // of posted writes
    Counter native_signals;  // posted
    Counter coalesced_signals;  // native: raised by the signal of a later message instead of one of their own
    Counter signals_raised;  // words of this rank's control window that this proxy raised (counted)
    Counter arrivals;        // immediates polled
    Counter emulated_immediates;   // counted: writes that carried one
    Counter emulated_gaps;         // counted: empty messages sent for numbers that the kernel skipped
    Counter emulated_counts;       // counted: arrivals counted
    Counter emulated_duplicates;   // counted: arrivals ignored, as seen before
    Counter emulated_closed;       // counted: arrivals for a message that was complete
    Counter emulated_credits;      // arrival credits written to senders
    Counter emulated_fences;       // fenced: writes posted with WRITE_FENCED
    Counter emulated_signal_writes;  // fenced: signals written from the outbox
    Counter heartbeats;
    Counter verdicts_forwarded;
    Counter completions;
    Counter lane_generations;  // begun after an error
    Counter retried;           // operations posted again under a new one
    Counter busy_ns;         // in passes that did something
    Counter passes;
};

}  // namespace uccl_ep
