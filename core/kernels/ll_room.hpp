// When a packed low-latency message may take the place of the one of two operations ago: every rank has read that
// (credit), and the transport is done with the outbox that it lay in (completions).
//
// Where a transport is in play, a look at either is a load from host memory, and block 0 looks for all at a barrier of
// the grid: 4 us of an operation, for what nearly always is there. So the head of a dispatch says what its sender has
// read, of dispatches and of combines; whoever receives it, and finds its own commands of then completed, notes in device
// memory that there is room for the next dispatch and the next combine. A send that finds this note looks at nothing.
//
// A send that does not find it (the first ones; two sends before a receive; a second combine of one dispatch) looks,
// and before that tells the others what it has read itself, by signals: a rank that waits for that may be what this one
// waits for. Other sends tell it beside their messages, so that signals, of which the counted plan wants every number,
// never fall far behind. models/low_latency.pml is this protocol.
//
// Where ranks can be left out (`masked`), or there is no transport, credits are raised at the end of the receive half,
// and every send looks.
#pragma once

#include "ll_exchange.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE bool ll_credits_travel(const Group &group, const int32_t *masked) {
    return group.layout.has_remote && masked == nullptr;
}

// Whether there is known to be room for message `number`. All blocks of a launch get the same answer, though block 0 may
// note more meanwhile: it notes nothing less, and where the answer is no, nothing before a barrier that all have
// reached with theirs.
template <class Op>
UCCL_EP_DEVICE bool ll_knows_room(const Group &group, const int32_t *masked, uint64_t number) {
    return ll_credits_travel(group, masked) && device::load_relaxed_system(Counters::at(group, Op::kRoom)) >= number;
}

// Tell all ranks what this one has read, where they were not told. One block at a time calls this, all of it; its last
// warp does it, since others may have rows to wait for, and a fence and a push take 4 us.
template <class Op>
UCCL_EP_DEVICE void ll_tell(const Group &group) {
    if (device::warp_in_block() + 1 != device::warps_per_block()) return;
    uint64_t *told = Counters::at(group, Op::kTold);
    const uint64_t read = ll_done(group, Op::kReceived);
    if (*told >= read) return;
    const Span span(group, Activity::kGivesBack);
    for (uint32_t peer = device::lane(); peer < group.num_ranks(); peer += device::kWarpSize) {
        if (peer == group.rank) continue;
        raise_signal(group, peer, group.layout.signal_index(Op::kCredit, group.rank, 0), read, Op::kSend);
    }
    device::sync_warp();  // all lanes have seen what was told before
    if (device::lane() == 0) *told = read;
}

// The same at the end of a receive half, where credits do not travel otherwise. The whole block, the last one.
template <class Op>
UCCL_EP_DEVICE void ll_tell_at_once(const Group &group, uint64_t number) {
    const Span span(group, Activity::kGivesBack);
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    for (uint32_t peer = device::warp_in_block() * device::kWarpSize + device::lane(); peer < group.num_ranks();
         peer += threads) {
        if (peer == group.rank) continue;  // one that is left out may be taken in again, and needs its credits then
        raise_signal(group, peer, group.layout.signal_index(Op::kCredit, group.rank, 0), number, Op::kReceive);
    }
}

// Wait until there is room for message `number`: inboxes by the credits of the peers, outboxes by the completions of the
// transport. All words are looked at together, a lane each. The whole grid; false on failure.
template <class Op>
UCCL_EP_DEVICE bool ll_wait_room(const Group &group, uint64_t number, int32_t *masked) {
    const Span span(group, Activity::kWaitsForRoom);
    const Layout &layout = group.layout;
    if (ll_credits_travel(group, masked) && looks(group)) ll_tell<Op>(group);
    // After an earlier failure, what the kernels before should have left is not there.
    bool ok = device::warp_in_block() + 1 != device::warps_per_block() || device::lane() != 0 || !aborted(group);
    for (uint32_t peer = device::warp_in_block(); peer < group.num_ranks(); peer += device::warps_per_block()) {
        if (peer == group.rank || !looks(group) || (masked != nullptr && masked[peer] != 0)) continue;
        const uint32_t credit_signal = layout.signal_index(Op::kCredit, peer, 0);
        const uint32_t words = group.is_local(peer) ? 1 : 1 + layout.ll_parts;
        for (uint32_t word = device::lane(); word < words && ok; word += device::kWarpSize) {
            if (word == 0 && masked != nullptr) {
                ok = number <= 2 ||
                     wait_or_leave_out(group, {Op::kSend, peer, credit_signal, number - 2}, masked, Op::kSent, number);
                continue;
            }
            const uint64_t *address = word == 0 ? signal_address(group, peer, credit_signal) : nullptr;
            Awaited awaited{Op::kSend, peer, credit_signal, number > 2 ? number - 2 : 0};
            if (word != 0) {
                awaited.signal = layout.signal_index(Op::kRows, group.rank, word - 1);
                awaited.expected = *Op::ticket(group, number, peer, word - 1);  // 0: none was ever pushed
                address = ring_of(group, peer, awaited.signal).completed;
            }
            ok = awaited.expected == 0 || wait_at_least(group, awaited, address);
        }
    }
    return layout.has_remote ? sync_grid(group) : device::sync_block_all(ok);
}

