// The warps that work together, and what they do together.
#pragma once

#include "roles.hpp"

namespace uccl_ep {

// The warps that work a role together: one, all of their block, or some of it, so that one team's wait leaves the
// multiprocessor to the others. Each warp has its own copy of the team's state, and all of them make the
// same calls; the leader alone meets the peer.
struct Team {
    uint32_t index = 0, size = 1;  // this warp, in warps

    UCCL_EP_DEVICE static Team of(const TeamOfWarp &at) { return {device::warp_in_block() - at.first_warp, at.size}; }
    UCCL_EP_DEVICE bool leads() const { return index == 0 && device::lane() == 0; }
    UCCL_EP_DEVICE uint32_t thread() const { return index * device::kWarpSize + device::lane(); }
    UCCL_EP_DEVICE uint32_t threads() const { return size * device::kWarpSize; }
    UCCL_EP_DEVICE void sync() const {
        if (size == 1) {
            device::sync_warp();
        } else {
            device::sync_warps(first_warp(), size);
        }
    }
    // Whether the first lanes of all warps say so; also a sync().
    UCCL_EP_DEVICE bool all(bool ok) const {
        if (size != 1) return device::sync_warps_all(first_warp(), size, ok || device::lane() != 0);
        const uint32_t answer = device::broadcast(static_cast<uint32_t>(ok));
        device::sync_warp();
        return answer != 0;
    }

  private:
    UCCL_EP_DEVICE uint32_t first_warp() const { return device::warp_in_block() - index; }
};

// Calls `visit(item)` for items [0, count), shared out among the threads of the team. One at a time: with the loads of two
// under way together high throughput was 2 to 3 % slower (docs/performance.md), since copies of rows are what it waits for.
template <class Visit>
UCCL_EP_DEVICE void share_out(Team team, uint32_t count, Visit visit) {
    const uint32_t threads = team.threads();
    for (uint32_t item = team.thread(); item < count; item += threads) visit(item);
}

UCCL_EP_DEVICE TeamOfWarp team_of_warp(uint64_t team_ends) {
    return TeamOfWarp::of(team_ends, device::warp_in_block(), device::warps_per_block());
}

// Copy bytes that lie together, a piece for each warp of the team.
UCCL_EP_DEVICE void copy_shared_out(Team team, uint8_t *to, const uint8_t *from, uint64_t bytes) {
    const uint64_t piece = team.size == 1 ? bytes : align_up((bytes + team.size - 1) / team.size, 512);
    const uint64_t begin = piece * team.index;
    if (begin >= bytes) return;
    device::copy(to + begin, from + begin, bytes - begin < piece ? bytes - begin : piece);
}

}  // namespace uccl_ep
