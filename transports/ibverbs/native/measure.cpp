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

}  // namespace uccl_ep::ibverbs
