// Proxies over a network that reorders, delays, duplicates, refuses and fails.
#include <thread>

#include "check.hpp"
#include "fake_network.hpp"
#include "harness.hpp"
#include "uccl_ep/null_transport.hpp"

using namespace uccl_ep;

namespace {

struct Pair {
    Pair(PlanKind plan, TransportLimits limits, const fake::Behaviour &behaviour, uint64_t seed, uint32_t proxies,
         const EngineOptions &options = {})
        : network(2, proxies, behaviour, seed) {
        limits.lanes = proxies;
        limits.send_queue_depth = behaviour.depth;
        for (uint32_t rank = 0; rank < 2; ++rank) {
            hosts.push_back(std::make_unique<Host>(rank, test_layout(2, 4), network.ops(rank), plan, limits, proxies, 4,
                                                   16, options));
            network.region(rank, UCCL_EP_REGION_DATA, hosts[rank]->data.pointer());
            network.region(rank, UCCL_EP_REGION_CONTROL, hosts[rank]->control.pointer());
        }
        for (auto &host : hosts) {
            host->engine = std::make_unique<Engine>(host->shared);
            host->engine->start();
        }
    }

    // Both engines end before either one's windows go: the network delivers into them.
    ~Pair() {
        for (auto &host : hosts) {
            host->shared->stop_deadline_ns = 1;
            host->shared->stop_requested = true;
        }
        for (auto &host : hosts) {
            host->engine->stop(0.1);
        }
    }

    fake::Network network;
    std::vector<std::unique_ptr<Host>> hosts;
};

// Messages of several writes from 0 to 1 on every channel; the receiver checks each slot when its signal
// is up, and credits it.
void transfer(Pair &pair, uint64_t messages) {
    Host &from = *pair.hosts[0];
    Host &to = *pair.hosts[1];
    const uint64_t slot_bytes = from.layout.slot_bytes;
    const uint64_t slots = from.layout.num_slots;
    uint64_t sent[4] = {};
    uint64_t received[4] = {};
    uint64_t credited[4] = {};
    check::Random random(messages);
    const bool done = eventually([&] {
        bool all = true;
        for (uint32_t channel = 0; channel < 4; ++channel) {
            const uint32_t name = from.data_signal(0, channel);
            const uint32_t credit = from.layout.signal_index(SignalKind::kDirectCredit, 1, channel);
            const uint64_t free = from.signal(credit);
            if (sent[channel] < messages && sent[channel] - free < slots) {
                const uint64_t number = ++sent[channel];
                const uint64_t slot = number % slots * slot_bytes;
                const uint64_t source = from.layout.direct_outbox(1, channel) + slot;
                const uint64_t target = from.layout.direct_ring(0, channel) + slot;
                for (uint64_t i = 0; i < slot_bytes / 8; ++i) {
                    StdAtomics::store_relaxed_system(from.words(source) + i, number * 1000 + i);
                }
                // Some contiguous, some not, the end sometimes alone.
                const uint64_t part = slot_bytes / 4;
                const bool lone_end = random.below(3) == 0;
                for (uint64_t i = 0; i < 4; ++i) {
                    const uint64_t place = (number % 2 == 0 ? i : 3 - i) * part;
                    from.push(channel, Command{i == 3 && !lone_end ? Operation::kWriteSignal : Operation::kWrite, 1,
                                               name, part, source + place, target + place, number});
                }
                if (lone_end) {
                    from.push(channel, Command{Operation::kWriteSignal, 1, name, 0, 0, 0, number});
                }
            }
            const uint64_t up = to.signal(name);
            while (received[channel] < up) {
                const uint64_t number = ++received[channel];
                const uint64_t at = to.layout.direct_ring(0, channel) + number % slots * slot_bytes;
                for (uint64_t i = 0; i < slot_bytes / 8; ++i) {
                    CHECK_EQ(StdAtomics::load_acquire_system(to.words(at) + i), number * 1000 + i);
                }
            }
            // Credits go up by more than one where the receiver was slow.
            if (received[channel] != credited[channel]) {
                credited[channel] = received[channel];
                to.push(channel, Command{Operation::kWriteSignal, 0, credit, 0, 0, 0, credited[channel]});
            }
            all = all && received[channel] == messages && free == messages;
        }
        for (const auto &host : pair.hosts) {
            CHECK_EQ(host->engine->error(), "");
            for (uint32_t reporter = 0; reporter < 2; ++reporter) {
                if (const auto verdict = host->shared->verdicts->entry(reporter)) {
                    check::fail(__FILE__, __LINE__,
                                "rank " + std::to_string(reporter) + " accuses " + std::to_string(verdict->culprit) +
                                    " for reason " + std::to_string(verdict->reason) + " after " +
                                    std::to_string(verdict->elapsed_ns) + " ns");
                }
            }
            CHECK(!host->shared->verdicts->aborted());
        }
        return all;
    });
    if (!done) {
        std::string words = "the transfer did not end:";
        for (uint32_t channel = 0; channel < 4; ++channel) {
            const RingView view = from.shared->channel->view(channel);
            const RingView back = to.shared->channel->view(channel);
            words += " [sent " + std::to_string(sent[channel]) + " received " + std::to_string(received[channel]) +
                     " credited " + std::to_string(credited[channel]) + " credit seen " +
                     std::to_string(from.signal(from.layout.signal_index(SignalKind::kDirectCredit, 1, channel))) +
                     "; pushed " + std::to_string(*view.head) + " popped " + std::to_string(*view.consumed) +
                     " completed " + std::to_string(*view.completed) + "; back pushed " + std::to_string(*back.head) +
                     " popped " + std::to_string(*back.consumed) + " completed " + std::to_string(*back.completed) +
                     "]";
        }
        check::fail(__FILE__, __LINE__, words);
    }
    for (auto &host : pair.hosts) {
        for (uint32_t ring = 0; ring < 4; ++ring) {
            const RingView view = host->shared->channel->view(ring);
            CHECK(eventually([&] {
                return StdAtomics::load_acquire_system(view.completed) == StdAtomics::load_acquire_device(view.head);
            }));
        }
    }
    for (auto &host : pair.hosts) {
        CHECK(host->engine->stop(20));
        CHECK(!host->shared->verdicts->aborted());
    }
}

TransportLimits all_promises() {
    TransportLimits limits;
    limits.imm_bits = 32;
    limits.exactly_once = true;
    limits.placement_proof = true;
    return limits;
}

uint64_t sum(const Engine &engine, Counter ProxyStats::*field) {
    uint64_t total = 0;
    for (const auto &proxy : engine.proxies()) {
        total += (proxy->stats().*field).get();
    }
    return total;
}

}  // namespace

