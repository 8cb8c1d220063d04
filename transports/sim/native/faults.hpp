// What a simulated device does to the operations it is given: the knobs, and the decisions drawn
// from them. Every decision is a pure function of (seed, rank, lane, number of the operation), so
// the same posts under the same seed meet the same fate, however often anybody polls in between.
#pragma once

#include <cmath>
#include <cstdint>

namespace uccl_ep::sim {

enum class Distribution : uint32_t { kConstant = 0, kUniform = 1, kExponential = 2, kHeavy = 3 };

// Times are in units of the simulator's clock: polls of the lane, or microseconds.
struct Faults {
    uint64_t seed = 0;
    bool microseconds = false;    // the clock: false counts the lane's polls
    bool ordered = false;         // place operations of one lane to one peer in the order posted
    bool early_immediate = false; // show the immediate before its payload
    Distribution distribution = Distribution::kExponential;
    double delay = 0;             // mean time from post to placement
    double completion_delay = 0;  // mean time from placement to completion
    double arrival_delay = 0;     // mean time an immediate waits at the receiver
    double early_completion = 0;  // probability that an unfenced write completes without regard to placement
    uint32_t max_segments = 1;    // pieces that a payload may be placed in, each at its own time
    double duplicate = 0;         // probability that an operation lands twice
    double drop = 0;              // probability that one attempt is lost; the device retries
    double retry_delay = 64;      // time that each loss costs
    bool report_drops = false;    // do not retry: complete with an error
    double stall = 0;             // probability that an operation stalls its lane
    double stall_time = 256;      // time of one stall
    double refuse = 0;            // probability that an operation is refused a few times before it is accepted
    uint32_t send_queue_depth = 1024;
    uint64_t inflight_limit = 0;  // bytes to one peer above which the device collapses; 0: never
    double collapse = 12;         // then delays grow by this factor
    int64_t kill_peer = -1;       // rank that appears dead ...
    uint64_t kill_after = 0;      // ... after this many operations towards it
    uint64_t break_every = 0;     // operations after which a lane breaks, to be renewed; 0: never
    bool name_peers = true;       // arrivals say who sent them
    bool check_source = true;     // hash the source at post and at placement
    uint32_t imm_bits = 64;
    uint64_t max_message = 16u << 20;
    uint32_t alignment = 1;
};

// splitmix64's finaliser: every input bit reaches every output bit.
inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// The random numbers of one operation, by purpose: asking for one more never shifts the others.
class Draw {
  public:
    Draw(uint64_t seed, uint32_t rank, uint32_t lane, uint64_t number)
        : base_(mix(mix(mix(seed) ^ ((uint64_t{rank} << 32) | lane)) ^ number)) {}

    uint64_t bits(uint32_t purpose) const { return mix(base_ ^ (uint64_t{purpose} << 40)); }
    double unit(uint32_t purpose) const {  // in (0, 1]
        return (static_cast<double>(bits(purpose) >> 11) + 1.0) * 0x1p-53;
    }
    bool chance(uint32_t purpose, double probability) const { return unit(purpose) <= probability; }
    uint64_t time(uint32_t purpose, Distribution distribution, double mean) const;

  private:
    uint64_t base_;
};

inline uint64_t Draw::time(uint32_t purpose, Distribution distribution, double mean) const {
    if (mean <= 0) return 0;
    const double u = unit(purpose);
    double value = mean;
    switch (distribution) {
        case Distribution::kConstant:
            break;
        case Distribution::kUniform:
            value = 2 * mean * u;
            break;
        case Distribution::kExponential:
            value = -mean * std::log(u);
            break;
        // Pareto with exponent 1.5, whose mean is three times its least value. Its tail is cut, or one
        // operation in a million would outlast every time-out.
        case Distribution::kHeavy:
            value = std::fmin(mean / 3 * std::pow(u, -2.0 / 3.0), 200 * mean);
            break;
    }
    return static_cast<uint64_t>(value);
}

enum Purpose : uint32_t {
    kDelayOf = 1,
    kCompletionOf = 2,
    kEarly = 3,
    kSegments = 4,
    kDuplicate = 5,
    kLosses = 6,
    kStall = 7,
    kRefuse = 8,
    kTie = 9,
    kArrivalOf = 10,
    kFate = 11,          // whether a piece lands that failed with its lane
    kSegmentDelay = 32,  // and following: one for each segment
    kSegmentTie = 96,
    kSegmentCut = 160,
    kFateOfPeer = 1u << 16,  // and following: one for each rank
};

inline constexpr uint32_t kMaxSegments = 16;

}  // namespace uccl_ep::sim
