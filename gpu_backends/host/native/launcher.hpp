// Runs a kernel's blocks on threads: the caller's, and a pool that lives as long as the launcher.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fibers.hpp"
#include "kernel_table.hpp"

namespace uccl_ep::host {

class Launcher {
  public:
    explicit Launcher(uint32_t num_lanes) : num_lanes_(num_lanes) {}
    ~Launcher();
    Launcher(const Launcher &) = delete;
    Launcher &operator=(const Launcher &) = delete;

    // Run `kernel` with `num_blocks` blocks of `num_warps` warps, each block on its own thread; block 0
    // on the caller's. Returns when all have finished. One launch at a time. While it runs, the caller's
    // thread calls `interrupted` every 50 ms; when that says true, waits of the kernel fail. Returns whether it did.
    bool launch(const Kernel &kernel, const void *parameters, uint32_t num_blocks, uint32_t num_warps,
                size_t shared_bytes, const std::function<bool()> &interrupted);

    // Launches from now on give their cores away where they wait, until the doorbell rings or 50 us have passed.
    // Call it before the first launch.
    Doorbell *share_cores() {
        crowded_ = true;
        return &doorbell_;
    }

  private:
    void work(uint32_t index);

    uint32_t num_lanes_;
    Doorbell doorbell_;
    bool crowded_ = false;
    std::mutex launching_;
    std::vector<std::unique_ptr<Block>> blocks_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::thread> threads_;
    std::vector<Block *> assigned_;  // [thread]
    const std::function<void()> *body_ = nullptr;
    Interruption *interruption_ = nullptr;
    uint64_t round_ = 0;
    uint32_t unfinished_ = 0;
    bool stopping_ = false;
};

}  // namespace uccl_ep::host
