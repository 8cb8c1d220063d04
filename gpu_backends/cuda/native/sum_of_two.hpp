// The sum of two rows of bfloat16, as a combine of two ranks has it (compute capability 9.0 and later): added by pairs,
// three instructions for two elements where float32 takes eight and more, and some runs of elements ahead of the one
// that is added, so that the warp seldom waits for its loads.
//
// The bits are those of the definition, (0 + a) + b in float32, rounded to bfloat16. To round a sum of two such numbers
// once is the same: float32 has more than twice their 8 bits and two more, so its own rounding changes no result (the
// sums that are below its normal range are exact). That the definition begins with 0 makes +0 of -0 + -0, and its NaN
// is 0x7fc0, where the device has 0x7fff: all other results are less than that as signed numbers.
#pragma once

#include "vector_run.hpp"

namespace uccl_ep::device {

namespace detail {

UCCL_EP_DEVICE uint32_t add_bfloat16_pairs(uint32_t a, uint32_t b) {
    constexpr uint32_t kOnes = 0x3f803f80u, kZeros = 0, kNans = 0x7fc07fc0u;
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(kOnes), "r"(b));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(sum), "r"(kOnes), "r"(kZeros));
    asm("min.s16x2 %0, %1, %2;" : "=r"(sum) : "r"(sum), "r"(kNans));
    return sum;
}

}  // namespace detail

// Sum whole runs of the elements; returns where the first that is not whole begins. The whole warp.
UCCL_EP_DEVICE uint32_t sum_of_two(uint16_t *to, const uint16_t *a, const uint16_t *b, uint32_t elements) {
    constexpr uint32_t kAhead = 5, kPieces = 1, kRunPieces = kPieces * kWarpSize, kPieceElements = 8;
    const auto *first = reinterpret_cast<const RunPiece *>(a) + lane();
    const auto *second = reinterpret_cast<const RunPiece *>(b) + lane();
    auto *out = reinterpret_cast<RunPiece *>(to) + lane();
    const uint64_t addresses =
        reinterpret_cast<uint64_t>(first) | reinterpret_cast<uint64_t>(second) | reinterpret_cast<uint64_t>(out);
    if (addresses % sizeof(RunPiece) != 0) return 0;
    const uint32_t pieces = elements / (kRunPieces * kPieceElements) * kRunPieces;
    RunPiece loaded[kAhead][2][kPieces];
    const auto load = [&](RunPiece(&run)[2][kPieces], uint32_t at) {
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kPieces; ++i) {
            run[0][i] = first[at + i * kWarpSize];
            run[1][i] = second[at + i * kWarpSize];
        }
    };
    UCCL_EP_UNROLL
    for (uint32_t i = 0; i < kAhead; ++i) {
        if (i * kRunPieces < pieces) load(loaded[i], i * kRunPieces);
    }
    for (uint32_t base = 0; base < pieces; base += kAhead * kRunPieces) {
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kAhead; ++i) {
            const uint32_t at = base + i * kRunPieces;
            if (at >= pieces) break;
            UCCL_EP_UNROLL
            for (uint32_t j = 0; j < kPieces; ++j) {
                RunPiece sum;
                UCCL_EP_UNROLL
                for (uint32_t word = 0; word < 4; ++word)
                    sum.word[word] = detail::add_bfloat16_pairs(loaded[i][0][j].word[word], loaded[i][1][j].word[word]);
                out[at + j * kWarpSize] = sum;
            }
            if (at + kAhead * kRunPieces < pieces) load(loaded[i], at + kAhead * kRunPieces);
        }
    }
    return pieces * kPieceElements;
}

}  // namespace uccl_ep::device
