// How long a thread that polls looks away on a host whose ranks have fewer cores than threads that poll.
//
// A look in vain costs some 6 us of a core (the system call, two switches, what must be looked at), so a thread that looks
// each 50 us takes a tenth of one, also where nothing is under way: 42 idle proxies took both cores of a host, and threads
// that had work there were runnable for up to 12 s before they ran, since all that had just slept went before them (Linux
// 6.18). So the longest look away grows with the threads that a core has (Cores.look_away_s in uccl_ep/cores.py), which
// bounds what all of them take together; a thread comes to it by degrees, so that one whose work goes on looks as before.
#pragma once

#include <cstdint>

namespace uccl_ep {

inline constexpr uint64_t kLookAwayNs = 50'000;  // the first times, and always where threads have cores of their own
inline constexpr uint64_t kLooksPerDoubling =
    16;  // in vain: 4 times as long is reached after 2.4 ms, 32 times after 25

// `looks`: in vain, since it began to look away.
inline uint64_t look_away_ns(uint64_t looks, uint64_t longest_ns) {
    uint64_t ns = kLookAwayNs;
    for (; looks >= kLooksPerDoubling && ns < longest_ns; looks -= kLooksPerDoubling) {
        ns *= 2;
    }
    return ns < longest_ns ? ns : longest_ns;
}

}  // namespace uccl_ep
