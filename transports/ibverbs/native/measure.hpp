// A loop that posts and polls like a proxy, to compare the data plane with perftest on equal terms.
#pragma once

#include <cstdint>
#include <vector>

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

// One end of a ping-pong as ib_write_lat plays it: each side waits for the last byte of the other's write.
struct PingPong {
    uint32_t peer = 0;
    uint64_t bytes = 0;         // of each write
    uint64_t count = 0;         // writes of each side
    uint64_t local_offset = 0;  // in the data window, of the bytes that are sent
    uint64_t remote_offset = 0; // in the peer's, where they land
    uint8_t *sent = nullptr;    // the last byte that is sent
    const uint8_t *landed = nullptr;  // the last byte that the peer's write fills
    bool first = false;         // this side begins
    bool yields = false;        // between looks, as a proxy does; else it spins, as ib_write_lat does
    double limit_s = 0;
};

// Of the side that begins, half the seconds of each exchange; of the other side nothing. Throws like measure().
std::vector<double> ping_pong(const uccl_ep_transport_ops &ops, const PingPong &work);

}  // namespace uccl_ep::ibverbs
