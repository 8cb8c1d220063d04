// The kernels, compiled for the CPU. Traced ones serve here in any case: where no spans are recorded, a mark costs a
// look at a null pointer.
#include "traced_kernels.hpp"

#include "kernel_table.hpp"

namespace uccl_ep::host {

namespace {
template <class Parameters, void (*kKernel)(const Parameters &)>
void call(const void *parameters) {
    kKernel(*static_cast<const Parameters *>(parameters));
}
template <class Parameters, void (*kKernel)(const Parameters &)>
constexpr Kernel entry(const char *name) {
    return {name, sizeof(Parameters), &call<Parameters, kKernel>};
}
constexpr Kernel kKernels[] = {
    entry<RoutingParameters, uccl_ep_routing>("uccl_ep_routing"),
    entry<NotifyParameters, uccl_ep_notify>("uccl_ep_notify"),
    entry<DispatchParameters, uccl_ep_dispatch>("uccl_ep_dispatch"),
    entry<CombineParameters, uccl_ep_combine>("uccl_ep_combine"),
    entry<TermOrderParameters, uccl_ep_term_order>("uccl_ep_term_order"),
    entry<GatherParameters, uccl_ep_gather>("uccl_ep_gather"),
    entry<FoldParameters, uccl_ep_fold>("uccl_ep_fold"),
    entry<LowLatencyDispatchParameters, uccl_ep_ll_dispatch>("uccl_ep_ll_dispatch"),
    entry<LowLatencyDispatchParameters, uccl_ep_ll_dispatch_send>("uccl_ep_ll_dispatch_send"),
    entry<LowLatencyDispatchParameters, uccl_ep_ll_dispatch_receive>("uccl_ep_ll_dispatch_receive"),
    entry<LowLatencyCombineParameters, uccl_ep_ll_combine>("uccl_ep_ll_combine"),
    entry<LowLatencyCombineParameters, uccl_ep_ll_combine_send>("uccl_ep_ll_combine_send"),
    entry<LowLatencyCombineParameters, uccl_ep_ll_combine_receive>("uccl_ep_ll_combine_receive"),
    entry<LowLatencyDispatchParameters, uccl_ep_ll_direct_dispatch>("uccl_ep_ll_direct_dispatch"),
    entry<LowLatencyDispatchParameters, uccl_ep_ll_direct_dispatch_send>("uccl_ep_ll_direct_dispatch_send"),
    entry<LowLatencyDispatchParameters, uccl_ep_ll_direct_dispatch_receive>("uccl_ep_ll_direct_dispatch_receive"),
    entry<LowLatencyCombineParameters, uccl_ep_ll_direct_combine>("uccl_ep_ll_direct_combine"),
    entry<LowLatencyCombineParameters, uccl_ep_ll_direct_combine_send>("uccl_ep_ll_direct_combine_send"),
    entry<LowLatencyCombineParameters, uccl_ep_ll_direct_combine_receive>("uccl_ep_ll_direct_combine_receive"),
    entry<BarrierParameters, uccl_ep_barrier>("uccl_ep_barrier"),
    entry<ClockParameters, uccl_ep_clock>("uccl_ep_clock"),
};
}  // namespace

const Kernel *find_kernel(const char *name) {
    for (const Kernel &kernel : kKernels) {
        if (std::strcmp(kernel.name, name) == 0) return &kernel;
    }
    return nullptr;
}

}  // namespace uccl_ep::host
