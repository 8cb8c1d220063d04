// Commands a second from the GPU to CPU threads, and the time of a round trip.
//
// Each popped command is decoded and checked. Beside the channel the same run measures its ceiling: the
// same 32-byte stores without tickets, fence and credit, read by the same threads. The channel is popped by
// threads that look at their rings all the time, and by some that look away while they outrun a stream, as
// proxies do; and pushed with one fence a batch, and with two. A run takes about 10 s, and ends by 25.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "channel_device.hpp"
#include "clock.hpp"
#include "common.hpp"
#include "uccl_ep/look_away.hpp"
#include "uccl_ep/ring.hpp"

using namespace uccl_ep;

namespace {

struct CpuAtomics {
    static uint64_t load_relaxed_system(const uint64_t *word) {
        return std::atomic_ref(*const_cast<uint64_t *>(word)).load(std::memory_order_relaxed);
    }
    static void acquire_fence_system() { std::atomic_thread_fence(std::memory_order_acquire); }
    static void store_release_system(uint64_t *word, uint64_t value) {
        std::atomic_ref(*word).store(value, std::memory_order_release);
    }
};

constexpr uint64_t kProgressEvery = 256;  // pops between two looks of the producers at this ring's progress

constexpr auto kLimit = std::chrono::seconds(4);        // of one measurement: none lasts one
constexpr uint64_t kLimitOfProgramNs = 20'000'000'000;  // then no other case is begun

struct alignas(64) HostWord {
    uint64_t value;
};

// One ring of the benchmark with both its sides.
struct Ring {
    RingView host, device;
    uint64_t popped = 0;
};

template <class T>
T *mapped(uint64_t count, T **device) {
    void *memory;
    CHECK(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocMapped));
    std::memset(memory, 0, count * sizeof(T));
    CHECK(cudaHostGetDevicePointer(reinterpret_cast<void **>(device), memory, 0));
    return static_cast<T *>(memory);
}

std::vector<Ring> make_rings(uint32_t count, uint64_t capacity) {
    std::vector<Ring> rings(count);
    for (Ring &ring : rings) {
        PackedCommand *slots;
        HostWord *words;
        uint64_t *state;
        ring.host.slots = mapped(capacity, &slots);
        HostWord *host_words = mapped<HostWord>(2, &words);
        CHECK(cudaMalloc(&state, 128));
        CHECK(cudaMemset(state, 0, 128));
        ring.host.consumed = &host_words[0].value;
        ring.host.completed = &host_words[1].value;
        ring.host.capacity = ring.device.capacity = capacity;
        ring.device.slots = slots;
        ring.device.consumed = &words[0].value;
        ring.device.completed = &words[1].value;
        ring.device.head = state;
        ring.device.cached_consumed = state + 8;
    }
    return rings;
}

void free_rings(std::vector<Ring> &rings) {
    for (Ring &ring : rings) {
        CHECK(cudaFreeHost(ring.host.slots));
        CHECK(cudaFreeHost(const_cast<uint64_t *>(ring.host.consumed)));
        CHECK(cudaFree(ring.device.head));
    }
}

// Pops `commands` of each ring; returns how many were not what was pushed.
uint64_t pop_all(std::vector<Ring *> rings, uint64_t commands, LookAway look_away) {
    constexpr uint32_t kBatch = 512;
    uint64_t wrong = 0, idle = 0;
    const auto limit = std::chrono::steady_clock::now() + kLimit;
    for (size_t live = rings.size(); live != 0;) {
        live = 0;
        uint64_t popped = 0;
        uint32_t empty = 0, full = 0;
        if (++idle % 4096 == 0 && std::chrono::steady_clock::now() > limit) return wrong + 1;
        for (Ring *ring : rings) {
            PackedCommand packed;
            uint32_t i = 0;
            for (; i < kBatch && ring->popped < commands; ++i) {
                if (!ring_peek<CpuAtomics>(ring->host.slots, ring->host.capacity, ring->popped, &packed)) break;
                const Command command = unpack(packed);
                wrong += command.value != ring->popped + 1 || command.local_offset != command.value * 64 ||
                         command.bytes != 7168;
                if (++ring->popped % kProgressEvery == 0) {
                    ring_progress<CpuAtomics>(const_cast<uint64_t *>(ring->host.consumed), ring->popped);
                }
            }
            popped += i;
            empty += i < kBatch && ring->popped < commands;
            full += i == kBatch;
            live += ring->popped < commands;
        }
        look_away.looked(popped, full == 0 ? empty : 0, now_ns);
        while (look_away.away(now_ns)) cpu_pause();
    }
    return wrong;
}

struct Rate {
    double million_per_s;
    uint64_t wrong;
};

struct Case {
    const char *name;
    uint32_t rings, threads, warps, batch;  // batch: commands of a lane between two fences
    uint64_t per_ring;
};

enum class Stores { kChannel, kRaw };

