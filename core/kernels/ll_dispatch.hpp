// Low-latency dispatch: one packed message per destination rank, whole in the receiver's inbox, so that
// the send half never waits for the receive half. Two inboxes (parities) alternate; credits keep a
// sender from reusing one that is not expanded yet.
#pragma once

#include "ll_dispatch_receive.hpp"
#include "ll_dispatch_send.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_ll_dispatch_send, LowLatencyDispatchParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kLowLatencyDispatchSend);
    if (ll_dispatch_send(parameters)) ll_tell<PackedDispatch>(parameters.group);
}

UCCL_EP_KERNEL(uccl_ep_ll_dispatch_receive, LowLatencyDispatchParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kLowLatencyDispatchReceive);
    ll_dispatch_receive(parameters);
}

// Both halves at once, for a caller who waits anyhow.
UCCL_EP_KERNEL(uccl_ep_ll_dispatch, LowLatencyDispatchParameters) {
    const KernelSpan kernel(parameters.group, TracedKernel::kLowLatencyDispatch);
    const bool tells = ll_dispatch_send(parameters);
    device::sync_block();  // the halves share the block's memory
    if (tells) ll_tell<PackedDispatch>(parameters.group);
    ll_dispatch_receive(parameters);
}

}  // namespace uccl_ep
