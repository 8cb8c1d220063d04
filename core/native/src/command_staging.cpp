// What a proxy does with the commands in its rings: each is checked and staged as a write for the lane; commands that
// continue one another become one write, and one above the transport's limit becomes several. Part of the class, not a
// class of its own, which would reach rings and sending queue through one more pointer and take 3 % fewer commands/s.
#include <algorithm>

#include "proxy.hpp"

namespace uccl_ep {

// Everything a kernel could get wrong, before a byte moves. The rank at fault is this one.
bool Proxy::check(const Command &command, uint32_t *key) {
    const char *wrong = nullptr;
    if (command.operation != Operation::kWrite && command.operation != Operation::kWriteSignal) {
        wrong = "unknown operation";
    } else if (command.peer >= num_ranks_ || is_remote_[command.peer] == 0) {
        wrong = "no rank that is reached through the transport";
    } else if (command.bytes > kMaxWriteBytes) {
        wrong = "more than 16 MiB in one command";
    } else if (command.local_offset > data_bytes_ || command.bytes > data_bytes_ - command.local_offset) {
        wrong = "source outside the data window";
    } else if (command.remote_offset > data_bytes_ || command.bytes > data_bytes_ - command.remote_offset) {
        wrong = "target outside the data window";
    } else if (command.signal >= num_signals_) {
        wrong = "no such signal";
    } else if (names_[command.signal].writer != shared_->rank) {
        wrong = "a signal that another rank writes";
    } else if (alignment_ > 1 && (command.bytes % alignment_ | command.local_offset % alignment_ |
                                  command.remote_offset % alignment_) != 0) {
        wrong = "not aligned as the transport needs";
    } else {
        *key = command.peer * outbox_entries_ + names_[command.signal].entry;
        SenderSignal &signal = senders_[*key];
        uint8_t owner = signal.owner.load(std::memory_order_relaxed);
        if (owner == 0) {
            signal.owner.compare_exchange_strong(owner, static_cast<uint8_t>(lane_ + 1));
            owner = signal.owner.load(std::memory_order_relaxed);
        }
        if (owner != lane_ + 1) {
            wrong = "a signal that was sent on the rings of two proxies";
        } else if (signal.open ? command.value != signal.value : command.value <= signal.value) {
            wrong = "message out of sequence";
        } else {
            signal.value = command.value;
            signal.open = command.operation == Operation::kWrite;
            return true;
        }
    }
    refuse(command, wrong);
    return false;
}

[[gnu::cold, gnu::noinline]] void Proxy::refuse(const Command &command, const char *wrong) {
    faults_.fail(Fault{shared_->rank, Reason::kBadCommand, command.signal, shared_->data_bytes, command.remote_offset,
                       std::string("command refused: ") + wrong + " (operation " +
                           std::to_string(static_cast<uint32_t>(command.operation)) + ", peer " +
                           std::to_string(command.peer) + ", " + std::to_string(command.bytes) + " bytes from " +
                           std::to_string(command.local_offset) + " to " + std::to_string(command.remote_offset) +
                           " of windows of " + std::to_string(shared_->data_bytes) + " bytes, signal " +
                           std::to_string(command.signal) + " of " + std::to_string(num_signals_) + ", value " +
                           std::to_string(command.value) + ")"});
}

bool Proxy::under_caps(uint32_t peer, uint64_t bytes) const {
    if (!capped_) {
        return true;
    }
    // A write larger than a cap goes alone.
    const uint64_t of_peer = shared_->inflight_peer[peer].load(std::memory_order_relaxed);
    if (cap_peer_ != 0 && of_peer != 0 && of_peer + bytes > cap_peer_) {
        return false;
    }
    const uint64_t cap_nic = shared_->options.max_inflight_nic;
    const uint64_t of_nic = shared_->inflight_nic.load(std::memory_order_relaxed);
    return cap_nic == 0 || of_nic == 0 || of_nic + bytes <= cap_nic;
}

void Proxy::seal() {
    if (have_open_) {
        have_open_ = false;
        tally_.writes += 1;
        tally_.bytes += open_.write->bytes;
        plan_->write(*open_.write, *open_.op);
    }
}

// Pop the next command. False: there is none, or it was refused.
inline bool Proxy::begin(RingReader &ring) {
    if (!ring.peek(&ring.current) || !check(ring.current, &ring.key)) {
        return false;
    }
    ring.begun = true;
    ring.done = 0;
    ring.begin();
    tally_.commands += 1;
    if (trace_ != nullptr) {
        ring.trace_pop(*trace_);
    }
    return true;
}

// Stage the next `piece` bytes of the ring's command as a write of their own.
inline bool Proxy::open(RingReader &ring, uint64_t piece, bool last) {
    const Command &command = ring.current;
    seal();
    if (!outbound_.room(2 * Plan::kOperationsPerCommand) || !under_caps(command.peer, piece) ||
        (windowed_ && !plan_->admit(command.peer, ring.key, command.value))) {
        return false;
    }
    const uint32_t ring_slot = static_cast<uint32_t>(&ring - rings_.data());
    if (piece == 0) {
        Op op;
        op.last = last;
        op.peer = command.peer;
        op.ring = ring_slot;
        op.signal = command.signal;
        op.key = ring.key;
        op.value = command.value;
        plan_->end(op);
        return true;
    }
    open_ = outbound_.stage();
    Op &op = *open_.op;
    op.last = last;
    op.peer = command.peer;
    op.ring = ring_slot;
    op.commands = 1;
    op.signal = command.signal;
    op.key = ring.key;
    op.first_ticket = ring.ticket();
    op.bytes = piece;
    op.value = command.value;
    uccl_ep_write &write = *open_.write;
    write.peer = command.peer;
    write.local_region = UCCL_EP_REGION_DATA;
    write.remote_region = UCCL_EP_REGION_DATA;
    write.local_offset = command.local_offset + ring.done;
    write.remote_offset = command.remote_offset + ring.done;
    write.bytes = piece;
    have_open_ = true;
    ring.add_write(ring.ticket());
    charge(command.peer, piece, true);
    if (ring.done != 0) {
        stats_.split.add(1);
    }
    return true;
}

// A command for a rank that is gone, where the group goes on without it: done, without a write.
bool Proxy::dropped(RingReader &ring) {
    if (!ring.begun) {
        if (!ring.peek(&ring.current) || !shared_->verdicts->gone(ring.current.peer)) {
            return false;
        }
        ring.begin();
    } else if (!shared_->verdicts->gone(ring.current.peer)) {
        return false;
    }
    ring.begun = false;
    ring.pop();
    return true;
}

bool Proxy::stage(RingReader &ring) {
    if (some_gone_ && dropped(ring)) {
        return true;
    }
    if (!ring.begun && !begin(ring)) {
        return false;
    }
    const Command &command = ring.current;
    const uint64_t piece = std::min(command.bytes - ring.done, max_write_);
    const bool ends_command = ring.done + piece == command.bytes;
    const bool last = ends_command && command.operation == Operation::kWriteSignal;
    const bool same_message =
        have_open_ && !open_.op->last && open_.op->key == ring.key && open_.op->value == command.value;

    if (same_message && piece == 0) {
        open_.op->last = last;
    } else if (piece == 0 && !last) {
        // A write of nothing that ends nothing.
    } else if (same_message && ring.done == 0 && &rings_[open_.op->ring] == &ring &&
               open_.op->first_ticket + open_.op->commands == ring.ticket() &&
               open_.write->local_offset + open_.write->bytes == command.local_offset &&
               open_.write->remote_offset + open_.write->bytes == command.remote_offset &&
               open_.write->bytes + piece <= max_write_ && under_caps(command.peer, piece)) {
        open_.write->bytes += piece;
        open_.op->bytes += piece;
        open_.op->commands += 1;
        open_.op->last = last;
        ring.add_write(ring.ticket());
        charge(command.peer, piece, true);
        tally_.merged += 1;
    } else if (!open(ring, piece, last)) {
        return false;
    }
    ring.done += piece;
    if (ends_command) {
        ring.begun = false;
        ring.pop();
    }
    return true;
}

inline uint64_t Proxy::drain_ring(RingReader &ring) {
    uint64_t done = 0;
    while (done < batch_ && stage(ring)) {
        ++done;
    }
    if (trace_ != nullptr && ring.empty()) {
        ring.seen_empty();
    }
    return done;
}

Proxy::Drained Proxy::drain() {
    some_gone_ = shared_->verdicts->any_gone();
    Drained drained{};
    for (RingReader &ring : rings_) {
        const uint64_t done = drain_ring(ring);
        drained.commands += done;
        drained.rings_with_more += ring.begun || done == batch_ ? 1 : 0;
    }
    seal();
    stats_.commands.add(tally_.commands);
    stats_.writes.add(tally_.writes);
    stats_.merged.add(tally_.merged);
    stats_.bytes.add(tally_.bytes);
    tally_ = {};
    return drained;
}

}  // namespace uccl_ep
