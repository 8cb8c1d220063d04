// Native: writes, then the signal on the same lane. The receiving CPU does nothing.
#include "plan.hpp"

namespace uccl_ep {
namespace {

class NativePlan final : public Plan {
  public:
    NativePlan(EngineShared &shared, Outbound &outbound, ProxyStats &stats)
        : shared_(shared), outbound_(outbound), stats_(stats) {}

    bool admit(uint32_t, uint32_t, uint64_t) override { return true; }
    bool windowed() const override { return false; }
    void write(uccl_ep_write &, const Op &op) override {
        if (op.last) {
            end(op);
        }
    }
    void end(const Op &op) override {
        Op signal;
        signal.kind = OpKind::kSignal;
        signal.peer = op.peer;
        signal.signal = op.signal;
        signal.key = op.key;
        signal.value = op.value;
        if (outbound_.signal(shared_.layout.signal_offset(op.signal), signal)) {
            stats_.coalesced_signals.add(1);
        }
    }
    void completed(const Op &) override {}
    bool follows_completions() const override { return false; }
    uint64_t poll() override { return 0; }

  private:
    EngineShared &shared_;
    Outbound &outbound_;
    ProxyStats &stats_;
};

}  // namespace

std::unique_ptr<Plan> make_native_plan(EngineShared &shared, uint32_t, Outbound &outbound, ProxyStats &stats) {
    return std::make_unique<NativePlan>(shared, outbound, stats);
}

}  // namespace uccl_ep
