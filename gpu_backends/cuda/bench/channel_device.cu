// Kernels of the channel benchmark: the ring algorithm that all kernels use, with the CUDA primitives.
#include "primitives.hpp"
//
#include "channel_device.hpp"
#include "ring_atomics.hpp"
#include "uccl_ep/command.hpp"
#include "uccl_ep/ring.hpp"

namespace {

using namespace uccl_ep;

UCCL_EP_DEVICE Command command_of(uint32_t warp, uint64_t value) {
    return {Operation::kWriteSignal, warp % kMaxRanks, device::lane(), 7168, value * 64, value * 128, value};
}

constexpr uint64_t kLimitNs = 4'000'000'000;  // no run lasts a second; a lost command must not hang the GPU

// Tickets for `batch` commands of each lane: one fence, which all lanes carry out at the same time.
UCCL_EP_DEVICE uint64_t reserve_of_warp(const RingView &ring, uint32_t batch, uint64_t deadline) {
    TakenTickets taken{};
    if (device::lane() == 0) taken = ring_take<DeviceAtomics>(ring, uint64_t{batch} * device::kWarpSize);
    DeviceAtomics::fence_system();
    uint64_t first = 0;
    if (device::lane() == 0) {
        first = ring_wait_for_room<DeviceAtomics>(ring, taken, [deadline] { return device::now_ns() < deadline; });
    }
    device::sync_lanes();  // a shuffle alone orders no memory
    return device::broadcast(first);
}

// The same with the fence of the push and another of every lane behind it.
UCCL_EP_DEVICE uint64_t reserve_then_fence(const RingView &ring, uint32_t batch, uint64_t deadline) {
    uint64_t first = 0;
    if (device::lane() == 0) {
        first = ring_reserve<DeviceAtomics>(ring, uint64_t{batch} * device::kWarpSize,
                                            [deadline] { return device::now_ns() < deadline; });
    }
    first = device::broadcast(first);
    device::fence_system();
    return first;
}

__global__ void push_kernel(PushRun run) {
    const uint64_t deadline = device::now_ns() + kLimitNs;
    const uint32_t warp = blockIdx.x;
    const RingView ring = static_cast<const RingView *>(run.rings)[warp % run.num_rings];
    for (uint64_t done = 0; done < run.per_lane; done += run.batch) {
        const uint64_t first = run.fences == Fences::kOnce ? reserve_of_warp(ring, run.batch, deadline)
                                                           : reserve_then_fence(ring, run.batch, deadline);
        if (first == kNoTicket) return;
        for (uint32_t i = 0; i < run.batch; ++i) {
            const uint64_t ticket = first + uint64_t{i} * device::kWarpSize + device::lane();
            ring_fill<DeviceAtomics>(ring, ticket, command_of(warp, ticket + 1));
        }
    }
}

__global__ void raw_kernel(PushRun run, uint64_t commands_per_ring) {
    const uint32_t warp = blockIdx.x, warps_of_ring = run.warps / run.num_rings, place = warp / run.num_rings;
    const RingView ring = static_cast<const RingView *>(run.rings)[warp % run.num_rings];
    for (uint64_t ticket = uint64_t{place} * 32 + device::lane(); ticket < commands_per_ring;
         ticket += uint64_t{warps_of_ring} * 32) {
        const PackedCommand packed = pack(command_of(warp, ticket + 1), phase_of_ticket(ticket, ring.capacity));
        device::store_command(ring.slots[ticket & (ring.capacity - 1)].word, packed.word);
    }
}

// Sees the CPU's answer. The clock only now and then: looking at it in every turn would be part of what is measured.
template <bool acquire>
UCCL_EP_DEVICE bool wait_for(const uint64_t *word, uint64_t value, uint64_t deadline) {
    for (uint32_t looks = 1; (acquire ? device::load_acquire_system(word) : device::load_relaxed_system(word)) < value;
         ++looks) {
        if (looks % 1024 == 0 && device::now_ns() > deadline) return false;
    }
    return true;
}

template <Ping kind>
__global__ void ping_kernel(PushRun run, uint64_t *signal, uint64_t rounds, uint64_t *nanoseconds) {
    const RingView ring = *static_cast<const RingView *>(run.rings);
    const uint64_t start = device::now_ns();
    const uint64_t deadline = start + kLimitNs;
    for (uint64_t i = 0; i < rounds; ++i) {
        const Command command = command_of(0, i + 1);
        if (kind == Ping::kWord) {
            device::store_relaxed_system(ring.slots[0].word, i + 1);
        } else if (kind == Ping::kCommand) {
            ring_fill<DeviceAtomics>(ring, i, command);
        } else if (kind == Ping::kFence) {
            device::fence_system();
            ring_fill<DeviceAtomics>(ring, i, command);
        } else if (ring_push<DeviceAtomics>(ring, command, [] { return false; }) == kNoTicket) {
            return;
        }
        if (!wait_for<kind != Ping::kWord>(signal, i + 1, deadline)) return;
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
void launch_ping(Ping kind, const PushRun &run, uint64_t *signal, uint64_t rounds, uint64_t *nanoseconds,
                 void *stream) {
    auto *kernel = kind == Ping::kWord      ? ping_kernel<Ping::kWord>
                   : kind == Ping::kCommand ? ping_kernel<Ping::kCommand>
                   : kind == Ping::kFence   ? ping_kernel<Ping::kFence>
                                            : ping_kernel<Ping::kChannel>;
    kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(run, signal, rounds, nanoseconds);
}
