// Sums of one run of elements, by 16-byte loads that neighbouring lanes make together: several of each row are on
// their way at once, since a sum over rows is bound by the latency of its loads. The bits are those of ScalarRun
// (sums.hpp): the same additions in the same order. For primitives of GPUs, which include it
// at their end and give it `copy_bits`.
#pragma once

namespace uccl_ep::device {

struct alignas(16) RunPiece {
    uint32_t word[4];
};

// `kRows`: rows that are loaded before the first is added.
template <class Element, uint32_t kPieces, uint32_t kRows = 2>
class VectorRun {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
    static constexpr uint32_t kPieceElements = sizeof(RunPiece) / sizeof(Storage);

  public:
    static constexpr uint32_t kElements = kPieces * kPieceElements;

    UCCL_EP_DEVICE void clear() {
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] = 0;
    }

    static constexpr uint32_t kTerms = kRows;
    // As the words that were loaded: a register for each element would be two or four times as many.
    struct Loaded {
        RunPiece piece[kPieces];
    };

    UCCL_EP_DEVICE static Loaded load(const Storage *from) {
        Loaded loaded;
        if (is_aligned(from)) {
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kPieces; ++i)
                loaded.piece[i] = reinterpret_cast<const RunPiece *>(from)[i * kWarpSize + lane()];
        } else {
            Storage values[kElements];
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kElements; ++i) values[i] = from[place(i)];
            copy_bits(loaded.piece, values);
        }
        return loaded;
    }

    // Sums on their way: whole lines of neighbouring lanes, so in an order of their own within a run of one piece;
    // runs of more pieces are such runs, one behind the other.
    struct alignas(16) Chunk {
        Accumulator value[16 / sizeof(Accumulator)];
    };
    static constexpr uint32_t kChunks = kElements * sizeof(Accumulator) / sizeof(Chunk);
    struct Partial {
        Chunk chunk[kChunks];
    };
    UCCL_EP_DEVICE static Partial load_partial(const Accumulator *from) {
        Partial partial;
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kChunks; ++i)
            partial.chunk[i] = reinterpret_cast<const Chunk *>(from)[i * kWarpSize + lane()];
        return partial;
    }
    UCCL_EP_DEVICE void add_partial(const Partial &partial) {
        constexpr uint32_t kLength = sizeof(Chunk) / sizeof(Accumulator);
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] += partial.chunk[i / kLength].value[i % kLength];
    }
    UCCL_EP_DEVICE void store_partial(Accumulator *to) const {
        Chunk chunks[kChunks];
        copy_bits(chunks, sums_);
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kChunks; ++i) reinterpret_cast<Chunk *>(to)[i * kWarpSize + lane()] = chunks[i];
    }

    template <bool kWeighted>
    UCCL_EP_DEVICE void add(const Loaded &loaded, Accumulator factor) {
        Accumulator values[kElements];
        convert(values, loaded);
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] += kWeighted ? values[i] * factor : values[i];
    }
    UCCL_EP_DEVICE void store(Storage *to) const {
        const Loaded rounded = round();
        if (is_aligned(to)) {
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kPieces; ++i)
                reinterpret_cast<RunPiece *>(to)[i * kWarpSize + lane()] = rounded.piece[i];
        } else {
            Storage values[kElements];
            copy_bits(values, rounded.piece);
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kElements; ++i) to[place(i)] = values[i];
        }
    }

  private:
    UCCL_EP_DEVICE static void convert(Accumulator (&values)[kElements], const Loaded &loaded) {
        if constexpr (Element::kIsBfloat16) {
            // By words, one instruction an element: compilers take two more for a high half of its own.
            uint32_t words[kElements / 2];
            copy_bits(words, loaded.piece);
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kElements; ++i)
                values[i] = bits_to_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
        } else {
            Storage stored[kElements];
            copy_bits(stored, loaded.piece);
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kElements; ++i) values[i] = Element::load(stored[i]);
        }
    }

    // As the words that are stored.
    UCCL_EP_DEVICE Loaded round() const {
        Loaded rounded;
#ifdef UCCL_EP_DEVICE_BFLOAT16_PAIR
        constexpr bool kPairs = Element::kIsBfloat16;
#else
        constexpr bool kPairs = false;
#endif
        if constexpr (kPairs) {
#ifdef UCCL_EP_DEVICE_BFLOAT16_PAIR
            uint32_t words[kElements / 2];
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kElements / 2; ++i)
                words[i] = UCCL_EP_DEVICE_BFLOAT16_PAIR(sums_[2 * i], sums_[2 * i + 1]);
            copy_bits(rounded.piece, words);
#endif
        } else {
            Storage values[kElements];
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kElements; ++i) values[i] = Element::store(sums_[i]);
            copy_bits(rounded.piece, values);
        }
        return rounded;
    }

    // Where element i of this lane lies in the warp's run.
    UCCL_EP_DEVICE static uint32_t place(uint32_t i) {
        return (i / kPieceElements * kWarpSize + lane()) * kPieceElements + i % kPieceElements;
    }

    // Rows of some hidden sizes start between two 16-byte boundaries.
    UCCL_EP_DEVICE static bool is_aligned(const void *address) {
        return reinterpret_cast<uint64_t>(address) % sizeof(RunPiece) == 0;
    }

    Accumulator sums_[kElements];
};

template <class Element>
using LongRun = VectorRun<Element, 4>;
template <class Element>
using MiddleRun = VectorRun<Element, 3>;  // 12 warps take a row of 7168 in one go
template <class Element>
using ShortRun = VectorRun<Element, 1>;
template <class Element>
using PieceRun = VectorRun<Element, 1, 4>;  // of rows beyond a bus, where a load takes as long as twenty additions

}  // namespace uccl_ep::device
