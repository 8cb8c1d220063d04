// What kernels keep in the memory that a block shares: a struct for each, `in` of which places the parts and `bytes`
// of which says how much a launch must ask for. Kernels include it, and Python asks through the bindings. Nothing in
// it needs a device.
#pragma once

#include "parameters.hpp"

namespace uccl_ep {

// What each block works out for itself, from the indices of all tokens, in the send half of a low-latency dispatch: no
// block waits for another. A key is an expert, or `num_experts` plus a rank; a chunk is a run of tokens that one warp
// takes. Tokens are dealt to blocks in turn; an entry is one (token, k) of this block.
struct LowLatencyPlacing {
    uint32_t experts, keys, chunks, entries;
    int32_t *total;     // [keys] rows of mine with that key
    int32_t *begin;     // [experts] rows of mine in the experts before: the order in which rows come home. The
                        // last warp's until the block has met again
    int32_t *expert;    // [entries] -1: none
    int32_t *place;     // [entries] place among my rows of that expert
    int32_t *row;       // [entries] row in the message to the expert's rank; -1 but for the first k of each rank
    uint32_t *chunk;    // [entries]
    uint8_t **message;  // [ranks] where my message to each is written
    uint16_t *before;   // [chunks][keys] rows in the chunks before; counts up while the chunk is walked

    UCCL_EP_DEVICE static LowLatencyPlacing in(uint8_t *memory, uint32_t experts, uint32_t ranks, uint32_t chunks,
                                               uint32_t entries) {
        LowLatencyPlacing at;
        at.experts = experts;
        at.keys = experts + ranks;
        at.chunks = chunks;
        at.entries = entries;
        at.message = reinterpret_cast<uint8_t **>(memory);
        at.total = reinterpret_cast<int32_t *>(at.message + ranks);
        at.begin = at.total + at.keys;
        at.expert = at.begin + experts;
        at.place = at.expert + entries;
        at.row = at.place + entries;
        at.chunk = reinterpret_cast<uint32_t *>(at.row + entries);
        at.before = reinterpret_cast<uint16_t *>(at.chunk + entries);
        return at;
    }
    UCCL_EP_DEVICE static uint64_t bytes(uint64_t experts, uint64_t ranks, uint64_t chunks, uint64_t entries) {
        const uint64_t keys = experts + ranks;
        return 8 * ranks + 4 * (keys + experts + 4 * entries) + 2 * chunks * keys;
    }
};

// What the receive half of a low-latency dispatch keeps.
struct LowLatencyArrivals {
    int32_t *begin;    // [local experts][ranks] first row of each source within an expert
    uint32_t *rows;    // [ranks] rows of each source's message
    uint64_t *list;    // [warps][topk] output rows of the row at hand
    uint32_t *list_k;  // [warps][topk] and the k of each

    UCCL_EP_DEVICE static LowLatencyArrivals in(uint8_t *memory, uint32_t ranks, uint32_t warps, uint32_t topk) {
        LowLatencyArrivals at;
        at.list = reinterpret_cast<uint64_t *>(memory);
        at.list_k = reinterpret_cast<uint32_t *>(at.list + warps * topk);
        at.rows = at.list_k + warps * topk;
        at.begin = reinterpret_cast<int32_t *>(at.rows + ranks);
        return at;
    }
    UCCL_EP_DEVICE static uint64_t bytes(uint64_t experts, uint64_t ranks, uint64_t warps, uint64_t topk) {
        return 12 * warps * topk + 4 * (ranks + experts);
    }
};

// What a block of a direct low-latency dispatch keeps. A query is a pick of a token of a source, or, the last of its
// token, how many ranks before this one it goes to.
struct DirectPlacing {
    uint64_t *place;  // [ranks][topk] of a round: local expert << 32 | row there, or kNowhere
    uint64_t *list;   // [warps][topk] output rows of the row at hand
    int16_t *picks;   // [ranks][max_tokens][topk], and what fills the last 8 bytes

    static constexpr uint64_t kNowhere = ~uint64_t{0};

