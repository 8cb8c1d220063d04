#include "channel_bench.hpp"

#include <sched.h>

#include <ctime>
#include <stdexcept>
#include <thread>

#include "clock.hpp"
#include "uccl_ep/immediate.hpp"
#include "uccl_ep/null_transport.hpp"
#include "uccl_ep/shared_memory.hpp"

namespace uccl_ep::bench {
namespace {

constexpr uint64_t kCapacity = 4096;          // commands of a ring
constexpr uint64_t kLimitNs = 60'000'000'000;  // of one measurement
constexpr uint64_t kProgressEvery = 256;       // pops between two looks of the producer at the progress

// CPU time, so that a busy machine does not count against what is measured.
uint64_t cpu_ns() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

// Between two looks: spin, and yield where the other thread may not have a core of its own.
class Patience {
  public:
    bool operator()() {
        if (++looks_ % 256 == 0) {
            sched_yield();
            if (now_ns() > end_) {
                throw std::runtime_error("the other side of the ring did not move for a minute");
            }
        }
        cpu_pause();
        return true;
    }

  private:
    uint64_t looks_ = 0;
    uint64_t end_ = now_ns() + kLimitNs;
};

struct Memory {
    SharedMemory ring = SharedMemory::create(Channel::host_bytes(1, kCapacity), false);
    SharedMemory state = SharedMemory::create(Channel::state_bytes(1), false);
    Channel channel{1, kCapacity, ring.pointer(), ring.pointer(), state.pointer()};
};

Layout layout_of(uint32_t signals) {
    Layout layout{};
    layout.num_ranks = 2;
    layout.ranks_per_domain = 1;
    layout.num_channels = signals;
    layout.num_slots = 8;
    layout.slot_bytes = 1024;
    layout.has_remote = 1;
    layout.ll_parts = 1;
    layout.arrange();
    return layout;
}

// The n-th command of a stream.
class Commands {
  public:
    explicit Commands(const Stream &stream) : stream_(stream), layout_(layout_of(stream.signals)) {}

    Command next() {
        const bool last = ++in_message_ == stream_.contiguous;
        const uint64_t offset = stream_.contiguous == 1 ? 128 * (message_ % 64) : 64 * (in_message_ - 1);
        const Command command{last ? Operation::kWriteSignal : Operation::kWrite,
                              1,
                              layout_.signal_index(SignalKind::kDirectData, 0, static_cast<uint32_t>(signal_)),
                              64,
                              offset,
                              offset,
                              round_ + 1};
        if (last) {
            in_message_ = 0;
            ++message_;
            if (++signal_ == stream_.signals) {
                signal_ = 0;
                ++round_;
            }
        }
        return command;
    }
    const Layout &layout() const { return layout_; }

