// One lane: a queue pair to each peer, one completion queue for what it sends and one for what
// arrives. Driven by one proxy thread.
//
// Accounting. Every accepted write or signal owns one or more work requests, the last of which
// carries its token. Only the last work request of a chain (all that one call posts to one peer) is
// signalled. A reliable connection completes in order, so that completion settles all before it;
// a queue slot is free again only when it was settled, hence queues can never overflow.
//
// A device without immediates still gets one receive a pair, a watch: nothing ever fills it, and it
// is flushed when the connection ends. Without it, siw swallows writes that are posted later.
//
// A fenced write is settled by a one-byte read of the written region, posted behind it in the same
// chain: its answer cannot pass the write at the target. One read a region settles all fenced writes
// of a chain; not one for all regions, since a read of host memory pushes nothing into a GPU.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "regions.hpp"
#include "uccl_ep/transport.h"
#include "words.hpp"

namespace uccl_ep::ibverbs {

inline constexpr uint32_t kMaxRegions = 4;  // the contract has two: data and control

struct PairSettings {
    uint32_t send_depth = 0;     // work requests
    uint32_t receive_depth = 0;  // 0: no immediates on this device, one receive is posted as a watch
    uint32_t inline_bytes = 0;   // what the queue pair was created with
    std::vector<Region> remote;
};

struct LaneSettings {
    std::string device;
    std::vector<Region> local;
    uint64_t flush_address = 0;  // registered memory that the fencing reads land in
    uint32_t flush_key = 0;
    uint64_t max_message = 0;    // bytes of the longest write
};

struct Statistics {
    uint64_t requests = 0;     // work requests posted
    uint64_t doorbells = 0;    // ibv_post_send calls
    uint64_t completions = 0;  // completions the device delivered
    uint64_t flushes = 0;      // fencing reads
    uint64_t refills = 0;      // ibv_post_recv calls
};

class Lane {
  public:
    Lane(uint32_t index, uint32_t num_ranks, std::atomic<uint8_t> *dead, LaneSettings settings, ibv_cq *send_queue,
         ibv_cq *receive_queue);

    // The queue pair must be initialised and not yet connected; fills its receive queue.
    void add_pair(uint32_t peer, ibv_qp *queue_pair, PairSettings settings);

    int64_t post_writes(const uccl_ep_write *writes, uint64_t count);
    int64_t post_signals(const uccl_ep_signal *signals, uint64_t count);
    int64_t poll_completions(uccl_ep_completion *out, uint64_t capacity);
    int64_t poll_arrivals(uccl_ep_arrival *out, uint64_t capacity);

    const char *last_error() const { return error_.c_str(); }
    const Statistics &statistics() const { return statistics_; }

  private:
    struct Entry {
        uint64_t token;
        bool has_token;  // false: a piece of a write that goes on, or a fencing read
        bool fenced;
    };

    struct Pair {
        ibv_qp *queue_pair = nullptr;
        uint32_t peer = 0;
        PairSettings settings;
        std::vector<Entry> entries;  // ring, a power of two long
        uint64_t posted = 0;         // work requests, ever
        uint64_t settled = 0;
        uint32_t consumed = 0;       // receives used up since the last refill
        bool broken = false;
        // The chain under construction.
        ibv_send_wr *head = nullptr;
        ibv_send_wr *tail = nullptr;
        uint32_t fences = 0;  // bit r: the chain has a fenced write into the peer's region r
        std::array<uint64_t, kMaxRegions> fence_offset{};

        uint64_t room() const { return settings.send_depth - (posted - settled); }
    };

    enum class Verdict { kAccepted, kFull, kInvalid };

    Pair *pair_of(uint32_t peer);
    Verdict add_write(const uccl_ep_write &write);
    Verdict add_signal(const uccl_ep_signal &signal);
    ibv_send_wr *add_request(Pair &pair, uint64_t token, bool has_token, bool fenced);
    void add_fences(Pair &pair);
    void ring_doorbells();
    int fetch_completions();
    void refill(Pair &pair);
    void post_watch(Pair &pair);
    void look_at_watches();
    void on_flushed_receive(Pair &pair, const ibv_wc &completion);
    Place place_of(const Pair &pair) const;
    void settle(Pair &pair, uint64_t up_to);
    void break_pair(Pair &pair, uint64_t proven_up_to, int error, std::string words);
    void emit(uint64_t token, uint32_t peer, int32_t status);

    uint32_t index_;
    std::atomic<uint8_t> *dead_;  // one a rank, shared by all lanes
    LaneSettings settings_;
    ibv_cq *send_queue_;
    ibv_cq *receive_queue_;
    std::vector<int32_t> place_by_rank_;  // index into pairs_, -1: no peer
    std::vector<Pair> pairs_;
    bool watching_ = false;  // some pair has a watch

    // Scratch of one round of posting.
    std::vector<ibv_send_wr> requests_;
    std::vector<ibv_sge> elements_;
    std::vector<Pair *> touched_;
    size_t used_ = 0;

    // Completions known but not yet handed out; first those that still fit into the caller's array.
    uccl_ep_completion *out_ = nullptr;
    uint64_t out_capacity_ = 0;
    uint64_t out_count_ = 0;
    std::vector<uccl_ep_completion> pending_;
    size_t pending_head_ = 0;

    std::string error_;
    Statistics statistics_;
};

}  // namespace uccl_ep::ibverbs
