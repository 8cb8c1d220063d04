// Registered memory as the data plane sees it: an offset becomes an address and a key.
//
// A region is one memory registration, or several of `chunk_bytes` each where a device refuses the
// whole; a write that crosses a chunk's end becomes two.
#pragma once

#include <cstdint>
#include <vector>

namespace uccl_ep::ibverbs {

struct Region {
    uint64_t base = 0;         // address of offset 0, as the keys understand addresses
    uint64_t bytes = 0;
    uint64_t chunk_bytes = 0;  // at least 1; all chunks but the last have this length
    std::vector<uint32_t> keys;
    bool readable = false;     // the CPU may read it, so that small writes can be copied inline

    bool contains(uint64_t offset, uint64_t length) const { return offset <= bytes && length <= bytes - offset; }
    uint64_t room(uint64_t offset) const { return chunk_bytes - offset % chunk_bytes; }
    uint32_t key(uint64_t offset) const;
};

// Throws std::invalid_argument where the numbers do not fit together.
void check(const Region &region);

}  // namespace uccl_ep::ibverbs
