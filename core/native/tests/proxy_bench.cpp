// Commands a second of CPU time through one whole proxy (pop, decode, bounds, merge, post to a null transport,
// completion back) with the commands already in the ring, so that no producer shares the core.
#include <cstdio>
#include <cstdlib>

#include "harness.hpp"
#include "uccl_ep/null_transport.hpp"

using namespace uccl_ep;

namespace {

// CPU time, so that a busy machine does not count against the proxy.
uint64_t cpu_ns() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

double measure(uint64_t contiguous, uint64_t rounds) {
    constexpr uint64_t kCapacity = 4096;
    NullTransport network(1, 1024);
    TransportLimits limits;
    limits.imm_bits = 32;
    Host host(0, test_layout(2, 4), network.ops(), PlanKind::kNative, limits, 1, 1, kCapacity);
    host.engine = std::make_unique<Engine>(host.shared);
    Proxy &proxy = *host.engine->proxies()[0];
    const uint32_t name = host.data_signal(0, 0);
    uint64_t value = 0;
    uint64_t in_proxy_ns = 0;
    const RingView view = host.shared->channel->view(0);
    for (uint64_t round = 0; round < rounds; ++round) {
        for (uint64_t i = 0; i < kCapacity; ++i) {
            const bool last = (i + 1) % contiguous == 0;
            value += i % contiguous == 0 ? 1 : 0;
            const uint64_t offset = contiguous == 1 ? 128 * (i % 64) : 64 * (i % contiguous);
            ring_push<StdAtomics>(
                view, Command{last ? Operation::kWriteSignal : Operation::kWrite, 1, name, 64, offset, offset, value},
                [] { return false; });
        }
        const uint64_t start = cpu_ns();
        while (StdAtomics::load_acquire_system(view.completed) != (round + 1) * kCapacity) {
            proxy.pass();
        }
        in_proxy_ns += cpu_ns() - start;
    }
    return static_cast<double>(rounds * kCapacity) * 1e3 / static_cast<double>(in_proxy_ns);
}

}  // namespace

int main(int argc, char **argv) {
    const uint64_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 500;
    for (const uint64_t contiguous : {1u, 4u, 32u}) {
        std::printf("%2llu contiguous commands a message: %.1f M commands/s\n",
                    static_cast<unsigned long long>(contiguous), measure(contiguous, rounds));
    }
    return 0;
}
