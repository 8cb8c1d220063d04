// The immediate data of the counted plan. From bit 0: last (1), epoch (6), write index, signal.
//
//   signal  index into the receiver's signals
//   epoch   message number modulo 64; at most 32 messages of one signal are under way, so that an old
//           one is never taken for a new one
//   index   of the write within its message
//   last    this is the message's highest index: it has index + 1 writes
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace uccl_ep {

inline constexpr uint32_t kEpochBits = 6;
inline constexpr uint32_t kEpochs = 1u << kEpochBits;
inline constexpr uint32_t kEpochWindow = kEpochs / 2;  // messages of one signal under way, at most
inline constexpr uint32_t kMinIndexBits = 4;           // fewer writes per message would be useless
inline constexpr uint32_t kMaxIndexBits = 20;

struct Immediate {
    uint32_t signal;
    uint32_t epoch;
    uint32_t index;
    bool last;
};

class ImmediateCodec {
  public:
    // Throws std::invalid_argument where the fields do not fit.
    ImmediateCodec(uint32_t imm_bits, uint32_t num_signals) {
        while ((uint64_t{1} << signal_bits_) < num_signals) {
            ++signal_bits_;
        }
        const uint32_t usable = imm_bits >= 64 ? 64 : imm_bits >= 32 ? 32 : 0;
        const uint32_t taken = 1 + kEpochBits + signal_bits_;
        if (usable < taken + kMinIndexBits) {
            throw std::invalid_argument("the counted plan needs " + std::to_string(taken + kMinIndexBits) +
                                        " bits of immediate data for " + std::to_string(num_signals) +
                                        " signals, the transport has " + std::to_string(imm_bits) +
                                        ": use fewer channels or ranks, or another plan");
        }
        index_bits_ = usable - taken < kMaxIndexBits ? usable - taken : kMaxIndexBits;
    }

    uint64_t max_writes() const { return uint64_t{1} << index_bits_; }  // of one message
    uint32_t signal_bits() const { return signal_bits_; }
    uint32_t index_bits() const { return index_bits_; }

    uint64_t encode(const Immediate &imm) const {
        return static_cast<uint64_t>(imm.last) | (uint64_t{imm.epoch} << 1) |
               (uint64_t{imm.index} << (1 + kEpochBits)) | (uint64_t{imm.signal} << (1 + kEpochBits + index_bits_));
    }
    // The signal may be out of range: bits come from the wire.
    Immediate decode(uint64_t bits) const {
        Immediate imm{};
        imm.last = (bits & 1) != 0;
        imm.epoch = static_cast<uint32_t>(bits >> 1) & (kEpochs - 1);
        imm.index = static_cast<uint32_t>((bits >> (1 + kEpochBits)) & (max_writes() - 1));
        const uint64_t signal = bits >> (1 + kEpochBits + index_bits_);
        imm.signal = signal > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(signal);
        return imm;
    }

  private:
    uint32_t signal_bits_ = 0;
    uint32_t index_bits_ = 0;
};

}  // namespace uccl_ep