TEST(native_over_an_ordered_network_runs_no_emulation) {
    for (uint32_t proxies = 1; proxies <= 2; ++proxies) {
        fake::Behaviour behaviour;
        behaviour.ordered = true;
        Pair pair(PlanKind::kNative, all_promises(), behaviour, proxies, proxies);
        transfer(pair, 300);
        for (const auto &host : pair.hosts) {
            CHECK_EQ(sum(*host->engine, &ProxyStats::emulated_immediates), 0u);
            CHECK_EQ(sum(*host->engine, &ProxyStats::emulated_counts), 0u);
            CHECK_EQ(sum(*host->engine, &ProxyStats::emulated_fences), 0u);
            CHECK_EQ(sum(*host->engine, &ProxyStats::emulated_signal_writes), 0u);
        }
        CHECK(sum(*pair.hosts[0]->engine, &ProxyStats::merged) > 0);
        CHECK(pair.network.largest_batch() > 1);
    }
}

TEST(counted_over_a_network_that_keeps_no_order_and_completes_early) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
        fake::Behaviour behaviour;
        behaviour.complete_early = seed % 2 != 0;
        TransportLimits limits = all_promises();
        limits.placement_proof = !behaviour.complete_early;
        // A source may be used again at its completion, which then is not yet delivery: slots are paced
        // by credits, so the test's own slots stay unchanged until delivery.
        Pair pair(PlanKind::kCounted, limits, behaviour, seed, 1 + seed % 2);
        transfer(pair, 200);
        CHECK(sum(*pair.hosts[1]->engine, &ProxyStats::emulated_counts) > 0);
    }
}

