#include "fibers.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <new>
#include <stdexcept>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace uccl_ep::host {

namespace {
// Kernels keep small frames: the largest holds one row's accumulators. Sanitizers need more.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

constexpr uint32_t kYieldsPerClock = 256;  // a look at the clock costs as much as some yields
constexpr uint32_t kIdleRounds = 4;        // that a wait keeps the core of a crowded host for
constexpr long kLookAwayNs = 50'000;

thread_local Block *current_block = nullptr;

class NoStack : public std::bad_alloc {
  public:
    const char *what() const noexcept override {
        return "the host backend has no memory for the stack of one more lane: each takes 68 KiB of address space and "
               "two mappings (vm.max_map_count); fewer lanes (UCCL_EP_HOST_LANES) or fewer blocks need less";
    }
};

uint64_t clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}
}  // namespace

bool Interruption::due() {
    if (asked()) return false;
    const uint64_t now = clock_ns();
    if (looked_ns_ == 0) looked_ns_ = now;
    return now - looked_ns_ >= kPeriodNs;
}

void Interruption::look() {
    looked_ns_ = clock_ns();
    if (!asked() && check_()) asked_.store(true, std::memory_order_relaxed);
}

struct Block::Fiber {
    ucontext_t context{};
    void *stack = nullptr;
    size_t stack_bytes = 0;
    bool done = false;
    bool blocked = false;  // at a barrier: not run until the barrier opens
    void *fake_stack = nullptr;  // AddressSanitizer's, kept while another fiber runs
    void *tsan = nullptr;

    void allocate_stack() {
        // One guard page below the stack: an overflow faults instead of corrupting a neighbour.
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        stack_bytes = kStackBytes + page;
        stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (stack == MAP_FAILED) {
            stack = nullptr;
            throw NoStack();
        }
        mprotect(stack, page, PROT_NONE);
    }
    ~Fiber() {
        if (stack != nullptr) munmap(stack, stack_bytes);
#if defined(__SANITIZE_THREAD__)
        if (tsan != nullptr && stack != nullptr) __tsan_destroy_fiber(tsan);
#endif
    }
};

Block::Block(uint32_t index, uint32_t num_lanes) : index_(index), num_lanes_(num_lanes), scheduler_(new Fiber) {}

void Block::take_shape(uint32_t num_blocks, uint32_t num_warps, size_t shared_bytes) {
    num_blocks_ = num_blocks;
    num_warps_ = num_warps;
    num_fibers_ = num_warps * num_lanes_;
    while (fibers_.size() < num_fibers_) {
        auto fiber = std::make_unique<Fiber>();
        fiber->allocate_stack();
        fibers_.push_back(std::move(fiber));
    }
    warp_barriers_.resize(num_warps);
    team_barriers_.resize(num_warps);
    exchange_.resize(num_fibers_);
    span_counts_.resize(num_warps);
    // Exactly as much as asked for, so that AddressSanitizer sees a kernel that writes past it.
    if (shared_bytes_ != shared_bytes || !shared_) shared_.reset(new std::byte[shared_bytes + 64]);
    shared_bytes_ = shared_bytes;
}

Block::~Block() = default;

Block &Block::current() { return *current_block; }

void Block::entry(uint32_t low, uint32_t high) {
    Block *block = reinterpret_cast<Block *>((static_cast<uintptr_t>(high) << 32) | low);
#if defined(__SANITIZE_ADDRESS__)
    // Fiber 0 is the one that the scheduler enters: from it the bounds of the scheduler's stack are learnt.
    const void *bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (block->running_ == 0) {
        block->scheduler_bottom_ = bottom;
        block->scheduler_bytes_ = size;
    }
#endif
    (*block->body_)();
    block->fibers_[block->running_]->done = true;
    block->progressed_ = true;
    --block->alive_;
    if (block->alive_ == 0) {
        block->resume_scheduler();
    } else {
        block->yield();
    }
}

void Block::run(const std::function<void()> &body, Interruption &interruption, bool looks) {
    body_ = &body;
    interruption_ = &interruption;
    looks_ = looks;
    Block *const previous = current_block;
    current_block = this;
    if (num_fibers_ == 1) {  // a lone fiber needs no stack of its own
        running_ = 0;
        body();
        current_block = previous;
        return;
    }
    alive_ = num_fibers_;
    const auto address = reinterpret_cast<uintptr_t>(this);
    for (uint32_t i = 0; i < num_fibers_; ++i) {
        Fiber *const fiber = fibers_[i].get();
        fiber->done = fiber->blocked = false;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack;
        fiber->context.uc_stack.ss_size = fiber->stack_bytes;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Block::entry), 2, static_cast<uint32_t>(address),
                    static_cast<uint32_t>(address >> 32));
