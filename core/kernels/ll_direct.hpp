// What direct low-latency dispatch and combine have in common. In a group of one scale-up domain every row has a place
// of its own in the window that it goes to, so nobody numbers rows before they leave; and block b of a rank deals with
// tokens b, b + blocks, ... of all ranks, so it waits for block b of the others, never for the blocks beside it. All
// ranks launch as many blocks (the communicator agrees on that).
#pragma once

#include "stream.hpp"
#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE uint64_t *direct_flag(const Group &group, uint32_t owner, DirectFlag flag, uint32_t raiser,
                                     uint32_t block) {
    return reinterpret_cast<uint64_t *>(group.peer_data[owner] + group.layout.direct_flag_offset(flag, raiser, block));
}

// The two direct operations: what each raises, counts, and waits for. Verdicts name the signals of the packed ones.
struct DirectDispatch {
    static constexpr DirectFlag kRows = DirectFlag::kDispatchRows, kRead = DirectFlag::kDispatchRead;
    static constexpr DirectWords kWords = DirectWords::kPicks;
    static constexpr SignalKind kRowsSignal = SignalKind::kLowLatencyDispatch;
    static constexpr SignalKind kReadSignal = SignalKind::kLowLatencyDispatchCredit;
    static constexpr Phase kSend = Phase::kLowLatencyDispatchSend, kReceive = Phase::kLowLatencyDispatchReceive;
    static constexpr LowLatencyHalf kSent = LowLatencyHalf::kDispatchSend;
    static constexpr LowLatencyHalf kReceived = LowLatencyHalf::kDispatchReceive;
};
struct DirectCombine {
    static constexpr DirectFlag kRows = DirectFlag::kCombineRows, kRead = DirectFlag::kCombineRead;
    static constexpr DirectWords kWords = DirectWords::kWeights;
    static constexpr SignalKind kRowsSignal = SignalKind::kLowLatencyCombine;
    static constexpr SignalKind kReadSignal = SignalKind::kLowLatencyCombineCredit;
    static constexpr Phase kSend = Phase::kLowLatencyCombineSend, kReceive = Phase::kLowLatencyCombineReceive;
    static constexpr LowLatencyHalf kSent = LowLatencyHalf::kCombineSend;
    static constexpr LowLatencyHalf kReceived = LowLatencyHalf::kCombineReceive;
};

// The windows of the domain, a lane each, so that a row that is ready to leave need not wait for an address. The whole
// warp asks for the same one.
class PeerWindows {
  public:
    UCCL_EP_DEVICE explicit PeerWindows(const Group &group) : group_(group) {
        mine_ = device::lane() < group.num_ranks() ? group.peer_data[device::lane()] : nullptr;
    }
    UCCL_EP_DEVICE uint8_t *operator[](uint32_t rank) const {
        return rank < device::kWarpSize ? device::broadcast(mine_, rank) : group_.peer_data[rank];
    }

  private:
    const Group &group_;
    uint8_t *mine_;
};

// The picks of one token, a lane each; those beyond the lanes are read when they are asked for. The whole warp.
class TokenPicks {
  public:
    UCCL_EP_DEVICE TokenPicks(const void *topk_idx, uint32_t index_bytes, const LowLatencyShape &shape, uint32_t token)
        : topk_idx_(topk_idx),
          first_(uint64_t{token} * shape.num_topk),
          index_bytes_(index_bytes),
          num_experts_(shape.num_experts) {
        mine_ = device::lane() < shape.num_topk ? load(device::lane()) : -1;
    }
    // `k` is below the top-k, and may differ between lanes where it is their own.
    UCCL_EP_DEVICE int32_t operator()(uint32_t k) const { return k == device::lane() ? mine_ : load(k); }

  private:
    UCCL_EP_DEVICE int32_t load(uint32_t k) const {
        return static_cast<int32_t>(load_pick(topk_idx_, index_bytes_, first_ + k, num_experts_));
    }

    const void *topk_idx_;
    uint64_t first_;
    uint32_t index_bytes_, num_experts_;
    int32_t mine_;
};

// Calls `visit(rank)` for each rank that a token goes to, once, in the order of its first picks. `pick(k)` is an
// expert or negative. The whole warp.
template <class Pick, class Visit>
UCCL_EP_DEVICE void for_each_rank_of(Pick pick, uint32_t topk, uint32_t local_experts, Visit visit) {
    for (uint32_t base = 0; base < topk; base += device::kWarpSize) {
        const uint32_t k = base + device::lane();
        const int32_t expert = k < topk ? pick(k) : -1;
        const uint32_t rank = expert < 0 ? ~uint32_t{0} : static_cast<uint32_t>(expert) / local_experts;
        const device::LaneMask same = device::match(rank);  // of all lanes, also those without a pick
        bool first = expert >= 0 && (same & device::lanes_below()) == 0;
        for (uint32_t j = 0; j < base && first; ++j) {
            const int32_t earlier = pick(j);
            first = earlier < 0 || static_cast<uint32_t>(earlier) / local_experts != rank;
        }
        device::LaneMask left = device::ballot(first);
        while (left != 0) {
            visit(device::broadcast(rank, device::lowest_bit(left)));
            left &= left - 1;
        }
    }
}

