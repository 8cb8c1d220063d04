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

Block &Launcher::block(uint32_t index, uint32_t num_blocks, uint32_t num_warps, size_t shared_bytes) {
    auto &slot = blocks_[Shape{index, num_blocks, num_warps, shared_bytes}];
    if (!slot) slot = std::make_unique<Block>(index, num_blocks, num_warps, num_lanes_, shared_bytes);
    return *slot;
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
    Block &first = block(0, num_blocks, num_warps, shared_bytes);
    if (num_blocks > 1) {
        {
            const std::lock_guard lock(mutex_);
            while (threads_.size() < num_blocks - 1) {
                const uint32_t index = static_cast<uint32_t>(threads_.size());
                assigned_.push_back(nullptr);
                threads_.emplace_back([this, index] { work(index); });
            }
            for (uint32_t i = 1; i < num_blocks; ++i) assigned_[i - 1] = &block(i, num_blocks, num_warps, shared_bytes);
            body_ = &body;
            interruption_ = &interruption;
            unfinished_ = num_blocks - 1;
            ++round_;
        }
        changed_.notify_all();
    }
    first.run(body, interruption, true);
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
