// Native: writes, then the signal on the same lane. The receiving CPU does nothing.
#include "plan.hpp"

namespace uccl_ep {
namespace {

class NativePlan final : public Plan {
  public:
    NativePlan(Outbound &outbound, ProxyStats &stats) : outbound_(outbound), stats_(stats) {}

    bool admit(uint32_t, uint32_t, uint64_t) override { return true; }
    bool windowed() const override { return false; }
    void write(uccl_ep_write &, const Op &op) override {
        if (op.last) {
            end(op);
        }
    }
    void end(const Op &op) override {
        if (outbound_.signal(op.peer, op.signal, op.key, op.value)) {
            stats_.coalesced_signals.add(1);
        }
    }
    void completed(const Op &) override {}
    bool follows_completions() const override { return false; }
    uint64_t poll() override { return 0; }

  private:
    Outbound &outbound_;
    ProxyStats &stats_;
};

}  // namespace

std::unique_ptr<Plan> make_native_plan(EngineShared &, uint32_t, Outbound &outbound, ProxyStats &stats) {
    return std::make_unique<NativePlan>(outbound, stats);
}

}  // namespace uccl_ep