// The rings of a case, reused by its runs: pinning memory takes longer than they do.
class Bench {
  public:
    // A raw run takes no credit, so its ring must hold everything.
    Bench(const Case &shape, Stores stores)
        : case_(shape),
          stores_(stores),
          rings_(make_rings(shape.rings, stores == Stores::kRaw ? shape.per_ring : 4096)) {
        std::vector<RingView> views;
        for (const Ring &ring : rings_) views.push_back(ring.device);
        CHECK(cudaMalloc(&views_, views.size() * sizeof(RingView)));
        CHECK(cudaMemcpy(views_, views.data(), views.size() * sizeof(RingView), cudaMemcpyHostToDevice));
    }
    Bench(const Bench &) = delete;
    ~Bench() {
        free_rings(rings_);
        CHECK(cudaFree(views_));
    }

    Rate run(Fences fences, uint64_t look_away_ns) {
        reset();
        const PushRun run{
            views_, case_.rings, case_.warps, case_.batch, case_.per_ring * case_.rings / case_.warps / 32, fences};
        std::atomic<uint64_t> wrong{0};
        std::vector<std::thread> poppers;
        std::atomic<uint32_t> ready{0};
        for (uint32_t t = 0; t < case_.threads; ++t) {
            std::vector<Ring *> mine;
            for (uint32_t r = t; r < case_.rings; r += case_.threads) mine.push_back(&rings_[r]);
            poppers.emplace_back([this, mine, look_away_ns, &wrong, &ready] {
                ++ready;
                wrong += pop_all(mine, case_.per_ring, LookAway(look_away_ns));
            });
        }
        while (ready.load() < case_.threads) std::this_thread::yield();
        const auto start = std::chrono::steady_clock::now();
        stores_ == Stores::kRaw ? launch_raw(run, case_.per_ring, nullptr) : launch_push(run, nullptr);
        CHECK(cudaGetLastError());
        for (std::thread &popper : poppers) popper.join();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        CHECK(cudaDeviceSynchronize());
        return {static_cast<double>(case_.per_ring) * case_.rings / seconds / 1e6, wrong.load()};
    }

  private:
    void reset() {
        for (Ring &ring : rings_) {
            ring.popped = 0;
            std::memset(ring.host.slots, 0, ring.host.capacity * sizeof(PackedCommand));
            std::memset(const_cast<uint64_t *>(ring.host.consumed), 0, 2 * sizeof(HostWord));
            CHECK(cudaMemset(ring.device.head, 0, 128));
        }
        CHECK(cudaDeviceSynchronize());
    }

    Case case_;
    Stores stores_;
    std::vector<Ring> rings_;
    RingView *views_;
};

struct RoundTrip {
    double us;
    uint64_t wrong;
};

// The CPU pops, decodes and checks each command, publishes its progress and raises the signal, as a proxy does.
RoundTrip round_trip(Ping kind) {
    constexpr uint64_t kRounds = 20000, kCapacity = 1024;
    std::vector<Ring> rings = make_rings(1, kCapacity);
    Ring &ring = rings[0];
    RingView *view;
    CHECK(cudaMalloc(&view, sizeof(RingView)));
    CHECK(cudaMemcpy(view, &ring.device, sizeof(RingView), cudaMemcpyHostToDevice));
    HostWord *signal, *elapsed;
    HostWord *host_signal = mapped<HostWord>(1, &signal);
    HostWord *host_elapsed = mapped<HostWord>(1, &elapsed);
    launch_ping(kind, {view, 1, 1, 1, 1}, &signal->value, kRounds, &elapsed->value, nullptr);
    CHECK(cudaGetLastError());
    const auto limit = std::chrono::steady_clock::now() + kLimit;
    uint64_t wrong = 0, ticket = 0;
    LookAway look_away;  // never comes to it: one command is no stream
    for (uint64_t idle = 1; ticket < kRounds; ++idle) {
        if (idle % 65536 == 0 && std::chrono::steady_clock::now() > limit) break;
        if (kind == Ping::kWord) {
            if (CpuAtomics::load_relaxed_system(ring.host.slots[0].word) != ticket + 1) continue;
            ++ticket;
        } else {
            PackedCommand packed;
            if (!ring_peek<CpuAtomics>(ring.host.slots, kCapacity, ticket, &packed)) continue;
            const Command command = unpack(packed);
            ++ticket;
            wrong += command.value != ticket || command.local_offset != ticket * 64 || command.bytes != 7168;
            ring_progress<CpuAtomics>(const_cast<uint64_t *>(ring.host.consumed), ticket);
        }
        CpuAtomics::store_release_system(&host_signal->value, ticket);
        if (kind != Ping::kChannel) continue;
        look_away.looked(1, 1, now_ns);
        while (look_away.away(now_ns)) cpu_pause();
    }
    CHECK(cudaDeviceSynchronize());
    const uint64_t nanoseconds = host_elapsed->value;
    free_rings(rings);
    CHECK(cudaFree(view));
    CHECK(cudaFreeHost(host_signal));
    CHECK(cudaFreeHost(host_elapsed));
    return {static_cast<double>(nanoseconds) / kRounds / 1000, wrong + (nanoseconds == 0)};
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

constexpr double kLeastRatio = 0.75;  // of the ceiling of the same run

const char *verdict(double ratio) { return ratio >= kLeastRatio ? "" : "  below 0.75"; }

}  // namespace

