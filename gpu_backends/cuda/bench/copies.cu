// Checks the copy primitive byte by byte between all kinds of memory, then measures how fast blocks push
// rows to a peer with it: the ceiling for every kernel that moves tokens.
#include "primitives.hpp"
//
#include "common.hpp"

using namespace uccl_ep;

// ---- exactness ----

struct CopyParameters {
    uint8_t *destination;
    const uint8_t *source;
    uint64_t bytes;
    uint32_t through_shared;  // 1: put the source into the kernel's own shared memory first
};

UCCL_EP_KERNEL(copy_once, CopyParameters) {
    const CopyParameters &p = parameters;
    if (device::warp_in_block() != 0) return;
    const uint8_t *source = p.source;
    if (p.through_shared != 0) {
        uint8_t *shared = device::shared_memory();
        for (uint64_t i = device::lane(); i < p.bytes; i += device::kWarpSize) shared[i] = p.source[i];
        device::sync_warp();
        source = shared;
    }
    device::copy(p.destination, source, p.bytes);
    device::sync_warp();
}

struct ManyParameters {
    uint8_t *destination;  // places, `apart` bytes each behind the one before
    const uint8_t *source;
    uint64_t bytes, apart;
    uint32_t count;
};

UCCL_EP_KERNEL(copy_many, ManyParameters) {
    const ManyParameters &p = parameters;
    if (device::warp_in_block() != 0) return;
    device::copy_to_many([&](uint32_t i) { return p.destination + i * p.apart; }, p.count, p.source, p.bytes);
    device::sync_warp();
}

// Each warp copies its own rows, and checks after sync_warp that it sees what it wrote.
struct RowsParameters {
    uint8_t *destination[2];
    const uint8_t *source;
    uint64_t row_bytes;
    uint32_t rows;
    uint32_t destinations;
};

UCCL_EP_KERNEL(copy_rows, RowsParameters) {
    const RowsParameters &p = parameters;
    const uint32_t warp = device::block_index() * device::warps_per_block() + device::warp_in_block();
    const uint32_t warps = device::num_blocks() * device::warps_per_block();
    for (uint32_t row = warp; row < p.rows; row += warps) {
        for (uint32_t d = 0; d < p.destinations; ++d) {
            device::copy(p.destination[d] + row * p.row_bytes, p.source + row * p.row_bytes, p.row_bytes);
        }
    }
    device::sync_warp();
}

// Relay: a warp copies, signals another, which copies on. Shows that a signal carries the copies before it.
struct RelayParameters {
    const uint8_t *source;
    uint8_t *stage;        // memory of the peer or of this device
    uint8_t *destination;
    uint64_t bytes;
    uint64_t *signal;      // pinned host memory, raised to the round
    uint64_t rounds;
    uint64_t *errors;
};

UCCL_EP_KERNEL(relay, RelayParameters) {
    const RelayParameters &p = parameters;
    if (device::warp_in_block() != 0) return;
    const uint64_t deadline = device::now_ns() + 5'000'000'000;
    for (uint64_t round = 1; round <= p.rounds; ++round) {
        const uint8_t *source = p.source + round % 4 * p.bytes;
        if (device::block_index() == 0) {
            device::copy(p.stage, source, p.bytes);
            device::sync_warp();
            if (device::lane() == 0) device::store_release_system(p.signal, 2 * round - 1);
        }
        const uint64_t wanted = device::block_index() == 0 ? 2 * round : 2 * round - 1;
        if (device::lane() == 0) {
            while (device::load_acquire_system(p.signal) < wanted && device::now_ns() < deadline) device::relax();
        }
        device::sync_warp();
        if (device::block_index() == 1) {
            device::copy(p.destination, p.stage, p.bytes);
            device::sync_warp();
            uint64_t wrong = 0;
            for (uint64_t i = device::lane(); i < p.bytes; i += device::kWarpSize)
                wrong += p.destination[i] != source[i];
            if (wrong != 0) device::fetch_add_device(p.errors, wrong);
            device::sync_warp();
            if (device::lane() == 0) device::store_release_system(p.signal, 2 * round);
        }
    }
}

static uint32_t fill(uint8_t *memory, uint64_t bytes, uint32_t seed) {
    for (uint64_t i = 0; i < bytes; ++i) {
        seed = seed * 1664525u + 1013904223u;
        memory[i] = static_cast<uint8_t>(seed >> 24);
    }
    return seed;
}

