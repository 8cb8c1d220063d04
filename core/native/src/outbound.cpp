#include "outbound.hpp"

#include <algorithm>

namespace uccl_ep {

Outbound::Outbound(EngineShared &shared, uint32_t lane, ProxyStats &stats)
    : shared_(shared), lane_(lane), stats_(stats), ops_(shared.limits.send_queue_depth + kReserve) {
    free_.reserve(ops_.size());
    for (uint64_t i = ops_.size(); i-- > 0;) {
        free_.push_back(static_cast<uint32_t>(i));
    }
    writes_.reserve(ops_.size());
    signals_.reserve(ops_.size());
    signal_after_.reserve(ops_.size());
}

uint64_t Outbound::take(const Op &op) {
    const uint32_t index = free_.back();
    free_.pop_back();
    ops_[index] = op;
    ops_[index].in_use = true;
    return index;
}

void Outbound::write(uccl_ep_write write, const Op &op) {
    write.token = take(op);
    writes_.push_back(write);
}

void Outbound::signal(uccl_ep_signal signal, const Op &op) {
    signal.token = take(op);
    signals_.push_back(signal);
    signal_after_.push_back(writes_.size());
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
        if (next_write_ < writes_.size()) {
            const uint64_t want = std::min(writes_.size() - next_write_, depth - posted_);
            const int64_t taken = shared_.ops->post_writes(shared_.ops->context, lane_, &writes_[next_write_], want);
            if (taken < 0) {
                return taken;
            }
            if (trace_ != nullptr) {
                trace_writes(next_write_, static_cast<uint64_t>(taken));
            }
            next_write_ += static_cast<uint64_t>(taken);
            posted_ += static_cast<uint64_t>(taken);
            if (next_signal_ == signals_.size() && static_cast<uint64_t>(taken) < want) {
                break;
            }
        }
        uint64_t ready = next_signal_;
        while (ready < signals_.size() && signal_after_[ready] <= next_write_) {
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
        } else if (next_write_ < writes_.size()) {
            break;  // the transport took fewer writes, and no signal may go before them
        }
    }
    if (!staged()) {
        writes_.clear();
        signals_.clear();
        signal_after_.clear();
        next_write_ = 0;
        next_signal_ = 0;
    }
    return 0;
}

const Op *Outbound::complete(uint64_t token) {
    if (token >= ops_.size() || !ops_[token].in_use) {
        return nullptr;
    }
    completed_ = ops_[token];
    ops_[token].in_use = false;
    free_.push_back(static_cast<uint32_t>(token));
    --posted_;
    return &completed_;
}

}  // namespace uccl_ep
