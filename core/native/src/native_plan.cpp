// Native: writes, then the signal on the same lane. The receiving CPU does nothing.
#include "plan.hpp"

namespace uccl_ep {
namespace {

class NativePlan final : public Plan {
  public:
    NativePlan(EngineShared &shared, Outbound &outbound) : shared_(shared), outbound_(outbound) {}

    bool admit(uint32_t, uint32_t, uint64_t) override { return true; }
    void write(const uccl_ep_write &write, const Op &op) override {
        outbound_.write(write, op);
        if (op.last) {
            end(op);
        }
    }
    void end(const Op &op) override {
        Op signal = op;
        signal.kind = OpKind::kSignal;
        signal.commands = 0;
        signal.bytes = 0;
        outbound_.signal(
            uccl_ep_signal{op.peer, UCCL_EP_REGION_CONTROL, shared_.layout.signal_offset(op.signal), op.value, 0},
            signal);
    }
    void completed(const Op &) override {}
    uint64_t poll() override { return 0; }

  private:
    EngineShared &shared_;
    Outbound &outbound_;
};

}  // namespace

std::unique_ptr<Plan> make_native_plan(EngineShared &shared, uint32_t, Outbound &outbound, ProxyStats &) {
    return std::make_unique<NativePlan>(shared, outbound);
}

}  // namespace uccl_ep
