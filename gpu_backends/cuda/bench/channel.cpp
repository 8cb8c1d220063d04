// Commands a second from the GPU to CPU threads, and the time of a round trip.
//
// Each popped command is decoded and checked. Beside the channel the same run measures its ceiling: the
// same 32-byte stores without tickets, fence and credit, read by the same threads.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "channel_device.hpp"
#include "common.hpp"
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

constexpr auto kLimit = std::chrono::seconds(12);

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

// Pops `commands` of each ring; returns how many were not what was pushed.
uint64_t pop_all(std::vector<Ring *> rings, uint64_t commands) {
    uint64_t wrong = 0, idle = 0;
    const auto limit = std::chrono::steady_clock::now() + kLimit;
    for (size_t live = rings.size(); live != 0;) {
        live = 0;
        if (++idle % 4096 == 0 && std::chrono::steady_clock::now() > limit) return wrong + 1;
        for (Ring *ring : rings) {
            PackedCommand packed;
            for (uint32_t i = 0; i < 512 && ring->popped < commands; ++i) {
                if (!ring_peek<CpuAtomics>(ring->host.slots, ring->host.capacity, ring->popped, &packed)) break;
                const Command command = unpack(packed);
                wrong += command.value != ring->popped + 1 || command.local_offset != command.value * 64 ||
                         command.bytes != 7168;
                if (++ring->popped % kProgressEvery == 0) {
                    ring_progress<CpuAtomics>(const_cast<uint64_t *>(ring->host.consumed), ring->popped);
                }
            }
            live += ring->popped < commands;
        }
    }
    return wrong;
}

struct Rate {
    double million_per_s;
    uint64_t wrong;
};

Rate measure(uint32_t num_rings, uint32_t threads, uint32_t warps, uint32_t batch, uint64_t per_ring, bool raw) {
    // A raw run takes no credit, so its ring must hold everything.
    uint64_t capacity = 4096;
    while (raw && capacity < per_ring) capacity *= 2;
    std::vector<Ring> rings = make_rings(num_rings, capacity);
    std::vector<RingView> views;
    for (const Ring &ring : rings) views.push_back(ring.device);
    RingView *device_views;
    CHECK(cudaMalloc(&device_views, views.size() * sizeof(RingView)));
    CHECK(cudaMemcpy(device_views, views.data(), views.size() * sizeof(RingView), cudaMemcpyHostToDevice));
    const uint64_t per_lane = per_ring * num_rings / warps / 32;
    const uint64_t commands = per_lane * 32 * warps / num_rings;
    const PushRun run{device_views, num_rings, warps, batch, per_lane};
    std::atomic<uint64_t> wrong{0};
    std::vector<std::thread> poppers;
    std::atomic<uint32_t> ready{0};
    for (uint32_t t = 0; t < threads; ++t) {
        std::vector<Ring *> mine;
        for (uint32_t r = t; r < num_rings; r += threads) mine.push_back(&rings[r]);
        poppers.emplace_back([mine, commands, &wrong, &ready] {
            ++ready;
            wrong += pop_all(mine, commands);
        });
    }
    while (ready.load() < threads) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    raw ? launch_raw(run, commands, nullptr) : launch_push(run, nullptr);
    CHECK(cudaGetLastError());
    for (std::thread &popper : poppers) popper.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(cudaDeviceSynchronize());
    for (Ring &ring : rings) {
        CHECK(cudaFreeHost(ring.host.slots));
        CHECK(cudaFreeHost(const_cast<uint64_t *>(ring.host.consumed)));
        CHECK(cudaFree(ring.device.head));
    }
    CHECK(cudaFree(device_views));
    return {static_cast<double>(commands) * num_rings / seconds / 1e6, wrong.load()};
}

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
    }
    CHECK(cudaDeviceSynchronize());
    const uint64_t nanoseconds = host_elapsed->value;
    CHECK(cudaFreeHost(ring.host.slots));
    CHECK(cudaFreeHost(const_cast<uint64_t *>(ring.host.consumed)));
    CHECK(cudaFree(ring.device.head));
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
    std::printf("%-46s %12s %12s %8s\n", "32-byte commands", "M/s", "ceiling M/s", "ratio");
    struct Case {
        const char *name;
        uint32_t rings, threads, warps, batch;
        uint64_t per_ring;
    };
    const Case cases[] = {
        {"1 warp, 1 ring, 1 thread, fence each 32", 1, 1, 1, 1, 1 << 22},
        {"1 warp, 1 ring, 1 thread, fence each 256", 1, 1, 1, 8, 1 << 23},
        {"1 warp, 1 ring, 1 thread, fence each 1024", 1, 1, 1, 32, 1 << 23},
        {"16 warps, 1 ring, 1 thread, fence each 32", 1, 1, 16, 1, 1 << 23},
        {"32 warps, 32 rings, 8 threads, fence each 256", 32, 8, 32, 8, 1 << 20},
        {"256 warps, 32 rings, 8 threads, fence each 32", 32, 8, 256, 1, 1 << 20},
    };
    uint64_t wrong = 0;
    for (const Case &c : cases) {
        std::vector<double> rates, ceilings;
        for (int i = 0; i < 3; ++i) {  // in alternation
            const Rate rate = measure(c.rings, c.threads, c.warps, c.batch, c.per_ring, false);
            const Rate ceiling = measure(c.rings, c.threads, c.warps, c.batch, c.per_ring, true);
            wrong += rate.wrong + ceiling.wrong;
            rates.push_back(rate.million_per_s);
            ceilings.push_back(ceiling.million_per_s);
        }
        const double ratio = median(rates) / median(ceilings);
        std::printf("%-46s %12.1f %12.1f %8.2f%s\n", c.name, median(rates), median(ceilings), ratio, verdict(ratio));
    }
    constexpr Ping kPings[] = {Ping::kWord, Ping::kCommand, Ping::kFence, Ping::kChannel};
    const char *names[] = {"one word each way", "+ the 32 bytes of a command, decoded", "+ release fence",
                           "+ ticket and progress: the channel"};
    std::vector<double> times[4];
    for (int i = 0; i < 5; ++i) {  // in alternation
        for (int k = 0; k < 4; ++k) {
            const RoundTrip trip = round_trip(kPings[k]);
            wrong += trip.wrong;
            times[k].push_back(trip.us);
        }
    }
    std::printf("%-46s %12s %12s %8s\n", "round trip GPU, CPU, GPU", "us", "ceiling us", "ratio");
    for (int k = 0; k < 4; ++k) {
        const double ratio = median(times[0]) / median(times[k]);
        std::printf("%-46s %12.2f %12.2f %8.2f%s\n", names[k], median(times[k]), median(times[0]), ratio,
                    verdict(ratio));
    }
    std::printf("commands that were not what was pushed: %llu\n", static_cast<unsigned long long>(wrong));
    return wrong == 0 ? 0 : 1;
}
