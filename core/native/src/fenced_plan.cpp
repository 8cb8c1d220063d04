// Fenced: the signal leaves, as a write of 8 bytes from the control window's outbox, when the data are
// proven placed.
#include <memory>
#include <vector>

#include "plan.hpp"
#include "uccl_ep/fenced_sender.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {
namespace {

class FencedPlan final : public Plan {
  public:
    FencedPlan(EngineShared &shared, Outbound &outbound, ProxyStats &stats)
        : shared_(shared), outbound_(outbound), stats_(stats), signals_(shared.sender_signals.size()) {
        waiting_.reserve(signals_.size());
    }

    bool admit(uint32_t, uint32_t key, uint64_t value) override {
        return signals_[key] == nullptr ? value <= kEpochWindow : signals_[key]->sender.admit(value);
    }

    void write(uccl_ep_write &write, const Op &op) override {
        Signal &signal = at(op);
        signal.sender.write(op.value);
        write.flags |= UCCL_EP_WRITE_FENCED;
        stats_.emulated_fences.add(1);
        if (op.last) {
            signal.sender.end(op.value);
        }
    }
    void end(const Op &op) override {
        at(op).sender.end(op.value);
        want(op.key);
    }

    void completed(const Op &op) override {
        if (op.kind == OpKind::kCommand) {
            at(op).sender.placed(op.value);
        } else if (op.kind == OpKind::kSignalWrite) {
            at(op).sender.signal_placed();
        } else {
            return;
        }
        want(op.key);
    }

    uint64_t poll() override {
        uint64_t done = 0;
        while (!waiting_.empty() && outbound_.room(1)) {
            const uint32_t key = waiting_.back();
            waiting_.pop_back();
            Signal &signal = *signals_[key];
            signal.waits = false;
            if (const uint64_t value = signal.sender.take_signal()) {
                post(key, signal, value);
                ++done;
            }
        }
        return done;
    }

    bool pending() const override { return !waiting_.empty(); }

  private:
    struct Signal {
        FencedSender sender;
        uint32_t peer = 0;
        uint32_t index = 0;
        bool waits = false;  // in waiting_
    };

    Signal &at(const Op &op) {
        if (signals_[op.key] == nullptr) {
            signals_[op.key] = std::make_unique<Signal>();  // once in the group's life
            signals_[op.key]->peer = op.peer;
            signals_[op.key]->index = op.signal;
        }
        return *signals_[op.key];
    }

    void want(uint32_t key) {
        Signal &signal = *signals_[key];
        if (!signal.waits && signal.sender.wants_signal()) {
            signal.waits = true;
            waiting_.push_back(key);
        }
    }

    void post(uint32_t key, const Signal &signal, uint64_t value) {
        const uint64_t local = shared_.layout.outbox_offset(signal.peer, shared_.signal_entry(signal.index));
        StdAtomics::store_release_system(shared_.word(local), value);
        Op &op = outbound_.stage_control(OpKind::kSignalWrite, signal.peer, local,
                                         shared_.layout.signal_offset(signal.index), 8, true);
        op.signal = signal.index;
        op.key = key;
        op.value = value;
        stats_.emulated_signal_writes.add(1);
    }

    EngineShared &shared_;
    Outbound &outbound_;
    ProxyStats &stats_;
    std::vector<std::unique_ptr<Signal>> signals_;  // by key
    std::vector<uint32_t> waiting_;                 // keys with a value to write
};

}  // namespace

std::unique_ptr<Plan> make_fenced_plan(EngineShared &shared, uint32_t, Outbound &outbound, ProxyStats &stats) {
    return std::make_unique<FencedPlan>(shared, outbound, stats);
}

}  // namespace uccl_ep
