// The device side of the channel benchmark, as the CPU side sees it.
#pragma once

#include <cstdint>

// How a warp publishes what its lanes staged for a batch.
enum class Fences {
    kOnce,   // every lane at once, between the taking of tickets and the look at the progress
    kTwice,  // the lane that takes the tickets, and then every lane
};

struct PushRun {
    void *rings;        // RingView [num_rings], device address
    uint32_t num_rings;
    uint32_t warps;     // warps in all, warp w pushes into ring w % num_rings
    uint32_t batch;     // commands of a lane between two release fences
    uint64_t per_lane;  // commands of a lane in all
    Fences fences = Fences::kOnce;
};

// Asynchronous: every lane of every warp pushes `per_lane` commands.
void launch_push(const PushRun &run, void *stream);
// The same bytes to the same places with plain stores: no ticket, no fence, no look at the consumer.
void launch_raw(const PushRun &run, uint64_t commands_per_ring, void *stream);
// What goes there and back, each with one step more, so that the cost of each step shows.
enum class Ping {
    kWord,     // one relaxed 64-bit store: the ceiling
    kCommand,  // the 32 bytes of a command, without ticket and fence
    kFence,    // the same behind a fence: the release of staged bytes
    kChannel,  // the whole push: ticket, look at the progress, fence, command
};
// One thread sends and waits for the CPU to raise `*signal` to the number of the round, `rounds` times.
void launch_ping(Ping kind, const PushRun &run, uint64_t *signal, uint64_t rounds, uint64_t *nanoseconds, void *stream);
