// Replacing a queue pair in error: what the proxy thread that owns a lane and the thread that makes queue
// pairs tell each other.
//
// The stage says whose turn it is. A pair belongs to the proxy thread but between kDrained and kConnected,
// where it uses neither the old queue pair nor the new one.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace uccl_ep::ibverbs {

enum class Stage : uint32_t {
    kUp,         // in use
    kBroken,     // proxy: an error; what the device still holds is being returned, once the queue pair is in error
    kDrained,    // proxy: all of it came back; the queue pair can be destroyed
    kConnected,  // thread: a new one can receive
    kReady,      // thread: and so can the peer's
    kFinal,      // thread: there will be no other
};

struct Handover {
    std::atomic<Stage> stage{Stage::kUp};
    std::atomic<uint32_t> wanted{0};  // generation that the peer asks for
    ibv_qp *next = nullptr;           // these three are valid from kConnected on
    uint32_t next_generation = 0;
    uint32_t next_tag = 0;            // of its work requests: a queue pair may fail before it is ever connected
    std::string last_words;           // valid at kFinal
};

// Work request ids: place of the pair, tag of its queue pair (8 bits), number.
inline constexpr uint32_t kPlaceShift = 48;
inline constexpr uint32_t kTagShift = 40;
inline constexpr uint64_t kNumberMask = (uint64_t{1} << kTagShift) - 1;

inline uint64_t request_id(uint32_t place, uint32_t tag, uint64_t number) {
    return uint64_t{place} << kPlaceShift | uint64_t{tag & 0xFF} << kTagShift | (number & kNumberMask);
}
inline uint32_t place_of_id(uint64_t id) { return static_cast<uint32_t>(id >> kPlaceShift); }
inline uint32_t tag_of_id(uint64_t id) { return static_cast<uint32_t>(id >> kTagShift) & 0xFF; }
inline bool has_tag(uint64_t id, uint32_t tag) { return tag_of_id(id) == (tag & 0xFF); }

// Posts `count` receives without memory, for immediates; 0 or an errno.
int post_receives(ibv_qp *queue_pair, uint64_t id, uint32_t count);

}  // namespace uccl_ep::ibverbs