  private:
    Stream stream_;
    Layout layout_;
    uint32_t in_message_ = 0;
    uint64_t message_ = 0;
    uint64_t signal_ = 0;
    uint64_t round_ = 0;
};

void fill(const RingView &view, Commands &commands) {
    for (uint64_t i = 0; i < kCapacity; ++i) {
        if (ring_push<StdAtomics>(view, commands.next(), [] { return false; }) == kNoTicket) {
            throw std::runtime_error("the proxy did not take all commands of the round before");
        }
    }
}

double rate(uint64_t commands, uint64_t ns) { return static_cast<double>(commands) * 1e3 / static_cast<double>(ns); }

Command numbered(uint64_t ticket) {
    return {Operation::kWriteSignal, 1, 3, 7168, ticket * 64, ticket * 128, ticket + 1};
}

void expect(const PackedCommand &packed, uint64_t ticket) {
    const Command command = unpack(packed);
    if (command.value != ticket + 1 || command.local_offset != (ticket * 64) % kMaxWindowBytes) {
        throw std::runtime_error("command " + std::to_string(ticket) + " is not what was pushed");
    }
}

void check_stream(const Stream &stream, uint64_t rounds) {
    if (stream.contiguous == 0 || kCapacity % stream.contiguous != 0 || stream.signals == 0 || rounds == 0) {
        throw std::invalid_argument("a stream needs signals, rounds, and commands a message that divide " +
                                    std::to_string(kCapacity));
    }
}

// Runs `produce` on a thread of its own; an exception there is thrown here.
template <class Produce, class Consume>
double timed_ns(Produce &&produce, Consume &&consume) {
    std::exception_ptr failure;
    std::atomic<bool> ready{false};
    std::atomic<bool> go{false};
    std::thread thread([&] {
        ready.store(true, std::memory_order_release);
        while (!go.load(std::memory_order_acquire)) {
            sched_yield();
        }
        try {
            produce();
        } catch (...) {
            failure = std::current_exception();
        }
    });
    while (!ready.load(std::memory_order_acquire)) {
        sched_yield();
    }
    const uint64_t start = now_ns();
    go.store(true, std::memory_order_release);
    std::exception_ptr here;
    try {
        consume();
    } catch (...) {
        here = std::current_exception();
    }
    const uint64_t end = now_ns();
    thread.join();
    for (const std::exception_ptr &thrown : {failure, here}) {
        if (thrown != nullptr) {
            std::rethrow_exception(thrown);
        }
    }
    return static_cast<double>(end - start);
}

}  // namespace

double proxy_rate(const Stream &stream, uint64_t rounds) {
    check_stream(stream, rounds);
    Commands commands(stream);
    const Layout &layout = commands.layout();
    Memory memory;
    const SharedMemory control = SharedMemory::create(layout.control_bytes(), false);
    NullTransport network(1, 1024);
    const auto shared = std::make_shared<EngineShared>();
    shared->layout = layout;
    shared->control = control.pointer();
    shared->ops = network.ops();
    shared->plan = stream.plan;
    shared->limits.imm_bits = 32;
    shared->limits.placement_proof = true;
    shared->options.trace_path = stream.trace_path;
    shared->remote_peers = {1};
    shared->channel = std::make_shared<Channel>(memory.channel);
    shared->verdicts = std::make_shared<Verdicts>(0, layout, control.pointer(), std::vector<uint64_t>{});
    const Engine engine(shared);
    Proxy &proxy = *engine.proxies()[0];
    const RingView view = memory.channel.view(0);
    uint64_t ns = 0;
    for (uint64_t round = 1; round <= rounds; ++round) {
        fill(view, commands);
        const uint64_t start = cpu_ns();
        while (StdAtomics::load_acquire_system(view.completed) != round * kCapacity) {
            if (proxy.pass() == 0 && shared->verdicts->aborted()) {
                throw std::runtime_error(engine.error());
            }
        }
        ns += cpu_ns() - start;
    }
    return rate(rounds * kCapacity, ns);
}

double pop_rate(const Stream &stream, uint64_t rounds) {
    check_stream(stream, rounds);
    Commands commands(stream);
    Memory memory;
    const RingView view = memory.channel.view(0);
    uint64_t ns = 0;
    uint64_t ticket = 0;
    uint64_t sum = 0;
    for (uint64_t round = 0; round < rounds; ++round) {
        fill(view, commands);
        const uint64_t start = cpu_ns();
        for (const uint64_t end = ticket + kCapacity; ticket != end; ++ticket) {
            PackedCommand packed;
            if (!ring_peek<StdAtomics>(memory.channel.slots(0), kCapacity, ticket, &packed)) {
                throw std::runtime_error("command " + std::to_string(ticket) + " is not in the ring");
            }
            const Command command = unpack(packed);
            sum += command.bytes + command.peer + (command.value == 0) + (command.signal >= 1u << 20) +
                   (command.local_offset ^ command.remote_offset);
        }
        ring_progress<StdAtomics>(memory.channel.consumed(0), ticket);
        ns += cpu_ns() - start;
    }
    if (sum != ticket * 65) {
        throw std::runtime_error("the commands in the ring are not those that were pushed");
    }
    return rate(ticket, ns);
}

double ring_rate(uint32_t batch, bool bare, uint64_t commands) {
    if (batch == 0 || kCapacity % batch != 0 || commands == 0) {
        throw std::invalid_argument("the batch must divide " + std::to_string(kCapacity));
    }
    commands = (commands + kCapacity - 1) / kCapacity * kCapacity;
    Memory memory;
    const RingView view = memory.channel.view(0);
    const auto with_tickets = [&] {
        Patience patience;
        for (uint64_t pushed = 0; pushed < commands; pushed += batch) {
            const uint64_t first = ring_reserve<StdAtomics>(view, batch, patience);
            for (uint64_t i = 0; i < batch; ++i) {
                ring_publish<StdAtomics>(view, first + i, numbered(first + i));
            }
        }
    };
    const auto stores_only = [&] {
        Patience patience;
        for (uint64_t ticket = 0; ticket < commands; ++ticket) {
            if (ticket % kCapacity == 0) {  // the lap before was read
                while (StdAtomics::load_acquire_system(view.consumed) != ticket) {
                    patience();
                }
            }
            StdAtomics::store_slot(&view.slots[ticket % kCapacity],
                                   pack(numbered(ticket), phase_of_ticket(ticket, kCapacity)));
        }
    };
    const auto pop = [&](uint64_t progress_every) {
        Patience patience;
        PackedCommand packed;
        for (uint64_t ticket = 0; ticket < commands;) {
            if (!ring_peek<StdAtomics>(view.slots, kCapacity, ticket, &packed)) {
                patience();
                continue;
            }
            expect(packed, ticket);
            if (++ticket % progress_every == 0) {
                ring_progress<StdAtomics>(memory.channel.consumed(0), ticket);
            }
        }
    };
    const double ns =
        bare ? timed_ns(stores_only, [&] { pop(kCapacity); }) : timed_ns(with_tickets, [&] { pop(kProgressEvery); });
    return static_cast<double>(commands) * 1e3 / ns;
}

double round_trip_us(bool bare, uint64_t rounds) {
    Memory memory;
    const RingView view = memory.channel.view(0);
    uint64_t *const answer = memory.channel.completed(0);
    const auto wait_for = [](const uint64_t *word, uint64_t value, Patience &patience) {
        while (StdAtomics::load_acquire_system(word) != value) {
            patience();
        }
    };
    const auto ask = [&] {
        Patience patience;
        for (uint64_t i = 0; i < rounds; ++i) {
            if (bare) {
                StdAtomics::store_release_system(&view.slots[0].word[0], i + 1);
            } else {
                ring_push<StdAtomics>(view, numbered(i), patience);
            }
            wait_for(answer, i + 1, patience);
        }
    };
    const auto reply = [&] {
        Patience patience;
        PackedCommand packed;
        for (uint64_t i = 0; i < rounds; ++i) {
            if (bare) {
                wait_for(&view.slots[0].word[0], i + 1, patience);
            } else {
                while (!ring_peek<StdAtomics>(view.slots, kCapacity, i, &packed)) {
                    patience();
                }
                expect(packed, i);
                ring_progress<StdAtomics>(memory.channel.consumed(0), i + 1);
            }
            StdAtomics::store_release_system(answer, i + 1);
        }
    };
    return timed_ns(ask, reply) * 1e-3 / static_cast<double>(rounds);
}

Shares payload_seconds(Engine &sender, Engine &receiver, const Payload &payload) {
    const EngineShared &from = sender.shared();
    const EngineShared &to = receiver.shared();
    const uint64_t places = payload.bytes == 0 ? 0 : payload.window_bytes / (2 * payload.bytes);
    if (sender.running() || receiver.running()) {
        throw std::invalid_argument("the engines must not have been started: this thread runs their proxies");
    }
    if (places == 0 || payload.writes == 0 || payload.window_bytes > from.data_bytes) {
        throw std::invalid_argument("window_bytes must hold two writes and fit the data window");
    }
    const RingView view = from.channel->view(0);
    const uint64_t *const raised = to.word(to.layout.signal_offset(payload.signal));
    const uint64_t last = payload.first_value + payload.messages - 1;
    const uint64_t end = now_ns() + kLimitNs;
    uint64_t value = payload.first_value;
    uint32_t written = 0;
    uint64_t place = 0;
    uint64_t sending = 0;
    uint64_t receiving = 0;
    Proxy &sends = *sender.proxies()[0];
    Proxy &receives = *receiver.proxies()[0];
    // To the last completion: other engines may share the transport's lane.
    uint64_t seen = payload.first_value - 1;
    for (uint64_t turn = 1; seen != last || !sends.idle() || !receives.idle(); ++turn) {
        // As many as the ring and the window of messages under way let in, as a kernel would.
        while (value <= last && value - seen <= kEpochWindow &&
               StdAtomics::load_acquire_device(view.head) - StdAtomics::load_acquire_system(view.consumed) <
                   view.capacity) {
            const bool ends = ++written == payload.writes;
            const uint64_t offset = 2 * payload.bytes * place;  // every second place: nothing is contiguous
            ring_push<StdAtomics>(view,
                                  Command{ends ? Operation::kWriteSignal : Operation::kWrite, to.rank, payload.signal,
                                          payload.bytes, offset, offset, value},
                                  [] { return false; });
            place = place + 1 == places ? 0 : place + 1;
            if (ends) {
                written = 0;
                ++value;
            }
        }
        const uint64_t start = cpu_ns();
        sends.pass();
        const uint64_t between = cpu_ns();
        receives.pass();
        sending += between - start;
        receiving += cpu_ns() - between;
        seen = StdAtomics::load_acquire_system(raised);
        if (turn % 1024 == 0 && (from.verdicts->aborted() || now_ns() > end)) {
            throw std::runtime_error("the stream stopped at message " + std::to_string(seen) + ": " + sender.error() +
                                     receiver.error());
        }
    }
    return {static_cast<double>(sending) * 1e-9, static_cast<double>(receiving) * 1e-9};
}

}  // namespace uccl_ep::bench
