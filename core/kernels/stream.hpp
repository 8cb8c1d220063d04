// A stream carries slot-sized messages from one rank to another through a ring of slots in the
// receiver's data window: `data` signals count filled slots at the receiver, `credit` signals count
// emptied ones at the sender. Inside the scale-up domain the sender stores straight into the peer's
// window; otherwise it fills the same slot of its outbox and pushes a command.
//
// One warp works an end of a stream at a time.
#pragma once

#include "channel.hpp"
#include "wait.hpp"

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

// What a high-throughput message says of its rows besides their count; both ends must agree, since fields are
// found by it. `dtype` as in DispatchShape; of a combine, the PayloadType.
struct RowFormat {
    uint32_t row_bytes, scale_bytes, num_topk, dtype;
};

// A message of this very call says something else of it than this rank: every rank's error names both values.
UCCL_EP_DEVICE void fail_difference(const Group &group, Phase phase, uint32_t source, Difference what, uint64_t theirs,
                                    uint64_t mine) {
    fail(group, Reason::kMismatch, {phase, source, kDifference | static_cast<uint32_t>(what), mine}, theirs, 0);
}

// The first difference of two row formats, if there is one.
UCCL_EP_DEVICE bool fail_difference(const Group &group, Phase phase, uint32_t source, const RowFormat &theirs,
                                    const RowFormat &mine) {
    if (theirs.dtype != mine.dtype) {
        fail_difference(group, phase, source, Difference::kDtype, theirs.dtype, mine.dtype);
    } else if (theirs.row_bytes != mine.row_bytes) {
        fail_difference(group, phase, source, Difference::kRowBytes, theirs.row_bytes, mine.row_bytes);
    } else if (theirs.scale_bytes != mine.scale_bytes) {
        fail_difference(group, phase, source, Difference::kScaleBytes, theirs.scale_bytes, mine.scale_bytes);
    } else if (theirs.num_topk != mine.num_topk) {
        fail_difference(group, phase, source, Difference::kTopk, theirs.num_topk, mine.num_topk);
    } else {
        return false;
    }
    return true;
}

// Both ends of a stream, in window offsets and signal indices; computed by the functions below.
struct StreamPlace {
    uint32_t peer;             // rank at the other end
    uint64_t remote_ring;      // sender: ring in the receiver's data window; receiver: my own ring
    uint64_t outbox;           // sender: ring in my own data window, used where peer is remote
    uint32_t data_signal;      // in the receiver's control window
    uint32_t credit_signal;    // in the sender's control window
    uint64_t *counter;         // slots sent, or received, ever
    uint32_t channel;
};

UCCL_EP_DEVICE StreamPlace direct_to(const Group &group, uint32_t destination, uint32_t channel) {
    const Layout &layout = group.layout;
    return {destination,
            layout.direct_ring(group.rank, channel),
            layout.has_remote ? layout.direct_outbox(destination, channel) : 0,
            layout.signal_index(SignalKind::kDirectData, group.rank, channel),
            layout.signal_index(SignalKind::kDirectCredit, destination, channel),
            Counters::at(group, Counter::kDirectSent, destination, channel),
            channel};
}

UCCL_EP_DEVICE StreamPlace direct_from(const Group &group, uint32_t source, uint32_t channel) {
    const Layout &layout = group.layout;
    return {source,
            layout.direct_ring(source, channel),
            0,
            layout.signal_index(SignalKind::kDirectData, source, channel),
            layout.signal_index(SignalKind::kDirectCredit, group.rank, channel),
            Counters::at(group, Counter::kDirectReceived, source, channel),
            channel};
}

// The rank of another domain at my own place in it.
UCCL_EP_DEVICE uint32_t rail_peer(const Group &group, uint32_t domain) {
    return domain * group.layout.ranks_per_domain + group.place();
}

UCCL_EP_DEVICE StreamPlace rail_to(const Group &group, uint32_t domain, uint32_t channel) {
    const Layout &layout = group.layout;
    return {rail_peer(group, domain),
            layout.rail_ring(group.domain(), channel),
            layout.rail_outbox(domain, channel),
            layout.signal_index(SignalKind::kRailData, group.rank, channel),
            layout.signal_index(SignalKind::kRailCredit, rail_peer(group, domain), channel),
            Counters::at(group, Counter::kRailSent, domain, channel),
            channel};
}

