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
    UCCL_EP_DEVICE TokenPicks(const void *topk_idx, uint32_t index_bytes, uint32_t topk, uint32_t token)
        : topk_idx_(topk_idx), first_(uint64_t{token} * topk), index_bytes_(index_bytes) {
        mine_ = device::lane() < topk ? load(device::lane()) : -1;
    }
    // `k` is below the top-k, and may differ between lanes where it is their own.
    UCCL_EP_DEVICE int32_t operator()(uint32_t k) const { return k == device::lane() ? mine_ : load(k); }

  private:
    UCCL_EP_DEVICE int32_t load(uint32_t k) const {
        return static_cast<int32_t>(load_index(topk_idx_, index_bytes_, first_ + k));
    }

    const void *topk_idx_;
    uint64_t first_;
    uint32_t index_bytes_;
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

// Wait for a flag; one thread. `phase` says what for.
UCCL_EP_DEVICE bool wait_flag(const Group &group, Phase phase, DirectFlag flag, SignalKind named, uint32_t peer,
                              uint32_t block, uint64_t number) {
    const uint64_t *word = direct_flag(group, group.rank, flag, peer, block);
    return wait_at_least(group, {phase, peer, group.layout.signal_index(named, peer, 0), number},
                         [word] { return device::load_acquire_system(word); });
}

// Wait until block b of every other rank has read what this block, b, wrote for it two operations ago. Also ends at
// an earlier failure: what earlier kernels should have left is then not there. The whole warp: each warp looks for
// itself, so that none waits for another.
UCCL_EP_DEVICE bool direct_wait_room(const Group &group, Phase phase, DirectFlag read, SignalKind named,
                                     uint64_t number) {
    bool ok = true;
    for (uint32_t i = device::lane(); i < group.num_ranks(); i += device::kWarpSize) {
        if (i == 0) {
            ok = !aborted(group);
        } else {
            ok = ok && wait_flag(group, phase, read, named, (group.rank + i) % group.num_ranks(), device::block_index(),
                                 number > 2 ? number - 2 : 0);
        }
    }
    device::sync_lanes();  // what each lane has seen is there for all: a ballot orders no memory
    return device::ballot(!ok) == 0;
}

// The same for what all blocks of a peer read: the head that this rank writes for it. The whole warp.
UCCL_EP_DEVICE bool direct_wait_head_room(const Group &group, Phase phase, DirectFlag read, SignalKind named,
                                          uint32_t peer, uint64_t number) {
    const uint64_t expected = number > 2 ? number - 2 : 0;
    constexpr uint32_t kAtOnce = 8;  // looks in flight; the fence behind them makes acquires of all
    bool ok = true;
    for (uint32_t base = device::lane(); base < device::num_blocks(); base += kAtOnce * device::kWarpSize) {
        uint64_t seen[kAtOnce];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t block = base + i * device::kWarpSize;
            seen[i] = block < device::num_blocks()
                          ? device::load_relaxed_system(direct_flag(group, group.rank, read, peer, block))
                          : expected;
        }
        bool all = true;
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) all = all && seen[i] >= expected;
        for (uint32_t i = 0; i < kAtOnce && !all; ++i) {
            const uint32_t block = base + i * device::kWarpSize;
            if (block < device::num_blocks()) ok = ok && wait_flag(group, phase, read, named, peer, block, expected);
        }
    }
    device::fence_system();
    device::sync_lanes();
    return device::ballot(!ok) == 0;
}

// Write entries [0, num_entries) of the head for a peer, `load(i)` each, once `has_room()`, which is asked once, while
// the first loads are on their way. False where there is none. The whole warp.
template <class Entry, class Load, class HasRoom>
UCCL_EP_DEVICE bool direct_write_head(Entry *head, uint32_t num_entries, Load load, HasRoom has_room) {
    constexpr uint32_t kAtOnce = 16;  // loads in flight
    bool asked = false;
    for (uint32_t base = device::lane(); base < num_entries || !asked; base += kAtOnce * device::kWarpSize) {
        Entry loaded[kAtOnce];
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t entry = base + i * device::kWarpSize;
            loaded[i] = entry < num_entries ? load(entry) : Entry{};
        }
        if (!asked && !has_room()) return false;
        asked = true;
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t entry = base + i * device::kWarpSize;
            if (entry < num_entries) head[entry] = loaded[i];
        }
    }
    return true;
}

// Tell a peer that its head is written. The whole warp that wrote it.
UCCL_EP_DEVICE void direct_raise_head(const Group &group, DirectFlag flag, uint32_t peer, uint64_t number) {
    device::sync_lanes();
    if (device::lane() == 0)
        device::store_release_system(direct_flag(group, peer, flag, group.rank, kDirectHead), number);
}

// Calls `send(peer)` for each peer whose head this block writes: on its last warp, while the others write rows. The
// blocks at the end have the fewest tokens.
template <class Send>
UCCL_EP_DEVICE void for_each_head_of_block(const Group &group, Send send) {
    const uint32_t ranks = group.num_ranks(), blocks = device::num_blocks();
    if (device::warp_in_block() != device::warps_per_block() - 1) return;
    for (uint32_t i = blocks - 1 - device::block_index(); i + 1 < ranks; i += blocks)
        send((group.rank + 1 + i) % ranks);
}

// Tell block b of every other rank; what this block wrote before comes first. The whole block.
UCCL_EP_DEVICE void direct_raise(const Group &group, DirectFlag flag, uint64_t number) {
    device::sync_block();
    const uint32_t threads = device::warps_per_block() * device::kWarpSize;
    const uint32_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
    for (uint32_t i = thread + 1; i < group.num_ranks(); i += threads) {
        const uint32_t peer = (group.rank + i) % group.num_ranks();
        device::store_release_system(direct_flag(group, peer, flag, group.rank, device::block_index()), number);
    }
}

}  // namespace uccl_ep
