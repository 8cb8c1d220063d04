// The primitives of uccl_ep/ring.hpp, made of those of Relacy, less what the mutation takes out of them. Relacy has
// one scope: a fence or access whose scope is too narrow counts as no fence at all.
#pragma once

#include <cstdint>

#include <relacy/relacy.hpp>

#include UCCL_EP_RING_HEADER
#include "mutations.hpp"

namespace ring_model {

using Word = rl::atomic<uint64_t>;

struct Slot {
    Word word[4];
};

struct Ring {
    Slot *slots;
    Word *head;
    Word *cached_consumed;
    Word *consumed;
    Word *completed;
    uint64_t capacity;
};

// What a slot's words hold here is the place of a command in this list, and word i tears away from the
// others only with its group, i modulo `groups`: 4 is the machine, 2 is small enough for a full search.
struct Words {
    const Word *first;
    uint64_t groups;
    uccl_ep::PackedCommand published[16];  // 0: the zeros that slots start with
    uint64_t count;
    uint64_t seen[4];     // the consumer's last loads
    uint64_t tickets[3];  // of each thread, the next one it fills
    uint64_t expected_phase;
};
inline Words words;

// Written when the command with this ticket was popped. Whoever refills its slot reads it, which is a data
// race without a happens-before edge from the pop.
inline rl::var<uint64_t> *popped = nullptr;
inline uint64_t slots_of_ring = 0;

// The progress words are told apart by address, so that each order can be taken away on its own.
inline Word *completed_word = nullptr;
inline constexpr uint64_t kPhase = uint64_t{1} << uccl_ep::kPhaseBit;

struct RelacyAtomics {
    static uint64_t fetch_add_device(Word *word, uint64_t n) {
        if (mutation == Mutation::kTicketNotAtomic) {
            const uint64_t old = word->load(rl::mo_relaxed, $);
            word->store(old + n, rl::mo_relaxed, $);
            return words.tickets[rl::thread_index()] = old;
        }
        return words.tickets[rl::thread_index()] = word->fetch_add(n, rl::mo_relaxed, $);
    }
    static uint64_t load_relaxed_device(Word *word) {
        if (mutation == Mutation::kNoFullCheck) {
            return words.tickets[rl::thread_index()];  // "everything before mine was consumed"
        }
        return word->load(rl::mo_relaxed, $) + (mutation == Mutation::kOneSlotTooMany ? 1 : 0);
    }
    static void store_release_device(Word *word, uint64_t value) {
        word->store(value, mutation == Mutation::kRelaxedCachedCopy ? rl::mo_relaxed : rl::mo_release, $);
    }
    static uint64_t load_acquire_system(Word *word) {
        const bool relaxed =
            mutation == (word == completed_word ? Mutation::kRelaxedCompletedLoad : Mutation::kRelaxedConsumedLoad);
        return word->load(relaxed ? rl::mo_relaxed : rl::mo_acquire, $) +
               (mutation == Mutation::kOneSlotTooMany && word != completed_word ? 1 : 0);
    }
    static void store_release_system(Word *word, uint64_t value) {
        const bool relaxed =
            mutation == (word == completed_word ? Mutation::kRelaxedCompletedStore : Mutation::kRelaxedConsumedStore);
        word->store(value, relaxed ? rl::mo_relaxed : rl::mo_release, $);
    }
    // A word of a slot: ring_peek reads them from 0 to 3.
    static uint64_t load_relaxed_system(const Word *word) {
        const uint64_t index = (word - words.first) % 4;
        if (index < words.groups) {
            words.seen[index] = const_cast<Word *>(word)->load(rl::mo_relaxed, $);
        }
        const uint64_t value = words.published[words.seen[index % words.groups]].word[index];
        if (mutation == Mutation::kOnePhaseBit) {  // what stands behind word 0 passes for new with it
            const uint64_t phase = words.published[words.seen[0]].word[0] & kPhase;
            return (value & ~kPhase) | phase;
        }
        if (mutation == Mutation::kNoPhase && value != 0) {
            return (value & ~kPhase) | words.expected_phase;
        }
        return value;
    }
    static void acquire_fence_system() {
        if (mutation != Mutation::kNoAcquireFence) {
            rl::atomic_thread_fence(rl::mo_acquire, $);
        }
    }
    static void release_fence_system() {
        if (mutation != Mutation::kNoReleaseFence) {
            rl::atomic_thread_fence(rl::mo_release, $);
        }
    }
    // Of a push: publishes what was staged, and acquires the producers' shared copy of the progress.
    static void fence_system() {
        if (mutation != Mutation::kNoReleaseFence && mutation != Mutation::kFenceWithoutAcquire) {
            rl::atomic_thread_fence(rl::mo_acq_rel, $);
        } else if (mutation == Mutation::kNoReleaseFence) {
            rl::atomic_thread_fence(rl::mo_acquire, $);
        } else {
            rl::atomic_thread_fence(rl::mo_release, $);
        }
    }
    // "In any order": the weak memory model reorders relaxed stores to different words by itself.
    static void store_slot(Slot *slot, const uccl_ep::PackedCommand &packed) {
        const uint64_t ticket = words.tickets[rl::thread_index()]++;
        if (ticket >= slots_of_ring) {
            (void)static_cast<uint64_t>(popped[ticket - slots_of_ring]($));
        }
        words.published[words.count] = packed;
        const uint64_t place = words.count++;
        for (uint64_t i = 0; i < words.groups; ++i) {
            slot->word[i].store(place, rl::mo_relaxed, $);
        }
    }
};

}  // namespace ring_model
