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
    bool in_use = false;
    uint32_t peer = 0;
    uint32_t ring = 0;
    uint32_t commands = 0;    // of that ring, from first_ticket on, that wait for this completion
    uint32_t signal = 0;
    uint32_t key = 0;
    uint64_t first_ticket = 0;
    uint64_t bytes = 0;
    uint64_t value = 0;       // message number
};

class Outbound {
  public:
    static constexpr uint64_t kReserve = 160;  // operations beyond the queue depth that may be staged

    // `keep`: remember posted operations until they complete, so that repost() can repeat them.
    Outbound(EngineShared &shared, uint32_t lane, ProxyStats &stats, bool keep);

    // Room for this many more writes and as many signals.
    bool room(uint64_t operations) const { return num_free_ >= operations; }
    bool staged() const { return next_write_ < num_writes_ || next_signal_ < num_signals_; }
    uint64_t outstanding() const { return ops_.size() - num_free_; }  // staged or posted
    uint64_t posted() const { return posted_; }

    // A write and its record, to be filled where they stay, before the next flush(). All fields are zero
    // but the token. Never fill a copy and assign it: reading fields back together right after they were
    // stored one by one stalls for longer than all the rest of staging takes.
    struct Staged {
        uccl_ep_write *write = nullptr;
        Op *op = nullptr;
    };
    Staged stage() {
        const uint32_t token = take();
        uccl_ep_write &write = writes_[num_writes_++];
        write = uccl_ep_write{};
        write.token = token;
        return {&write, &ops_[token]};
    }
    // A write within the control windows, whole.
    Op &stage_control(OpKind kind, uint32_t peer, uint64_t local_offset, uint64_t remote_offset, uint64_t bytes,
                      bool fenced) {
        const Staged staged = stage();
        staged.write->peer = peer;
        staged.write->flags = fenced ? UCCL_EP_WRITE_FENCED : 0;
        staged.write->local_region = UCCL_EP_REGION_CONTROL;
        staged.write->remote_region = UCCL_EP_REGION_CONTROL;
        staged.write->local_offset = local_offset;
        staged.write->remote_offset = remote_offset;
        staged.write->bytes = bytes;
        staged.op->kind = kind;
        staged.op->peer = peer;
        return *staged.op;
    }
    // Take back the write staged last.
    void unstage() {
        const uint64_t token = writes_[--num_writes_].token;
        ops_[token].in_use = false;
        free_[num_free_++] = static_cast<uint32_t>(token);
    }
    // Signals hold absolute values: where the one staged last was not posted yet and has the same key, the
    // new value takes its place behind the new writes. False: it became an operation of its own.
    bool signal(uint32_t peer, uint32_t signal, uint32_t key, uint64_t value) {
        if (num_signals_ > next_signal_) {
            uccl_ep_signal &before = signals_[num_signals_ - 1];
            Op &record = ops_[before.token];
            if (record.key == key) {
                record.value = before.value = value;
                signal_after_[num_signals_ - 1] = num_writes_;
                return true;
            }
        }
        const uint32_t token = take();
        Op &op = ops_[token];
        op.kind = OpKind::kSignal;
        op.peer = peer;
        op.signal = signal;
        op.key = key;
        op.value = value;
        signal_after_[num_signals_] = num_writes_;
        uccl_ep_signal &staged = signals_[num_signals_++];
        staged.peer = peer;
        staged.remote_region = UCCL_EP_REGION_CONTROL;
        staged.remote_offset = shared_.layout.signal_offset(signal);
        staged.value = value;
        staged.token = token;
        return false;
    }

    // Post what the transport takes now, in order. Negative errno where it broke.
    int64_t flush();
    // Record what is posted from now on; nullptr: nothing.
    void trace(TraceRecorder *recorder) { trace_ = recorder; }
    // Whose turn it is: the rank to blame when flush() fails.
    uint32_t next_peer() const {
        return next_write_ < num_writes_     ? writes_[next_write_].peer
               : next_signal_ < num_signals_ ? signals_[next_signal_].peer
                                             : shared_.rank;
    }
    // Post operations again that completed with an error, on a new generation of the lane: in the order in
    // which they were posted, before all that was not posted yet, and of each signal the newest value alone,
    // since an older one could take back what the lane still placed.
    void repost(const std::vector<uint64_t> &tokens);
    // The record of a completion, valid until release(); nullptr for a token that is none.
    const Op *find(uint64_t token) const { return token < ops_.size() && ops_[token].in_use ? &ops_[token] : nullptr; }
    void release(uint64_t token) {
        ops_[token].in_use = false;
        free_[num_free_++] = static_cast<uint32_t>(token);
        --posted_;
    }

  private:
    uint32_t take() {
        const uint32_t token = free_[--num_free_];
        ops_[token] = Op{};
        ops_[token].in_use = true;
        return token;
    }
    void keep_writes(uint64_t first, uint64_t count);
    void keep_signals(uint64_t first, uint64_t count);
    void trace_writes(uint64_t first, uint64_t count);
    void trace_signals(uint64_t first, uint64_t count);

    EngineShared &shared_;
    uint32_t lane_;
    ProxyStats &stats_;
    std::vector<Op> ops_;         // by token
    std::vector<uint32_t> free_;  // tokens, the first num_free_
    std::vector<uccl_ep_write> writes_;
    std::vector<uccl_ep_signal> signals_;
    std::vector<uint64_t> signal_after_;  // writes staged before the signal
    uint64_t num_free_ = 0;
    uint64_t num_writes_ = 0;
    uint64_t num_signals_ = 0;
    uint64_t next_write_ = 0;
    uint64_t next_signal_ = 0;
    uint64_t posted_ = 0;
    const bool keep_;
    struct Kept {
        uccl_ep_write write;
        uccl_ep_signal signal;
        uint64_t number;  // of the post
    };
    std::vector<Kept> kept_;                 // by token
    std::vector<uint64_t> newest_signals_;   // posted, by key
    uint64_t posts_ = 0;
    TraceRecorder *trace_ = nullptr;
};

}  // namespace uccl_ep
