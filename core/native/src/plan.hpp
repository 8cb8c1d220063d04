// How one proxy keeps data before signals: a class per ordering plan, a file each.
#pragma once

#include <memory>
#include <string>

#include "engine_types.hpp"
#include "outbound.hpp"

namespace uccl_ep {

// What a plan found wrong; becomes a verdict.
struct Fault {
    uint32_t culprit = 0;
    Reason reason = Reason::kNone;
    uint64_t signal = 0;
    uint64_t expected = 0;
    uint64_t seen = 0;
    std::string words;
};

class Plan {
  public:
    // Operations that staging one command may need, at most (one write, or an empty message for each
    // number that a kernel skipped).
    static constexpr uint64_t kOperationsPerCommand = 40;

    virtual ~Plan() = default;

    // May a write or an empty end of message be staged now? False: later (a window is full). Not asked
    // where windowed() is false.
    virtual bool admit(uint32_t peer, uint32_t key, uint64_t value) = 0;
    virtual bool windowed() const { return true; }
    // Complete a write of payload that is the last one staged. `op.last`: it ends its message.
    virtual void write(uccl_ep_write &write, const Op &op) = 0;
    // Stage the end of a message that has no more bytes.
    virtual void end(const Op &op) = 0;
    // A write or an operation of the plan's own has completed without error. Not told where
    // follows_completions() is false.
    virtual void completed(const Op &op) = 0;
    virtual bool follows_completions() const { return true; }
    // Look for arrivals and for work put off; returns how much was done.
    virtual uint64_t poll() = 0;
    // About once a millisecond.
    virtual void tick() {}
    // Signals put off that still have to leave before an orderly stop.
    virtual bool pending() const { return false; }

    void trace(TraceRecorder *recorder) { trace_ = recorder; }

    // Set once; the proxy turns it into a verdict.
    const Fault *fault() const { return fault_.reason == Reason::kNone ? nullptr : &fault_; }

  protected:
    void fail(Fault fault) {
        if (fault_.reason == Reason::kNone) {
            fault_ = std::move(fault);
        }
    }

    TraceRecorder *trace_ = nullptr;

  private:
    Fault fault_;
};

std::unique_ptr<Plan> make_native_plan(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats);
std::unique_ptr<Plan> make_counted_plan(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats);
std::unique_ptr<Plan> make_fenced_plan(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats);

}  // namespace uccl_ep
