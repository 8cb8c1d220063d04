// The receiving half of the counted plan: counts the writes of each message in any order and says when
// a signal may be raised. One thread per receiver; no I/O, so that models and tests drive it directly.
//
// Rules (core/verification shows what breaks without each):
//   - a bit per write index tells a duplicate from a missing write; a count alone would not;
//   - the last flag announces how many writes there are, in whatever order it arrives;
//   - message n completes only after n - 1, so a signal's value implies all messages up to it;
//   - 32 of 64 epochs may be open; the other half is closed, and its arrivals are told apart.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "uccl_ep/immediate.hpp"

namespace uccl_ep {

enum class Arrival : uint32_t {
    kCounted,        // one write more
    kRaise,          // the same, and the signal goes up to `complete(signal)`
    kDuplicate,      // this write was counted before
    kClosedEpoch,    // its message was complete before (or it lies beyond the window)
    kContradiction,  // two different last writes, or a write beyond the last
    kUnknownSignal,
};

class CountedReceiver {
  public:
    CountedReceiver(const ImmediateCodec &codec, uint32_t num_signals) : codec_(codec), signals_(num_signals) {}

    // Count one arrival. `signal` receives the index it names.
    Arrival accept(uint64_t immediate, uint32_t *signal) {
        const Immediate imm = codec_.decode(immediate);
        *signal = imm.signal;
        if (imm.signal >= signals_.size()) {
            return Arrival::kUnknownSignal;
        }
        if (signals_[imm.signal] == nullptr) {
            signals_[imm.signal] = std::make_unique<Signal>();  // once in the group's life
        }
        Signal &state = *signals_[imm.signal];
        const uint64_t next = state.complete + 1;
        const uint64_t ahead = (imm.epoch - next) % kEpochs;
        if (ahead >= kEpochWindow) {
            return Arrival::kClosedEpoch;
        }
        Message &message = state.open[(next + ahead) % kEpochWindow];
        if (!message.set(imm.index)) {
            return Arrival::kDuplicate;
        }
        ++message.seen;
        if (message.highest < imm.index) {
            message.highest = imm.index;
        }
        if (imm.last) {
            if (message.announced != 0) {
                return Arrival::kContradiction;
            }
            message.announced = imm.index + 1;
        }
        if (message.announced != 0 && message.highest >= message.announced) {
            return Arrival::kContradiction;
        }
        bool raised = false;
        while (state.open[(state.complete + 1) % kEpochWindow].complete()) {
            state.open[(state.complete + 1) % kEpochWindow].clear();
            ++state.complete;
            raised = true;
        }
        return raised ? Arrival::kRaise : Arrival::kCounted;
    }

    // The highest message of the signal that is complete, with all before it.
    uint64_t complete(uint32_t signal) const { return signals_[signal] == nullptr ? 0 : signals_[signal]->complete; }
    // Writes counted of the next message, and how many it has (0: not announced yet). For diagnosis.
    void progress(uint32_t signal, uint64_t *seen, uint64_t *announced) const {
        const Signal *state = signals_[signal].get();
        *seen = state == nullptr ? 0 : state->open[(state->complete + 1) % kEpochWindow].seen;
        *announced = state == nullptr ? 0 : state->open[(state->complete + 1) % kEpochWindow].announced;
    }

  private:
    struct Message {
        uint64_t first = 0;          // bits of the indices below 64: nearly all messages need no more
        std::vector<uint64_t> more;  // the others; keeps its capacity for the next message
        uint32_t seen = 0;
        uint32_t announced = 0;      // number of writes, 0: unknown
        uint32_t highest = 0;        // index seen

        bool set(uint32_t index) {
            uint64_t *word = &first;
            if (index >= 64) {
                if (index / 64 > more.size()) {
                    more.resize(index / 64, 0);
                }
                word = &more[index / 64 - 1];
            }
            const uint64_t bit = uint64_t{1} << (index % 64);
            const bool fresh = (*word & bit) == 0;
            *word |= bit;
            return fresh;
        }
        bool complete() const { return announced != 0 && seen == announced; }
        void clear() {
            first = 0;
            more.clear();
            seen = announced = highest = 0;
        }
    };
    struct Signal {
        uint64_t complete = 0;
        std::array<Message, kEpochWindow> open;
    };

    ImmediateCodec codec_;
    std::vector<std::unique_ptr<Signal>> signals_;
};

}  // namespace uccl_ep
