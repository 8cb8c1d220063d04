// When a thread that pops rings looks at them again.
//
// Each look at an empty ring takes the cache line that a device is writing away from its write. A GPU's
// commands are 32-byte posted writes into 64-byte lines, which a bus keeps in order, so one look delays
// all that are under way; producers slow down, the thread outruns them the more, and looks the more. Two
// H200, 2026-11-30: 32 warps, 32 rings, 8 threads, a fence each 256 commands, 502 M/s if nobody had to
// wait: 28 to 32 M/s where threads looked all the time, 425 M/s where they executed 32 `pause` (half a
// microsecond or more, by CPU) after each empty look (one fence a batch; 61 with two).
//
// So a thread that outruns a stream of commands looks away for a while. A command that comes alone is
// not part of a stream, a burst shorter than a span neither: a kernel that waits for the answer to each
// command, 3.3 us, or sends one to each peer, never meets a thread that looks away.
#pragma once

#include <cstdint>

namespace uccl_ep {

class LookAway {
  public:
    static constexpr uint64_t kNsOfRing = 500;  // for each ring that was found empty
    static constexpr uint64_t kSpanNs = 4000;
    static constexpr uint64_t kStream = 8;  // commands in a span: four times what one that waits for answers sends

    // `ns_of_ring` 0: never.
    explicit LookAway(uint64_t ns_of_ring = kNsOfRing) : ns_of_ring_(ns_of_ring) {}

    // After a look at all rings of this thread: it popped `commands`, and `empty` rings have no more; 0 where
    // some ring has more, since then the producers are ahead. `now()`, in ns, is called only where commands come.
    template <class Now>
    void looked(uint64_t commands, uint32_t empty, Now &&now) {
        until_ = 0;
        if (ns_of_ring_ == 0 || empty == 0 || (commands == 0 && !stream_)) {
            return;
        }
        const uint64_t time = now();
        if (time - since_ >= kSpanNs) {
            stream_ = seen_ * kSpanNs >= kStream * (time - since_);  // a span is longer while this thread looks away
            since_ = time;
            seen_ = 0;
        }
        seen_ += commands;
        until_ = stream_ ? time + ns_of_ring_ * empty : 0;
    }

    // Whether to look away still; then a call costs a look at the clock.
    template <class Now>
    bool away(Now &&now) const {
        return until_ != 0 && now() < until_;
    }

  private:
    uint64_t ns_of_ring_;
    uint64_t until_ = 0;  // 0: look at once
    uint64_t since_ = 0;  // when the span began
    uint64_t seen_ = 0;  // commands in it
    bool stream_ = false;  // the span before held kStream commands for each kSpanNs
};

}  // namespace uccl_ep
