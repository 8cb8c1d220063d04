// What messages look like, and how many bytes they take. Computed here alone: kernels include it, and Python asks
// through the bindings. Nothing in it needs a device.
#pragma once

#include "parameters.hpp"

namespace uccl_ep {

// First line of every slot and of every low-latency message.
struct MessageHeader {
    uint64_t operation;   // sequence number of the sender's operation
    uint32_t kind;        // OperationKind
    uint32_t rows;
    uint32_t row_bytes;   // payload bytes of a row: the cheapest check that shapes agree
    uint32_t source;      // rank whose tokens these are
    uint32_t words[10];
};

static_assert(sizeof(MessageHeader) == 64, "payload starts on a cache line");

// Payload of a notify message, int32 after the header:
//   DispatchShape | rows for you [C] | rows for you to forward [C] | rows per expert of yours [L]
struct NotifyWords {
    UCCL_EP_DEVICE static uint64_t count(uint32_t num_channels, uint32_t local_experts) {
        return sizeof(DispatchShape) / 4 + 2 * uint64_t{num_channels} + local_experts;
    }
    // Of the whole message.
    UCCL_EP_DEVICE static uint64_t bytes(uint32_t num_channels, uint32_t local_experts) {
        return align_up(sizeof(MessageHeader) + 4 * count(num_channels, local_experts), 64);
    }
};

inline constexpr uint32_t kMaxRanksPerDomain = 128;  // bits of a row's target mask

// The rows of one high-throughput dispatch message. Each field of all rows lies together, so that the
// receiver takes a message into its output in one copy a field, whatever the row count.
struct DispatchRows {
    uint64_t payload, scales, topk_idx, topk_weights, source, mask, end;  // byte offsets into the slot

    UCCL_EP_DEVICE static DispatchRows of(const DispatchShape &shape, uint32_t rows, bool on_rail) {
        DispatchRows at;
        at.payload = sizeof(MessageHeader);
        at.scales = align_up(at.payload + uint64_t{rows} * shape.row_bytes, 16);
        at.topk_idx = align_up(at.scales + uint64_t{rows} * shape.scale_bytes, 16);
        at.topk_weights = at.topk_idx + uint64_t{rows} * shape.num_topk * 4;
        at.source = at.topk_weights + uint64_t{rows} * shape.num_topk * 4;
        at.mask = align_up(at.source + uint64_t{rows} * 4, 16);
        at.end = align_up(at.mask + (on_rail ? uint64_t{rows} * (kMaxRanksPerDomain / 8) : 0), 64);
        return at;
    }

    // Of a message besides its rows, at most: the header, and what alignment adds.
    UCCL_EP_DEVICE static constexpr uint64_t fixed_bytes() { return sizeof(MessageHeader) + 3 * 16 + 64; }
    UCCL_EP_DEVICE static uint64_t bytes_of_row(uint64_t row_bytes, uint64_t scale_bytes, uint64_t num_topk,
                                                bool on_rail) {
        return row_bytes + scale_bytes + num_topk * 8 + 4 + (on_rail ? kMaxRanksPerDomain / 8 : 0);
    }
    // Rows that fit a slot; at least 1 (the communicator refuses shapes for which it would be 0).
    UCCL_EP_DEVICE static uint32_t capacity(const DispatchShape &shape, uint64_t slot_bytes, bool on_rail) {
        const uint64_t row = bytes_of_row(shape.row_bytes, shape.scale_bytes, shape.num_topk, on_rail);
        return slot_bytes <= fixed_bytes() ? 0 : static_cast<uint32_t>((slot_bytes - fixed_bytes()) / row);
    }
};

// The rows of one high-throughput combine message, likewise.
struct CombineRows {
    uint64_t payload, topk_weights, end;

    UCCL_EP_DEVICE static CombineRows of(const CombineParameters &p, uint32_t rows) {
        CombineRows at;
        at.payload = sizeof(MessageHeader);
        at.topk_weights = align_up(at.payload + uint64_t{rows} * p.row_bytes, 16);
        at.end = align_up(at.topk_weights + uint64_t{rows} * p.num_topk * 4, 64);
        return at;
    }

