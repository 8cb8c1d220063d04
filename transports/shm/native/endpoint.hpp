// The data half of the shm transport: writes are memcpy into the peer's mapped windows, native signals
// are release stores, immediates go through single-producer single-consumer rings in shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "uccl_ep/transport.h"

namespace uccl_ep_shm {

// One (sender, lane) of a receiver. Zeroed memory is an empty ring. The sender owns `tail` and the
// entries behind it, the receiver owns `head`.
struct ArrivalRing {
    static constexpr uint64_t kCapacity = 4096;  // immediates
    alignas(64) std::atomic<uint64_t> tail;
    alignas(64) std::atomic<uint64_t> head;
    alignas(64) uint64_t immediates[kCapacity];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

struct Region {
    char *base = nullptr;
    uint64_t nbytes = 0;
};

class Endpoint {
  public:
    static constexpr uint64_t kQueueDepth = 1024;           // unpolled completions of one lane
    static constexpr uint64_t kBytesPerPost = 4u << 20;     // a post stops accepting after copying these
    // Immediates are published together: a line of them at a time, but no later than the end of the post, nor
    // than after a large write.
    static constexpr uint64_t kPublishEvery = 64 / sizeof(uint64_t);
    static constexpr uint64_t kPublishBytes = 32u << 10;

    Endpoint(uint32_t num_ranks, uint32_t num_lanes);
    ~Endpoint();
    Endpoint(const Endpoint &) = delete;

    void add_local_region(uint64_t pointer, uint64_t nbytes);
    void add_peer_region(uint32_t peer, uint64_t pointer, uint64_t nbytes);
    // The ring that I fill at `peer`, and the one that `peer` fills here.
    void set_rings(uint32_t peer, uint32_t lane, uint64_t outgoing, uint64_t incoming);
    // Watch the process of a peer; takes the descriptor over.
    void watch(uint32_t peer, int pidfd);

    const uccl_ep_transport_ops *ops() const { return &ops_; }

    int64_t post_writes(uint32_t lane, const uccl_ep_write *writes, uint64_t count);
    int64_t post_signals(uint32_t lane, const uccl_ep_signal *signals, uint64_t count);
    int64_t poll_completions(uint32_t lane, uccl_ep_completion *out, uint64_t capacity);
    int64_t poll_arrivals(uint32_t lane, uccl_ep_arrival *out, uint64_t capacity);
    int32_t peer_state(uint32_t peer);
    const char *last_error(uint32_t lane) const;

  private:
    // The sending side of an arrival ring, touched by its lane's thread alone.
    struct Outgoing {
        ArrivalRing *ring = nullptr;
        uint64_t tail = 0;  // entries filled
        uint64_t head = 0;  // what the receiver had taken when last looked at
    };
    struct Peer {
        std::vector<Region> regions;
        std::vector<Outgoing> outgoing;  // per lane
        int pidfd = -1;
        std::atomic<bool> dead{false};
    };
    struct Lane {
        uccl_ep_completion completions[kQueueDepth];
        uint64_t head = 0;
        uint64_t tail = 0;
        std::vector<std::pair<uint32_t, ArrivalRing *>> incoming;  // (peer, ring)
        uint64_t next_incoming = 0;                                // where the next poll starts: fairness
        char error[160] = "";
    };

    static bool room(Outgoing &outgoing);
    static void publish(Outgoing &outgoing);
    int64_t refuse(Lane &lane, const char *what, uint32_t peer, uint64_t offset, uint64_t bytes);
    char *resolve(const std::vector<Region> &regions, uint32_t region, uint64_t offset, uint64_t bytes) const;

    std::vector<Region> local_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    uccl_ep_transport_ops ops_;
};

}  // namespace uccl_ep_shm
