// Memory for the bytes of writes that complete before they are placed: once the caller has seen the
// completion it may change its own bytes, so the simulated wire keeps a copy, as a real one does.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace uccl_ep::sim {

// First fit over one registered region; offsets are multiples of 64 bytes.
class Bounce {
  public:
    Bounce(uint64_t offset, uint64_t bytes) {
        if (bytes >= kGrain) free_[offset] = bytes / kGrain * kGrain;
    }

    std::optional<uint64_t> allocate(uint64_t bytes) {
        bytes = rounded(bytes);
        for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
            if (hole->second < bytes) continue;
            const auto [offset, length] = *hole;
            free_.erase(hole);
            if (length > bytes) free_[offset + bytes] = length - bytes;
            return offset;
        }
        return std::nullopt;
    }

    void release(uint64_t offset, uint64_t bytes) {
        bytes = rounded(bytes);
        auto next = free_.lower_bound(offset);
        if (next != free_.end() && offset + bytes == next->first) {
            bytes += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == offset) {
                before->second += bytes;
                return;
            }
        }
        free_[offset] = bytes;
    }

  private:
    static constexpr uint64_t kGrain = 64;
    static uint64_t rounded(uint64_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }
    std::map<uint64_t, uint64_t> free_;  // offset -> bytes
};

}  // namespace uccl_ep::sim
