// Sums of one run of elements in one lane, by 16-byte loads: 64 bytes of each row are on their way at
// once, since a sum over rows is bound by the latency of its loads. The bits are those of ScalarRun
// (core/kernels/numerics.hpp): the same additions in the same order.
#pragma once

#include "uccl_ep/integers.hpp"

namespace uccl_ep::device {

struct alignas(16) RunPiece {
    uint32_t word[4];
};

template <class Element>
class VectorRun {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
    static constexpr uint32_t kPieces = 4;
    static constexpr uint32_t kPieceElements = sizeof(RunPiece) / sizeof(Storage);

  public:
    static constexpr uint32_t kElements = kPieces * kPieceElements;

    UCCL_EP_DEVICE void clear() {
#pragma unroll
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] = 0;
    }

    static constexpr uint32_t kTerms = 2;  // rows that are loaded before the first is added
    struct Loaded {
        Storage value[kElements];
    };

    UCCL_EP_DEVICE static Loaded load(const Storage *from) {
        Loaded loaded;
        if (is_aligned(from)) {
            RunPiece pieces[kPieces];
#pragma unroll
            for (uint32_t i = 0; i < kPieces; ++i) pieces[i] = reinterpret_cast<const RunPiece *>(from)[i];
            memcpy(loaded.value, pieces, sizeof(pieces));
        } else {
#pragma unroll
            for (uint32_t i = 0; i < kElements; ++i) loaded.value[i] = from[i];
        }
        return loaded;
    }

    template <bool kWeighted>
    UCCL_EP_DEVICE void add(const Loaded &loaded, Accumulator factor) {
#pragma unroll
        for (uint32_t i = 0; i < kElements; ++i) {
            const Accumulator value = Element::load(loaded.value[i]);
            sums_[i] += kWeighted ? value * factor : value;
        }
    }

    UCCL_EP_DEVICE void store(Storage *to) const {
        Storage values[kElements];
#pragma unroll
        for (uint32_t i = 0; i < kElements; ++i) values[i] = Element::store(sums_[i]);
        if (is_aligned(to)) {
            RunPiece pieces[kPieces];
            memcpy(pieces, values, sizeof(pieces));
#pragma unroll
            for (uint32_t i = 0; i < kPieces; ++i) reinterpret_cast<RunPiece *>(to)[i] = pieces[i];
        } else {
#pragma unroll
            for (uint32_t i = 0; i < kElements; ++i) to[i] = values[i];
        }
    }

  private:
    // Rows of some hidden sizes start between two 16-byte boundaries.
    UCCL_EP_DEVICE static bool is_aligned(const void *address) {
        return reinterpret_cast<uint64_t>(address) % sizeof(RunPiece) == 0;
    }

    Accumulator sums_[kElements];
};

}  // namespace uccl_ep::device
