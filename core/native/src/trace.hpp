// The life of commands as a trace that Perfetto and chrome://tracing open, and beside it what kernels did, where they
// were asked to record it. One recorder per proxy, no locks; off (the usual case) it is a null pointer and one branch
// per event.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clock.hpp"

namespace uccl_ep {

enum class TraceKind : uint8_t {
    kLook,       // the ring was last seen empty; what is popped next was pushed after this
    kPopped,     // number: ticket
    kPosted,     // number: first ticket, extra: commands in the write
    kCompleted,  // likewise
    kSignalled,  // a signal left for the peer (native: posted; fenced: written); number: value
    kRaised,     // a signal of this rank was raised by its proxy (counted); number: value
};

struct TraceEvent {
    uint64_t time_ns;
    uint64_t number;
    uint64_t bytes;
    uint32_t ring;    // kSignalled, kRaised: the signal
    uint32_t peer;
    uint32_t extra;
    TraceKind kind;
};

class TraceRecorder {
  public:
    static constexpr uint64_t kEvents = 1u << 18;  // per proxy, 10 MB; the newest are kept

    TraceRecorder() { events_.reserve(kEvents); }
    void add(TraceKind kind, uint32_t ring, uint64_t number, uint32_t peer, uint64_t bytes, uint32_t extra,
             uint64_t time_ns = 0) {
        const TraceEvent event{time_ns != 0 ? time_ns : now_ns(), number, bytes, ring, peer, extra, kind};
        if (events_.size() < kEvents) {
            events_.push_back(event);
        } else {
            events_[dropped_++ % kEvents] = event;
        }
    }
    uint64_t dropped() const { return dropped_; }
    // Oldest first.
    template <class Visit>
    void visit(Visit &&see) const {
        for (uint64_t i = 0; i < events_.size(); ++i) {
            see(events_[(dropped_ + i) % events_.size()]);
        }
    }

  private:
    std::vector<TraceEvent> events_;
    uint64_t dropped_ = 0;
};

// What kernels add to the file of their rank (uccl_ep/tracing/perfetto.py writes it).
struct KernelEvents {
    std::string json;  // events of the trace event format, with commas between them
    uint64_t lost = 0;  // spans that were recorded, and written over before they were read
    uint64_t clock_error_ns = 0;  // by which the times of kernels may be off, against those of proxies
};

// `trace.json` becomes `trace.3.json` for rank 3: ranks of several hosts cannot share a file.
std::string trace_path(const std::string &path, uint32_t rank);

// Write the recorders of all proxies, and what kernels add. Returns an error in words, or "".
std::string write_trace(const std::string &path, uint32_t rank, const std::vector<const TraceRecorder *> &recorders,
                        const KernelEvents &kernels = {});

}  // namespace uccl_ep
