// What the warps of a kernel do, and when. Where kernels are traced (option trace_kernels; for the compiler
// UCCL_EP_TRACE_KERNELS), a mark in an algorithm records a span of time, from where it stands to the next one or the end
// of its scope:
//
//     Span step(group, Activity::kWaitsForRows);
//     ...
//     step.next(Activity::kCopies);
//
// Where they are not, a mark is nothing: no instruction and no register.
//
// A record is some plain stores of one thread into a ring that belongs to its warp, and nobody waits for them. How
// many spans a warp has recorded is kept in the block's memory while a kernel runs, since a load from device memory for
// each span would take longer than many of them last.
#pragma once

#include "parameters.hpp"

namespace uccl_ep {

// uccl_ep/tracing/names.py has both of these in words.
enum class TracedKernel : uint32_t {
    kBarrier = 0,
    kNotify = 1,
    kDispatch = 2,
    kCombine = 3,
    kLowLatencyDispatch = 4,
    kLowLatencyDispatchSend = 5,
    kLowLatencyDispatchReceive = 6,
    kLowLatencyCombine = 7,
    kLowLatencyCombineSend = 8,
    kLowLatencyCombineReceive = 9,
    kDirectDispatch = 10,
    kDirectDispatchSend = 11,
    kDirectDispatchReceive = 12,
    kDirectCombine = 13,
    kDirectCombineSend = 14,
    kDirectCombineReceive = 15,
};

enum class Activity : uint32_t {
    kKernel = 0,  // from its first instruction to its last, by each warp
    // Roles of high throughput and halves of low latency; they hold the others.
    kSends = 1,
    kReceives = 2,
    kForwards = 3,
    kKeeps = 4,
    kSums = 5,
    // Steps of them.
    kWaitsForRoom = 6,  // what was there before has been read, and has left
    kWaitsUntilSent = 7,  // the transport has what was pushed
    kWaitsForRows = 8,  // a peer has written what is read next
    kMeetsBlocks = 9,  // waits for the other blocks of the launch, or counts them
    kCounts = 10,  // how many rows go where
    kPlaces = 11,  // which row has which place
    kReadsHeads = 12,  // of messages: what they hold
    kCopies = 13,  // rows, cast where that was asked for
    kCopiesOwn = 14,  // likewise, of tokens that stay on this rank
    kAddsUp = 15,  // rows or sums of them
    kAddsUpOwn = 16,  // likewise, of this rank's own tokens
    kHandsOver = 17,  // signals or commands, after what was written before
    kGivesBack = 18,  // credits: what was read may be written again
    kSendsWords = 19,  // picks or weights
    kGathersPicks = 20,  // of all ranks
};

inline constexpr uint32_t kNobody = ~uint32_t{0};

#ifdef UCCL_EP_TRACE_KERNELS

// The track of this warp; none of the table where that has too few.
UCCL_EP_DEVICE uint32_t span_track(const SpanTable &table) {
    return device::warp_in_block() < table.warps ? device::block_index() * table.warps + device::warp_in_block()
                                                 : table.tracks;
}
UCCL_EP_DEVICE bool is_traced(const Group &group) {
    return group.spans.counts != nullptr && span_track(group.spans) < group.spans.tracks;
}

// Record a span that ends here, and return when that is. One thread of a warp. Out of line: it stands at many places.
UCCL_EP_DEVICE_SELDOM uint64_t record_span(const SpanTable &table, Activity activity, uint32_t detail,
                                           uint64_t start_ns) {
    const uint64_t end_ns = device::stamp_ns();
    const uint32_t warps = device::warps_per_block() < table.warps ? device::warps_per_block() : table.warps;
    uint32_t &count = device::span_count();
    table.records[uint64_t{count & (table.capacity - 1)} * table.tracks + span_track(table)] =
        SpanRecord{start_ns, end_ns, static_cast<uint32_t>(activity), detail, device::num_blocks() * warps, 0};
    ++count;
    return end_ns;
}

class Span {
  public:
    // By the first lane of each warp that comes here.
    UCCL_EP_DEVICE Span(const Group &group, Activity activity) : Span(group, activity, device::lane() == 0) {}
    // By the thread that says so: the first lane of a warp, or none. `peer`: the rank at the other end.
    UCCL_EP_DEVICE Span(const Group &group, Activity activity, bool records, uint32_t peer = kNobody)
        : Span(group, records, peer) {
        next(activity);
    }
    // None yet: one begins with next().
    UCCL_EP_DEVICE Span(const Group &group, bool records, uint32_t peer = kNobody)
        : table_(group.spans), peer_(peer), records_(records && is_traced(group)) {}
    UCCL_EP_DEVICE ~Span() { end(); }
    // What begins here, and what was under way ends.
    UCCL_EP_DEVICE void next(Activity activity) {
        if (!records_) return;
        start_ns_ = start_ns_ == 0 ? device::stamp_ns() : record_span(table_, activity_, peer_, start_ns_);
        activity_ = activity;
    }
    UCCL_EP_DEVICE void end() {
        if (start_ns_ != 0) record_span(table_, activity_, peer_, start_ns_);
        start_ns_ = 0;
    }
    Span(const Span &) = delete;
    Span &operator=(const Span &) = delete;

  private:
    const SpanTable &table_;
    Activity activity_ = Activity::kKernel;
    uint32_t peer_;
    bool records_;
    uint64_t start_ns_ = 0;  // 0: none is under way
};

// A whole kernel: the first line of each that has marks. Every warp records it, also one that does nothing, so that it
// can be told afterwards which spans are of one launch.
class KernelSpan {
  public:
    UCCL_EP_DEVICE KernelSpan(const Group &group, TracedKernel kernel) : table_(group.spans), kernel_(kernel) {
        if (device::lane() != 0 || !is_traced(group)) return;
        start_ns_ = device::stamp_ns();
        device::span_count() = table_.counts[span_track(table_)];
    }
    UCCL_EP_DEVICE ~KernelSpan() {
        if (start_ns_ == 0) return;
        record_span(table_, Activity::kKernel, static_cast<uint32_t>(kernel_), start_ns_);
        table_.counts[span_track(table_)] = device::span_count();
    }
    KernelSpan(const KernelSpan &) = delete;
    KernelSpan &operator=(const KernelSpan &) = delete;

  private:
    const SpanTable &table_;
    TracedKernel kernel_;
    uint64_t start_ns_ = 0;
};

#else

class Span {
  public:
    UCCL_EP_DEVICE Span(const Group &, Activity, bool = true, uint32_t = kNobody) {}
    UCCL_EP_DEVICE Span(const Group &, bool, uint32_t = kNobody) {}
    UCCL_EP_DEVICE void next(Activity) {}
    UCCL_EP_DEVICE void end() {}
};
class KernelSpan {
  public:
    UCCL_EP_DEVICE KernelSpan(const Group &, TracedKernel) {}
};

#endif

}  // namespace uccl_ep
