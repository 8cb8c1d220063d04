#include "measure.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

namespace uccl_ep::ibverbs {
namespace {

constexpr uint64_t kPoll = 64;  // completions or arrivals taken at once

// A clock whose look is no system call, as it may be where this runs as a guest.
uint64_t ticks() {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

void check(int64_t result, const uccl_ep_transport_ops &ops) {
    if (result < 0) throw std::runtime_error(ops.last_error(ops.context, 0));
}

}  // namespace

double measure(const uccl_ep_transport_ops &sender, const uccl_ep_transport_ops *receiver, const Workload &work) {
    std::vector<uccl_ep_write> writes(work.batch);
    for (uccl_ep_write &write : writes) {
        write = {};
        write.peer = work.peer;
        write.flags = work.flags;
        write.bytes = work.bytes;
    }
    uccl_ep_completion completions[kPoll];
    uccl_ep_arrival arrivals[kPoll];
    uint64_t posted = 0, completed = 0, arrived = 0;
    const auto start = std::chrono::steady_clock::now();
    const auto elapsed = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    while (completed < work.count || (receiver != nullptr && arrived < work.count)) {
        if (posted < work.count && posted - completed + work.batch <= work.depth) {
            const uint64_t wanted = std::min(work.batch, work.count - posted);
            const int64_t accepted = sender.post_writes(sender.context, 0, writes.data(), wanted);
            check(accepted, sender);
            posted += static_cast<uint64_t>(accepted);
        }
        const int64_t done = sender.poll_completions(sender.context, 0, completions, kPoll);
        check(done, sender);
        for (int64_t i = 0; i < done; ++i) {
            if (completions[i].status != 0) throw std::runtime_error(sender.last_error(sender.context, 0));
        }
        completed += static_cast<uint64_t>(done);
        if (receiver != nullptr) {
            const int64_t got = receiver->poll_arrivals(receiver->context, 0, arrivals, kPoll);
            check(got, *receiver);
            arrived += static_cast<uint64_t>(got);
        }
        if (done == 0) {
            if (elapsed() > work.limit_s) {
                throw std::runtime_error(std::to_string(completed) + " of " + std::to_string(work.count) +
                                         " writes completed within " + std::to_string(work.limit_s) + " s");
            }
            sched_yield();  // a software device shares this core
        }
    }
    return elapsed();
}

std::vector<double> ping_pong(const uccl_ep_transport_ops &ops, const PingPong &work) {
    using Clock = std::chrono::steady_clock;
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(work.limit_s));
    uint64_t outstanding = 0;
    const auto poll = [&] {
        uccl_ep_completion completions[kPoll];
        const int64_t done = ops.poll_completions(ops.context, 0, completions, kPoll);
        check(done, ops);
        for (int64_t i = 0; i < done; ++i) {
            if (completions[i].status != 0) throw std::runtime_error(ops.last_error(ops.context, 0));
        }
        outstanding -= static_cast<uint64_t>(done);
    };
    uint64_t looks = 0;
    const auto pause = [&] {
        if (work.yields) sched_yield();
        if (++looks % 4096 == 0 && Clock::now() > deadline) {
            throw std::runtime_error("the ping-pong did not end within " + std::to_string(work.limit_s) + " s");
        }
    };
    uccl_ep_write write = {};
    write.peer = work.peer;
    write.bytes = work.bytes;
    write.local_offset = work.local_offset;
    write.remote_offset = work.remote_offset;
    std::vector<double> halves;
    const auto start = Clock::now();
    const uint64_t first_tick = ticks();
    uint64_t before = first_tick;
    for (uint64_t number = 1; number <= 2 * work.count; ++number) {
        if ((number % 2 == 1) == work.first) {
            while (outstanding != 0) {  // the bytes of a write stay as they are until it completes
                poll();
                if (outstanding != 0) pause();
            }
            *work.sent = static_cast<uint8_t>(number);
            while (ops.post_writes(ops.context, 0, &write, 1) == 0) poll();
            ++outstanding;
        } else {
            while (__atomic_load_n(work.landed, __ATOMIC_ACQUIRE) != static_cast<uint8_t>(number)) pause();
            if (work.first) {
                const uint64_t now = ticks();
                halves.push_back(static_cast<double>(now - before) / 2);
                before = now;
            }
        }
    }
    while (outstanding != 0) {
        poll();
        if (outstanding != 0) pause();
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    for (double &half : halves) half *= seconds / static_cast<double>(ticks() - first_tick);
    return halves;
}

}  // namespace uccl_ep::ibverbs
