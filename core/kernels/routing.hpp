// get_dispatch_layout: which ranks each token goes to, and how many tokens each rank and expert gets.
// One block: counts stay in the order tokens come, and 64 thousand indices take microseconds.
#pragma once

#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_routing, RoutingParameters) {
    const RoutingParameters &p = parameters;
    const uint32_t experts_per_rank = p.num_experts / p.num_ranks;
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    for (uint32_t token = thread; token < p.num_tokens; token += threads) {
        uint8_t *in_rank = p.is_token_in_rank + uint64_t{token} * p.num_ranks;
        for (uint32_t rank = 0; rank < p.num_ranks; ++rank) in_rank[rank] = 0;
        for (uint32_t k = 0; k < p.num_topk; ++k) {
            const int64_t expert = load_index(p.topk_idx, p.index_bytes, uint64_t{token} * p.num_topk + k);
            if (is_refused(expert, p.num_experts)) {
                refuse_index(p.group, Phase::kDispatch, expert, p.num_experts);
                continue;
            }
            if (expert < 0) continue;
            device::add_device(&p.num_tokens_per_expert[expert], 1);
            const uint32_t rank = static_cast<uint32_t>(expert) / experts_per_rank;
            if (in_rank[rank] == 0) {
                in_rank[rank] = 1;
                device::add_device(&p.num_tokens_per_rank[rank], 1);
            }
        }
    }
}

}  // namespace uccl_ep
