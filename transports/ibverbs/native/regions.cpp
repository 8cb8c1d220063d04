#include "regions.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace uccl_ep::ibverbs {

uint32_t Region::key(uint64_t offset) const {
    // An empty write may lie at the very end, one past the last chunk.
    return keys[std::min<uint64_t>(offset / chunk_bytes, keys.size() - 1)];
}

void check(const Region &region) {
    const bool fits = region.bytes > 0 && region.chunk_bytes > 0 &&
                      region.keys.size() == (region.bytes + region.chunk_bytes - 1) / region.chunk_bytes;
    if (!fits) {
        throw std::invalid_argument("a region of " + std::to_string(region.bytes) + " bytes in chunks of " +
                                    std::to_string(region.chunk_bytes) + " came with " +
                                    std::to_string(region.keys.size()) + " keys");
    }
}

}  // namespace uccl_ep::ibverbs
