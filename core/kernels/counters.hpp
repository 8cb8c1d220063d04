// Where the message counters of a communicator lie in its device memory. They only grow, advance in
// the kernels, and live as long as the group: a captured graph that is replayed goes on counting.
#pragma once

#include "parameters.hpp"

namespace uccl_ep {

enum class MessageCounter : uint32_t {
    kDirectSent = 0,      // [peer][channel] slots sent into my direct ring at peer
    kDirectReceived = 1,  // [peer][channel]
    kRailSent = 2,        // [domain][channel]
    kRailReceived = 3,
    kForwardSent = 4,     // [source domain * ranks_per_domain + receiver's place][channel]
    kForwardReceived = 5, // [source rank][channel]
    // [operation][parity][peer][part]: 1 + ticket of the last command that reads that part of an outbox
    kLowLatencyTicket = 6,
    kLowLatencyDecision = 10,  // [half of an operation][peer]: 2 * message + whether it came, see wait_or_leave_out
    kLowLatencyRows = 14,   // [source] rows of its message of the dispatch at hand; not a count
    kSingles = 15,          // the single counters below
    kCount = 16,
};

enum class SingleCounter : uint32_t {
    // Of packed low-latency operations where a transport is in play (ll_room.hpp, ll_exchange.hpp), by message number:
    kLowLatencyDispatchRoom = 0,  // up to which one every rank has room, and every outbox
    kLowLatencyCombineRoom = 1,
    kLowLatencyDispatchTold = 2,  // up to which one the others were told that theirs have been read
    kLowLatencyCombineTold = 3,
    kLowLatencyDispatchWritten = 4,  // up to which one the blocks of this rank have written what is theirs
    kLowLatencyCombineWritten = 5,
    kLowLatencyDispatchArrived = 6,  // up to which one those of all ranks have come, and their heads are handed on
    kLowLatencyCombineArrived = 7,
    kBarrier = 8,
    kGridArrived = 9,
    kGridRound = 10,       // barriers of all blocks that were passed
    kBlocksDone = 11,      // blocks of the launch at hand that have done their part
    kBlocksWritten = 12,   // blocks of the launch at hand that have written their rows
    kAborted = 13,  // not a count: non-zero once a kernel of this rank has seen that somebody failed
};

enum class LowLatencyHalf : uint32_t { kDispatchSend = 0, kDispatchReceive = 1, kCombineSend = 2, kCombineReceive = 3 };

struct Counters {
    UCCL_EP_DEVICE static uint64_t stride(const Layout &layout) {
        const uint64_t entries = uint64_t{layout.num_ranks} * layout.num_channels;
        return entries > 16 ? entries : 16;
    }
    // kLowLatencyTicket takes four strides: dispatch and combine, one a parity each.
    UCCL_EP_DEVICE static uint64_t bytes(const Layout &layout) {
        const uint64_t entries = static_cast<uint64_t>(MessageCounter::kCount) * stride(layout);
        return (entries + 4 * uint64_t{kDirectBlocks + kPackedBlocks}) * sizeof(uint64_t);
    }
    // Operations that a block of direct low-latency kernels has done, of this half: its own, so that no block waits for
    // the others of its launch.
    UCCL_EP_DEVICE static uint64_t *direct(const Group &group, LowLatencyHalf half, uint32_t block) {
        return group.counters + static_cast<uint64_t>(MessageCounter::kCount) * stride(group.layout) +
               static_cast<uint64_t>(half) * kDirectBlocks + block;
    }
    // Likewise of packed ones. Every launch of them has as many blocks, or their counts would differ.
    UCCL_EP_DEVICE static uint64_t *packed(const Group &group, LowLatencyHalf half, uint32_t block) {
        return direct(group, LowLatencyHalf::kDispatchSend, 0) + 4 * kDirectBlocks +
               static_cast<uint64_t>(half) * kPackedBlocks + block;
    }
    UCCL_EP_DEVICE static uint64_t *at(const Group &group, MessageCounter counter, uint32_t peer, uint32_t channel) {
        return group.counters + static_cast<uint64_t>(counter) * stride(group.layout) +
               uint64_t{peer} * group.layout.num_channels + channel;
    }
    UCCL_EP_DEVICE static uint64_t *at(const Group &group, SingleCounter counter) {
        return group.counters + static_cast<uint64_t>(MessageCounter::kSingles) * stride(group.layout) +
               static_cast<uint64_t>(counter);
    }
    UCCL_EP_DEVICE static uint64_t *ticket(const Group &group, uint32_t parity, uint32_t peer, uint32_t part) {
        return group.counters +
               (static_cast<uint64_t>(MessageCounter::kLowLatencyTicket) + parity) * stride(group.layout) +
               uint64_t{peer} * group.layout.num_channels + part;
    }
    UCCL_EP_DEVICE static uint64_t *combine_ticket(const Group &group, uint32_t parity, uint32_t peer, uint32_t part) {
        return ticket(group, 2 + parity, peer, part);
    }
    UCCL_EP_DEVICE static uint64_t *rows(const Group &group, uint32_t source) {
        return group.counters + static_cast<uint64_t>(MessageCounter::kLowLatencyRows) * stride(group.layout) + source;
    }
    UCCL_EP_DEVICE static uint64_t *decision(const Group &group, LowLatencyHalf half, uint32_t peer) {
        return group.counters +
               (static_cast<uint64_t>(MessageCounter::kLowLatencyDecision) + static_cast<uint64_t>(half)) *
                   stride(group.layout) +
               peer;
    }
};

}  // namespace uccl_ep
