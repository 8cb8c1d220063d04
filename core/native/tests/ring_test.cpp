// The ring between real threads: order per producer, nothing lost or doubled, wrap, full, interruption.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "uccl_ep/channel.hpp"
#include "uccl_ep/look_away.hpp"

using namespace uccl_ep;

namespace {

struct Rings {
    Rings(uint32_t num_rings, uint64_t capacity)
        : host(Channel::host_bytes(num_rings, capacity) / 64),
          state(Channel::state_bytes(num_rings) / 64),
          channel(num_rings, capacity, address(host), address(host), address(state)) {}

    struct alignas(64) Line {
        uint64_t words[8] = {};
    };
    static uint64_t address(std::vector<Line> &lines) { return reinterpret_cast<uint64_t>(lines.data()); }

    std::vector<Line> host;
    std::vector<Line> state;
    Channel channel;
};

Command numbered(uint32_t producer, uint64_t number) {
    return Command{Operation::kWriteSignal,
                   producer,
                   static_cast<uint32_t>(number % kMaxSignals),
                   number % 1000,
                   number % kMaxWindowBytes,
                   (number * 3) % kMaxWindowBytes,
                   number};
}

bool forever() {
    sched_yield();
    return true;
}

}  // namespace

TEST(one_producer_wraps_many_times) {
    for (const uint64_t capacity : {2u, 8u}) {
        Rings rings(1, capacity);
        const RingView view = rings.channel.view(0);
        std::thread producer([&] {
            for (uint64_t i = 0; i < 20000; ++i) {
                ring_push<StdAtomics>(view, numbered(1, i), forever);
            }
        });
        for (uint64_t ticket = 0; ticket < 20000; ++ticket) {
            PackedCommand packed;
            while (!ring_peek<StdAtomics>(view.slots, capacity, ticket, &packed)) {
                sched_yield();
            }
            const Command command = unpack(packed);
            ring_progress<StdAtomics>(rings.channel.consumed(0), ticket + 1);
            if (command.value != ticket || command.remote_offset != ticket * 3) {
                producer.detach();
                CHECK_EQ(command.value, ticket);
            }
        }
        producer.join();
    }
}

TEST(many_producers_lose_and_double_nothing_and_keep_their_order) {
    constexpr uint32_t kProducers = 4;
    constexpr uint64_t kEach = 5000;
    constexpr uint64_t kCapacity = 16;
    Rings rings(1, kCapacity);
    const RingView view = rings.channel.view(0);
    std::vector<uint64_t> staged(kProducers * kEach, 0);  // plain memory: what a push must publish
    std::vector<std::thread> producers;
    for (uint32_t p = 0; p < kProducers; ++p) {
        producers.emplace_back([&, p] {
            for (uint64_t i = 0; i < kEach;) {
                // In groups of up to three tickets, as the lanes of a warp do.
                const uint64_t group = std::min<uint64_t>(1 + i % 3, kEach - i);
                const uint64_t first = ring_reserve<StdAtomics>(view, group, forever);
                for (uint64_t k = 0; k < group; ++k, ++i) {
                    staged[p * kEach + i] = i + 1;
                    ring_publish<StdAtomics>(view, first + k, numbered(p, i));
                }
            }
        });
    }
    std::vector<uint64_t> next(kProducers, 0);
    uint64_t wrong = 0;
    for (uint64_t ticket = 0; ticket < kProducers * kEach; ++ticket) {
        PackedCommand packed;
        while (!ring_peek<StdAtomics>(view.slots, kCapacity, ticket, &packed)) {
            sched_yield();
        }
        const Command command = unpack(packed);
        wrong += command.peer >= kProducers || command.value != next[command.peer % kProducers]++;
        wrong += staged[command.peer % kProducers * kEach + command.value] != command.value + 1;
        ring_progress<StdAtomics>(rings.channel.consumed(0), ticket + 1);
    }
    for (std::thread &producer : producers) {
        producer.join();
    }
    CHECK_EQ(wrong, 0u);
}

