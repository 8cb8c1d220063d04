// Where the rings of a channel lie in memory that somebody else allocated.
//
// Host memory (mapped for the device): per ring two progress lines (consumed, completed), then its
// slots. Device memory: per ring one line with the producers' head and their copy of the progress.
// Both memories must be zero at the start: the first lap publishes phase 1.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "uccl_ep/command.hpp"
#include "uccl_ep/ring.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {

class Channel {
  public:
    static constexpr uint64_t kLine = 64;                // bytes: nobody shares a cache line with a progress word
    static constexpr uint64_t kMaxCapacity = 1u << 20;   // commands of one ring

    Channel(uint32_t num_rings, uint64_t capacity, uint64_t host_pointer, uint64_t host_device_pointer,
            uint64_t state_device_pointer)
        : num_rings_(num_rings),
          capacity_(capacity),
          host_(host_pointer),
          host_device_(host_device_pointer),
          state_device_(state_device_pointer) {
        check(num_rings, capacity);
        if (host_pointer % kLine != 0 || host_device_pointer % kLine != 0 || state_device_pointer % kLine != 0) {
            throw std::invalid_argument("channel memory must be aligned to 64 bytes");
        }
    }

    static uint64_t host_bytes(uint32_t num_rings, uint64_t capacity) {
        check(num_rings, capacity);
        return num_rings * ring_host_bytes(capacity);
    }
    static uint64_t state_bytes(uint32_t num_rings) { return num_rings * kLine; }

    uint32_t num_rings() const { return num_rings_; }
    uint64_t capacity() const { return capacity_; }

    // The consumer's addresses, of this process.
    PackedCommand *slots(uint32_t ring) const {
        return reinterpret_cast<PackedCommand *>(ring_host(host_, ring) + 2 * kLine);
    }
    uint64_t *consumed(uint32_t ring) const { return reinterpret_cast<uint64_t *>(ring_host(host_, ring)); }
    uint64_t *completed(uint32_t ring) const { return reinterpret_cast<uint64_t *>(ring_host(host_, ring) + kLine); }

    // The producers' addresses, of the device.
    RingView view(uint32_t ring) const {
        if (ring >= num_rings_) {
            throw std::out_of_range("ring " + std::to_string(ring) + " of " + std::to_string(num_rings_));
        }
        const uint64_t base = ring_host(host_device_, ring);
        const uint64_t state = state_device_ + ring * kLine;
        return RingView{reinterpret_cast<PackedCommand *>(base + 2 * kLine),
                        reinterpret_cast<uint64_t *>(state),
                        reinterpret_cast<uint64_t *>(state + 8),
                        reinterpret_cast<const uint64_t *>(base),
                        reinterpret_cast<const uint64_t *>(base + kLine),
                        capacity_};
    }

  private:
    static uint64_t ring_host_bytes(uint64_t capacity) { return 2 * kLine + capacity * sizeof(PackedCommand); }
    uint64_t ring_host(uint64_t base, uint32_t ring) const { return base + ring * ring_host_bytes(capacity_); }

    static void check(uint32_t num_rings, uint64_t capacity) {
        if (num_rings == 0) {
            throw std::invalid_argument("a channel needs at least 1 ring");
        }
        if (capacity < 2 || capacity > kMaxCapacity || (capacity & (capacity - 1)) != 0) {
            throw std::invalid_argument("ring capacity " + std::to_string(capacity) + " is no power of two from 2 to " +
                                        std::to_string(kMaxCapacity));
        }
    }

    uint32_t num_rings_;
    uint64_t capacity_;
    uint64_t host_;
    uint64_t host_device_;
    uint64_t state_device_;
};

}  // namespace uccl_ep
