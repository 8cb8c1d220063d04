#include "outbound.hpp"

#include <algorithm>

namespace uccl_ep {

Outbound::Outbound(EngineShared &shared, uint32_t lane, ProxyStats &stats, bool keep)
    : shared_(shared),
      lane_(lane),
      stats_(stats),
      ops_(shared.limits.send_queue_depth + kReserve),
      free_(ops_.size()),
      writes_(ops_.size()),
      signals_(ops_.size()),
      signal_after_(ops_.size()),
      num_free_(ops_.size()),
      keep_(keep),
      kept_(keep ? ops_.size() : 0),
      newest_signals_(keep ? shared.sender_signals.size() : 0) {
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

void Outbound::keep_writes(uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
        kept_[writes_[i].token].write = writes_[i];
        kept_[writes_[i].token].number = ++posts_;
    }
}

void Outbound::keep_signals(uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
        const uint64_t token = signals_[i].token;
        kept_[token].signal = signals_[i];
        kept_[token].number = ++posts_;
        newest_signals_[ops_[token].key] = signals_[i].value;
    }
}

void Outbound::repost(const std::vector<uint64_t> &tokens) {
    std::vector<uint64_t> ordered(tokens);
    std::sort(ordered.begin(), ordered.end(),
              [this](uint64_t a, uint64_t b) { return kept_[a].number < kept_[b].number; });
    posted_ -= ordered.size();
    std::vector<uccl_ep_write> writes;
    std::vector<uccl_ep_signal> signals;
    for (const uint64_t token : ordered) {
        const Op &op = ops_[token];
        if (op.kind != OpKind::kSignal) {
            writes.push_back(kept_[token].write);
            continue;
        }
        const auto same = std::find_if(signals.begin(), signals.end(),
                                       [&](const uccl_ep_signal &signal) { return ops_[signal.token].key == op.key; });
        if (same == signals.end()) {
            signals.push_back(kept_[token].signal);
            signals.back().value = newest_signals_[op.key];
        } else {
            ops_[token].in_use = false;
            free_[num_free_++] = static_cast<uint32_t>(token);
        }
    }
    const uint64_t again = writes.size();
    std::vector<uint64_t> after(signals.size(), again);
    for (uint64_t i = next_signal_; i < num_signals_; ++i) {
        after.push_back(std::max(signal_after_[i], next_write_) - next_write_ + again);
    }
    writes.insert(writes.end(), writes_.begin() + static_cast<int64_t>(next_write_),
                  writes_.begin() + static_cast<int64_t>(num_writes_));
    signals.insert(signals.end(), signals_.begin() + static_cast<int64_t>(next_signal_),
                   signals_.begin() + static_cast<int64_t>(num_signals_));
    std::copy(writes.begin(), writes.end(), writes_.begin());
    std::copy(signals.begin(), signals.end(), signals_.begin());
    std::copy(after.begin(), after.end(), signal_after_.begin());
    num_writes_ = writes.size();
    num_signals_ = signals.size();
    next_write_ = next_signal_ = 0;
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
            if (keep_) {
                keep_writes(next_write_, static_cast<uint64_t>(taken));
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
            if (keep_) {
                keep_signals(next_signal_, static_cast<uint64_t>(taken));
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
