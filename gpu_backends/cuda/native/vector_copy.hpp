// Copies by ordinary loads and stores of a warp: any address, any size, any memory.
#pragma once

#include "staging.hpp"

namespace uccl_ep::device::detail {

template <uint32_t kBytes>
struct Piece;
template <>
struct alignas(16) Piece<16> {
    uint32_t word[4];
};
template <>
struct Piece<4> {
    uint32_t word;
};
template <>
struct Piece<1> {
    uint8_t byte;
};

// Several loads of a lane are in flight before the first store, or each would cost a full latency.
template <uint32_t kBytes>
__device__ __forceinline__ void copy_pieces(uint8_t *destination, const uint8_t *source, uint64_t count) {
    using P = Piece<kBytes>;
    constexpr uint32_t kUnroll = 8;
    auto *to = reinterpret_cast<P *>(destination);
    const auto *from = reinterpret_cast<const P *>(source);
    uint64_t i = lane();
    for (; i + (kUnroll - 1) * 32 < count; i += kUnroll * 32) {
        P pieces[kUnroll];
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) pieces[j] = from[i + j * 32];
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) to[i + j * 32] = pieces[j];
    }
    for (; i < count; i += 32) to[i] = from[i];
}

// Not inlined: it is long, and what calls it from many places wants it seldom.
static __device__ __noinline__ void vector_copy(uint8_t *destination, const uint8_t *source, uint64_t bytes) {
    const uint64_t to = reinterpret_cast<uint64_t>(destination), from = reinterpret_cast<uint64_t>(source);
    const uint64_t difference = to ^ from;
    if ((difference & 15) == 0) {
        const uint64_t to_boundary = (16 - (to & 15)) & 15;
        const uint64_t head = to_boundary < bytes ? to_boundary : bytes;
        const uint64_t body = (bytes - head) & ~uint64_t{15};
        copy_pieces<1>(destination, source, head);
        copy_pieces<16>(destination + head, source + head, body / 16);
        copy_pieces<1>(destination + head + body, source + head + body, bytes - head - body);
    } else if ((difference & 3) == 0) {
        const uint64_t to_boundary = (4 - (to & 3)) & 3;
        const uint64_t head = to_boundary < bytes ? to_boundary : bytes;
        const uint64_t body = (bytes - head) & ~uint64_t{3};
        copy_pieces<1>(destination, source, head);
        copy_pieces<4>(destination + head, source + head, body / 4);
        copy_pieces<1>(destination + head + body, source + head + body, bytes - head - body);
    } else {
        copy_pieces<1>(destination, source, bytes);
    }
}

__device__ __forceinline__ uint8_t *address_of_lane(uint8_t *mine, uint32_t lane) {
    return reinterpret_cast<uint8_t *>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(mine), lane));
}

// The first bytes of a row, a few pieces a lane.
struct FirstPieces {
    static constexpr uint32_t kUnroll = 4;
    Piece<16> of_lane[kUnroll];

    __device__ __forceinline__ void load(const Piece<16> *from, uint32_t pieces) {
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) {
            if (lane() + j * 32 < pieces) of_lane[j] = from[lane() + j * 32];
        }
    }
    __device__ __forceinline__ void store(Piece<16> *to, uint32_t pieces) const {
#pragma unroll
        for (uint32_t j = 0; j < kUnroll; ++j) {
            if (lane() + j * 32 < pieces) to[lane() + j * 32] = of_lane[j];
        }
    }
};

// One row to at most 32 places, a lane's each: it is loaded once, and all stores of a load follow it. `ahead`: the
// first pieces are loaded already.
__device__ __forceinline__ void copy_to_lanes(uint8_t *mine, uint32_t count, const uint8_t *source, uint64_t bytes,
                                              FirstPieces &loaded, bool ahead) {
    const uint64_t addresses = reinterpret_cast<uint64_t>(mine) | reinterpret_cast<uint64_t>(source);
    if (!__all_sync(0xffffffffu, (addresses & 15) == 0)) {
        for (uint32_t i = 0; i < count; ++i) vector_copy(address_of_lane(mine, i), source, bytes);
        return;
    }
    const auto pieces = static_cast<uint32_t>(bytes / 16);
    const auto *from = reinterpret_cast<const Piece<16> *>(source);
    constexpr uint32_t kRound = FirstPieces::kUnroll * 32;
    for (uint32_t base = 0; base < pieces; base += kRound) {  // the whole warp: lanes ask each other
        if (base != 0 || !ahead) loaded.load(from + base, pieces - base);
        for (uint32_t i = 0; i < count; ++i) {
            loaded.store(reinterpret_cast<Piece<16> *>(address_of_lane(mine, i)) + base, pieces - base);
        }
    }
    const uint32_t rest = pieces * 16 + lane();
    for (uint32_t i = 0; i < count && pieces * 16 < bytes; ++i) {
        uint8_t *destination = address_of_lane(mine, i);
        if (rest < bytes) destination[rest] = source[rest];
    }
}

template <class Find, class To>
__device__ __forceinline__ void vector_copy_to_found(Find find, To to, const uint8_t *source, uint64_t bytes) {
    FirstPieces loaded;
    if ((reinterpret_cast<uint64_t>(source) & 15) == 0) {
        loaded.load(reinterpret_cast<const Piece<16> *>(source), static_cast<uint32_t>(bytes / 16));
    }
    const uint32_t count = find();
    for (uint32_t first = 0; first < count; first += 32) {
        const uint32_t some = count - first < 32 ? count - first : 32;
        copy_to_lanes(lane() < some ? to(first + lane()) : nullptr, some, source, bytes, loaded,
                      first == 0 || bytes <= FirstPieces::kUnroll * 32 * 16);
    }
}

}  // namespace uccl_ep::device::detail
