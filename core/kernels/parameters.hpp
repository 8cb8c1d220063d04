// What the kernels are given: one plain struct a kernel, filled by uccl_ep/*.py through the
// bindings, copied by value at launch. Pointers are device addresses.
#pragma once

#include "uccl_ep/command.hpp"
#include "uccl_ep/layout.hpp"

namespace uccl_ep {

// Which operation a message belongs to; a receiver that meets another one reports a mismatch.
enum class OperationKind : uint32_t {
    kNotify = 1,
    kDispatch = 2,
    kCombine = 3,
    kLowLatencyDispatch = 4,
    kLowLatencyCombine = 5,
};

enum class PayloadType : uint32_t {
    kBytes = 0,  // moved, never computed with
    kBfloat16 = 1,
    kFloat16 = 2,
    kFloat32 = 3,
    kFloat64 = 4,
    kFloat8 = 5,  // e4m3fn; Python numbers further types, which kernels only compare
};

// What differs between a message and the call of the rank that receives it; in words in uccl_ep/failures.py. Such a
// verdict names no signal but this, and has as `expected` the value of the rank that noticed, as `seen` the culprit's.
inline constexpr uint32_t kDifference = 0xffffff00u;
enum class Difference : uint32_t {
    kDtype = 1,
    kRowBytes = 2,
    kScaleBytes = 3,
    kTopk = 4,
    kExperts = 5,
    kMaxTokens = 6,
    kQuantization = 7,
    kExpertRows = 8,  // of a rank with itself: more rows for one expert than a low-latency layout has room for
    kMostTokens = 9,  // of a high-throughput dispatch
    kPath = 10,  // how low-latency rows travel, LowLatencyPath
    kExpertIndex = 11,  // of a rank with itself: an index in topk_idx that is no expert's; expected: num_experts
};

// Where a kernel leaves what went wrong; host memory, read when the launch is done.
struct KernelStatus {
    uint64_t failed;  // 0: all is well; set once, by the first that fails
    uint64_t ready;   // the verdict below is complete
    Verdict verdict;
    uint64_t detail[4];  // of a mismatch: what was found, what was expected
};

// What a warp did for a while, see spans.hpp.
struct SpanRecord {
    uint64_t start_ns, end_ns;  // by device::now_ns()
    uint32_t activity;          // Activity
    uint32_t detail;            // the rank at the other end, or kNobody; of a whole kernel its TracedKernel
    uint32_t warps;             // of the whole launch that have a track
    uint32_t reserved;
};

// Where a traced kernel records spans. Each warp of each block has a track: a ring of records, which keeps the newest.
struct SpanTable {
    uint32_t *counts;     // [tracks] spans recorded, ever, modulo 2^32; null: none are
    SpanRecord *records;  // [capacity][tracks], so that the first rounds of all rings lie together
    uint32_t warps;       // tracks of a block
    uint32_t tracks;
    uint32_t capacity;    // of a ring, a power of two
    uint32_t reserved;
};

// The group as kernels see it, the same for every kernel of a communicator.
struct Group {
    Layout layout;
    uint32_t rank;
    uint32_t num_rings;
    uint64_t timeout_ns;
    uint8_t *data;                  // own data window
    uint8_t *control;               // own control window
    uint8_t *const *peer_data;      // [num_ranks] data windows of the scale-up domain, own included; null elsewhere
    uint8_t *const *peer_control;   // [num_ranks] likewise
    const RingView *rings;          // [num_rings], empty where the whole group is one domain
    uint64_t *counters;             // device memory, see counters.hpp
    KernelStatus *status;
    uint64_t operation;             // sequence number of this call, for diagnosis and mismatch detection
    uint8_t *own_messages;          // device memory [2 parities][ll_dispatch_bytes], or null: see ll_own_message
    SpanTable spans;                // kernels that are not traced leave it alone

