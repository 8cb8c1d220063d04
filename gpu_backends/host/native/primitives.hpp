// The device primitives of the host backend: what core/kernels is written against.
//
// Every backend gives these names with these meanings; an algorithm file that needs a vendor's word
// is a primitive missing here. Collective functions are called by all lanes of a warp (or all threads
// of a block) with equal arguments unless said otherwise.
#pragma once

#include <time.h>

#include <atomic>
#include <bit>
#include <cstring>

#include "fibers.hpp"
#include "stream_copy.hpp"

#define UCCL_EP_DEVICE inline
#define UCCL_EP_DEVICE_SELDOM UCCL_EP_DEVICE  // the compiler knows best
// Before a loop of a few constant rounds whose loads should be in flight together.
#define UCCL_EP_UNROLL
// An entry point: a kernel takes one parameter struct.
#define UCCL_EP_KERNEL(name, Parameters) extern "C" void name(const Parameters &parameters)

#include "uccl_ep/integers.hpp"

#ifndef UCCL_EP_HOST_LANES
#define UCCL_EP_HOST_LANES 1
#endif
#if UCCL_EP_HOST_LANES == 1
#include "vector_run.hpp"
// A lone lane sums in vector registers; many lanes sum as on a GPU, each its elements.
#define UCCL_EP_DEVICE_RUN ::uccl_ep::host::VectorRun
#define UCCL_EP_DEVICE_MIDDLE_RUN ::uccl_ep::host::VectorRun
#define UCCL_EP_DEVICE_SHORT_RUN ::uccl_ep::host::VectorRun
#define UCCL_EP_DEVICE_PIECE_RUN ::uccl_ep::host::VectorRun
#endif

namespace uccl_ep::device {

inline constexpr uint32_t kWarpSize = UCCL_EP_HOST_LANES;
using LaneMask = uint64_t;  // a bit a lane; wide enough for wave64

// ---- where am I ----
inline uint32_t lane() {
    if constexpr (kWarpSize == 1) return 0;
    return host::Block::current().lane();
}
inline uint32_t warp_in_block() { return host::Block::current().warp(); }
inline uint32_t warps_per_block() { return host::Block::current().num_warps(); }
inline uint32_t block_index() { return host::Block::current().index(); }
inline uint32_t num_blocks() { return host::Block::current().num_blocks(); }

// ---- dynamic shared memory of the block, `shared_bytes` of the launch, 16-byte aligned ----
inline uint8_t *shared_memory() {
    const auto address = reinterpret_cast<uintptr_t>(host::Block::current().shared());
    return reinterpret_cast<uint8_t *>((address + 63) / 64 * 64);
}

// ---- convergence; each also orders memory among its threads ----
inline void sync_warp() { host::Block::current().sync_warp(); }
inline void sync_lanes() { sync_warp(); }  // where no copy is under way
inline void sync_block() { host::Block::current().sync_block(); }
// The same, and whether `predicate` holds on all threads of the block.
inline bool sync_block_all(bool predicate) { return host::Block::current().sync_block_all(predicate); }
// All threads of the block arrive, and only those that say so wait for the others, whose writes they then see. Not again
// before the block has met otherwise. Where kPartsMeet is false, all wait.
inline void sync_block_for(bool waits) { host::Block::current().sync_block_for(waits); }
// The same for warps [first, first + count) of the block alone: several such runs of warps, which do not overlap, may be
// at this at once, each as often as it likes. Where kPartsMeet is false, and KernelLimits.block_teams 1, all warps of the
// block are meant.
inline constexpr bool kPartsMeet = true;
inline void sync_warps(uint32_t first, uint32_t count) { host::Block::current().sync_warps(first, count); }
inline bool sync_warps_all(uint32_t first, uint32_t count, bool predicate) {
    return host::Block::current().sync_warps_all(first, count, predicate);
}

// ---- warp collectives ----
inline LaneMask ballot(bool predicate) {
    if constexpr (kWarpSize == 1) return predicate ? 1 : 0;
    auto &block = host::Block::current();
    block.exchange(block.lane()) = predicate;
    block.sync_warp();
    LaneMask mask = 0;
    for (uint32_t i = 0; i < kWarpSize; ++i) mask |= LaneMask{block.exchange(i) != 0} << i;
    block.sync_warp();  // nobody overwrites the exchange before all have read it
    return mask;
}

// The value of lane `source`; 64-bit payload or narrower, trivially copyable.
template <class T>
inline T broadcast(T value, uint32_t source = 0) {
    static_assert(sizeof(T) <= 8);
    if constexpr (kWarpSize == 1) return value;
    auto &block = host::Block::current();
    if (block.lane() == source) std::memcpy(&block.exchange(source), &value, sizeof(T));
    block.sync_warp();
    T result;
    std::memcpy(&result, &block.exchange(source), sizeof(T));
    block.sync_warp();
    return result;
}

// Lanes whose `value` equals this lane's.
inline LaneMask match(uint32_t value) {
    if constexpr (kWarpSize == 1) return 1;
    auto &block = host::Block::current();
    block.exchange(block.lane()) = value;
    block.sync_warp();
    LaneMask mask = 0;
    for (uint32_t i = 0; i < kWarpSize; ++i) mask |= LaneMask{block.exchange(i) == value} << i;
    block.sync_warp();
    return mask;
}

template <class Combine>
inline uint32_t reduce(uint32_t value, Combine combine) {
    if constexpr (kWarpSize == 1) return value;
    auto &block = host::Block::current();
    block.exchange(block.lane()) = value;
    block.sync_warp();
    auto result = static_cast<uint32_t>(block.exchange(0));
    for (uint32_t i = 1; i < kWarpSize; ++i) result = combine(result, static_cast<uint32_t>(block.exchange(i)));
    block.sync_warp();
    return result;
}
inline uint32_t reduce_max(uint32_t value) {
    return reduce(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t reduce_sum(uint32_t value) {
    return reduce(value, [](uint32_t a, uint32_t b) { return a + b; });
}

inline uint32_t population_count(LaneMask mask) { return static_cast<uint32_t>(std::popcount(mask)); }
inline uint32_t lowest_bit(LaneMask mask) { return static_cast<uint32_t>(std::countr_zero(mask)); }
// Lanes below this one.
inline LaneMask lanes_below() { return (LaneMask{1} << lane()) - 1; }

// ---- memory order. "system" reaches peers and the CPU, "device" the threads of this launch ----
inline uint64_t load_acquire_system(const uint64_t *address) {
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t *>(address)).load(std::memory_order_acquire);
}
inline uint64_t load_relaxed_system(const uint64_t *address) {
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t *>(address)).load(std::memory_order_relaxed);
}
inline void store_release_system(uint64_t *address, uint64_t value) {
    std::atomic_ref<uint64_t>(*address).store(value, std::memory_order_release);
}
inline void store_relaxed_system(uint64_t *address, uint64_t value) {
    std::atomic_ref<uint64_t>(*address).store(value, std::memory_order_relaxed);
}
inline uint64_t load_acquire_device(const uint64_t *address) { return load_acquire_system(address); }
inline void store_release_device(uint64_t *address, uint64_t value) { store_release_system(address, value); }
inline uint64_t fetch_add_device(uint64_t *address, uint64_t value) {
    return std::atomic_ref<uint64_t>(*address).fetch_add(value, std::memory_order_acq_rel);
}
inline uint64_t fetch_add_relaxed_device(uint64_t *address, uint64_t value) {
    return std::atomic_ref<uint64_t>(*address).fetch_add(value, std::memory_order_relaxed);
}
inline void add_device(int32_t *address, int32_t value) {
    std::atomic_ref<int32_t>(*address).fetch_add(value, std::memory_order_relaxed);
}
inline bool compare_exchange_system(uint64_t *address, uint64_t expected, uint64_t desired) {
    return std::atomic_ref<uint64_t>(*address).compare_exchange_strong(expected, desired, std::memory_order_acq_rel);
}
// Earlier writes of this thread, and writes it has observed, come before its later stores for peers
// and the CPU.
inline void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Publish the four words of a command; each is seen whole, in any order among them.
inline void store_command(uint64_t *slot, const uint64_t *words) {
    for (int i = 0; i < 4; ++i) store_release_system(slot + i, words[i]);
}

// ---- waiting ----
inline uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}
// The same for spans of a traced kernel (core/kernels/spans.hpp): no access to memory moves across it.
inline uint64_t stamp_ns() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const uint64_t now = now_ns();
    std::atomic_signal_fence(std::memory_order_seq_cst);
    return now;
}
// How many spans this warp has recorded: a word of its own, which lasts as long as the launch. Traced kernels only.
inline uint32_t &span_count() { return host::Block::current().span_count(); }
// Called by a waiting thread between polls, and when its wait has ended.
inline void relax() { host::Block::current().yield(); }
inline void wait_ended() { host::Block::current().progress(); }
// Whether the process that launched the kernel wants it to end: a wait fails then.
inline bool interrupted() { return host::Block::current().interrupted(); }

