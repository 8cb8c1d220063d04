#include "outbound.hpp"

#include <algorithm>

namespace uccl_ep {

Outbound::Outbound(EngineShared &shared, uint32_t lane, ProxyStats &stats)
    : shared_(shared),
      lane_(lane),
      stats_(stats),
      ops_(shared.limits.send_queue_depth + kReserve),
      free_(ops_.size()),
      writes_(ops_.size()),
      signals_(ops_.size()),
      signal_after_(ops_.size()),
      num_free_(ops_.size()) {
    for (uint64_t i = 0; i < free_.size(); ++i) {
        free_[i] = static_cast<uint32_t>(free_.size() - 1 - i);
    }
}

void Outbound::trace_writes(uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
        const Op &op = ops_[writes_[i].token];
        if (op.kind == OpKind::kCommand) {
            trace_->add(TraceKind::kPosted, op.ring * shared_.num_proxies + lane_, op.first_ticket, op.peer, op.bytes,
                        op.commands);
        } else if (op.kind == OpKind::kSignalWrite) {
            trace_->add(TraceKind::kSignalled, op.signal, op.value, op.peer, 0, 0);
        }
    }
}

void Outbound::trace_signals(uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
        const Op &op = ops_[signals_[i].token];
        trace_->add(TraceKind::kSignalled, op.signal, op.value, op.peer, 0, 0);
    }
}

int64_t Outbound::flush() {
    const uint64_t depth = shared_.limits.send_queue_depth;
    while (staged() && posted_ < depth) {
        // Writes up to the next signal's place may go first; further ones too, since a signal that lands
        // later than it could is still right, and one batch is cheaper than two.
        if (next_write_ < num_writes_) {
            const uint64_t want = std::min(num_writes_ - next_write_, depth - posted_);
            const int64_t taken = shared_.ops->post_writes(shared_.ops->context, lane_, &writes_[next_write_], want);
            if (taken < 0) {
                return taken;
            }
            if (trace_ != nullptr) {
                trace_writes(next_write_, static_cast<uint64_t>(taken));
            }
            next_write_ += static_cast<uint64_t>(taken);
            posted_ += static_cast<uint64_t>(taken);
            if (next_signal_ == num_signals_ && static_cast<uint64_t>(taken) < want) {
                break;
            }
        }
        uint64_t ready = next_write_ == num_writes_ ? num_signals_ : next_signal_;
        while (ready < num_signals_ && signal_after_[ready] <= next_write_) {
            ++ready;
        }
        const uint64_t want = std::min(ready - next_signal_, depth - posted_);
        if (want != 0) {
            const int64_t taken = shared_.ops->post_signals(shared_.ops->context, lane_, &signals_[next_signal_], want);
            if (taken < 0) {
                return taken;
            }
            if (trace_ != nullptr) {
                trace_signals(next_signal_, static_cast<uint64_t>(taken));
            }
            next_signal_ += static_cast<uint64_t>(taken);
            posted_ += static_cast<uint64_t>(taken);
            stats_.native_signals.add(static_cast<uint64_t>(taken));
            if (static_cast<uint64_t>(taken) < want) {
                break;
            }
        } else if (next_write_ < num_writes_) {
            break;  // the transport took fewer writes, and no signal may go before them
        }
    }
    if (!staged()) {
        num_writes_ = num_signals_ = next_write_ = next_signal_ = 0;
    }
    return 0;
}

}  // namespace uccl_ep