    UCCL_EP_DEVICE uint32_t num_ranks() const { return layout.num_ranks; }
    UCCL_EP_DEVICE uint32_t domain() const { return rank / layout.ranks_per_domain; }
    UCCL_EP_DEVICE uint32_t place() const { return rank % layout.ranks_per_domain; }
    UCCL_EP_DEVICE bool is_local(uint32_t peer) const { return peer / layout.ranks_per_domain == domain(); }
};

// get_dispatch_layout.
struct RoutingParameters {
    Group group;
    const void *topk_idx;        // [num_tokens, num_topk] int32 or int64, -1: no expert
    uint32_t index_bytes;        // 4 or 8
    uint32_t num_tokens;
    uint32_t num_topk;
    uint32_t num_experts;
    uint32_t num_ranks;
    uint32_t reserved;
    int32_t *num_tokens_per_rank;    // [num_ranks], zeroed
    int32_t *num_tokens_per_expert;  // [num_experts], zeroed
    uint8_t *is_token_in_rank;       // [num_tokens, num_ranks]
};

// What a notify message says besides the counts; all ranks must agree.
struct DispatchShape {
    uint32_t row_bytes;    // payload bytes of a token
    uint32_t scale_bytes;  // bytes of its scales, 0: none
    uint32_t num_topk;     // 0: no top-k indices and weights travel
    uint32_t num_experts;
    uint32_t dtype;        // PayloadType of the payload | of the scales << 8
    uint32_t most_tokens;  // of any rank, where outputs are sized by it; 0: they are sized by the counts
};
static_assert(sizeof(DispatchShape) == 24, "compared word by word");

// High-throughput notify: tell every rank how many rows it will get, learn the same.
// Channel c of a rank with T tokens carries tokens [c*T/C, (c+1)*T/C).
struct NotifyParameters {
    Group group;
    DispatchShape shape;
    const uint8_t *is_token_in_rank;       // [num_tokens, num_ranks]
    const int32_t *num_tokens_per_expert;  // [num_experts]
    uint32_t num_tokens;
    uint32_t reserved;
    int32_t *send_rows;       // out [num_ranks, C] rows for each rank
    int32_t *rail_send_rows;  // out [num_domains, C] rows for each domain
    int32_t *receive_rows;    // out [num_ranks, C] rows from each rank
    int32_t *receive_offset;  // out [num_ranks * C + 1] first row of each in the output; the last entry is the total
    int32_t *rail_rows;       // out [num_domains, C] rows my rail peer in each domain sends me to forward
    int32_t *expert_rows;     // out [num_experts / num_ranks] rows that name each local expert
};

// High-throughput dispatch of rows whose counts are known (from notify or from a cached handle).
struct DispatchParameters {
    Group group;
    DispatchShape shape;
    const uint8_t *x;            // [num_tokens, row_bytes]
    const uint8_t *scales;       // [num_tokens, scale_bytes], or null
    const void *topk_idx;        // [num_tokens, num_topk] global expert indices, or null
    const float *topk_weights;   // [num_tokens, num_topk], or null: zeros travel
    const uint8_t *is_token_in_rank;  // [num_tokens, num_ranks]
    const int32_t *send_rows, *rail_send_rows, *receive_rows, *receive_offset, *rail_rows;
    uint32_t num_tokens;
    uint32_t index_bytes;        // of topk_idx and receive_topk_idx: 4 or 8
    uint8_t *receive_x;          // out [rows, row_bytes]
    uint8_t *receive_scales;     // out [rows, scale_bytes]
    void *receive_topk_idx;      // out [rows, num_topk] local expert indices, -1 elsewhere
    float *receive_topk_weights; // out [rows, num_topk], 0 where -1
    int32_t *receive_source;     // out [rows] index of the token on its source rank
    uint64_t team_ends;          // how the warps of a block are divided into teams: TeamOfWarp
};

// High-throughput combine: out[t] = bias0[t] + bias1[t] + sum over ranks r of r's row for t, in rank order or
// in that of term_ranks[t]; accumulated in float32 (float64 for float64) and rounded once. With domains_first the
// rows of one scale-up domain, which are neighbours in term_ranks, are summed and rounded on their own before.
struct CombineParameters {
    Group group;
    uint32_t payload_type;       // PayloadType
    uint32_t hidden;             // elements
    uint32_t row_bytes;
    uint32_t num_topk;           // 0: no weights
    const uint8_t *x;            // [rows, hidden], rows as dispatch delivered them
    const float *topk_weights;   // [rows, num_topk], or null
    const uint8_t *bias[2];      // [num_tokens, hidden] of the payload type, or null
    const uint8_t *is_token_in_rank;  // [num_tokens, num_ranks]
    const int32_t *send_rows, *receive_rows, *receive_offset;  // of the dispatch
    const int32_t *term_ranks;   // [num_tokens, max_terms] the ranks of a token, and -1; or null: rank order
    uint32_t max_terms;
    uint32_t domains_first;      // 1: two levels; needs term_ranks
    uint32_t num_tokens;
    uint32_t reserved;
    uint64_t team_ends;          // how the warps of a block are divided into teams: TeamOfWarp
    uint8_t *out;                // [num_tokens, hidden]
    float *out_topk_weights;     // [num_tokens, num_topk], or null
};

// CombineParameters::term_ranks for the picks of a dispatch.
struct TermOrderParameters {
    const void *topk_idx;  // [num_tokens, num_topk] int32 or int64, -1: no expert
    int32_t *term_ranks;   // out, likewise
    uint32_t index_bytes;  // 4 or 8
    uint32_t num_tokens;
    uint32_t num_topk;
    uint32_t num_experts;
    uint32_t num_ranks;
    uint32_t ranks_per_domain;
    uint32_t domains_first;
    uint32_t reserved;
};

// out[i] = x[source_rows[i]], or zeros where that is -1 and they are asked for.
struct GatherParameters {
    const uint8_t *x;
    uint8_t *out;                // [num_rows, row_bytes]
    const int32_t *source_rows;  // [num_rows]
    uint32_t num_rows;
    uint32_t row_bytes;
    uint32_t zero_padding;       // 1: fill; 0: leave what is there
    uint32_t reserved;
};

// out[i] = bias0[i] + bias1[i] + sum over k of x[slots[i, k]], k increasing, -1 for no term; accumulated in float32
// (float64 for float64) and rounded once.
struct FoldParameters {
    const uint8_t *x;
    uint8_t *out;            // [num_rows, hidden]
    const int32_t *slots;    // [num_rows, num_terms]
    const uint8_t *bias[2];  // [num_rows, hidden], or null
    uint32_t num_rows;
    uint32_t num_terms;
    uint32_t payload_type;   // PayloadType
    uint32_t hidden;         // elements
    uint32_t row_bytes;
    uint32_t reserved;
};

enum class Quantization : uint32_t {
    kNone = 0,
    kFloat8 = 1,              // e4m3, a float32 scale for each 128 elements: amax / 448
    kFloat8PowerOfTwo = 2,    // the scale rounded up to a power of two
    kFloat8Exponent = 3,      // likewise, and the receiver gets the scale as its exponent (UE8M0)
};

inline constexpr uint32_t kScaleGroup = 128;  // elements that share a scale
inline constexpr uint32_t kLowLatencyTokenBits = 16;  // of max_tokens: counts of tokens are summed bit by bit

// How the rows of a low-latency operation travel.
enum class LowLatencyPath : uint32_t {
    kPacked = 0,  // one message a rank, its rows packed
    kDirect = 1,  // each row to a place of its own in the window of a rank of the same domain
};

// Shape of a low-latency exchange; all ranks must agree.
struct LowLatencyShape {
    uint32_t max_tokens;    // per rank
    uint32_t hidden;        // elements
    uint32_t num_topk;
    uint32_t num_experts;
    uint32_t row_bytes;     // of a row on the wire
    uint32_t scale_bytes;   // of its float32 scales on the wire, 0: none
    uint32_t quantization;  // Quantization
    uint32_t payload_type;  // PayloadType of the caller's tensor
};
static_assert(sizeof(LowLatencyShape) == 32, "compared word by word");

struct LowLatencyDispatchParameters {
    Group group;
    LowLatencyShape shape;
    // send half
    const uint8_t *x;         // [num_tokens, hidden]
    const void *topk_idx;     // [num_tokens, num_topk]
    uint32_t num_tokens;
    uint32_t index_bytes;
    int32_t *combine_row;     // out [num_tokens, num_topk] row of the combine inbox where it comes home, -1
    int32_t *own_row;         // out [num_tokens, num_topk] its row of receive_x where that is on this rank, -1
    int32_t *masked;          // in/out [num_ranks] 1: leave this rank out; set for one that is gone or late; or null
    uint32_t own_in_place;    // 1: x stays as it is until the receive half, which takes my own rows from it
    uint32_t num_chunks;      // runs of tokens that the warps of a block place; at most its warps
    // receive half; L = num_experts / num_ranks, M = max_tokens
    uint8_t *receive_x;       // out [L, num_ranks * M, hidden]
    uint8_t *receive_scales;  // out float32 [L, groups, num_ranks * M], or exponents, or null
    int32_t *source_index;    // out [L, num_ranks * M] index of the token on its source rank
    int32_t *begin;           // out [L, num_ranks] first row of each source rank within an expert
    int32_t *count;           // out [L, num_ranks]
    int32_t *receive_count;   // out [L]
    int32_t *combine_base;    // out [num_ranks] first row of mine in each source rank's combine inbox
    int32_t *rows_before;     // out [L, num_ranks] rows of that source in the experts before
    int32_t *rows_home;       // out [num_ranks] rows of each source in all my experts
    int64_t *layout_range;    // out [L, num_ranks] begin << 32 | count, or null
    int32_t *statistics;      // in/out [L] cumulative receive counts, or null
    int64_t *wait_cost;       // in/out [num_ranks] cycles (ns on the host) waited for each rank, or null
    // the direct path alone
    int32_t *picks;           // out [num_ranks, M, topk + 1] the row of receive_x of each pick of a token, -1; and
                              // behind them how many ranks before this one it goes to
};

struct LowLatencyCombineParameters {
    Group group;
    LowLatencyShape shape;
    // send half
    const uint8_t *x;            // [L, num_ranks * M, hidden] of the payload type
    const int32_t *begin, *count, *combine_base, *rows_before, *rows_home;  // of the dispatch
    // receive half
    const void *topk_idx;        // [num_tokens, num_topk] as given to dispatch
    const float *topk_weights;   // [num_tokens, num_topk]
    const int32_t *combine_row, *own_row;  // of the dispatch
    uint32_t num_tokens;
    uint32_t index_bytes;
    int32_t *masked;             // as in dispatch
    uint32_t own_in_place;       // 1: x stays as it is until the receive half, which sums my own rows from it
    uint32_t reserved;
    uint8_t *out;                // [num_tokens, hidden]
    int64_t *wait_cost;          // as in dispatch
    const int32_t *picks;        // of the dispatch, on the direct path
};

struct BarrierParameters {
    Group group;
};

// A look at both clocks: the host's reading was taken between the two of the device.
struct ClockSample {
    uint64_t before_ns, host_ns, after_ns;
};

// Compare the device's clock with the host's; all in host memory.
struct ClockParameters {
    uint64_t *question;      // round that the device is at, from 1
    const uint64_t *answer;  // the host's clock in ns when it saw the question; grows from round to round
    ClockSample *samples;    // out [rounds]; left as they are where the host did not answer in time
    uint64_t timeout_ns;     // of a round
    uint32_t rounds;
    uint32_t reserved;
};

}  // namespace uccl_ep
