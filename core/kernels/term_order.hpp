// The order in which a combine of v2 sums the rows of a token: that of the largest k among the picks of each rank, and
// with domains_first of the largest k of each domain before that. No warp waits for another.
#pragma once

#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_KERNEL(uccl_ep_term_order, TermOrderParameters) {
    const TermOrderParameters &p = parameters;
    const uint32_t per_rank = p.num_experts / p.num_ranks;
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    for (uint32_t token = device::block_index() * threads + thread; token < p.num_tokens;
         token += device::num_blocks() * threads) {
        // The place of pick k's rank or domain, -1 for none: picks with the same one belong together.
        const auto group = [&](uint32_t k, uint32_t experts) -> int64_t {
            const int64_t expert =
                load_pick(p.topk_idx, p.index_bytes, uint64_t{token} * p.num_topk + k, p.num_experts);
            return expert < 0 ? -1 : expert / experts;
        };
        const auto is_last = [&](uint32_t k, uint32_t experts) {
            const int64_t own = group(k, experts);
            for (uint32_t later = k + 1; later < p.num_topk; ++later) {
                if (group(later, experts) == own) return false;
            }
            return own >= 0;
        };
        int32_t *out = p.term_ranks + uint64_t{token} * p.num_topk;
        uint32_t filled = 0;
        const uint32_t per_domain = per_rank * p.ranks_per_domain;
        for (uint32_t k = 0; k < p.num_topk; ++k) {
            if (p.domains_first == 0) {
                if (is_last(k, per_rank)) out[filled++] = static_cast<int32_t>(group(k, per_rank));
            } else if (is_last(k, per_domain)) {
                for (uint32_t j = 0; j <= k; ++j) {
                    if (group(j, per_domain) == group(k, per_domain) && is_last(j, per_rank))
                        out[filled++] = static_cast<int32_t>(group(j, per_rank));
                }
            }
        }
        while (filled < p.num_topk) out[filled++] = -1;
    }
}

}  // namespace uccl_ep
