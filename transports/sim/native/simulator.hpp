// A device that misbehaves within its promises. It stands between a caller of transport.h and an
// inner transport: operations are held back, cut, reordered, doubled, lost and retried, then posted
// to the inner transport; completions and arrivals are held back in turn.
//
// A lane is driven by one thread, as the contract says, so a lane needs no locks; what lanes share
// (dead peers, counters) is atomic.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "bounce.hpp"
#include "faults.hpp"
#include "uccl_ep/transport.h"

namespace uccl_ep::sim {

struct Region {
    uint8_t *pointer = nullptr;  // this process's view of a registered host region
    uint64_t bytes = 0;
};

// Everything counted since connect; read it when the lanes are idle.
struct Statistics {
    std::atomic<uint64_t> writes{0}, signals{0}, early_completions{0}, segments{0}, duplicates{0}, losses{0},
        reported_losses{0}, stalls{0}, refusals{0}, collapsed{0}, overtakes{0}, killed{0}, source_changed{0},
        held_arrivals{0}, breaks{0}, late_copies{0}, revoked{0};
    std::atomic<uint64_t> decisions{0};  // digest of all draws: equal for equal seeds and posts
};

inline void count(std::atomic<uint64_t> &counter) { counter.fetch_add(1, std::memory_order_relaxed); }

class Lane;

class Simulator {
  public:
    Simulator(const uccl_ep_transport_ops *inner, const Faults &faults, uint32_t rank, uint32_t num_ranks,
              uint32_t num_lanes, std::vector<Region> regions, bool with_signals, bool with_immediates,
              bool with_peer_state);
    ~Simulator();
    Simulator(const Simulator &) = delete;
    Simulator &operator=(const Simulator &) = delete;

    const uccl_ep_transport_ops *ops() const { return &ops_; }
    const Statistics &statistics() const { return statistics_; }

    // Lets what is under way land, as a NIC that disconnects does; the proxies have stopped. Gives up
    // after `limit_us` microseconds and returns whether all has landed.
    bool drain(uint64_t limit_us);

  private:
    friend class Lane;
    bool is_dead(uint32_t peer) const { return dead_[peer].load(std::memory_order_acquire); }
    void count_towards(uint32_t peer);

    const uccl_ep_transport_ops *inner_;
    const Faults faults_;
    const uint32_t rank_;
    const uint32_t num_ranks_;
    const std::vector<Region> regions_;  // the last one is the bounce region where early completions exist
    std::vector<std::atomic<bool>> dead_;
    std::atomic<uint64_t> towards_killed_{0};
    Statistics statistics_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    uccl_ep_transport_ops ops_;
};

// One operation, from the post until its last copy has landed and its completion was polled.
struct Flight {
    bool is_signal = false;
    bool completed = false;       // the caller's completion is queued or polled
    bool live = false;
    bool failed = false;          // its lane broke under it: reported as an error, may yet land before a renewal
    bool early = false;           // completes on its own clock; bytes lie in the bounce region
    uint32_t unplaced = 0;        // pieces (with duplicates) whose inner completion is missing
    int32_t status = 0;
    uccl_ep_write write = {};
    uccl_ep_signal signal = {};
    uint64_t number = 0;          // of this lane
    uint64_t completion_delay = 0;
    uint64_t bounce_offset = 0;
    uint64_t source_hash = 0;

    uint32_t peer() const { return is_signal ? signal.peer : write.peer; }
};

// Something that happens to a flight at a time of the lane's clock.
struct Event {
    enum Kind : uint32_t { kPlace, kComplete };
    uint64_t due;
    uint64_t tie;     // order among equals; random where order is not kept
    Kind kind;
    uint32_t flight;  // index
    uint64_t begin, end;  // bytes of the payload to place
    bool last;        // this piece carries the immediate
    bool operator>(const Event &other) const { return due != other.due ? due > other.due : tie > other.tie; }
};

class Lane {
  public:
    Lane(Simulator &owner, uint32_t index, Bounce bounce);
    int64_t post_writes(const uccl_ep_write *writes, uint64_t count);
    int64_t post_signals(const uccl_ep_signal *signals, uint64_t count);
    int64_t poll_completions(uccl_ep_completion *out, uint64_t capacity);
    int64_t poll_arrivals(uccl_ep_arrival *out, uint64_t capacity);
    int64_t renew();
    const char *last_error();
    bool empty() const { return flights_.size() == free_flights_.size(); }

  private:
    struct Waiting {
        uint64_t due;
        uint64_t tie;
        uccl_ep_arrival arrival;
        bool operator>(const Waiting &other) const { return due != other.due ? due > other.due : tie > other.tie; }
    };

    uint64_t now() const;
    int64_t refuse_write(const uccl_ep_write &write);
    bool accepts(const Draw &draw);
    uint32_t begin_flight(const Draw &draw, uint32_t peer, uint64_t bytes);
    void schedule(uint32_t index, const Draw &draw);
    void schedule_pieces(uint32_t index, const Draw &draw, uint64_t from, uint64_t due);
    bool place(const Event &event);
    int64_t post_piece(const Event &event, Flight &flight);
    void piece_placed(uint32_t index, int32_t status);
    void complete(uint32_t index);
    void retire(uint32_t index);
    void progress();
    void maybe_break();  // this, is_lost() and renew(): lane_break.cpp
    bool is_lost(const Event &event) const;
    uint64_t hash_source(const Flight &flight) const;
    void note(uint64_t decision);

    Simulator &owner_;
    const Faults &faults_;
    const uint32_t index_;
    Bounce bounce_;
    uint64_t ticks_ = 0;
    uint64_t stalled_until_ = 0;
    bool down_ = false;             // broken as the option break_every asks: every post fails until renewed
    int64_t broken_ = 0;            // negative errno once an operation failed after its completion
    uint64_t number_ = 0;           // operations accepted
    uint64_t arrivals_ = 0;
    uint32_t refusals_left_ = 0;    // of the operation that comes next
    bool refusal_drawn_ = false;
    uint64_t outstanding_ = 0;      // accepted, completion not yet polled
    uint64_t last_arrival_due_ = 0;
    uint64_t digest_ = 0;
    std::vector<Flight> flights_;
    std::vector<uint32_t> free_flights_;
    std::vector<uint64_t> last_due_;        // by peer, where order is kept
    std::vector<uint64_t> inflight_bytes_;  // by peer
    std::vector<uint64_t> last_placed_;     // by peer: highest number placed so far; a lower one was overtaken
    std::vector<uint64_t> lost_from_;       // by peer: where order is kept, the first that did not land whole
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting_;
    std::deque<uccl_ep_completion> done_;
    std::string error_;
};

}  // namespace uccl_ep::sim
