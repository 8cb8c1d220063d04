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
// A queue pair in error is replaced where the transport can (renewal.cpp): its work requests carry a
// tag of the queue pair they were posted on, so that no completion is taken for a later one's.
//
// A fenced write is settled by a one-byte read of the written region, posted behind it in the same
// chain: its answer cannot pass the write at the target. One read a region settles all fenced writes
// of a chain; not one for all regions, since a read of host memory pushes nothing into a GPU.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "regions.hpp"
#include "renewal.hpp"
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
    int wake_fd = -1;            // a byte here wakes the thread that replaces queue pairs; -1: errors are final
};

struct Statistics {
    uint64_t requests = 0;     // work requests posted
    uint64_t doorbells = 0;    // ibv_post_send calls
    uint64_t completions = 0;  // completions the device delivered
    uint64_t flushes = 0;      // fencing reads
    uint64_t refills = 0;      // ibv_post_recv calls
    uint64_t renewals = 0;     // queue pairs replaced
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
    int64_t renew();

    // The side of the thread that replaces queue pairs; each in the stage that its name follows.
    Stage stage(uint32_t peer) { return handover(peer).stage.load(std::memory_order_acquire); }
    void ask(uint32_t peer, uint32_t generation);
    void prepare(uint32_t peer, ibv_qp *queue_pair);  // fills its receive queue; after kDrained
    void connected(uint32_t peer, uint32_t generation);
    void ready(uint32_t peer);
    void give_up(uint32_t peer, std::string words);  // of a pair under way
    void end_renewals(const std::string &words);

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
        uint32_t place = 0;          // in pairs_
        uint32_t generation = 0;     // of the queue pair, the same on both ends
        uint32_t tag = 0;            // of its work requests
        PairSettings settings;
        std::vector<Entry> entries;  // ring, a power of two long
        uint64_t posted = 0;         // work requests, ever
        uint64_t settled = 0;
        uint64_t taken = 0;          // work requests that come back for certain: not those of a chain refused midway
        uint64_t returned = 0;       // all below this number have completed, with or without an error
        uint32_t consumed = 0;       // receives used up since the last refill
        uint32_t receives = 0;       // receives that the device holds
        uint32_t early_tag = 0;      // of a queue pair that is not in use yet, or never was:
        uint32_t early = 0;          // receives that it has returned with an error
        bool broken = false;         // nothing is sent
        bool open = true;            // the queue pair may be used; it is before `broken` ends, to receive
        bool owes = false;           // an error was reported, so the caller must ask for a new generation
        bool again = false;          // the new queue pair broke before it was used
        bool final = false;          // never replaced
        std::string words;           // why it broke
        std::unique_ptr<Handover> handover;
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
    Handover &handover(uint32_t peer);
    bool renewable() const { return settings_.wake_fd >= 0; }
    void wake();
    void look_after_pairs();
    void look_after(Pair &pair);
    void drain(Pair &pair);
    bool pass_on(Pair &pair, Stage from, Stage to);
    void adopt(Pair &pair);
    void bring_up(Pair &pair);
    void drain_receives();
    bool take_receive(const ibv_wc &completion, uccl_ep_arrival *arrival);
    void refill(Pair &pair);
    void post_watch(Pair &pair);
    void look_at_watches();
    void on_flushed_receive(Pair &pair, const ibv_wc &completion);
    void say(const Pair &pair);
    void refuse(Pair &pair, uint64_t token);
    void break_receiver(Pair &pair, int error, std::string words);
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
    uint64_t under_way_ = 0;  // pairs that are being replaced
    std::atomic<bool> attention_{false};  // a pair's handover has news
    std::atomic<bool> ended_{false};      // no queue pair is replaced any more
    std::vector<uccl_ep_arrival> arrived_;  // found while draining, handed out by the next poll_arrivals

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

    bool said_ = false;  // error_ is about a pair whose errors are not all handed out
    std::string error_;
    Statistics statistics_;
};

}  // namespace uccl_ep::ibverbs
