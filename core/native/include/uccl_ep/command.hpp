// A command: what a kernel pushes into a ring of the channel and a proxy pops. One source for the
// device (core/kernels/channel.hpp pushes) and the CPU (core/native/src/command_staging.cpp pops).
//
//   "write `bytes` bytes at `local_offset` of my data window to `remote_offset` of rank `peer`'s
//    data window; when this and all earlier writes of the same message are there, raise signal
//    `signal` of that rank's control window to `value`."
//
// 32 bytes, four 64-bit words. Bit 63 of every word is the phase of the lap the command belongs to:
// the PTX memory model lets a vector store tear at 64 bits, so each word says for itself whether it
// is new (core/verification/ has the model, and the mutant with one phase bit, which is torn).
#pragma once

#include "uccl_ep/integers.hpp"

#ifndef UCCL_EP_DEVICE
#define UCCL_EP_DEVICE inline
#endif

namespace uccl_ep {

enum class Operation : uint32_t {
    kWrite = 1,        // one write of a message that goes on: the signal is not raised yet
    kWriteSignal = 2,  // the last (or only) write of a message, then the signal; bytes may be 0
};

struct Command {
    Operation operation;
    uint32_t peer;           // rank
    uint32_t signal;         // index into the receiver's signals (layout.hpp)
    uint64_t bytes;
    uint64_t local_offset;   // bytes into the data window
    uint64_t remote_offset;  // bytes into the data window
    uint64_t value;          // what the signal is raised to; the message number, counted from 1
};

inline constexpr uint32_t kPeerBits = 12;     // 4096 ranks
inline constexpr uint32_t kOperationBits = 3;
inline constexpr uint32_t kBytesBits = 25;    // 16 MiB inclusive
inline constexpr uint32_t kOffsetBits = 36;   // 64 GiB windows
inline constexpr uint32_t kSignalBits = 26;
inline constexpr uint32_t kValueLowBits = 63; // the 64th bit lies in word 0
inline constexpr uint32_t kPhaseBit = 63;

inline constexpr uint64_t kMaxWriteBytes = uint64_t{16} << 20;
inline constexpr uint32_t kMaxRanks = 1u << kPeerBits;
inline constexpr uint64_t kMaxWindowBytes = uint64_t{1} << kOffsetBits;
inline constexpr uint32_t kMaxSignals = 1u << kSignalBits;

static_assert(kOperationBits + kPeerBits + kBytesBits + 1 <= kPhaseBit, "word 0 overflows");
static_assert(kOffsetBits + kSignalBits <= kPhaseBit, "word 1 overflows");
static_assert(kMaxWriteBytes < (uint64_t{1} << kBytesBits), "a 16 MiB write must be representable");

struct alignas(32) PackedCommand {
    uint64_t word[4];
};
static_assert(sizeof(PackedCommand) == 32, "two commands share a 64-byte cache line");

// `lap` is ticket / capacity; its low bit is the phase. Slots start as all zeros, so the first lap
// must publish phase 1: the phase is the complement of the lap's low bit.
UCCL_EP_DEVICE uint64_t phase_of_lap(uint64_t lap) { return (~lap & 1u) << kPhaseBit; }

UCCL_EP_DEVICE constexpr uint64_t low_bits(uint32_t bits) { return (uint64_t{1} << bits) - 1; }

UCCL_EP_DEVICE PackedCommand pack(const Command &command, uint64_t phase) {
    PackedCommand packed;
    packed.word[0] = phase | static_cast<uint64_t>(command.operation) |
                     (static_cast<uint64_t>(command.peer) << kOperationBits) |
                     (command.bytes << (kOperationBits + kPeerBits)) |
                     ((command.value >> kValueLowBits) << (kOperationBits + kPeerBits + kBytesBits));
    packed.word[1] = phase | command.local_offset | (static_cast<uint64_t>(command.signal) << kOffsetBits);
    packed.word[2] = phase | command.remote_offset;
    packed.word[3] = phase | (command.value & low_bits(kValueLowBits));
    return packed;
}

UCCL_EP_DEVICE Command unpack(const PackedCommand &packed) {
    Command command;
    command.operation = static_cast<Operation>(packed.word[0] & low_bits(kOperationBits));
    command.peer = static_cast<uint32_t>((packed.word[0] >> kOperationBits) & low_bits(kPeerBits));
    command.bytes = (packed.word[0] >> (kOperationBits + kPeerBits)) & low_bits(kBytesBits);
    command.local_offset = packed.word[1] & low_bits(kOffsetBits);
    command.signal = static_cast<uint32_t>((packed.word[1] >> kOffsetBits) & low_bits(kSignalBits));
    command.remote_offset = packed.word[2] & low_bits(kOffsetBits);
    command.value = (packed.word[3] & low_bits(kValueLowBits)) |
                    (((packed.word[0] >> (kOperationBits + kPeerBits + kBytesBits)) & 1) << kValueLowBits);
    return command;
}

// One ring as both sides see it. Memory: `slots` and `progress` lie in host memory that the device
// can reach; `head` lies in the device's memory and is advanced by device-scope atomics only.
struct RingView {
    PackedCommand *slots;
    uint64_t *head;             // next ticket; written by producers
    uint64_t *cached_consumed;  // producers' copy of *consumed, refreshed only when the ring looks full
    const uint64_t *consumed;   // commands popped, in order; written by the proxy
    const uint64_t *completed;  // commands whose local bytes may be reused, in order; written by the proxy
    uint64_t capacity;          // a power of two
};

}  // namespace uccl_ep