inline constexpr uint64_t kMostBehind = 16;  // messages by which a credit's signal may lag behind what heads tell

// What block 0 finds out, in the receive half of a dispatch, of the room for the next dispatch and the next combine.
class RoomAhead {
  public:
    // Looks at the completions of the transport and at credits, without waiting: to be called before messages are waited
    // for, so that this costs no time. The whole block.
    UCCL_EP_DEVICE RoomAhead(const Group &group, const int32_t *masked, uint64_t number)
        : number_(number), combines_(ll_done(group, LowLatencyHalf::kCombineSend)) {
        dispatch_ = combine_ = ll_credits_travel(group, masked) && device::block_index() == 0;
        if (!dispatch_) return;
        // For each thread a part of an outbox, or a credit, of either operation, so that all looks are under way together.
        const uint32_t words = group.layout.ll_parts + 1, per_peer = 2 * words;
        const uint32_t threads = device::warps_per_block() * device::kWarpSize;
        for (uint32_t i = device::warp_in_block() * device::kWarpSize + device::lane();
             i < group.num_ranks() * per_peer; i += threads) {
            const uint32_t peer = i / per_peer, word = i % words;
            if (group.is_local(peer)) continue;
            if (i / words % 2 == 0) {
                dispatch_ = is_free<PackedDispatch>(group, number_ + 1, peer, word) && dispatch_;
            } else {
                combine_ = is_free<PackedCombine>(group, combines_ + 1, peer, word) && combine_;
            }
        }
    }

    // The head of a message has come. Each lane that has it.
    UCCL_EP_DEVICE void read(const MessageHeader &header) {
        // Counts are told modulo 2^32; nobody has read more than was sent, nor less than 2^32 fewer.
        dispatch_ = dispatch_ && static_cast<uint32_t>(number_) - header.words[kWordDispatchesRead] <= 1;
        combine_ = combine_ && static_cast<uint32_t>(combines_) - header.words[kWordCombinesRead] <= 1;
    }

    // Note what there is room for. The whole block, at the end.
    UCCL_EP_DEVICE void note(const Group &group) const {
        const bool dispatch = device::sync_block_all(dispatch_), combine = device::sync_block_all(combine_);
        if (device::warp_in_block() != 0 || device::lane() != 0) return;
        if (dispatch) store(group, SingleCounter::kLowLatencyDispatchRoom, number_ + 1);
        if (combine) store(group, SingleCounter::kLowLatencyCombineRoom, combines_ + 1);
    }

  private:
    UCCL_EP_DEVICE static void store(const Group &group, SingleCounter counter, uint64_t number) {
        device::store_relaxed_system(Counters::at(group, counter), number);
    }

    // Whether the transport is done with the part of an outbox that message `number` takes; or, behind the parts, whether
    // the signal of the peer's credit keeps up.
    template <class Op>
    UCCL_EP_DEVICE static bool is_free(const Group &group, uint64_t number, uint32_t peer, uint32_t part) {
        const bool credit = part == group.layout.ll_parts;
        const uint32_t signal = group.layout.signal_index(Op::kRows, group.rank, part);
        const uint64_t *address = credit ? signal_address(group, peer, group.layout.signal_index(Op::kCredit, peer, 0))
                                         : ring_of(group, peer, signal).completed;
        const uint64_t least =
            credit ? (number > kMostBehind ? number - kMostBehind : 0) : *Op::ticket(group, number, peer, part);
        return device::load_acquire_system(address) >= least;
    }

    uint64_t number_, combines_;  // the dispatch that is received, and the combine that was sent last
    bool dispatch_, combine_;  // as far as this thread knows
};

}  // namespace uccl_ep