#if defined(__SANITIZE_THREAD__)
        if (fiber->tsan == nullptr) fiber->tsan = __tsan_create_fiber(0);
#endif
    }
#if defined(__SANITIZE_THREAD__)
    scheduler_->tsan = __tsan_get_current_fiber();
#endif
    running_ = 0;
    for (;;) {  // a fiber comes back here when all are done, or for a look around on this stack
        Fiber &next = *fibers_[running_];
#if defined(__SANITIZE_THREAD__)
        __tsan_switch_to_fiber(next.tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(&scheduler_->fake_stack, next.stack, next.stack_bytes);
#endif
        swapcontext(&scheduler_->context, &next.context);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(scheduler_->fake_stack, nullptr, nullptr);
#endif
        if (alive_ == 0) break;
        interruption_->look();
    }
    current_block = previous;
}

void Block::resume_scheduler() {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_->tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(nullptr, scheduler_bottom_, scheduler_bytes_);
#endif
    setcontext(&scheduler_->context);
}

// Look at the interruption, on the thread's own stack, and come back.
void Block::look_around() {
    if (num_fibers_ == 1) {
        interruption_->look();
        return;
    }
    Fiber &from = *fibers_[running_];
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_->tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack, scheduler_bottom_, scheduler_bytes_);
#endif
    swapcontext(&from.context, &scheduler_->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void Block::switch_to(uint32_t next) {
    Fiber &from = *fibers_[running_];
    Fiber &to = *fibers_[next];
    running_ = next;
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(from.done ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
    if (from.done) {
        setcontext(&to.context);
    } else {
        swapcontext(&from.context, &to.context);
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// Every fiber had its turn.
void Block::end_round() {
    if (progressed_) {
        idle_rounds_ = 0;
    } else if (doorbell_ == nullptr || ++idle_rounds_ < kIdleRounds) {
        sched_yield();
    } else {
        doorbell_->wait(rings_, kLookAwayNs);
    }
    if (doorbell_ != nullptr) rings_ = doorbell_->look();
    progressed_ = false;
}

void Block::yield() {
    if (looks_ && ++yields_ % kYieldsPerClock == 0 && interruption_->due()) look_around();
    const uint32_t count = num_fibers_;
    if (count == 1) {
        end_round();
        return;
    }
    uint32_t next = running_;
    do {
        next = next + 1 == count ? 0 : next + 1;
        if (next == 0) end_round();
    } while ((fibers_[next]->done || fibers_[next]->blocked) && next != running_);
    if (next != running_) switch_to(next);
}

// Whether this fiber is the last of [first, first + expected) to come; the others may go on then. Those of them that wait
// at another barrier look once more whether they may.
bool Block::arrive_at(Barrier &barrier, uint32_t first, uint32_t expected) {
    progressed_ = true;
    if (++barrier.arrived != expected) return false;
    barrier.arrived = 0;
    ++barrier.generation;
    for (uint32_t i = first; i < first + expected; ++i) fibers_[i]->blocked = false;
    return true;
}

// Wait for fibers [first, first + expected).
void Block::wait_at(Barrier &barrier, uint32_t first, uint32_t expected) {
    const uint64_t generation = barrier.generation;
    if (arrive_at(barrier, first, expected)) return;
    fibers_[running_]->blocked = true;
    while (barrier.generation == generation) yield();
}

// The same, and whether all of them say so.
bool Block::vote_at(Barrier &barrier, uint32_t first, uint32_t expected, bool predicate) {
    if (expected == 1) return predicate;
    if (!predicate) barrier.vote = false;
    wait_at(barrier, first, expected);
    const bool result = barrier.vote;
    wait_at(barrier, first, expected);  // all have read it
    if (running_ == first) barrier.vote = true;
    wait_at(barrier, first, expected);  // nobody votes again before it is reset
    return result;
}

void Block::sync_warp() { wait_at(warp_barriers_[warp()], warp() * num_lanes_, num_lanes_); }

void Block::sync_warps(uint32_t first, uint32_t count) {
    wait_at(team_barriers_[first], first * num_lanes_, count * num_lanes_);
}

bool Block::sync_warps_all(uint32_t first, uint32_t count, bool predicate) {
    return vote_at(team_barriers_[first], first * num_lanes_, count * num_lanes_, predicate);
}

void Block::sync_block() { wait_at(block_barrier_, 0, num_fibers_); }

void Block::sync_block_for(bool waits) {
    if (waits) {
        wait_at(block_for_barrier_, 0, num_fibers_);
    } else {
        arrive_at(block_for_barrier_, 0, num_fibers_);
    }
}

bool Block::sync_block_all(bool predicate) { return vote_at(block_barrier_, 0, num_fibers_, predicate); }

}  // namespace uccl_ep::host
