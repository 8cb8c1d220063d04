#include "launcher.hpp"

#include <chrono>

namespace uccl_ep::host {

Launcher::~Launcher() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    for (auto &thread : threads_) thread.join();
}

void Launcher::work(uint32_t index) {
    uint64_t seen = 0;
    for (;;) {
        Block *block = nullptr;
        const std::function<void()> *body = nullptr;
        Interruption *interruption = nullptr;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stopping_ || (round_ != seen && assigned_[index] != nullptr); });
            if (stopping_) return;
            seen = round_;
            block = assigned_[index];
            assigned_[index] = nullptr;
            body = body_;
            interruption = interruption_;
        }
        block->run(*body, *interruption, false);
        {
            const std::lock_guard lock(mutex_);
            --unfinished_;
        }
        changed_.notify_all();
    }
}

bool Launcher::launch(const Kernel &kernel, const void *parameters, uint32_t num_blocks, uint32_t num_warps,
                      size_t shared_bytes, const std::function<bool()> &interrupted) {
    const std::lock_guard launch_lock(launching_);
    Interruption interruption(interrupted);
    const std::function<void()> body = [&] { kernel.run(parameters); };
    while (blocks_.size() < num_blocks) {
        blocks_.push_back(std::make_unique<Block>(static_cast<uint32_t>(blocks_.size()), num_lanes_));
        if (crowded_) blocks_.back()->share_core(&doorbell_);
    }
    // Before any block is handed to a thread: this may throw.
    for (uint32_t i = 0; i < num_blocks; ++i) blocks_[i]->take_shape(num_blocks, num_warps, shared_bytes);
    if (num_blocks > 1) {
        {
            const std::lock_guard lock(mutex_);
            while (threads_.size() < num_blocks - 1) {
                const uint32_t index = static_cast<uint32_t>(threads_.size());
                assigned_.push_back(nullptr);
                threads_.emplace_back([this, index] { work(index); });
            }
            for (uint32_t i = 1; i < num_blocks; ++i) assigned_[i - 1] = blocks_[i].get();
            body_ = &body;
            interruption_ = &interruption;
            unfinished_ = num_blocks - 1;
            ++round_;
        }
        changed_.notify_all();
    }
    blocks_[0]->run(body, interruption, true);
    if (num_blocks > 1) {
        // Every wait inside a kernel has a limit, so this one has too.
        std::unique_lock lock(mutex_);
        while (!changed_.wait_for(lock, std::chrono::nanoseconds(Interruption::kPeriodNs),
                                  [&] { return unfinished_ == 0; })) {
            lock.unlock();
            interruption.look();
            lock.lock();
        }
    }
    return interruption.asked();
}

}  // namespace uccl_ep::host
