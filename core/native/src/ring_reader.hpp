// The consuming side of one ring: what was popped, and in order what completed.
#pragma once

#include <cstdint>
#include <vector>

#include "engine_types.hpp"
#include "trace.hpp"
#include "uccl_ep/ring.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {

class RingReader {
  public:
    RingReader(const Channel &channel, uint32_t ring)
        : index(ring),
          slots_(channel.slots(ring)),
          consumed_(channel.consumed(ring)),
          completed_word_(channel.completed(ring)),
          capacity_(channel.capacity()),
          remaining_(std::max<uint64_t>(channel.capacity(), 1024), 0),
          mask_(remaining_.size() - 1) {}

    bool peek(Command *command) const {
        PackedCommand packed;
        if (popped_ - completed_ > mask_ || !ring_peek<StdAtomics>(slots_, capacity_, popped_, &packed)) {
            return false;
        }
        *command = unpack(packed);
        return true;
    }
    uint64_t ticket() const { return popped_; }
    bool empty() const {
        PackedCommand packed;
        return !begun && !ring_peek<StdAtomics>(slots_, capacity_, popped_, &packed);
    }
    // For the trace: the command at ticket() was not there yet.
    void seen_empty() {
        looked_at_ = popped_;
        looked_ns_ = now_ns();
    }
    void trace_pop(TraceRecorder &trace) const {
        if (looked_at_ == popped_) {
            trace.add(TraceKind::kLook, index, popped_, current.peer, current.bytes, 0, looked_ns_);
        }
        trace.add(TraceKind::kPopped, index, popped_, current.peer, current.bytes, 0);
    }

    // The command at ticket() is being worked on: it holds itself open until pop().
    void begin() { remaining_[popped_ & mask_] = 1; }
    void add_write(uint64_t ticket) { ++remaining_[ticket & mask_]; }
    void pop() { --remaining_[popped_++ & mask_]; }
    void finish(uint64_t first, uint32_t count) {
        for (uint32_t i = 0; i < count; ++i) {
            --remaining_[(first + i) & mask_];
        }
    }

    // Tell the producers. `consumed` first: a completed command is a consumed one.
    void publish() {
        while (completed_ != popped_ && remaining_[completed_ & mask_] == 0) {
            ++completed_;
        }
        if (popped_ != told_popped_) {
            told_popped_ = popped_;
            ring_progress<StdAtomics>(consumed_, popped_);
        }
        if (completed_ != told_completed_) {
            told_completed_ = completed_;
            ring_progress<StdAtomics>(completed_word_, completed_);
        }
    }
    bool quiet() const { return completed_ == popped_; }

    const uint32_t index;
    bool begun = false;     // the command at ticket() was checked and partly staged
    Command current{};
    uint32_t key = 0;       // of its peer and signal
    uint64_t done = 0;      // its bytes that are staged

  private:
    PackedCommand *slots_;
    uint64_t *consumed_;
    uint64_t *completed_word_;
    uint64_t capacity_;
    uint64_t popped_ = 0;
    uint64_t completed_ = 0;
    uint64_t told_popped_ = 0;
    uint64_t told_completed_ = 0;
    std::vector<uint32_t> remaining_;  // per popped command: writes under way, plus one while it is staged
    uint64_t mask_;
    uint64_t looked_at_ = ~uint64_t{0};
    uint64_t looked_ns_ = 0;
};

}  // namespace uccl_ep