// ---- copies: warp collective, any alignment; visible to the warp after sync_warp ----
inline void copy(void *destination, const void *source, uint64_t bytes) {
    if constexpr (kWarpSize == 1) {
        std::memcpy(destination, source, bytes);
    } else {
        constexpr uint64_t kPiece = 16;
        for (uint64_t i = lane() * kPiece; i < bytes; i += kWarpSize * kPiece) {
            const uint64_t length = bytes - i < kPiece ? bytes - i : kPiece;
            std::memcpy(static_cast<uint8_t *>(destination) + i, static_cast<const uint8_t *>(source) + i, length);
        }
    }
}

// The same bytes to `count` places, `to(i)` being each; a primitive since a GPU loads them only once.
template <class To>
inline void copy_to_many(To to, uint32_t count, const void *source, uint64_t bytes) {
    for (uint32_t i = 0; i < count; ++i) {
        if (kWarpSize == 1 && bytes >= host::kStreamLeast) {
            host::stream_copy(to(i), source, bytes);
        } else {
            copy(to(i), source, bytes);
        }
    }
}

// The same, where find() says how many places there are: a GPU has the first bytes on their way meanwhile.
template <class Find, class To>
inline void copy_to_found(Find find, To to, const void *source, uint64_t bytes) {
    copy_to_many(to, find(), source, bytes);
}

// What registers hold, as something else of the same size.
template <class To, class From>
inline void copy_bits(To &to, const From &from) {
    static_assert(sizeof(To) == sizeof(From), "all bits have a place");
    std::memcpy(&to, &from, sizeof(to));
}

// ---- floating point: bit patterns, so that no vendor's type is needed ----
inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline float half_to_float(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t float_to_half(float value) { return std::bit_cast<uint16_t>(static_cast<_Float16>(value)); }

}  // namespace uccl_ep::device
