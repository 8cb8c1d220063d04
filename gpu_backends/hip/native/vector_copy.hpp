// Copies by vector loads and stores of a wavefront: any address, any size, any memory.
#pragma once

#include "uccl_ep/integers.hpp"

namespace uccl_ep::device::detail {

// There is no reliable macro for the width: clang 22 dropped the old one, and a default of 64 would be
// wrong on RDNA without a word. GFX9 (which CDNA is) has 64 lanes, later ones run kernels with 32.
#if defined(__GFX9__)
inline constexpr uint32_t kWavefront = 64;
#else
inline constexpr uint32_t kWavefront = 32;
#endif

UCCL_EP_DEVICE uint32_t lane() {
    const uint32_t low = __builtin_amdgcn_mbcnt_lo(~0u, 0u);
    if constexpr (kWavefront == 64) return __builtin_amdgcn_mbcnt_hi(~0u, low);
    return low;
}

using Quad = uint32_t __attribute__((ext_vector_type(4)));

// Several loads of a lane are in flight before the first store, or each would cost a full latency.
template <class Piece>
UCCL_EP_DEVICE void copy_pieces(uint8_t *destination, const uint8_t *source, uint64_t count) {
    constexpr uint32_t kUnroll = 8;
    auto *to = reinterpret_cast<Piece *>(destination);
    const auto *from = reinterpret_cast<const Piece *>(source);
    uint64_t i = lane();
    for (; i + (kUnroll - 1) * kWavefront < count; i += kUnroll * kWavefront) {
        Piece pieces[kUnroll];
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) pieces[j] = from[i + j * kWavefront];
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) to[i + j * kWavefront] = pieces[j];
    }
    for (; i < count; i += kWavefront) to[i] = from[i];
}

// The part up to the first boundary of `Piece` in the destination and the part behind the last one go
// byte by byte.
template <class Piece>
UCCL_EP_DEVICE void copy_aligned(uint8_t *destination, const uint8_t *source, uint64_t bytes) {
    const uint64_t to_boundary =
        (sizeof(Piece) - reinterpret_cast<uint64_t>(destination) % sizeof(Piece)) % sizeof(Piece);
    const uint64_t head = to_boundary < bytes ? to_boundary : bytes;
    const uint64_t body = (bytes - head) / sizeof(Piece) * sizeof(Piece);
    copy_pieces<uint8_t>(destination, source, head);
    copy_pieces<Piece>(destination + head, source + head, body / sizeof(Piece));
    copy_pieces<uint8_t>(destination + head + body, source + head + body, bytes - head - body);
}

static UCCL_EP_HIP_DEVICE __attribute__((noinline)) void vector_copy(uint8_t *destination, const uint8_t *source,
                                                                     uint64_t bytes) {
    const uint64_t difference = reinterpret_cast<uint64_t>(destination) ^ reinterpret_cast<uint64_t>(source);
    if (difference % 16 == 0) {
        copy_aligned<Quad>(destination, source, bytes);
    } else if (difference % 4 == 0) {
        copy_aligned<uint32_t>(destination, source, bytes);
    } else {
        copy_pieces<uint8_t>(destination, source, bytes);
    }
}

// The first bytes of a row, a few pieces a lane.
struct FirstPieces {
    static constexpr uint32_t kUnroll = 4;
    Quad of_lane[kUnroll];

    UCCL_EP_DEVICE void load(const Quad *from, uint64_t pieces) {
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) {
            if (lane() + j * kWavefront < pieces) of_lane[j] = from[lane() + j * kWavefront];
        }
    }
    UCCL_EP_DEVICE void store(Quad *to, uint64_t pieces) const {
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) {
            if (lane() + j * kWavefront < pieces) to[lane() + j * kWavefront] = of_lane[j];
        }
    }
};

// One row to several places: it is loaded once, and all stores of a load follow it. The first loads are under way while
// find() says how many places there are.
template <class Find, class To>
UCCL_EP_DEVICE void vector_copy_to_found(Find find, To to, const uint8_t *source, uint64_t bytes) {
    const uint64_t pieces = bytes / sizeof(Quad);
    const auto *from = reinterpret_cast<const Quad *>(source);
    FirstPieces loaded;
    uint64_t addresses = reinterpret_cast<uint64_t>(source);
    if (addresses % sizeof(Quad) == 0) loaded.load(from, pieces);
    const uint32_t count = find();
    for (uint32_t i = 0; i < count; ++i) addresses |= reinterpret_cast<uint64_t>(to(i));
    if (addresses % sizeof(Quad) != 0) {
        for (uint32_t i = 0; i < count; ++i) vector_copy(to(i), source, bytes);
        return;
    }
    for (uint64_t base = 0; base < pieces; base += FirstPieces::kUnroll * kWavefront) {
        if (base != 0) loaded.load(from + base, pieces - base);
        for (uint32_t i = 0; i < count; ++i) loaded.store(reinterpret_cast<Quad *>(to(i)) + base, pieces - base);
    }
    const uint64_t rest = pieces * sizeof(Quad) + lane();
    if (rest < bytes) {
        const uint8_t byte = source[rest];
        for (uint32_t i = 0; i < count; ++i) to(i)[rest] = byte;
    }
}

}  // namespace uccl_ep::device::detail
