// What `uccl-ep bench channel` and `uccl-ep bench ordering` measure, without Python in the loops. Every
// function checks what it times: a command that is not the one pushed makes it throw std::runtime_error.
#pragma once

#include <cstdint>
#include <string>

#include "engine.hpp"

namespace uccl_ep::bench {

// A stream of commands for one proxy.
struct Stream {
    PlanKind plan = PlanKind::kNative;
    uint32_t contiguous = 1;  // commands of a message, which merge into one write
    uint32_t signals = 1;     // messages use so many signals in turn
    std::string trace_path;   // "": off
};

// Million commands a second of CPU time through one whole proxy: pop, decode, bounds, merge, post to a
// null transport, completion back. The commands lie in the ring already, so that no producer shares the core.
double proxy_rate(const Stream &stream, uint64_t rounds);
// The same commands only popped, decoded and compared: the most a proxy could reach.
double pop_rate(const Stream &stream, uint64_t rounds);

// Million commands a second, wall clock, from one thread to another through a ring, `batch` tickets at a
// time; `bare`: the same stores and loads without tickets, credit and fences, a hand-shake a lap.
double ring_rate(uint32_t batch, bool bare, uint64_t commands);
// Microseconds, wall clock, from the push of a command to the sight of the word that its consumer raises;
// `bare`: one word each way.
double round_trip_us(bool bare, uint64_t rounds);

// A stream of writes of payload between two engines of this process, neither of them started: this thread
// runs both proxies in turn, so that nothing waits for a core.
struct Payload {
    uint32_t signal = 0;        // that the sender raises
    uint64_t bytes = 7168;      // of a write
    uint32_t writes = 1;        // of a message; they are not contiguous
    uint64_t messages = 1024;
    uint64_t window_bytes = 0;  // sources and targets lie in this much of the data windows, in turn
    uint64_t first_value = 1;   // of the signal
};
// Seconds of CPU time of either side's proxy.
struct Shares {
    double sender;
    double receiver;
};
Shares payload_seconds(Engine &sender, Engine &receiver, const Payload &payload);

}  // namespace uccl_ep::bench
