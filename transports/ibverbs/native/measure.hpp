// A loop that posts and polls like a proxy, to compare the data plane with perftest on equal terms.
#pragma once

#include <cstdint>

#include "uccl_ep/transport.h"

namespace uccl_ep::ibverbs {

struct Workload {
    uint32_t peer = 0;
    uint32_t flags = 0;     // uccl_ep_write_flags
    uint64_t bytes = 0;     // of each write
    uint64_t count = 0;     // writes
    uint64_t depth = 0;     // writes in flight
    uint64_t batch = 0;     // writes posted at once
    double limit_s = 0;     // give up after this many seconds
};

// Seconds from the first post to the last completion (and, where `receiver` is given, arrival).
// Throws std::runtime_error with the lane's words, or when the time is up.
double measure(const uccl_ep_transport_ops &sender, const uccl_ep_transport_ops *receiver, const Workload &work);

}  // namespace uccl_ep::ibverbs
