// Direct low-latency dispatch, in a group of one scale-up domain: rows go straight to the window of each rank that wants
// them, and find their places there.
#pragma once

#include "ll_direct_dispatch_receive.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_ll_direct_dispatch_send, LowLatencyDispatchParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kDirectDispatchSend);
    direct_dispatch_send(parameters, DirectDispatchCounts::of(parameters.group));
}

UCCL_EP_KERNEL(uccl_ep_ll_direct_dispatch_receive, LowLatencyDispatchParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kDirectDispatchReceive);
    direct_dispatch_receive(parameters, DirectDispatchCounts::of(parameters.group));
}

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_direct_dispatch, LowLatencyDispatchParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kDirectDispatch);
    const auto counts = DirectDispatchCounts::of(parameters.group);
    direct_dispatch_send(parameters, counts);
    direct_dispatch_receive(parameters, counts);
}

}  // namespace uccl_ep
