// Where kernels of a crowded host wait: proxies ring when they have raised signals or completed commands.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace uccl_ep::host {

class Doorbell {
  public:
    // Before a look at what is awaited: a ring after it ends the wait at once.
    uint32_t look() const { return rings_.load(std::memory_order_acquire); }

    // Until it rings, at most `limit_ns`: peers of the same scale-up domain raise signals without ringing.
    void wait(uint32_t seen, long limit_ns) {
        waiting_.fetch_add(1, std::memory_order_seq_cst);
        const timespec limit{0, limit_ns};
        syscall(SYS_futex, word(), FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0);
        waiting_.fetch_sub(1, std::memory_order_relaxed);
    }

    // Any thread; a system call only where somebody waits.
    void ring() {
        rings_.fetch_add(1, std::memory_order_seq_cst);
        if (waiting_.load(std::memory_order_seq_cst) != 0) {
            syscall(SYS_futex, word(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        }
    }
    static void ring(void *doorbell) { static_cast<Doorbell *>(doorbell)->ring(); }

  private:
    uint32_t *word() { return reinterpret_cast<uint32_t *>(&rings_); }

    std::atomic<uint32_t> rings_{0};
    std::atomic<uint32_t> waiting_{0};
};

}  // namespace uccl_ep::host