TEST(a_full_ring_waits_and_can_be_told_to_stop) {
    Rings rings(1, 4);
    const RingView view = rings.channel.view(0);
    for (uint64_t i = 0; i < 4; ++i) {
        CHECK_EQ(ring_push<StdAtomics>(view, numbered(0, i), [] { return false; }), i);
    }
    int asked = 0;
    CHECK_EQ(ring_push<StdAtomics>(view, numbered(0, 4), [&] { return ++asked < 3; }), kNoTicket);
    CHECK_EQ(asked, 3);
}

TEST(progress_is_read_only_when_the_ring_looks_full) {
    Rings rings(1, 4);
    const RingView view = rings.channel.view(0);
    for (uint64_t i = 0; i < 4; ++i) {
        ring_push<StdAtomics>(view, numbered(0, i), [] { return false; });
        ring_progress<StdAtomics>(rings.channel.consumed(0), i + 1);
        CHECK_EQ(*view.cached_consumed, 0u);
    }
    CHECK_EQ(ring_push<StdAtomics>(view, numbered(0, 4), [] { return false; }), 4u);
    CHECK_EQ(*view.cached_consumed, 4u);
}

TEST(completion_is_waited_for_by_ticket) {
    Rings rings(2, 4);
    const RingView view = rings.channel.view(1);
    const uint64_t ticket = ring_push<StdAtomics>(view, numbered(0, 0), [] { return false; });
    CHECK(!ring_wait_completed<StdAtomics>(view, ticket, [] { return false; }));
    ring_progress<StdAtomics>(rings.channel.completed(1), ticket + 1);
    CHECK(ring_wait_completed<StdAtomics>(view, ticket, [] { return false; }));
}

TEST(wrong_shapes_are_refused) {
    CHECK_THROWS(Channel::host_bytes(0, 4));
    CHECK_THROWS(Channel::host_bytes(1, 3));
    CHECK_THROWS(Channel::host_bytes(1, 1));
    CHECK_THROWS(Channel(1, 4, 8, 8, 64));
}

TEST(a_command_that_comes_alone_is_always_looked_for) {
    LookAway look_away;
    for (uint64_t now = 1'000'000; now < 2'000'000; now += 2'600) {  // as fast as a round trip can ever be
        look_away.looked(1, 1, [&] { return now; });
        CHECK(!look_away.away([&] { return now; }));
        look_away.looked(0, 1, [&]() -> uint64_t { throw std::logic_error("the clock of an idle ring is looked at"); });
        CHECK(!look_away.away([&] { return now; }));
    }
}

TEST(a_thread_that_outruns_a_stream_looks_away_until_it_ends) {
    LookAway look_away;
    uint64_t now = 1'000'000;
    const auto clock = [&] { return now; };
    look_away.looked(1, 2, clock);
    look_away.looked(LookAway::kStream - 1, 2, clock);
    CHECK(!look_away.away(clock));  // a burst
    now += LookAway::kSpanNs;
    look_away.looked(1, 2, clock);
    CHECK(look_away.away(clock));
    now += 2 * LookAway::kNsOfRing - 1;
    CHECK(look_away.away(clock));
    now += 1;
    CHECK(!look_away.away(clock));
    look_away.looked(0, 1, clock);  // part of the stream still: none came while nobody looked
    CHECK(look_away.away(clock));
    look_away.looked(64, 0, clock);  // producers are ahead
    CHECK(!look_away.away(clock));
    for (uint64_t passed = 0; passed <= 3 * LookAway::kSpanNs; passed += LookAway::kNsOfRing) {
        now += LookAway::kNsOfRing;
        look_away.looked(0, 1, clock);
    }
    CHECK(!look_away.away(clock));
    LookAway never(0);
    for (int i = 0; i < 10; ++i, now += LookAway::kNsOfRing) {
        never.looked(1000, 1, clock);
        CHECK(!never.away(clock));
    }
}

CHECK_MAIN()
