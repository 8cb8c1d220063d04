// The shipped ring (uccl_ep/ring.hpp, command.hpp) under Relacy, a checker for the C++11 memory model.
//
//   ring_relacy CONFIGURATION MUTATION SEARCH LIMIT
//
// SEARCH is full, bound:N (at most N preemptions) or random; LIMIT is a number of executions (0: none).
// Prints one line "verdict=... executions=..." and, for a failure, Relacy's word for it.
//
// Checked in every execution: each command is popped exactly once, in the order of its tickets, with
// all fields of one and the same command; the staged bytes it names are visible; a slot is refilled and
// staged bytes are overwritten only with a happens-before edge from their last use; nobody waits for
// ever. Relacy has one scope: a fence or access whose scope is too narrow counts as no fence at all.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>

#include <relacy/relacy.hpp>

#include UCCL_EP_RING_HEADER

namespace {

enum class Mutation {
    kNone,
    kNoReleaseFence,       // publish
    kNoAcquireFence,       // poll
    kRelaxedConsumedStore,
    kRelaxedConsumedLoad,
    kRelaxedCachedCopy,    // the producers' shared copy of `consumed` without release
    kFenceWithoutAcquire,  // nor is it acquired
    kNoFullCheck,
    kOnePhaseBit,          // only word 0 says whether the command is new
    kConsumedTooEarly,     // published before the slot was read
    kCompletedTooEarly,    // published before the transport is done with the staged bytes
    kRelaxedCompletedStore,
    kRelaxedCompletedLoad,
    kNoCompletedWait,      // staging reused after the push
    kBatchAboveCapacity,   // one reservation of more slots than there are
    kTicketNotAtomic,      // head advanced by a load and a store
    kNoPhase,              // a slot that is not zero passes for new, whatever its lap
    kOneSlotTooMany,       // the full check lets capacity + 1 commands in
    kLaneWithoutFence,     // of a warp, only the lane that takes the tickets fences
    kNoWarpSync,           // the other lanes learn their tickets without being synchronised
};

constexpr const char *kNames[] = {"none",
                                  "no_release_fence",
                                  "no_acquire_fence",
                                  "relaxed_consumed_store",
                                  "relaxed_consumed_load",
                                  "relaxed_cached_copy",
                                  "fence_without_acquire",
                                  "no_full_check",
                                  "one_phase_bit",
                                  "consumed_too_early",
                                  "completed_too_early",
                                  "relaxed_completed_store",
                                  "relaxed_completed_load",
                                  "no_completed_wait",
                                  "batch_above_capacity",
                                  "ticket_not_atomic",
                                  "no_phase",
                                  "one_slot_too_many",
                                  "lane_without_fence",
                                  "no_warp_sync"};

Mutation mutation = Mutation::kNone;

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
Words words;

// Written when the command with this ticket was popped. Whoever refills its slot reads it, which is a data
// race without a happens-before edge from the pop.
rl::var<uint64_t> *popped = nullptr;
uint64_t slots_of_ring = 0;

// The progress words are told apart by address, so that each order can be taken away on its own.
Word *completed_word = nullptr;
constexpr uint64_t kPhase = uint64_t{1} << uccl_ep::kPhaseBit;

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
        if (mutation == Mutation::kOnePhaseBit) { // what stands behind word 0 passes for new with it
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

// All fields follow from the command's number, so a mixture of two commands shows.
uccl_ep::Command numbered(uint32_t producer, uint64_t index) {
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

using Test = bool (*)(rl::test_params &);

struct Configuration {
    const char *name;
    Test test;
};

const Configuration kConfigurations[] = {
    // groups of words, producers, capacity, commands of each, staging buffers of each, batch
    {"spsc_small", &rl::simulate<RingTest<4, 1, 1, 2, 2, 1>>},
    {"spsc_staging", &rl::simulate<RingTest<4, 1, 2, 3, 1, 1>>},
    {"mpsc_small", &rl::simulate<RingTest<4, 2, 1, 1, 1, 1>>},
    {"mpsc_medium", &rl::simulate<RingTest<4, 2, 2, 2, 2, 1>>},
    {"spsc", &rl::simulate<RingTest<4, 1, 2, 4, 2, 2>>},
    {"mpsc", &rl::simulate<RingTest<4, 2, 2, 3, 2, 1>>},
    // groups of words, capacity, rounds
    {"warp", &rl::simulate<WarpTest<4, 2, 3>>},
    {"warp_small", &rl::simulate<WarpTest<4, 2, 2>>},
};

int usage() {
    std::cerr << "usage: ring_relacy CONFIGURATION MUTATION full|bound:N|random LIMIT\n";
    return 2;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 5) {
        return usage();
    }
    Test test = nullptr;
    for (const Configuration &configuration : kConfigurations) {
        test = std::strcmp(configuration.name, argv[1]) == 0 ? configuration.test : test;
    }
    bool known = false;
    for (size_t i = 0; i < sizeof kNames / sizeof *kNames; ++i) {
        if (std::strcmp(kNames[i], argv[2]) == 0) {
            mutation = static_cast<Mutation>(i);
            known = true;
        }
    }
    const std::string search = argv[3];
    if (test == nullptr || !known) {
        return usage();
    }
    rl::test_params params;
    params.output_stream = &std::cerr;  // for a failure: the execution, step by step
    params.progress_stream = &std::cerr;
    params.execution_depth_limit = 4000;
    const uint64_t limit = std::stoull(argv[4]);
    params.iteration_count = limit == 0 ? ~rl::iteration_t{0} >> 1 : limit;
    if (search == "full") {
        params.search_type = rl::sched_full;
    } else if (search == "random") {
        params.search_type = rl::sched_random;
    } else if (search.rfind("bound:", 0) == 0) {
        params.search_type = rl::sched_bound;
        params.context_bound = std::stoul(search.substr(6));
    } else {
        return usage();
    }
    const bool passed = test(params);
    std::cout << "verdict=" << (passed ? "pass" : "fail") << " executions=" << params.stop_iteration << " reason='"
              << rl::test_result_str(params.test_result) << "'\n";
    return 0;
}
