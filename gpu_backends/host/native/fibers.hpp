// A block of the host backend: its warps and lanes are fibers on one operating-system thread.
//
// Kernels wait for each other (a warp for its lanes, a receiver for a peer), so each needs a stack of
// its own; a wait runs the other fibers of the block, and gives the core away when none of them
// could go on. Blocks are threads and run truly at once.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "doorbell.hpp"

namespace uccl_ep::host {

// What the launching thread looks at while a kernel runs: whether the kernel is to end. `check` is called every
// 50 ms, on that thread's own stack (a signal handler written in Python needs more than a fiber has), until it says so.
class Interruption {
  public:
    explicit Interruption(const std::function<bool()> &check) : check_(check) {}
    bool asked() const { return asked_.load(std::memory_order_relaxed); }
    bool due();   // launching thread: whether it is time to look
    void look();  // launching thread

    static constexpr uint64_t kPeriodNs = 50'000'000;

  private:
    const std::function<bool()> &check_;
    std::atomic<bool> asked_{false};
    uint64_t looked_ns_ = 0;
};

class Block {
  public:
    Block(uint32_t index, uint32_t num_lanes);
    ~Block();
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;

    // What the next runs find: their blocks, this one's warps and shared memory. Stacks are kept from shape to shape;
    // there are never more of them than the largest needs, and they are mappings, of which a process has few.
    // Throws std::bad_alloc; the next shape that fits works again.
    void take_shape(uint32_t num_blocks, uint32_t num_warps, size_t shared_bytes);

    // Runs `body` once on every fiber; returns when all have returned. A C++ exception must not
    // leave `body`. The block of the launching thread also `looks` at the interruption.
    void run(const std::function<void()> &body, Interruption &interruption, bool looks);

    // The block that the calling fiber belongs to.
    static Block &current();

    uint32_t index() const { return index_; }
    uint32_t num_blocks() const { return num_blocks_; }
    uint32_t num_warps() const { return num_warps_; }
    uint32_t num_lanes() const { return num_lanes_; }
    uint32_t warp() const { return running_ / num_lanes_; }
    uint32_t lane() const { return running_ % num_lanes_; }
    std::byte *shared() { return shared_.get(); }

    // Let other fibers run; when a whole round passed without progress(), yield the core.
    void yield();
    // From now on, after some such rounds, wait for a ring of the doorbell, 50 us at most: whoever this rank waits
    // for may need the core.
    void share_core(Doorbell *doorbell) { doorbell_ = doorbell; }
    void progress() { progressed_ = true; }
    bool interrupted() const { return interruption_->asked(); }

    // Wait for all lanes of this warp, for those of some warps, or for all fibers of the block.
    void sync_warp();
    void sync_warps(uint32_t first, uint32_t count);
    bool sync_warps_all(uint32_t first, uint32_t count, bool predicate);
    void sync_block();
    bool sync_block_all(bool predicate);
    void sync_block_for(bool waits);

    // A word of this warp's own, see the primitives.
    uint32_t &span_count() { return span_counts_[warp()]; }

    // 64 bits per lane, for exchanges inside a warp (each lane writes its own, then sync_warp).
    uint64_t &exchange(uint32_t lane) { return exchange_[warp() * num_lanes_ + lane]; }

  private:
    struct Barrier {
        uint32_t arrived = 0;
        uint64_t generation = 0;
        bool vote = true;
    };
    struct Fiber;

    void end_round();
    bool arrive_at(Barrier &barrier, uint32_t first, uint32_t expected);
    void wait_at(Barrier &barrier, uint32_t first, uint32_t expected);
    bool vote_at(Barrier &barrier, uint32_t first, uint32_t expected, bool predicate);
    void switch_to(uint32_t next);
    void resume_scheduler();
    void look_around();
    static void entry(uint32_t low, uint32_t high);

    uint32_t index_;
    uint32_t num_blocks_ = 0;
    uint32_t num_warps_ = 0;
    uint32_t num_lanes_;
    uint32_t num_fibers_ = 0;  // of this shape; fibers_ may hold more
    uint32_t running_ = 0;
    uint32_t alive_ = 0;
    bool progressed_ = false;
    bool looks_ = false;
    uint32_t yields_ = 0;
    Doorbell *doorbell_ = nullptr;  // nullptr: there is a core for each thread, so waits keep theirs
    uint32_t rings_ = 0;            // of the doorbell, before this round
    uint32_t idle_rounds_ = 0;
    Interruption *interruption_ = nullptr;
    const std::function<void()> *body_ = nullptr;
    std::unique_ptr<std::byte[]> shared_;
    size_t shared_bytes_ = 0;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Barrier> warp_barriers_;
    std::vector<Barrier> team_barriers_;  // of warps from each one on
    Barrier block_barrier_;
    Barrier block_for_barrier_;
    std::vector<uint64_t> exchange_;
    std::vector<uint32_t> span_counts_;
    std::unique_ptr<Fiber> scheduler_;
    const void *scheduler_bottom_ = nullptr;  // AddressSanitizer only
    size_t scheduler_bytes_ = 0;
};

}  // namespace uccl_ep::host
