// Error completions in words: what the status means and what to try.
#pragma once

#include <infiniband/verbs.h>

#include <string>

namespace uccl_ep::ibverbs {

struct Place {
    std::string device;  // "rxe0 port 1"
    uint32_t peer;       // rank
    uint32_t lane;
    uint32_t qp_num;
};

std::string describe_completion(ibv_wc_status status, uint32_t vendor_error, const Place &place);
std::string describe_post(int error, const Place &place);  // errno of ibv_post_send or ibv_post_recv

// The negative errno that a completion carries for this status.
int errno_of(ibv_wc_status status);

}  // namespace uccl_ep::ibverbs