    UCCL_EP_DEVICE static DirectPlacing in(uint8_t *memory, uint32_t ranks, uint32_t warps, uint32_t topk) {
        DirectPlacing at;
        at.place = reinterpret_cast<uint64_t *>(memory);
        at.list = at.place + ranks * topk;
        at.picks = reinterpret_cast<int16_t *>(at.list + warps * topk);
        return at;
    }
    UCCL_EP_DEVICE static uint64_t bytes(uint64_t ranks, uint64_t warps, uint64_t topk, uint64_t max_tokens) {
        return 8 * topk * (ranks + warps) + align_up(2 * ranks * max_tokens * topk, 8);
    }
};

// A row that a token's sum takes in a low-latency combine, and its factor; each warp has a list of one for each k.
struct WeightedRow {
    const uint8_t *row;
    float weight;
    uint32_t pick;     // its k

    UCCL_EP_DEVICE static uint64_t bytes(uint64_t warps, uint64_t topk) { return warps * topk * sizeof(WeightedRow); }
};

// One addend of a token's sum in a high-throughput combine: its payload, and its top-k weights where it has some.
struct CombineTerm {
    const uint8_t *payload;
    const float *topk_weights;
    uint32_t rank;
    uint32_t reserved;
};

// The payload of each of a list of them.
struct CombinePayloads {
    const CombineTerm *terms;
    UCCL_EP_DEVICE const uint8_t *operator()(uint32_t i) const { return terms[i].payload; }
};

// What the reducing team keeps; a block has only one such, as it works for one channel. Rows that come home from a rank
// are numbered in the order of its tokens; every message but the last is full, so a row's number says where it lies.
// Tokens are summed in rounds, and a round is numbered while the one before is summed: what both keep is there twice.
struct CombineProgress {
    uint8_t *memory;
    uint32_t warps, ranks;

    // Messages received in earlier operations [ranks].
    UCCL_EP_DEVICE uint64_t *received() const { return reinterpret_cast<uint64_t *>(memory); }
    // The terms of the token at hand [warps][ranks + 2].
    UCCL_EP_DEVICE CombineTerm *terms() const {
        return reinterpret_cast<CombineTerm *>(received() + ranks + ranks % 2);
    }
    // Where the first message of this operation lies [ranks].
    UCCL_EP_DEVICE uint32_t *slot() const { return reinterpret_cast<uint32_t *>(terms() + warps * (ranks + 2)); }
    // Rows that come home [ranks].
    UCCL_EP_DEVICE uint32_t *total() const { return slot() + ranks; }
    // Messages of this operation that were given back [ranks].
    UCCL_EP_DEVICE uint32_t *emptied() const { return slot() + 2 * ranks; }
    // Number of the next row after a round, after the one before it, and after the one before that [3][ranks].
    UCCL_EP_DEVICE uint32_t *after() const { return slot() + 3 * ranks; }
    // Number of a token's row, -1: none [2][tokens of a round][ranks].
    UCCL_EP_DEVICE int32_t *row() const { return reinterpret_cast<int32_t *>(slot() + 6 * ranks); }

    // Tokens of one round: equally many for all warps, and 24 at least (8 for a lone one), since a round costs a team a
    // meeting, whatever it holds; and no more than whose rows the slots can hold together with those of the next round.
    UCCL_EP_DEVICE static constexpr uint32_t tokens(uint32_t warps, uint32_t ranks, uint32_t slots, uint32_t capacity) {
        const uint32_t least = warps == 1 ? 8 : 24, wanted = (warps + least - 1) / warps * warps,
                       held = ((slots - 1) * capacity + 1) / 2;
        const uint32_t fit = ranks < 1024 ? 1024 / ranks : 1;
        const uint32_t few = wanted < held ? wanted : held;
        return few < fit ? few : fit;
    }
    // For any number and size of slots.
    UCCL_EP_DEVICE static uint64_t bytes(uint32_t warps, uint32_t ranks) {
        const uint64_t most_tokens = tokens(warps, ranks, 2, 4096);  // slots that hold more than two rounds take
        return 8 * (ranks + ranks % 2) + uint64_t{warps} * (ranks + 2) * sizeof(CombineTerm) +
               4 * ranks * (6 + 2 * most_tokens);
    }
};

// The rows that a sum of `uccl_ep_fold` takes: for each warp a pointer for each term and for two biases.
struct FoldTerms {
    UCCL_EP_DEVICE static const uint8_t **in(uint8_t *memory, uint32_t warp, uint32_t num_terms) {
        return reinterpret_cast<const uint8_t **>(memory) + warp * (uint64_t{num_terms} + 2);
    }
    UCCL_EP_DEVICE static uint64_t bytes(uint64_t warps, uint64_t num_terms) { return 8 * warps * (num_terms + 2); }
};

}  // namespace uccl_ep