    UCCL_EP_DEVICE static constexpr uint64_t fixed_bytes() { return sizeof(MessageHeader) + 16 + 64; }
    UCCL_EP_DEVICE static uint64_t bytes_of_row(uint64_t row_bytes, uint64_t num_topk) {
        return row_bytes + num_topk * 4;
    }
    UCCL_EP_DEVICE static uint32_t capacity(const CombineParameters &p) {
        return static_cast<uint32_t>((p.group.layout.slot_bytes - fixed_bytes()) /
                                     bytes_of_row(p.row_bytes, p.num_topk));
    }
};

// Header words of a low-latency dispatch message (MessageHeader.words).
enum LowLatencyWord : uint32_t {
    kWordMaxTokens = 0,
    kWordNumTopk = 1,
    kWordNumExperts = 2,
    kWordQuantization = 3,
    kWordCombineBase = 4,  // first row of the receiver's experts in the sender's combine inbox; packed
    kWordPayloadType = 5,  // of the caller's tensor, which is also that of the combine
    kWordPath = 6,         // LowLatencyPath
    kWordDispatchesRead = 7,  // low 32 bits of how many dispatches of the receiver the sender has read; packed
    kWordCombinesRead = 8,    // likewise of combines
};

// A packed low-latency dispatch message: header, rows per local expert, then the rows, each with all its fields. So where
// a row lies does not depend on how many there are, and the receiver loads all of its fields at once.
struct LowLatencyRows {
    uint64_t counts, rows, stride, end;       // byte offsets into the message, and from row to row
    uint64_t scales, expert, place, source;   // byte offsets into a row, which begins with its payload

    UCCL_EP_DEVICE static LowLatencyRows of(uint64_t local_experts, uint64_t rows, uint64_t row_bytes,
                                            uint64_t scale_bytes, uint64_t num_topk) {
        LowLatencyRows at;
        at.counts = sizeof(MessageHeader);
        at.rows = align_up(at.counts + local_experts * 4, 64);
        at.scales = align_up(row_bytes, 16);
        at.expert = at.scales + scale_bytes;     // local expert of each k, -1: elsewhere
        at.place = at.expert + num_topk * 4;     // the row's place among mine of that expert
        at.source = at.place + num_topk * 4;
        at.stride = align_up(at.source + 4, 64);  // whole lines: a row shares none with another block's
        at.end = at.rows + rows * at.stride;
        return at;
    }
    UCCL_EP_DEVICE static LowLatencyRows of(const LowLatencyShape &shape, uint32_t num_ranks, uint32_t rows) {
        return of(shape.num_experts / num_ranks, rows, shape.row_bytes, shape.scale_bytes, shape.num_topk);
    }
    UCCL_EP_DEVICE uint64_t row(uint64_t i) const { return rows + i * stride; }
};

// A direct low-latency dispatch: where a rank finds what a rank of its domain wrote into its inbox, behind the header. A
// token's row has the place that its index says, so that no sender numbers anything: each receiver works out from the
// picks, which come as words (DirectWords), where rows go.
struct DirectDispatchInbox {
    uint64_t payload, scales, end;  // byte offsets

    UCCL_EP_DEVICE static DirectDispatchInbox of(const LowLatencyShape &shape) {
        DirectDispatchInbox at;
        at.payload = sizeof(MessageHeader);
        at.scales = align_up(at.payload + uint64_t{shape.max_tokens} * shape.row_bytes, 16);
        at.end = align_up(at.scales + uint64_t{shape.max_tokens} * shape.scale_bytes, 64);
        return at;
    }
};

// A direct low-latency combine: what comes home to a rank. A token has as many sums as ranks that it went to, one a
// place, in the order of ranks.
struct DirectCombineInbox {
    uint64_t sum_bytes, places, end;

    UCCL_EP_DEVICE static DirectCombineInbox of(uint64_t num_ranks, uint64_t max_tokens, uint64_t hidden,
                                                uint64_t accumulator_bytes, uint64_t num_topk) {
        DirectCombineInbox at;
        at.sum_bytes = align_up(hidden * accumulator_bytes, 64);
        at.places = num_topk < num_ranks ? num_topk : num_ranks;
        at.end = max_tokens * at.places * at.sum_bytes;
        return at;
    }
    UCCL_EP_DEVICE static DirectCombineInbox of(const LowLatencyShape &shape, uint32_t num_ranks) {
        const bool wide = shape.payload_type == static_cast<uint32_t>(PayloadType::kFloat64);
        return of(num_ranks, shape.max_tokens, shape.hidden, wide ? 8 : 4, shape.num_topk);
    }
    UCCL_EP_DEVICE uint64_t sum(uint64_t token, uint64_t place) const { return (token * places + place) * sum_bytes; }
};

}  // namespace uccl_ep