UCCL_EP_DEVICE StreamPlace rail_from(const Group &group, uint32_t domain, uint32_t channel) {
    const Layout &layout = group.layout;
    return {rail_peer(group, domain),
            layout.rail_ring(domain, channel),
            0,
            layout.signal_index(SignalKind::kRailData, rail_peer(group, domain), channel),
            layout.signal_index(SignalKind::kRailCredit, group.rank, channel),
            Counters::at(group, Counter::kRailReceived, domain, channel),
            channel};
}

// Forwarding, inside my domain, rows of the rail peer of `source_domain` to the rank at `place`.
UCCL_EP_DEVICE StreamPlace forward_to(const Group &group, uint32_t source_domain, uint32_t place, uint32_t channel) {
    const Layout &layout = group.layout;
    const uint32_t source = rail_peer(group, source_domain);
    const uint32_t entry = source_domain * layout.ranks_per_domain + place;
    return {group.domain() * layout.ranks_per_domain + place,
            layout.forward_ring(source, channel),
            0,
            layout.signal_index(SignalKind::kForwardData, source, channel),
            layout.signal_index(SignalKind::kForwardCredit, entry, channel),
            Counters::at(group, Counter::kForwardSent, entry, channel),
            channel};
}

// Receiving rows of `source`, of another domain, from the forwarder of my domain at source's place.
UCCL_EP_DEVICE StreamPlace forward_from(const Group &group, uint32_t source, uint32_t channel) {
    const Layout &layout = group.layout;
    const uint32_t source_domain = source / layout.ranks_per_domain;
    const uint32_t entry = source_domain * layout.ranks_per_domain + group.place();
    return {group.domain() * layout.ranks_per_domain + source % layout.ranks_per_domain,
            layout.forward_ring(source, channel),
            0,
            layout.signal_index(SignalKind::kForwardData, source, channel),
            layout.signal_index(SignalKind::kForwardCredit, entry, channel),
            Counters::at(group, Counter::kForwardReceived, source, channel),
            channel};
}

// Raise a signal of a peer's control window, after all this warp wrote before for that peer.
// Called by one thread.
UCCL_EP_DEVICE bool raise_signal(const Group &group, uint32_t peer, uint32_t signal, uint64_t value, Phase phase) {
    if (group.is_local(peer)) {
        device::store_release_system(local_signal(group, peer, signal), value);
        return true;
    }
    const Command command{Operation::kWriteSignal, peer, signal, 0, 0, 0, value};
    uint64_t ticket;
    return push(group, command, phase, &ticket);
}

class StreamSender {
  public:
    UCCL_EP_DEVICE StreamSender(const Group &group, const StreamPlace &place, Phase phase)
        : group_(group), place_(place), phase_(phase), sent_(*place.counter) {
        device::sync_warp();  // all lanes have read the counter before finish() may write it
    }

    // The next slot to fill, or null on failure. Called by the whole warp.
    UCCL_EP_DEVICE uint8_t *acquire() {
        const Layout &layout = group_.layout;
        const uint64_t slot = sent_ % layout.num_slots;
        if (sent_ >= layout.num_slots) {
            const uint64_t needed = sent_ - layout.num_slots + 1;
            if (!wait_signal_warp(group_, {phase_, place_.peer, place_.credit_signal, needed})) return nullptr;
        }
        const uint64_t offset = slot * layout.slot_bytes;
        if (group_.is_local(place_.peer)) return group_.peer_data[place_.peer] + place_.remote_ring + offset;
        // The receiver has emptied the slot, so its bytes have left; the transport may still hold the
        // outbox slot for a retransmission until it reports completion.
        if (!wait_outbox_slot(slot)) return nullptr;
        return group_.data + place_.outbox + offset;
    }

    // Hand over the first `bytes` bytes of the slot. Called by the whole warp.
    UCCL_EP_DEVICE bool commit(uint64_t bytes) {
        device::sync_warp();
        ++sent_;
        uint32_t ok = 1;
        if (device::lane() == 0) {
            if (group_.is_local(place_.peer)) {
                device::store_release_system(local_signal(group_, place_.peer, place_.data_signal), sent_);
            } else {
                const uint64_t slot = (sent_ - 1) % group_.layout.num_slots;
                const uint64_t offset = slot * group_.layout.slot_bytes;
                const Command command{
                    Operation::kWriteSignal,     place_.peer, place_.data_signal, bytes, place_.outbox + offset,
                    place_.remote_ring + offset, sent_};
                ok = push(group_, command, phase_, &tickets_[slot]);
                used_ |= uint64_t{1} << slot;
            }
        }
        return device::broadcast(ok) != 0;
    }

