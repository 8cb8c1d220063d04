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
    bool acquire;             // false: the control, which looks at the signal without acquiring
};

UCCL_EP_KERNEL(watch, WatchParameters) {
    const WatchParameters &p = parameters;
    const uint64_t deadline = device::now_ns() + 20'000'000'000;
    for (uint64_t round = 1; round <= p.rounds; ++round) {
        if (device::warp_in_block() == 0 && device::lane() == 0) {
            while ((p.acquire ? device::load_acquire_system(p.signal) : device::load_relaxed_system(p.signal)) <
                       round &&
                   device::now_ns() < deadline) {
                device::relax();
            }
        }
        device::sync_block();
        uint64_t wrong = 0;
        const uint64_t thread = device::warp_in_block() * device::kWarpSize + device::lane();
        const uint64_t threads = device::warps_per_block() * device::kWarpSize;
        for (uint64_t i = thread; i < p.words; i += threads) wrong += p.data[i] != round * 0x9e3779b97f4a7c15u + i;
        if (wrong != 0) device::fetch_add_device(p.wrong, wrong);
        device::sync_block();
        // Relaxed: an acquire here would drop the old bytes from the cache, whatever the look at the signal does.
        if (thread == 0 && device::fetch_add_relaxed_device(p.counter, 1) + 1 == round * device::num_blocks()) {
            device::store_release_system(p.seen, round);
        }
    }
}

namespace {

// Few enough that a multiprocessor's own cache still holds the round before: old bytes are there to be seen.
constexpr uint64_t kWords = 2 * 14336 / 8, kRounds = 5000;
constexpr uint32_t kBlocks = 16;

struct Result {
    uint64_t seen, stale;
};

Result run(bool acquire) {
    uint64_t *data, *staging, *signal, *seen, *state;
    CHECK(cudaMalloc(&data, kWords * 8));
    CHECK(cudaMemset(data, 0, kWords * 8));
    CHECK(cudaMalloc(&state, 128));
    CHECK(cudaMemset(state, 0, 128));
    CHECK(cudaHostAlloc(&staging, kWords * 8, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&signal, 64, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&seen, 64, cudaHostAllocMapped));
    *signal = *seen = 0;
    cudaStream_t kernel, copies;
    CHECK(cudaStreamCreateWithFlags(&kernel, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    watch<<<kBlocks, 128, kStagingOfLaunch, kernel>>>({data, signal, seen, state, state + 8, kWords, kRounds, acquire});
    CHECK(cudaGetLastError());
    for (uint64_t round = 1; round <= kRounds; ++round) {
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
    Result result{*seen, 0};
    CHECK(cudaMemcpy(&result.stale, state + 8, 8, cudaMemcpyDeviceToHost));
    for (uint64_t *memory : {staging, signal, seen}) CHECK(cudaFreeHost(memory));
    for (uint64_t *memory : {data, state}) CHECK(cudaFree(memory));
    CHECK(cudaStreamDestroy(kernel));
    CHECK(cudaStreamDestroy(copies));
    return result;
}

}  // namespace

int main() {
    CHECK(cudaFuncSetAttribute(watch, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagingOfLaunch));
    const Result result = run(true), control = run(false);
    std::printf("rounds seen: %llu of %llu, stale words: %llu\n", static_cast<unsigned long long>(result.seen),
                static_cast<unsigned long long>(kRounds), static_cast<unsigned long long>(result.stale));
    std::printf("control, which does not acquire the signal: %llu stale words%s\n",
                static_cast<unsigned long long>(control.stale),
                control.stale == 0 ? " (this machine hides the mistake)" : ": the check can fail");
    return result.stale == 0 && result.seen == kRounds ? 0 : 1;
}
