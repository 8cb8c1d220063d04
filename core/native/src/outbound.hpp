// The sending queue of one lane: writes and signals in the order they must be posted, and a record of
// each until its completion. Fixed size: nothing is allocated after construction.
#pragma once

#include <cstdint>
#include <vector>

#include "engine_types.hpp"
#include "trace.hpp"

namespace uccl_ep {

enum class OpKind : uint8_t {
    kCommand,      // bytes of the data window
    kEmpty,        // counted: a write of no bytes, whose immediate ends a message
    kSignal,       // native signal
    kSignalWrite,  // fenced: a signal from the outbox
    kNotice,       // heartbeat, closed
    kCredit,       // arrival credit
    kVerdict,
};

struct Op {
    OpKind kind = OpKind::kCommand;
    bool last = false;        // the write (with the commands merged into it) ends its message
    uint32_t peer = 0;
    uint32_t ring = 0;
    uint32_t commands = 0;    // of that ring, from first_ticket on, that wait for this completion
    uint32_t signal = 0;
    uint32_t key = 0;
    uint64_t first_ticket = 0;
    uint64_t bytes = 0;
    uint64_t value = 0;       // message number
    bool in_use = false;
};

class Outbound {
  public:
    static constexpr uint64_t kReserve = 160;  // operations beyond the queue depth that may be staged

    Outbound(EngineShared &shared, uint32_t lane, ProxyStats &stats);

    // Room for this many more writes and as many signals.
    bool room(uint64_t operations) const { return free_.size() >= operations; }
    bool staged() const { return next_write_ < writes_.size() || next_signal_ < signals_.size(); }
    uint64_t outstanding() const { return ops_.size() - free_.size(); }  // staged or posted
    uint64_t posted() const { return posted_; }

    void write(uccl_ep_write write, const Op &op);
    void signal(uccl_ep_signal signal, const Op &op);

    // Post what the transport takes now, in order. Negative errno where it broke.
    int64_t flush();
    // Record what is posted from now on; nullptr: nothing.
    void trace(TraceRecorder *recorder) { trace_ = recorder; }
    // Whose turn it is: the rank to blame when flush() fails.
    uint32_t next_peer() const {
        return next_write_ < writes_.size()     ? writes_[next_write_].peer
               : next_signal_ < signals_.size() ? signals_[next_signal_].peer
                                                : shared_.rank;
    }
    // The record of a completion, its token freed; nullptr for a token that is none.
    const Op *complete(uint64_t token);

  private:
    uint64_t take(const Op &op);
    void trace_writes(uint64_t first, uint64_t count);
    void trace_signals(uint64_t first, uint64_t count);

    EngineShared &shared_;
    uint32_t lane_;
    ProxyStats &stats_;
    std::vector<Op> ops_;
    std::vector<uint32_t> free_;
    Op completed_;
    std::vector<uccl_ep_write> writes_;
    std::vector<uccl_ep_signal> signals_;
    std::vector<uint64_t> signal_after_;  // writes staged before the signal
    uint64_t next_write_ = 0;
    uint64_t next_signal_ = 0;
    uint64_t posted_ = 0;
    TraceRecorder *trace_ = nullptr;
};

}  // namespace uccl_ep
