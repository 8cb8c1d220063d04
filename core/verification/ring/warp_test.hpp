// A warp that pushes together, and a thread that pops.
#pragma once

#include "ring_test.hpp"

namespace ring_model {

// A warp of two lanes pushes: the first takes a ticket for each, both fence, the first waits for room and
// hands the tickets on. The last thread pops. Nothing staged is used again,
// so that only the look at the progress protects a slot.
template <int Groups, int Capacity, int Rounds>
struct WarpTest : rl::test_suite<WarpTest<Groups, Capacity, Rounds>, 3> {
    using Single = RingTest<Groups, 2, Capacity, Rounds, Rounds, 1>;
    Single single;
    Word handed_on;  // 1 + the first ticket of the newest round: the warp's synchronisation
    Word arrived;    // rounds that the second lane has filled in

    void before() {
        single.before();
        handed_on.store(0, rl::mo_relaxed, $);
        arrived.store(0, rl::mo_relaxed, $);
    }

    void thread(unsigned index) {
        if (index == 2) {
            single.consume();
            return;
        }
        for (int round = 0; round < Rounds; ++round) {
            const uccl_ep::Command command = numbered(index, round);
            single.staged[index * Rounds + round]($) = command.value;
            const uint64_t ticket = index == 0 ? lead(round) : follow(round);
            words.tickets[index] = ticket;
            uccl_ep::ring_fill<RelacyAtomics>(single.ring, ticket, command);
            if (index == 1) {
                arrived.store(round + 1, rl::mo_relaxed, $);
            }
        }
    }

    uint64_t lead(int round) {
        const uccl_ep::TakenTickets taken = uccl_ep::ring_take<RelacyAtomics>(single.ring, 2);
        RelacyAtomics::fence_system();
        const uint64_t first = uccl_ep::ring_wait_for_room<RelacyAtomics>(single.ring, taken, Single::keep_waiting);
        while (arrived.load(rl::mo_relaxed, $) != static_cast<uint64_t>(round)) {
            Single::keep_waiting();
        }
        handed_on.store(1 + first, mutation == Mutation::kNoWarpSync ? rl::mo_relaxed : rl::mo_release, $);
        return first;
    }

    uint64_t follow(int round) {
        if (mutation != Mutation::kLaneWithoutFence) {
            RelacyAtomics::fence_system();
        }
        uint64_t seen;
        do {
            Single::keep_waiting();
            seen = handed_on.load(mutation == Mutation::kNoWarpSync ? rl::mo_relaxed : rl::mo_acquire, $);
        } while (seen != 1 + 2 * static_cast<uint64_t>(round));
        return seen;  // the first ticket, plus one
    }
};

}  // namespace ring_model
