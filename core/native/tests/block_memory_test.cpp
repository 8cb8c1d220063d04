// The parts of the memory of a block do not overlap, and end where its size says.
#include "block_memory.hpp"

#include <vector>

#include "check.hpp"

using namespace uccl_ep;

namespace {

alignas(16) uint8_t memory[4 << 20];

template <class Pointer>
uint64_t end_of(Pointer begin, uint64_t count) {
    return static_cast<uint64_t>(reinterpret_cast<const uint8_t *>(begin + count) - memory);
}

}  // namespace

TEST(low_latency_placing) {
    for (const uint32_t experts : {1u, 7u, 64u, 288u}) {
        for (const uint32_t ranks : {1u, 3u, 8u}) {
            for (const uint32_t chunks : {1u, 5u, 12u}) {
                for (const uint32_t entries : {0u, 1u, 96u}) {
                    const auto at = LowLatencyPlacing::in(memory, experts, ranks, chunks, entries);
                    CHECK_EQ(end_of(at.message, ranks), end_of(at.total, 0));
                    CHECK_EQ(end_of(at.total, at.keys), end_of(at.begin, 0));
                    CHECK_EQ(end_of(at.begin, experts), end_of(at.expert, 0));
                    CHECK_EQ(end_of(at.expert, entries), end_of(at.place, 0));
                    CHECK_EQ(end_of(at.place, entries), end_of(at.row, 0));
                    CHECK_EQ(end_of(at.row, entries), end_of(at.chunk, 0));
                    CHECK_EQ(end_of(at.chunk, entries), end_of(at.before, 0));
                    CHECK_EQ(end_of(at.before, uint64_t{chunks} * at.keys),
                             LowLatencyPlacing::bytes(experts, ranks, chunks, entries));
                }
            }
        }
    }
}

TEST(low_latency_arrivals) {
    for (const uint32_t ranks : {1u, 3u, 8u}) {
        for (const uint32_t warps : {1u, 12u}) {
            for (const uint32_t topk : {1u, 5u, 8u}) {
                const uint32_t experts = 6 * ranks;
                const auto at = LowLatencyArrivals::in(memory, ranks, warps, topk);
                CHECK_EQ(end_of(at.list, warps * topk), end_of(at.list_k, 0));
                CHECK_EQ(end_of(at.list_k, warps * topk), end_of(at.rows, 0));
                CHECK_EQ(end_of(at.rows, ranks), end_of(at.begin, 0));
                CHECK_EQ(end_of(at.begin, experts), LowLatencyArrivals::bytes(experts, ranks, warps, topk));
            }
        }
    }
}

TEST(combine_progress) {
    for (const uint32_t ranks : {1u, 2u, 3u, 64u, 1024u, 4096u}) {
        for (const uint32_t warps : {1u, 2u, 4u, 6u, 12u}) {
            const CombineProgress at{memory, warps, ranks};
            CHECK_EQ(end_of(at.terms(), warps * (ranks + 2)), end_of(at.slot(), 0));
            CHECK_EQ(end_of(at.slot(), ranks), end_of(at.total(), 0));
            CHECK_EQ(end_of(at.total(), ranks), end_of(at.emptied(), 0));
            CHECK_EQ(end_of(at.emptied(), ranks), end_of(at.after(), 0));
            CHECK_EQ(end_of(at.after(), 3 * ranks), end_of(at.row(), 0));
            CHECK_EQ(end_of(at.terms(), 0) % alignof(CombineTerm), 0u);
            const uint64_t bytes = CombineProgress::bytes(warps, ranks);
            uint64_t most = 0;
            for (const uint32_t slots : {2u, 3u, 32u}) {  // no more tokens a round than there is room for
                for (const uint32_t capacity : {1u, 9u, 4096u}) {
                    const uint64_t tokens = CombineProgress::tokens(warps, ranks, slots, capacity);
                    CHECK(tokens >= 1 && 2 * tokens <= (slots - 1) * capacity + 1);  // two rounds lie in the slots
                    most = tokens > most ? tokens : most;
                }
            }
            CHECK_EQ(end_of(at.row(), 2 * most * ranks), bytes);
        }
    }
}

TEST(lists_of_terms) {
    CHECK_EQ(end_of(FoldTerms::in(memory, 3, 5), 5 + 2), FoldTerms::bytes(4, 5));
    CHECK_EQ(end_of(reinterpret_cast<WeightedRow *>(memory), 4 * 5), WeightedRow::bytes(4, 5));
}

CHECK_MAIN()