TEST(counted_ignores_duplicates_where_the_transport_may_deliver_twice) {
    fake::Behaviour behaviour;
    behaviour.duplicate_percent = 10;
    TransportLimits limits = all_promises();
    limits.exactly_once = false;
    Pair pair(PlanKind::kCounted, limits, behaviour, 11, 1);
    // One message at a time: a late duplicate rewrites payload, which no plan can repair.
    Host &from = *pair.hosts[0];
    Host &to = *pair.hosts[1];
    for (uint64_t number = 1; number <= 20; ++number) {
        for (uint64_t i = 0; i < 5; ++i) {
            from.push(0, Command{i == 4 ? Operation::kWriteSignal : Operation::kWrite, 1, from.data_signal(0, 0), 8,
                                 16 * i, 16 * i, number});
        }
        CHECK(eventually([&] { return to.signal(from.data_signal(0, 0)) == number; }));
    }
    CHECK(sum(*to.engine, &ProxyStats::emulated_duplicates) + sum(*to.engine, &ProxyStats::emulated_closed) > 0);
    CHECK_EQ(to.engine->error(), "");
}

TEST(counted_reports_a_duplicate_of_a_transport_that_promised_none) {
    fake::Behaviour behaviour;
    behaviour.duplicate_percent = 100;
    Pair pair(PlanKind::kCounted, all_promises(), behaviour, 12, 1);
    pair.hosts[0]->push(0, Command{Operation::kWriteSignal, 1, pair.hosts[0]->data_signal(0, 0), 8, 0, 0, 1});
    CHECK(eventually([&] { return pair.hosts[1]->shared->verdicts->aborted(); }));
    const auto verdict = pair.hosts[1]->shared->verdicts->agree(0.05);
    CHECK_EQ(verdict->culprit, 0u);
    CHECK(verdict->reason == static_cast<uint32_t>(Reason::kProtocol));
    CHECK(pair.hosts[1]->engine->error().find("arrived") != std::string::npos);
}

TEST(counted_obeys_a_small_remote_queue) {
    fake::Behaviour behaviour;
    TransportLimits limits = all_promises();
    limits.remote_queue_depth = 6;
    Pair pair(PlanKind::kCounted, limits, behaviour, 13, 2);
    transfer(pair, 100);
    CHECK(sum(*pair.hosts[1]->engine, &ProxyStats::emulated_credits) > 0);
}

TEST(fenced_over_a_network_that_completes_early_and_keeps_no_order) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
        fake::Behaviour behaviour;
        behaviour.complete_early = true;
        TransportLimits limits = all_promises();
        limits.imm_bits = 0;
        Pair pair(PlanKind::kFenced, limits, behaviour, seed, 1 + seed % 2);
        transfer(pair, 200);
        CHECK(sum(*pair.hosts[0]->engine, &ProxyStats::emulated_signal_writes) > 0);
    }
}

TEST(the_send_queue_depth_is_obeyed_down_to_one) {
    for (const PlanKind plan : {PlanKind::kNative, PlanKind::kCounted, PlanKind::kFenced}) {
        for (const uint64_t depth : {1u, 3u}) {
            fake::Behaviour behaviour;
            behaviour.ordered = plan == PlanKind::kNative;
            behaviour.depth = depth;
            Pair pair(plan, all_promises(), behaviour, depth, 1);
            transfer(pair, 16);
            CHECK(pair.network.most_posted() <= depth);
        }
    }
}

TEST(large_commands_are_split_and_caps_obeyed) {
    fake::Behaviour behaviour;
    TransportLimits limits = all_promises();
    limits.max_message = 64;
    EngineOptions options;
    options.max_inflight_peer = 200;
    options.max_inflight_nic = 150;
    Pair pair(PlanKind::kCounted, limits, behaviour, 21, 2, options);
    transfer(pair, 50);
    CHECK(sum(*pair.hosts[0]->engine, &ProxyStats::split) >= 50 * 4 * 4 * 3u);
}

TEST(a_failed_write_blames_the_peer_and_reaches_it) {
    fake::Behaviour behaviour;
    behaviour.ordered = true;
    behaviour.fail_write = 3;
    Pair pair(PlanKind::kNative, all_promises(), behaviour, 31, 1);
    Host &from = *pair.hosts[0];
    for (uint64_t i = 0; i < 5; ++i) {
        from.push(0, Command{Operation::kWriteSignal, 1, from.data_signal(0, 0), 8, 16 * i, 16 * i, i + 1});
    }
    for (const auto &host : pair.hosts) {
        CHECK(eventually([&] { return host->shared->verdicts->aborted(); }));
        const auto verdict = host->shared->verdicts->agree(0.05);
        CHECK_EQ(verdict->culprit, 1u);
        CHECK_EQ(verdict->reporter, 0u);
        CHECK(verdict->reason == static_cast<uint32_t>(Reason::kTransport));
    }
    CHECK(from.engine->error().find("asked to fail") != std::string::npos);
}

