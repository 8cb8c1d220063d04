#pragma once

#include <cstdint>
#include <ctime>

namespace uccl_ep {

// Nanoseconds of the monotonic clock.
inline uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

// Time that counts as silence between two looks. Where this process itself did not run (a stopped job, a
// machine that was moved, a starved core), its peers may not have either: that is nobody's death. A clock
// that steps back counts nothing.
inline uint64_t silence_ns(uint64_t before_ns, uint64_t now) {
    constexpr uint64_t kMostNs = 100'000'000;
    const uint64_t passed = now > before_ns ? now - before_ns : 0;
    return passed < kMostNs ? passed : kMostNs;
}

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

}  // namespace uccl_ep
