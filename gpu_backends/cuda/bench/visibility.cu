// A kernel that sees a signal sees the payload: the data window lies in GPU memory, a copy engine plays the
// NIC, a CPU thread raises the signal in pinned memory when the copy is complete. Reading pinned memory
// would prove nothing, since it is the GPU's own caches that could hold old bytes.
#include "primitives.hpp"
//
#include <atomic>

#include "common.hpp"

using namespace uccl_ep;

struct WatchParameters {
    const uint64_t *data;     // device memory, written by the copy engine
    const uint64_t *signal;   // pinned memory: rounds whose data are there
    uint64_t *seen;           // pinned memory: rounds that all blocks have read
    uint64_t *counter;        // device memory
    uint64_t *wrong;
    uint64_t words, rounds;
};

UCCL_EP_KERNEL(watch, WatchParameters) {
    const WatchParameters &p = parameters;
    const uint64_t deadline = device::now_ns() + 20'000'000'000;
    for (uint64_t round = 1; round <= p.rounds; ++round) {
        if (device::warp_in_block() == 0 && device::lane() == 0) {
            while (device::load_acquire_system(p.signal) < round && device::now_ns() < deadline) device::relax();
        }
        device::sync_block();
        uint64_t wrong = 0;
        const uint64_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
        const uint64_t threads = device::warps_per_block() * device::kWarpSize;
        for (uint64_t i = thread; i < p.words; i += threads) wrong += p.data[i] != round * 0x9e3779b97f4a7c15u + i;
        if (wrong != 0) device::fetch_add_device(p.wrong, wrong);
        device::sync_block();
        if (thread == 0 && device::fetch_add_device(p.counter, 1) + 1 == round * device::num_blocks()) {
            device::store_release_system(p.seen, round);
        }
    }
}

int main() {
    constexpr uint64_t kWords = 14336 / 8 * 8, kRounds = 5000;
    constexpr uint32_t kBlocks = 16;
    uint64_t *data, *staging, *signal, *seen, *state;
    CHECK(cudaMalloc(&data, kWords * 8));
    CHECK(cudaMemset(data, 0, kWords * 8));
    CHECK(cudaMalloc(&state, 128));
    CHECK(cudaMemset(state, 0, 128));
    CHECK(cudaHostAlloc(&staging, kWords * 8, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&signal, 64, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&seen, 64, cudaHostAllocMapped));
    *signal = *seen = 0;
    CHECK(cudaFuncSetAttribute(watch, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagingOfLaunch));
    cudaStream_t kernel, copies;
    CHECK(cudaStreamCreateWithFlags(&kernel, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    watch<<<kBlocks, 128, kStagingOfLaunch, kernel>>>({data, signal, seen, state, state + 8, kWords, kRounds});
    CHECK(cudaGetLastError());
    uint64_t round = 1;
    for (; round <= kRounds; ++round) {
        for (uint64_t i = 0; i < kWords; ++i) staging[i] = round * 0x9e3779b97f4a7c15u + i;
        CHECK(cudaMemcpyAsync(data, staging, kWords * 8, cudaMemcpyHostToDevice, copies));
        CHECK(cudaStreamSynchronize(copies));
        std::atomic_ref(*signal).store(round, std::memory_order_release);
        // The next copy overwrites what the kernel is reading, so it waits; the kernel itself ends in time.
        while (std::atomic_ref(*seen).load(std::memory_order_acquire) < round &&
               cudaStreamQuery(kernel) == cudaErrorNotReady) {
        }
    }
    CHECK(cudaStreamSynchronize(kernel));
    uint64_t wrong;
    CHECK(cudaMemcpy(&wrong, state + 8, 8, cudaMemcpyDeviceToHost));
    std::printf("rounds seen: %llu of %llu, stale words: %llu\n", static_cast<unsigned long long>(*seen),
                static_cast<unsigned long long>(kRounds), static_cast<unsigned long long>(wrong));
    return wrong == 0 && *seen == kRounds ? 0 : 1;
}