TEST(a_silent_peer_of_a_transport_without_notice_is_dead) {
    fake::Behaviour behaviour;
    EngineOptions options;
    options.heartbeat_timeout_s = 2;  // a busy machine may not run a proxy for a second
    Pair pair(PlanKind::kCounted, all_promises(), behaviour, 41, 1, options);
    const uint64_t start = now_ns();
    CHECK(!eventually([&] { return pair.hosts[0]->shared->verdicts->aborted(); }, 3));
    CHECK(now_ns() - start >= 2'000'000'000);
    CHECK(pair.hosts[1]->engine->stop(5));  // says goodbye: its silence is no death
    CHECK(!eventually([&] { return pair.hosts[0]->shared->verdicts->aborted(); }, 3));
    CHECK(pair.hosts[0]->shared->verdicts->peer_closed(1));

    Pair other(PlanKind::kCounted, all_promises(), behaviour, 42, 1, options);
    other.hosts[1]->shared->stop_deadline_ns = 1;  // ends at once, without a word
    other.hosts[1]->shared->stop_requested = true;
    CHECK(eventually([&] { return other.hosts[0]->shared->verdicts->aborted(); }));
    const auto verdict = other.hosts[0]->shared->verdicts->agree(0.05);
    CHECK_EQ(verdict->culprit, 1u);
    CHECK(verdict->reason == static_cast<uint32_t>(Reason::kDead));
}

TEST(bad_commands_are_refused) {
    const TransportLimits limits = all_promises();
    const Layout layout = test_layout(2, 4);
    const uint64_t end = layout.data_bytes();
    const uint32_t name = layout.signal_index(SignalKind::kDirectData, 0, 0);
    const Command good{Operation::kWriteSignal, 1, name, 64, 0, 0, 1};
    std::vector<Command> bad(9, good);
    bad[0].local_offset = end - 63;
    bad[1].remote_offset = end - 63;
    bad[2].peer = 0;
    bad[3].peer = 2;
    bad[4].signal = layout.num_signals();
    bad[5].signal = layout.signal_index(SignalKind::kDirectData, 1, 0);
    bad[6].value = 0;
    bad[7].operation = static_cast<Operation>(3);
    bad[8].bytes = kMaxWriteBytes + 1;
    for (const Command &command : bad) {
        NullTransport network(1, 64);
        Host host(0, layout, network.ops(), PlanKind::kNative, limits, 1, 1, 16);
        host.engine = std::make_unique<Engine>(host.shared);
        host.push(0, command);
        host.engine->proxies()[0]->pass();
        CHECK(host.shared->verdicts->aborted());
        const auto verdict = host.shared->verdicts->entry(0);
        CHECK_EQ(verdict->culprit, 0u);
        CHECK(verdict->reason == static_cast<uint32_t>(Reason::kBadCommand));
        CHECK_EQ(sum(*host.engine, &ProxyStats::writes), 0u);
    }
    NullTransport network(1, 64);
    Host host(0, layout, network.ops(), PlanKind::kNative, limits, 1, 1, 16);
    host.engine = std::make_unique<Engine>(host.shared);
    host.push(0, Command{Operation::kWriteSignal, 1, name, 64, end - 64, end - 64, 1});
    host.engine->proxies()[0]->pass();
    CHECK(!host.shared->verdicts->aborted());
    CHECK_EQ(sum(*host.engine, &ProxyStats::writes), 1u);
}

TEST(a_signal_on_the_rings_of_two_proxies_is_refused) {
    NullTransport network(2, 64);
    TransportLimits limits = all_promises();
    limits.lanes = 2;
    Host host(0, test_layout(2, 4), network.ops(), PlanKind::kNative, limits, 2, 2, 16);
    host.engine = std::make_unique<Engine>(host.shared);
    Command command{Operation::kWriteSignal, 1, host.data_signal(0, 0), 8, 0, 0, 1};
    host.push(0, command);
    host.engine->proxies()[0]->pass();
    CHECK(!host.shared->verdicts->aborted());
    command.value = 2;
    host.push(1, command);
    host.engine->proxies()[1]->pass();
    CHECK(host.shared->verdicts->aborted());
    CHECK(host.engine->error().find("two proxies") != std::string::npos);
}

TEST(contiguous_commands_of_a_message_merge_and_no_others) {
    NullTransport network(1, 256);
    Host host(0, test_layout(2, 4), network.ops(), PlanKind::kNative, all_promises(), 1, 1, 64);
    host.engine = std::make_unique<Engine>(host.shared);
    const uint32_t name = host.data_signal(0, 0);
    for (uint64_t i = 0; i < 10; ++i) {
        host.push(0,
                  Command{i == 9 ? Operation::kWriteSignal : Operation::kWrite, 1, name, 64, 64 * i, 4096 + 64 * i, 1});
    }
    // Contiguous, but another message.
    host.push(0, Command{Operation::kWriteSignal, 1, name, 64, 640, 4096 + 640, 2});
    // Contiguous at one end only.
    host.push(0, Command{Operation::kWrite, 1, name, 64, 1024, 0, 3});
    host.push(0, Command{Operation::kWriteSignal, 1, name, 64, 1024 + 64, 128, 3});
    Proxy &proxy = *host.engine->proxies()[0];
    proxy.pass();
    proxy.pass();
    CHECK_EQ(proxy.stats().writes.get(), 4u);
    CHECK_EQ(proxy.stats().merged.get(), 9u);
    // All three messages were staged before one was signalled: the newest value says it for all.
    CHECK_EQ(proxy.stats().native_signals.get(), 1u);
    CHECK_EQ(proxy.stats().coalesced_signals.get(), 2u);
    CHECK_EQ(proxy.stats().bytes.get(), 13 * 64u);
    CHECK_EQ(StdAtomics::load_acquire_system(host.shared->channel->view(0).completed), 13u);
    CHECK(proxy.idle());
}

TEST(signals_coalesce_with_their_own_kind_only) {
    NullTransport network(1, 256);
    Host host(0, test_layout(2, 4), network.ops(), PlanKind::kNative, all_promises(), 1, 1, 64);
    host.engine = std::make_unique<Engine>(host.shared);
    uint64_t values[4] = {};
    for (const uint32_t channel : {0u, 0u, 1u, 0u, 1u, 1u, 1u, 2u}) {
        host.push(0, Command{Operation::kWriteSignal, 1, host.data_signal(0, channel), 64, 0, 0, ++values[channel]});
    }
    Proxy &proxy = *host.engine->proxies()[0];
    proxy.pass();
    CHECK_EQ(proxy.stats().native_signals.get(), 5u);  // 2 of channel 0, 1, 0, 3 of channel 1, 2
    CHECK_EQ(proxy.stats().coalesced_signals.get(), 3u);
    proxy.pass();
    CHECK(proxy.idle());
    CHECK_EQ(proxy.stats().completions.get(), 8u + 5u);
}

namespace {

// Everything posted under the first generation of the lane fails, later it succeeds; a renewal takes two calls.
struct FailingLane {
    struct Post {
        uint64_t generation;
        uint64_t offset;  // of a write
        uint64_t value;   // of a signal
    };
    std::vector<Post> posts;
    std::vector<uccl_ep_completion> done;
    uint64_t generation = 0;
    uint64_t outstanding = 0;
    uint64_t calls = 0;
    bool renewed_too_early = false;
    uccl_ep_transport_ops ops{};

    FailingLane() {
        ops.magic = UCCL_EP_TRANSPORT_MAGIC;
        ops.size = sizeof ops;
        ops.context = this;
        ops.post_writes = [](void *context, uint32_t, const uccl_ep_write *writes, uint64_t count) {
            for (uint64_t i = 0; i < count; ++i) {
                self(context).add({self(context).generation, writes[i].remote_offset, 0}, writes[i].token);
            }
            return static_cast<int64_t>(count);
        };
        ops.post_signals = [](void *context, uint32_t, const uccl_ep_signal *signals, uint64_t count) {
            for (uint64_t i = 0; i < count; ++i) {
                self(context).add({self(context).generation, 0, signals[i].value}, signals[i].token);
            }
            return static_cast<int64_t>(count);
        };
        ops.poll_completions = [](void *context, uint32_t, uccl_ep_completion *out, uint64_t) {
            FailingLane &lane = self(context);  // one at a time
            if (lane.done.empty()) {
                return int64_t{0};
            }
            out[0] = lane.done.front();
            lane.done.erase(lane.done.begin());
            --lane.outstanding;
            return int64_t{1};
        };
        ops.renew_lane = [](void *context, uint32_t) {
            FailingLane &lane = self(context);
            lane.renewed_too_early = lane.renewed_too_early || lane.outstanding != 0;
            return ++lane.calls % 2 == 0 ? static_cast<int64_t>(++lane.generation != 0) : int64_t{0};
        };
    }
    static FailingLane &self(void *context) { return *static_cast<FailingLane *>(context); }
    void add(const Post &post, uint64_t token) {
        posts.push_back(post);
        done.push_back({token, 1, generation == 0 ? -EIO : 0});
        ++outstanding;
    }
};

}  // namespace

TEST(what_failed_is_posted_again_in_order_under_a_new_generation) {
    FailingLane lane;
    Host host(0, test_layout(2, 4), &lane.ops, PlanKind::kNative, all_promises(), 1, 1, 64);
    host.engine = std::make_unique<Engine>(host.shared);
    Proxy &proxy = *host.engine->proxies()[0];
    const auto send = [&](uint32_t channel, uint64_t value, uint64_t offset) {
        host.push(0, Command{Operation::kWriteSignal, 1, host.data_signal(0, channel), 64, 0, offset, value});
    };
    send(0, 1, 4096);
    proxy.pass();
    send(1, 1, 8192);
    send(0, 2, 12288);
    const RingView view = host.shared->channel->view(0);
    for (int pass = 0; pass < 30; ++pass) {
        CHECK(lane.generation != 0 || StdAtomics::load_acquire_system(view.completed) == 0);
        proxy.pass();
    }
    CHECK(!lane.renewed_too_early);
    CHECK_EQ(lane.calls, 2u);
    CHECK_EQ(proxy.stats().lane_generations.get(), 1u);
    CHECK(!host.shared->verdicts->aborted());
    CHECK_EQ(StdAtomics::load_acquire_system(view.completed), 3u);
    CHECK(proxy.idle());
    std::vector<uint64_t> offsets, values;
    for (const FailingLane::Post &post : lane.posts) {
        if (post.generation == 1) {
            (post.offset != 0 ? offsets : values).push_back(post.offset != 0 ? post.offset : post.value);
        }
    }
    CHECK(offsets == (std::vector<uint64_t>{4096, 8192, 12288}));
    // Of channel 0, 1 and 2 were posted or staged: the newest alone is raised again.
    CHECK(values == (std::vector<uint64_t>{1, 1, 2}) || values == (std::vector<uint64_t>{2, 1}));
}

TEST(a_lane_that_cannot_be_renewed_blames_the_peer) {
    FailingLane lane;
    lane.ops.renew_lane = [](void *, uint32_t) { return int64_t{-ENOTCONN}; };
    Host host(0, test_layout(2, 4), &lane.ops, PlanKind::kNative, all_promises(), 1, 1, 64);
    host.engine = std::make_unique<Engine>(host.shared);
    host.push(0, Command{Operation::kWriteSignal, 1, host.data_signal(0, 0), 64, 0, 0, 1});
    for (int pass = 0; pass < 10; ++pass) {
        host.engine->proxies()[0]->pass();
    }
    CHECK(host.shared->verdicts->aborted());
    CHECK_EQ(host.shared->verdicts->entry(0)->culprit, 1u);
    CHECK(host.engine->error().find("could not be renewed") != std::string::npos);
}

TEST(an_engine_refuses_what_it_cannot_run) {
    NullTransport network(1, 64);
    TransportLimits limits = all_promises();
    limits.placement_proof = false;
    Host fenced(0, test_layout(2, 4), network.ops(), PlanKind::kFenced, limits, 1, 1, 16);
    CHECK_THROWS(Engine(fenced.shared));
    Host lanes(0, test_layout(2, 4), network.ops(), PlanKind::kNative, limits, 2, 2, 16);
    CHECK_THROWS(Engine(lanes.shared));
    limits.imm_bits = 8;
    Host narrow(0, test_layout(2, 4), network.ops(), PlanKind::kCounted, limits, 1, 1, 16);
    CHECK_THROWS(Engine(narrow.shared));
    uccl_ep_transport_ops wrong = *network.ops();
    wrong.magic ^= 1;
    Host magic(0, test_layout(2, 4), &wrong, PlanKind::kNative, limits, 1, 1, 16);
    CHECK_THROWS(Engine(magic.shared));
}

CHECK_MAIN()