    // Keep the count for the next operation. Called by the whole warp, also after a failure.
    UCCL_EP_DEVICE void finish() {
        if (device::lane() == 0) {
            *place_.counter = sent_;
            // The next operation starts with no tickets: what this one pushed must have left the outbox.
            for (uint64_t slot = 0; slot < group_.layout.num_slots; ++slot) {
                if ((used_ >> slot & 1) != 0 &&
                    !wait_completed(group_, place_.peer, place_.data_signal, tickets_[slot], phase_))
                    break;
            }
        }
        device::sync_warp();
    }

  private:
    UCCL_EP_DEVICE bool wait_outbox_slot(uint64_t slot) {
        uint32_t ok = 1;
        if (device::lane() == 0 && (used_ >> slot & 1) != 0) {
            ok = wait_completed(group_, place_.peer, place_.data_signal, tickets_[slot], phase_);
        }
        return device::broadcast(ok) != 0;
    }

    const Group &group_;
    StreamPlace place_;
    Phase phase_;
    uint64_t sent_;
    uint64_t used_ = 0;               // lane 0: slots with a ticket below
    uint64_t tickets_[kMaxSlots];     // lane 0: command that last read each outbox slot
};

class StreamReceiver {
  public:
    UCCL_EP_DEVICE StreamReceiver(const Group &group, const StreamPlace &place, Phase phase)
        : group_(group), place_(place), phase_(phase), received_(*place.counter) {
        device::sync_warp();
    }

    // The next filled slot, its header checked against what this operation expects; null on failure.
    // Called by the whole warp.
    UCCL_EP_DEVICE const uint8_t *acquire(OperationKind kind, const RowFormat &rows) {
        if (!wait_signal_warp(group_, {phase_, place_.peer, place_.data_signal, received_ + 1})) return nullptr;
        const uint8_t *slot =
            group_.data + place_.remote_ring + received_ % group_.layout.num_slots * group_.layout.slot_bytes;
        const auto *header = reinterpret_cast<const MessageHeader *>(slot);
        const bool same_call = header->operation == group_.operation && header->kind == static_cast<uint32_t>(kind);
        const RowFormat theirs{header->row_bytes, header->words[0], header->words[1], header->words[2]};
        if (!same_call || theirs.row_bytes != rows.row_bytes || theirs.scale_bytes != rows.scale_bytes ||
            theirs.num_topk != rows.num_topk || theirs.dtype != rows.dtype) {
            if (device::lane() == 0 && !(same_call && fail_difference(group_, phase_, header->source, theirs, rows))) {
                uint64_t *detail = group_.status->detail;
                detail[0] = header->operation;
                detail[1] = header->kind;
                detail[2] = header->row_bytes;
                detail[3] = rows.row_bytes;
                fail(group_, Reason::kMismatch,
                     {phase_, header->source, place_.data_signal, static_cast<uint64_t>(kind)}, received_ + 1, 0);
            }
            return nullptr;
        }
        return slot;
    }

    // A message brings more rows than the handle of this rank has room for: the ranks use different handles.
    UCCL_EP_DEVICE void refuse_rows(uint32_t source, uint32_t rows, uint32_t room, OperationKind kind) {
        if (device::lane() != 0) return;
        for (uint32_t i = 0; i < 4; ++i) group_.status->detail[i] = 0;
        fail(group_, Reason::kMismatch, {phase_, source, place_.data_signal, static_cast<uint64_t>(kind)}, rows, room);
    }

    // Give the slot back to the sender. Called by the whole warp.
    UCCL_EP_DEVICE bool release() {
        device::sync_warp();
        ++received_;
        uint32_t ok = 1;
        if (device::lane() == 0) ok = raise_signal(group_, place_.peer, place_.credit_signal, received_, phase_);
        return device::broadcast(ok) != 0;
    }

    UCCL_EP_DEVICE void finish() {
        if (device::lane() == 0) *place_.counter = received_;
        device::sync_warp();
    }

  private:
    const Group &group_;
    StreamPlace place_;
    Phase phase_;
    uint64_t received_;
};

}  // namespace uccl_ep
