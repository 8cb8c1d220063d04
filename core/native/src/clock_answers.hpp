// Tells a device what the host's clock says, each time that it asks (core/kernels/clock.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace uccl_ep {

class ClockAnswers {
  public:
    // Two words of host memory, each in a cache line of its own. Answers until stop(), at most for `limit_ns`.
    ClockAnswers(uint64_t *question, uint64_t *answer, uint64_t limit_ns);
    ~ClockAnswers() { stop(); }
    ClockAnswers(const ClockAnswers &) = delete;

    void stop();

  private:
    void run(uint64_t *question, uint64_t *answer, uint64_t seen, uint64_t limit_ns);

    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace uccl_ep
