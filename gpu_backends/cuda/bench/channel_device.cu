// Kernels of the channel benchmark: the ring algorithm that all kernels use, with the CUDA primitives.
#include "primitives.hpp"
//
#include "channel_device.hpp"
#include "uccl_ep/command.hpp"
#include "uccl_ep/ring.hpp"

namespace {

using namespace uccl_ep;

// The fence of a batch has been made by the caller.
struct Atomics {
    UCCL_EP_DEVICE static uint64_t fetch_add_device(uint64_t *word, uint64_t n) {
        return device::fetch_add_device(word, n);
    }
    UCCL_EP_DEVICE static uint64_t load_acquire_device(const uint64_t *word) {
        return device::load_acquire_device(word);
    }
    UCCL_EP_DEVICE static void store_release_device(uint64_t *word, uint64_t value) {
        device::store_release_device(word, value);
    }
    UCCL_EP_DEVICE static uint64_t load_acquire_system(const uint64_t *word) {
        return device::load_acquire_system(word);
    }
    UCCL_EP_DEVICE static void release_fence_system() {}
    UCCL_EP_DEVICE static void store_slot(PackedCommand *slot, const PackedCommand &packed) {
        device::store_command(slot->word, packed.word);
    }
};

UCCL_EP_DEVICE Command command_of(uint32_t warp, uint64_t value) {
    return {Operation::kWriteSignal, warp % kMaxRanks, device::lane(), 7168, value * 64, value * 128, value};
}

constexpr uint64_t kLimitNs = 10'000'000'000;  // no run lasts a second; a lost command must not hang the GPU

__global__ void push_kernel(PushRun run) {
    const uint64_t deadline = device::now_ns() + kLimitNs;
    const uint32_t warp = blockIdx.x;
    const RingView &ring = static_cast<const RingView *>(run.rings)[warp % run.num_rings];
    for (uint64_t done = 0; done < run.per_lane; done += run.batch) {
        uint64_t first = 0;
        if (device::lane() == 0) {
            first = ring_reserve<Atomics>(ring, uint64_t{run.batch} * device::kWarpSize,
                                          [deadline] { return device::now_ns() < deadline; });
        }
        first = device::broadcast(first);
        if (first == kNoTicket) return;
        device::fence_system();
        for (uint32_t i = 0; i < run.batch; ++i) {
            const uint64_t ticket = first + uint64_t{i} * device::kWarpSize + device::lane();
            ring_publish<Atomics>(ring, ticket, command_of(warp, ticket + 1));
        }
    }
}

__global__ void raw_kernel(PushRun run, uint64_t commands_per_ring) {
    const uint32_t warp = blockIdx.x, warps_of_ring = run.warps / run.num_rings, place = warp / run.num_rings;
    const RingView &ring = static_cast<const RingView *>(run.rings)[warp % run.num_rings];
    for (uint64_t ticket = uint64_t{place} * 32 + device::lane(); ticket < commands_per_ring;
         ticket += uint64_t{warps_of_ring} * 32) {
        const PackedCommand packed = pack(command_of(warp, ticket + 1), phase_of_ticket(ticket, ring.capacity));
        device::store_command(ring.slots[ticket & (ring.capacity - 1)].word, packed.word);
    }
}

__global__ void ping_kernel(PushRun run, uint64_t *signal, uint64_t rounds, uint64_t *nanoseconds) {
    const RingView &ring = *static_cast<const RingView *>(run.rings);
    const uint64_t start = device::now_ns();
    for (uint64_t i = 1; i <= rounds; ++i) {
        device::fence_system();
        const uint64_t ticket = ring_reserve<Atomics>(ring, 1, [] { return false; });
        if (ticket == kNoTicket) return;
        ring_publish<Atomics>(ring, ticket, command_of(0, ticket + 1));
        while (device::load_acquire_system(signal) < i) {
            if (device::now_ns() - start > kLimitNs) return;
        }
    }
    *nanoseconds = device::now_ns() - start;
}

}  // namespace

void launch_push(const PushRun &run, void *stream) {
    push_kernel<<<run.warps, 32, 0, static_cast<cudaStream_t>(stream)>>>(run);
}
void launch_raw(const PushRun &run, uint64_t commands_per_ring, void *stream) {
    raw_kernel<<<run.warps, 32, 0, static_cast<cudaStream_t>(stream)>>>(run, commands_per_ring);
}
void launch_ping(const PushRun &run, uint64_t *signal, uint64_t rounds, uint64_t *nanoseconds, void *stream) {
    ping_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(run, signal, rounds, nanoseconds);
}
