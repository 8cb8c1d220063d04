#include "clock_answers.hpp"

#include <sched.h>

#include "clock.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {

namespace {
constexpr uint32_t kPausesPerYield = 256;  // the asker may need this core
}

ClockAnswers::ClockAnswers(uint64_t *question, uint64_t *answer, uint64_t limit_ns) {
    const uint64_t seen = StdAtomics::load_acquire_system(question);
    thread_ = std::thread([this, question, answer, seen, limit_ns] { run(question, answer, seen, limit_ns); });
}

void ClockAnswers::stop() {
    stopping_.store(true);
    if (thread_.joinable()) {
        thread_.join();
    }
}

void ClockAnswers::run(uint64_t *question, uint64_t *answer, uint64_t seen, uint64_t limit_ns) {
    const uint64_t start = now_ns();
    uint64_t last = StdAtomics::load_acquire_system(answer);
    for (uint32_t looks = 1; !stopping_.load(std::memory_order_relaxed); ++looks) {
        const uint64_t asked = StdAtomics::load_acquire_system(question);
        const uint64_t now = now_ns();
        if (asked != seen) {
            seen = asked;
            last = now > last ? now : last + 1;  // another word than before is what says that it is an answer
            StdAtomics::store_release_system(answer, last);
        } else if (now - start > limit_ns) {
            return;
        } else if (looks % kPausesPerYield == 0) {
            sched_yield();
        } else {
            cpu_pause();
        }
    }
}

}  // namespace uccl_ep
