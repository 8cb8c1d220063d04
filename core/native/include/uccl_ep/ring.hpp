// The ring algorithm, once: kernels push with it, proxies pop with it, and core/verification checks
// this very source under a weak memory model.
//
// `Atomics` says how a word is loaded and stored. It provides (all static):
//   fetch_add_device(word, n)       relaxed read-modify-write among producers, device scope
//   load_relaxed_device(word)       among producers
//   store_release_device(word, v)   among producers
//   load_acquire_system(word)       across the CPU and the device
//   store_release_system(word, v)
//   load_relaxed_system(word)
//   acquire_fence_system()          turns the relaxed loads before it into acquires
//   release_fence_system()          turns the relaxed stores behind it into releases
//   fence_system()                  both
//   store_slot(slot, packed)        four relaxed system-scope stores, in any order
// `Ring` has the members of RingView (command.hpp).
//
// Rules, each with a mutant in core/verification that shows what its absence breaks:
//   - every word of a command carries the phase; a slot is valid when all four match;
//   - what a producer wrote before a push is visible to the consumer: release fence, then the words. The
//     one fence of a push stands between taking the ticket and looking at the progress: it acquires the
//     progress too, and the machine carries out fence, ticket and look together rather than one by one;
//   - a warp pushes a batch in the same three steps: one lane takes the tickets, every lane that staged
//     something fences, all at the same time, the one lane waits for room, and a synchronisation of the
//     warp hands the first ticket on. A lane without a fence publishes nothing of its own, and one that is
//     not synchronised with the look may refill a slot that is being read;
//   - the consumer never reads the producers' head;
//   - a slot is refilled only after the consumer's progress, read with acquire, has passed it. The
//     producers' shared copy of that progress is itself released and acquired, since the producer
//     that refills a slot is often not the one that read the progress.
#pragma once

#include "uccl_ep/command.hpp"

namespace uccl_ep {

inline constexpr uint64_t kNoTicket = ~uint64_t{0};  // a push that was told to stop waiting

// The phase of the command with this ticket; the same as phase_of_lap(ticket / capacity), without
// the division.
UCCL_EP_DEVICE uint64_t phase_of_ticket(uint64_t ticket, uint64_t capacity) {
    return (ticket & capacity) != 0 ? 0 : uint64_t{1} << kPhaseBit;
}

// Tickets in a row, not yet to be filled in.
struct TakenTickets {
    uint64_t first;
    uint64_t end;
    uint64_t cached_consumed;  // the producers' copy of the progress: acquired by the fence behind it
};

// First step of a push: take `count` tickets in a row (1 <= count <= capacity). Behind it comes
// Atomics::fence_system(), in this thread and in every other one that staged what these commands name.
template <class Atomics, class Ring>
UCCL_EP_DEVICE TakenTickets ring_take(const Ring &ring, uint64_t count) {
    const uint64_t first = Atomics::fetch_add_device(ring.head, count);
    return {first, first + count, Atomics::load_relaxed_device(ring.cached_consumed)};
}

// Last step, behind the fence and in the thread that took the tickets: wait until their slots are free.
// Returns the first ticket; whoever fills in a ticket is synchronised with this call. `keep_waiting()` is
// called between looks: it may yield, and returns false to stop (time-out or abort). After kNoTicket the
// ring has a hole and must not be used again: the group is then closed.
template <class Atomics, class Ring, class KeepWaiting>
UCCL_EP_DEVICE uint64_t ring_wait_for_room(const Ring &ring, const TakenTickets &taken, KeepWaiting &&keep_waiting) {
    if (taken.end - taken.cached_consumed <= ring.capacity) {
        return taken.first;
    }
    for (;;) {
        const uint64_t consumed = Atomics::load_acquire_system(ring.consumed);
        if (taken.end - consumed <= ring.capacity) {
            // May move backwards when two producers refresh at once: a smaller value is only cautious.
            Atomics::store_release_device(ring.cached_consumed, consumed);
            return taken.first;
        }
        if (!keep_waiting()) {
            return kNoTicket;
        }
    }
}

// The three steps of one thread: everything it did before is visible to whoever pops a command that it
// fills in with ring_fill. Arguments and result as above.
template <class Atomics, class Ring, class KeepWaiting>
UCCL_EP_DEVICE uint64_t ring_reserve(const Ring &ring, uint64_t count, KeepWaiting &&keep_waiting) {
    const TakenTickets taken = ring_take<Atomics>(ring, count);
    Atomics::fence_system();
    return ring_wait_for_room<Atomics>(ring, taken, keep_waiting);
}

// Fill the slot of a ticket that this thread reserved.
template <class Atomics, class Ring>
UCCL_EP_DEVICE void ring_fill(const Ring &ring, uint64_t ticket, const Command &command) {
    Atomics::store_slot(&ring.slots[ticket & (ring.capacity - 1)],
                        pack(command, phase_of_ticket(ticket, ring.capacity)));
}

// Fill the slot of a ticket that another thread may have reserved, or before more was staged. Everything
// this thread did before (the payload it staged) is visible to whoever pops the command.
template <class Atomics, class Ring>
UCCL_EP_DEVICE void ring_publish(const Ring &ring, uint64_t ticket, const Command &command) {
    Atomics::release_fence_system();
    ring_fill<Atomics>(ring, ticket, command);
}

// Push one command; returns its ticket or kNoTicket. The command's local bytes may be reused when
// *completed > ticket.
template <class Atomics, class Ring, class KeepWaiting>
UCCL_EP_DEVICE uint64_t ring_push(const Ring &ring, const Command &command, KeepWaiting &&keep_waiting) {
    const Ring view = ring;  // read before the fence, which on a GPU empties the cache that it lies in
    const uint64_t ticket = ring_reserve<Atomics>(view, 1, keep_waiting);
    if (ticket != kNoTicket) {
        ring_fill<Atomics>(view, ticket, command);
    }
    return ticket;
}

// Wait until the local bytes of the command with this ticket may be reused. False when told to stop.
template <class Atomics, class Ring, class KeepWaiting>
UCCL_EP_DEVICE bool ring_wait_completed(const Ring &ring, uint64_t ticket, KeepWaiting &&keep_waiting) {
    while (Atomics::load_acquire_system(ring.completed) <= ticket) {
        if (!keep_waiting()) {
            return false;
        }
    }
    return true;
}

// Look at the command with this ticket (the consumer's own count of pops). False: not there yet.
template <class Atomics, class Slot>
UCCL_EP_DEVICE bool ring_peek(const Slot *slots, uint64_t capacity, uint64_t ticket, PackedCommand *out) {
    const Slot &slot = slots[ticket & (capacity - 1)];
    const uint64_t phase = phase_of_ticket(ticket, capacity);
    constexpr uint64_t kPhaseMask = uint64_t{1} << kPhaseBit;
    for (uint32_t i = 0; i < 4; ++i) {
        out->word[i] = Atomics::load_relaxed_system(&slot.word[i]);
        if ((out->word[i] & kPhaseMask) != phase) {
            return false;
        }
    }
    Atomics::acquire_fence_system();
    return true;
}

// Tell the producers that all commands before `ticket` were popped (`consumed`) or completed.
template <class Atomics, class Word>
UCCL_EP_DEVICE void ring_progress(Word *word, uint64_t ticket) {
    Atomics::store_release_system(word, ticket);
}

}  // namespace uccl_ep