int main() {
    CHECK(cudaSetDeviceFlags(cudaDeviceMapHost));
    const uint64_t begun = now_ns();
    const Case cases[] = {
        {"1 warp, 1 ring, 1 thread, fence each 32", 1, 1, 1, 1, 1 << 20},
        {"1 warp, 1 ring, 1 thread, fence each 256", 1, 1, 1, 8, 1 << 22},
        {"1 warp, 1 ring, 1 thread, fence each 1024", 1, 1, 1, 32, 1 << 22},
        {"16 warps, 1 ring, 1 thread, fence each 32", 1, 1, 16, 1, 1 << 22},
        {"8 warps, 8 rings, 8 threads, fence each 256", 8, 8, 8, 8, 1 << 20},
        {"32 warps, 32 rings, 8 threads, fence each 32", 32, 8, 32, 1, 1 << 18},
        {"32 warps, 32 rings, 8 threads, fence each 256", 32, 8, 32, 8, 1 << 18},
        {"256 warps, 32 rings, 8 threads, fence each 32", 32, 8, 256, 1, 1 << 18},
    };
    // What a proxy does is the second.
    const struct Way {
        Fences fences;
        uint64_t look_away_ns;
    } ways[] = {{Fences::kOnce, 0},
                {Fences::kOnce, LookAway::kNsOfRing},
                {Fences::kOnce, 3 * LookAway::kNsOfRing},
                {Fences::kTwice, 0},
                {Fences::kTwice, LookAway::kNsOfRing}};
    constexpr int kWays = sizeof ways / sizeof *ways;
    std::printf("32-byte commands, M/s; fences a batch / ns that threads look away from a ring they outran\n");
    std::printf("%-46s %9s", "", "ceiling");
    for (const Way &way : ways) {
        std::printf("   %d / %4d", way.fences == Fences::kOnce ? 1 : 2, static_cast<int>(way.look_away_ns));
    }
    std::printf(" %8s\n", "ratio");
    uint64_t wrong = 0;
    bool goes_on = true;
    for (const Case &c : cases) {
        goes_on = goes_on && wrong == 0 && now_ns() - begun < kLimitOfProgramNs;
        if (!goes_on) {
            std::printf("%-46s not run: too late, or wrong commands before\n", c.name);
            continue;
        }
        Bench channel(c, Stores::kChannel), raw(c, Stores::kRaw);
        std::vector<double> rates[kWays], ceilings;
        for (int i = 0; i < 3; ++i) {  // in alternation
            const Rate ceiling = raw.run(Fences::kOnce, 0);
            wrong += ceiling.wrong;
            ceilings.push_back(ceiling.million_per_s);
            for (int w = 0; w < kWays; ++w) {
                const Rate rate = channel.run(ways[w].fences, ways[w].look_away_ns);
                wrong += rate.wrong;
                rates[w].push_back(rate.million_per_s);
            }
        }
        std::printf("%-46s %9.1f", c.name, median(ceilings));
        for (const auto &of_way : rates) std::printf(" %10.1f", median(of_way));
        const double ratio = median(rates[1]) / median(ceilings);
        std::printf(" %8.2f%s\n", ratio, verdict(ratio));
        std::fflush(stdout);
    }
    constexpr Ping kPings[] = {Ping::kWord, Ping::kCommand, Ping::kFence, Ping::kChannel};
    const char *names[] = {"one word each way", "+ the 32 bytes of a command, decoded", "+ release fence",
                           "+ ticket and progress: the channel"};
    std::vector<double> times[4];
    for (int i = 0; goes_on && i < 5; ++i) {  // in alternation
        for (int k = 0; k < 4; ++k) {
            const RoundTrip trip = round_trip(kPings[k]);
            wrong += trip.wrong;
            times[k].push_back(trip.us);
        }
    }
    std::printf("%-46s %12s %12s %8s\n", "round trip GPU, CPU, GPU", "us", "ceiling us", "ratio");
    for (int k = 0; goes_on && k < 4; ++k) {
        const double ratio = median(times[0]) / median(times[k]);
        std::printf("%-46s %12.2f %12.2f %8.2f%s\n", names[k], median(times[k]), median(times[0]), ratio,
                    verdict(ratio));
    }
    std::printf("commands that were not what was pushed: %llu\n", static_cast<unsigned long long>(wrong));
    return wrong == 0 && goes_on ? 0 : 1;
}