// Wait until `block` of a peer has written the rows of operation `number`; one thread.
template <class Operation>
UCCL_EP_DEVICE bool direct_wait_rows(const Group &group, uint32_t peer, uint32_t block, uint64_t number) {
    const uint64_t *word = direct_flag(group, group.rank, Operation::kRows, peer, block);
    return wait_at_least(
        group, {Operation::kReceive, peer, group.layout.signal_index(Operation::kRowsSignal, peer, 0), number}, word);
}

// What the block has done before this kernel, by loads that are under way together. A kernel begins when those before
// it have ended, so when block b says of itself what it has read, all blocks have.
template <class Operation>
struct DirectCounts {
    uint64_t sent, received;
    bool failed;  // a kernel did: what it should have left may not be there

    UCCL_EP_DEVICE static DirectCounts of(const Group &group) {
        const uint32_t block = device::block_index();
        return {*Counters::direct(group, Operation::kSent, block),
                *Counters::direct(group, Operation::kReceived, block),
                *Counters::at(group, SingleCounter::kAborted) != 0};
    }
};

// Two sends before the first receive: there is no room yet. The whole warp.
template <class Operation>
UCCL_EP_DEVICE_SELDOM bool direct_wait_long_for_room(const Group &group, uint64_t received, uint64_t expected) {
    const uint32_t ranks = group.num_ranks(), block = device::block_index();
    // The others may be waiting for the same of this rank, also where it waits for none of them.
    for (uint32_t i = device::lane(); i < ranks; i += device::kWarpSize) {
        device::store_release_system(direct_flag(group, (group.rank + i) % ranks, Operation::kRead, group.rank, block),
                                     received);
    }
    bool ok = true;
    for (uint32_t i = device::lane() == 0 ? device::kWarpSize : device::lane(); i < ranks && ok;
         i += device::kWarpSize) {
        const uint32_t peer = (group.rank + i) % ranks;
        const uint64_t *word = direct_flag(group, group.rank, Operation::kRead, peer, block);
        ok = wait_at_least(
            group, {Operation::kSend, peer, group.layout.signal_index(Operation::kReadSignal, peer, 0), expected},
            word);
    }
    device::sync_lanes();
    return device::ballot(!ok) == 0;
}

// Wait until the other ranks have read the operation before the last, whose places this one takes. False also where an
// earlier kernel failed. The whole warp: each warp looks for itself, so that none waits for another.
template <class Operation>
UCCL_EP_DEVICE bool direct_wait_room(const Group &group, const DirectCounts<Operation> &counts) {
    const Span span(group, Activity::kWaitsForRoom);
    const uint32_t ranks = group.num_ranks(), block = device::block_index();
    const uint64_t number = counts.sent + 1, expected = number > 2 ? number - 2 : 0;
    bool there = true;
    for (uint32_t i = device::lane(); i < ranks; i += device::kWarpSize) {
        // Of this rank: what it has told the others. They wait for that here, and it may wait for their weights next.
        const uint64_t *word = direct_flag(group, group.rank, Operation::kRead, (group.rank + i) % ranks, block);
        there = device::load_acquire_system(word) >= expected && there;
    }
    device::sync_lanes();  // what each lane has seen is there for all: a ballot orders no memory
    // Another block may fail between the loads of two lanes, which must go the same way.
    if (device::ballot(!there || counts.failed) == 0) return true;
    return device::ballot(counts.failed) == 0 && direct_wait_long_for_room<Operation>(group, counts.received, expected);
}

// The warp of a block that meets the other ranks: it tells them what was written, and sees what they have. The last one,
// which has the least of a row.
UCCL_EP_DEVICE bool is_herald() { return device::warp_in_block() == device::warps_per_block() - 1; }

// Tell block b of every other rank that the rows of this operation are written, and what has been read before. Everything
// that this block wrote comes first, so the herald waits for the other warps, and for a fence; they go on. A receiver does
// not tell at its end what it has read: that would cost a fence, and nobody needs to know before the send of the next
// operation but one. The whole block.
template <class Operation>
UCCL_EP_DEVICE void direct_raise(const Group &group, const DirectCounts<Operation> &counts) {
    const Span span(group, Activity::kHandsOver);
    device::sync_block_for(is_herald());
    if (!is_herald()) return;
    // After a failure, now or in an earlier kernel, rows are not there: whoever waits for them ends by the failure. The
    // load is under way while the fence is.
    const uint64_t failed = device::load_relaxed_system(Counters::at(group, SingleCounter::kAborted));
    if (group.num_ranks() > 1) device::fence_system();
    if (failed != 0) return;
    const uint64_t number = counts.sent + 1;
    for (uint32_t i = device::lane(); i < group.num_ranks(); i += device::kWarpSize) {
        const uint32_t peer = (group.rank + i) % group.num_ranks(), block = device::block_index();
        // This rank keeps what it has told.
        device::store_relaxed_system(direct_flag(group, peer, Operation::kRead, group.rank, block), counts.received);
        if (i != 0) device::store_relaxed_system(direct_flag(group, peer, Operation::kRows, group.rank, block), number);
    }
}

}  // namespace uccl_ep