// copy_to_many to as many places as some tokens have picks, with room between them that must stay as it is.
static int check_many(uint8_t *source, uint8_t *destination, const std::vector<uint8_t> &want) {
    int failures = 0;
    std::vector<uint8_t> got(want.size());
    for (uint32_t count : {0u, 1u, 3u, 8u, 32u, 33u, 40u}) {
        for (uint64_t bytes : {1u, 15u, 16u, 513u, 1024u, 2047u, 2560u}) {
            for (uint64_t offset : {0u, 1u, 4u, 16u}) {
                const uint64_t apart = (bytes + 31) / 16 * 16 + offset;  // aligned places, and others
                CHECK(cudaMemset(destination, 0xee, want.size()));
                const ManyParameters p{destination + 64, source + offset, bytes, apart, count};
                copy_many<<<1, 32, kStagingOfLaunch>>>(p);
                CHECK(cudaDeviceSynchronize());
                CHECK(cudaMemcpy(got.data(), destination, want.size(), cudaMemcpyDefault));
                bool ok = true;
                for (uint64_t i = 0; i < want.size() && ok; ++i) {
                    const uint64_t place = i < 64 ? count : (i - 64) / apart, within = i < 64 ? 0 : (i - 64) % apart;
                    ok = got[i] == (place < count && within < bytes ? want[offset + within] : 0xee);
                }
                failures += !ok;
                if (!ok)
                    std::printf("WRONG: %llu bytes to %u places, offset %llu\n", static_cast<unsigned long long>(bytes),
                                count, static_cast<unsigned long long>(offset));
            }
        }
    }
    return failures;
}

static int check_exactness(int peer) {
    constexpr uint64_t kRoom = 1 << 17;
    std::vector<uint8_t> want(kRoom), got(kRoom);
    uint8_t *source, *local, *remote = nullptr, *host, *host_source;
    CHECK(cudaMalloc(&source, kRoom));
    CHECK(cudaMalloc(&local, kRoom));
    CHECK(cudaHostAlloc(&host, kRoom, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&host_source, kRoom, cudaHostAllocMapped));
    if (peer >= 0) {
        CHECK(cudaSetDevice(peer));
        CHECK(cudaMalloc(&remote, kRoom));
        CHECK(cudaSetDevice(0));
    }
    int failures = 0, cases = 0;
    const uint64_t sizes[] = {0,    1,    15,   16,    17,    511,   512,   513,   1024,
                              2048, 7168, 7424, 14336, 14337, 24448, 24449, 100000};
    const uint64_t offsets[] = {0, 1, 4, 16};
    uint8_t *destinations[] = {local, host, remote};
    for (uint8_t *destination : destinations) {
        if (destination == nullptr) continue;
        for (uint32_t kind = 0; kind < 3; ++kind) {  // source: device, pinned host, shared memory
            for (uint64_t bytes : sizes) {
                if (kind == 2 && bytes > 30000) continue;
                for (uint64_t to : offsets) {
                    for (uint64_t from : offsets) {
                        fill(want.data(), kRoom, static_cast<uint32_t>(++cases));
                        CHECK(cudaMemcpy(source, want.data(), kRoom, cudaMemcpyDefault));
                        std::copy(want.begin(), want.end(), host_source);
                        CHECK(cudaMemset(destination, 0xee, kRoom));
                        const CopyParameters p{destination + 64 + to, (kind == 1 ? host_source : source) + from, bytes,
                                               kind == 2};
                        copy_once<<<1, 32 * (1 + cases % 12), 30720 + kStagingOfLaunch>>>(p);
                        CHECK(cudaDeviceSynchronize());
                        CHECK(cudaMemcpy(got.data(), destination, kRoom, cudaMemcpyDefault));
                        bool ok = true;
                        for (uint64_t i = 0; i < kRoom && ok; ++i) {
                            const bool inside = i >= 64 + to && i < 64 + to + bytes;
                            ok = got[i] == (inside ? want[i - 64 - to + from] : 0xee);
                        }
                        if (!ok && ++failures < 10) {
                            std::printf("WRONG: %llu bytes, offsets %llu and %llu, source kind %u, destination %s\n",
                                        static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(to),
                                        static_cast<unsigned long long>(from), kind,
                                        destination == local  ? "device"
                                        : destination == host ? "host"
                                                              : "peer");
                        }
                    }
                }
            }
        }
    }
    std::printf("copies checked: %d, wrong: %d\n", cases, failures);
    CHECK(cudaMemcpy(source, want.data(), kRoom, cudaMemcpyDefault));
    for (uint8_t *destination : {local, remote}) {
        if (destination != nullptr) failures += check_many(source, destination, want);
    }

    uint64_t *signal, *errors;
    CHECK(cudaHostAlloc(&signal, 64, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&errors, 64, cudaHostAllocMapped));
    for (uint8_t *stage : {local, remote}) {
        if (stage == nullptr) continue;
        *signal = *errors = 0;
        const RelayParameters p{source, stage, local + (kRoom >> 1), 14336, signal, 20000, errors};
        relay<<<2, 32, kStagingOfLaunch>>>(p);
        CHECK(cudaDeviceSynchronize());
        std::printf("relay through %s: %llu wrong bytes, ended at signal %llu of 40000\n",
                    stage == local ? "device" : "peer", static_cast<unsigned long long>(*errors),
                    static_cast<unsigned long long>(*signal));
        failures += *errors != 0 || *signal != 40000;
    }
    return failures;
}

