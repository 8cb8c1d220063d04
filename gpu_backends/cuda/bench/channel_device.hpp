// The device side of the channel benchmark, as the CPU side sees it.
#pragma once

#include <cstdint>

struct PushRun {
    void *rings;        // RingView [num_rings], device address
    uint32_t num_rings;
    uint32_t warps;     // warps in all, warp w pushes into ring w % num_rings
    uint32_t batch;     // commands of a lane between two release fences
    uint64_t per_lane;  // commands of a lane in all
};

// Asynchronous: every lane of every warp pushes `per_lane` commands.
void launch_push(const PushRun &run, void *stream);
// The same bytes to the same places with plain stores: no ticket, no fence, no look at the consumer.
void launch_raw(const PushRun &run, uint64_t commands_per_ring, void *stream);
// One thread pushes a command and waits for the CPU to raise `*signal` to its number, `rounds` times.
void launch_ping(const PushRun &run, uint64_t *signal, uint64_t rounds, uint64_t *nanoseconds, void *stream);
