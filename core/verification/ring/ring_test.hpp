// Threads that push commands, one at a time or in reservations, and one that pops them.
#pragma once

#include "relacy_atomics.hpp"

namespace ring_model {

// All fields follow from the command's number, so a mixture of two commands shows.
inline uccl_ep::Command numbered(uint32_t producer, uint64_t index) {
    const uint64_t n = 1 + producer * 16 + index;
    return {uccl_ep::Operation::kWriteSignal,
            static_cast<uint32_t>(n),
            static_cast<uint32_t>(n * 3),
            n,
            n * 64,
            n * 128,
            n};
}

// Producers threads push Commands each (in reservations of Batch) through a ring of Capacity slots; each
// has Staging staging buffers, which it uses in turn. The last thread pops.
template <int Groups, int Producers, int Capacity, int Commands, int Staging, int Batch>
struct RingTest : rl::test_suite<RingTest<Groups, Producers, Capacity, Commands, Staging, Batch>, Producers + 1> {
    Slot slots[Capacity];
    Word head, cached_consumed, consumed, completed;
    rl::var<uint64_t> gone[Producers * Commands];    // popped, by ticket
    rl::var<uint64_t> staged[Producers * Staging];   // bytes that the transport will read
    Ring ring;

    void before() {
        for (auto &slot : slots) {
            for (auto &word : slot.word) {
                word.store(0, rl::mo_relaxed, $);
            }
        }
        for (Word *word : {&head, &cached_consumed, &consumed, &completed}) {
            word->store(0, rl::mo_relaxed, $);
        }
        for (auto &variable : gone) {
            variable($) = 0;
        }
        for (auto &variable : staged) {
            variable($) = 0;
        }
        ring = {slots, &head, &cached_consumed, &consumed, &completed, Capacity};
        completed_word = &completed;
        popped = gone;
        slots_of_ring = Capacity;
        words = {&slots[0].word[0], Groups, {}, 1, {}, {}, 0};
    }

    static bool keep_waiting() {
        rl::yield(1, $);
        return true;
    }

    void thread(unsigned index) {
        if (index < Producers) {
            produce(index);
        } else {
            consume();
        }
    }

    void produce(uint32_t producer) {
        uint64_t tickets[Commands] = {};
        for (int i = 0; i < Commands; i += Batch) {
            for (int j = i; j < i + Batch; ++j) {
                if (j >= Staging && mutation != Mutation::kNoCompletedWait) {
                    uccl_ep::ring_wait_completed<RelacyAtomics>(ring, tickets[j - Staging], keep_waiting);
                }
                staged[producer * Staging + j % Staging]($) = numbered(producer, j).value;
            }
            if (Batch == 1 && mutation != Mutation::kBatchAboveCapacity) {
                tickets[i] = uccl_ep::ring_push<RelacyAtomics>(ring, numbered(producer, i), keep_waiting);
                continue;
            }
            const uint64_t count = mutation == Mutation::kBatchAboveCapacity ? Capacity + 1 : Batch;
            const uint64_t first = uccl_ep::ring_reserve<RelacyAtomics>(ring, count, keep_waiting);
            for (int j = i; j < i + Batch; ++j) {
                tickets[j] = first + (j - i);
                uccl_ep::ring_publish<RelacyAtomics>(ring, tickets[j], numbered(producer, j));
            }
        }
    }

    void consume() {
        uint64_t next[Producers] = {};
        for (uint64_t ticket = 0; ticket < Producers * Commands; ++ticket) {
            if (mutation == Mutation::kConsumedTooEarly) {
                uccl_ep::ring_progress<RelacyAtomics>(&consumed, ticket + 1);
            }
            uccl_ep::PackedCommand packed;
            words.expected_phase = uccl_ep::phase_of_ticket(ticket, Capacity);
            while (!uccl_ep::ring_peek<RelacyAtomics>(slots, Capacity, ticket, &packed)) {
                rl::yield(1, $);
            }
            const uccl_ep::Command command = uccl_ep::unpack(packed);
            const uint32_t producer = static_cast<uint32_t>((command.value - 1) / 16);
            RL_ASSERT(command.value > 0 && producer < Producers);
            const uccl_ep::Command expected = numbered(producer, next[producer]);
            RL_ASSERT(command.value == expected.value && command.peer == expected.peer &&
                      command.signal == expected.signal && command.bytes == expected.bytes &&
                      command.local_offset == expected.local_offset &&
                      command.remote_offset == expected.remote_offset && command.operation == expected.operation);
            gone[ticket]($) = 1;
            uccl_ep::ring_progress<RelacyAtomics>(&consumed, ticket + 1);
            if (mutation == Mutation::kCompletedTooEarly) {
                uccl_ep::ring_progress<RelacyAtomics>(&completed, ticket + 1);
            }
            RL_ASSERT(uint64_t(staged[producer * Staging + next[producer] % Staging]($)) == expected.value);
            uccl_ep::ring_progress<RelacyAtomics>(&completed, ticket + 1);
            ++next[producer];
        }
    }
};

}  // namespace ring_model