// ---- speed ----

static void measure(int devices) {
    struct Shape {
        const char *name;
        uint32_t rows;
        uint64_t row_bytes;
        bool local_too;
    };
    const Shape shapes[] = {{"4096 x 14336 B to the peer", 4096, 14336, false},
                            {"4096 x 14336 B to the peer and to local memory", 4096, 14336, true},
                            {"4096 x 7424 B to the peer and to local memory", 4096, 7424, true},
                            {"128 x 7424 B to the peer and to local memory", 128, 7424, true},
                            {"128 x 14336 B to the peer and to local memory", 128, 14336, true}};
    std::vector<uint8_t *> source(devices), here(devices), there(devices);
    std::vector<cudaStream_t> streams(devices);
    for (int d = 0; d < devices; ++d) {
        CHECK(cudaSetDevice(d));
        CHECK(cudaMalloc(&source[d], 4096 * 14336));
        CHECK(cudaMalloc(&here[d], 4096 * 14336));
        CHECK(cudaMalloc(&there[d], 4096 * 14336));
        CHECK(cudaMemset(source[d], 0x3c + d, 4096 * 14336));
        CHECK(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking));
        CHECK(cudaFuncSetAttribute(copy_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagingOfLaunch));
    }
    const int blocks[] = {4, 8, 16, 24, 32, 48, 132};
    const int warps[] = {2, 4, 8, 12};
    for (const Shape &shape : shapes) {
        std::printf("%s; us on device 0 with all %d pushing\n  warps", shape.name, devices);
        for (int b : blocks) std::printf(" %7d SMs", b);
        std::printf("\n");
        for (int w : warps) {
            std::printf("  %5d", w);
            for (int b : blocks) {
                const auto launch = [&](int d) {
                    CHECK(cudaSetDevice(d));
                    const RowsParameters p{{there[(d + 1) % devices], here[d]},
                                           source[d],
                                           shape.row_bytes,
                                           shape.rows,
                                           shape.local_too ? 2u : 1u};
                    copy_rows<<<b, 32 * w, kStagingOfLaunch, streams[d]>>>(p);
                };
                // The other devices are kept busy for longer than the measurement takes.
                for (int d = 1; d < devices; ++d) {
                    for (int i = 0; i < 40; ++i) launch(d);
                }
                CHECK(cudaSetDevice(0));
                const double us = median_us(streams[0], 20, [&] { launch(0); });
                std::printf(" %11.1f", us);
                for (int d = 0; d < devices; ++d) CHECK(cudaStreamSynchronize(streams[d]));
            }
            std::printf("\n");
        }
    }
}

int main(int argc, char **) {
    int devices;
    CHECK(cudaGetDeviceCount(&devices));
    devices = std::min(devices, 2);
    for (int d = 0; d < devices && devices > 1; ++d) {
        CHECK(cudaSetDevice(d));
        CHECK(cudaDeviceEnablePeerAccess(1 - d, 0));
    }
    CHECK(cudaSetDevice(0));
    CHECK(cudaFuncSetAttribute(copy_once, cudaFuncAttributeMaxDynamicSharedMemorySize, 30720 + kStagingOfLaunch));
    CHECK(cudaFuncSetAttribute(copy_many, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagingOfLaunch));
    CHECK(cudaFuncSetAttribute(relay, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagingOfLaunch));
    const int failures = check_exactness(devices > 1 ? 1 : -1);
    if (argc == 1 && failures == 0) measure(devices);  // any argument: the checks alone
    return failures == 0 ? 0 : 1;
}
