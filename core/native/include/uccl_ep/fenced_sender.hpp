// The sending half of the fenced plan for one signal of one peer: which value may be written now. No
// I/O, so that models and tests drive it directly.
//
// Rules: the signal says n only when every write of the messages up to n is proven placed; one write of
// the signal is under way at a time, since an older one that lands last would take the signal back;
// while one is under way, newer values coalesce.
#pragma once

#include <array>
#include <cstdint>

#include "uccl_ep/immediate.hpp"

namespace uccl_ep {

class FencedSender {
  public:
    // May a write of message `value` begin? False: 32 messages are under way.
    bool admit(uint64_t value) const { return value - complete_ <= kEpochWindow; }

    // A write of message `value` was posted. Numbers skipped since the last message are empty ones.
    void write(uint64_t value) {
        begin(value);
        ++open_[value % kEpochWindow].outstanding;
    }
    void end(uint64_t value) {
        begin(value);
        open_[value % kEpochWindow].ended = true;
        advance();
    }
    void placed(uint64_t value) {
        --open_[value % kEpochWindow].outstanding;
        advance();
    }

    // A value to write now, 0: none. The caller writes it and tells signal_placed() when it is there.
    uint64_t take_signal() {
        if (in_flight_ || complete_ == written_) {
            return 0;
        }
        in_flight_ = true;
        written_ = complete_;
        return written_;
    }
    void signal_placed() { in_flight_ = false; }
    bool wants_signal() const { return !in_flight_ && complete_ != written_; }
    bool quiet() const { return !in_flight_ && complete_ == written_ && complete_ == begun_; }

  private:
    struct Message {
        uint32_t outstanding = 0;
        bool ended = false;
    };

    void begin(uint64_t value) {
        while (begun_ < value) {
            ++begun_;
            open_[begun_ % kEpochWindow] = Message{0, begun_ != value};
        }
    }
    void advance() {
        while (complete_ < begun_) {
            const Message &next = open_[(complete_ + 1) % kEpochWindow];
            if (!next.ended || next.outstanding != 0) {
                return;
            }
            ++complete_;
        }
    }

    std::array<Message, kEpochWindow> open_{};
    uint64_t begun_ = 0;
    uint64_t complete_ = 0;  // all messages up to this one are placed
    uint64_t written_ = 0;
    bool in_flight_ = false;
};

}  // namespace uccl_ep
