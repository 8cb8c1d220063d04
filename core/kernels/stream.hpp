// A stream carries slot-sized messages from one rank to another through a ring of slots in the
// receiver's data window: `data` signals count filled slots at the receiver, `credit` signals count
// emptied ones at the sender. Inside the scale-up domain the sender stores straight into the peer's
// window; otherwise it fills the same slot of its outbox and pushes a command.
//
// A team of warps works an end of a stream at a time.
#pragma once

#include "channel.hpp"
#include "messages.hpp"
#include "team.hpp"
#include "wait.hpp"

namespace uccl_ep {

// What a high-throughput message says of its rows besides their count; both ends must agree, since fields are
// found by it. `dtype` as in DispatchShape; of a combine, the PayloadType.
struct RowFormat {
    uint32_t row_bytes, scale_bytes, num_topk, dtype;
};

// One thread.
UCCL_EP_DEVICE void write_message_header(const Group &group, uint8_t *slot, OperationKind kind, uint32_t rows,
                                         const RowFormat &format, uint32_t source) {
    *reinterpret_cast<MessageHeader *>(slot) = MessageHeader{group.operation,
                                                             static_cast<uint32_t>(kind),
                                                             rows,
                                                             format.row_bytes,
                                                             source,
                                                             {format.scale_bytes, format.num_topk, format.dtype}};
}

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
            Counters::at(group, MessageCounter::kDirectSent, destination, channel),
            channel};
}

UCCL_EP_DEVICE StreamPlace direct_from(const Group &group, uint32_t source, uint32_t channel) {
    const Layout &layout = group.layout;
    return {source,
            layout.direct_ring(source, channel),
            0,
            layout.signal_index(SignalKind::kDirectData, source, channel),
            layout.signal_index(SignalKind::kDirectCredit, group.rank, channel),
            Counters::at(group, MessageCounter::kDirectReceived, source, channel),
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
            Counters::at(group, MessageCounter::kRailSent, domain, channel),
            channel};
}

UCCL_EP_DEVICE StreamPlace rail_from(const Group &group, uint32_t domain, uint32_t channel) {
    const Layout &layout = group.layout;
    return {rail_peer(group, domain),
            layout.rail_ring(domain, channel),
            0,
            layout.signal_index(SignalKind::kRailData, rail_peer(group, domain), channel),
            layout.signal_index(SignalKind::kRailCredit, group.rank, channel),
            Counters::at(group, MessageCounter::kRailReceived, domain, channel),
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
            Counters::at(group, MessageCounter::kForwardSent, entry, channel),
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
            Counters::at(group, MessageCounter::kForwardReceived, source, channel),
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
    UCCL_EP_DEVICE StreamSender(const Group &group, const StreamPlace &place, Phase phase, Team team = {})
        : group_(group), place_(place), phase_(phase), team_(team), sent_(*place.counter) {
        if (!group.is_local(place.peer)) {  // else nobody asks for them, and their stores would take a GPU 5 us
            for (uint64_t &ticket : tickets_) ticket = 0;
        }
        team_.sync();  // all have read the counter before finish() may write it
    }

    // The next slot to fill, or null on failure. Called by the whole team.
    UCCL_EP_DEVICE uint8_t *acquire() {
        const Layout &layout = group_.layout;
        const uint64_t slot = sent_ % layout.num_slots, offset = slot * layout.slot_bytes;
        const bool local = group_.is_local(place_.peer);
        if (!local || sent_ >= layout.num_slots) {
            const Span span(group_, Activity::kWaitsForRoom, team_.leads(), place_.peer);
            bool ok = true;
            if (team_.leads()) {
                if (sent_ >= layout.num_slots) {
                    ok = wait_signal(group_, {phase_, place_.peer, place_.credit_signal, sent_ - layout.num_slots + 1});
                }
                // The receiver has emptied the slot, so its bytes have left; the transport may still hold the
                // outbox slot for a retransmission until it reports completion.
                if (ok && !local && (used_ >> slot & 1) != 0) {
                    ok = wait_completed(group_, place_.peer, place_.data_signal, tickets_[slot], phase_);
                }
            }
            if (!team_.all(ok)) return nullptr;
        }
        if (local) return group_.peer_data[place_.peer] + place_.remote_ring + offset;
        return group_.data + place_.outbox + offset;
    }

    // Hand over the first `bytes` bytes of the slot. Called by the whole team.
    UCCL_EP_DEVICE bool commit(uint64_t bytes) {
        const Span span(group_, Activity::kHandsOver, team_.leads(), place_.peer);
        team_.sync();
        ++sent_;
        const bool local = group_.is_local(place_.peer);
        bool ok = true;
        if (team_.leads()) {
            if (local) {
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
        return local || team_.all(ok);
    }

    // Keep the count for the next operation. Called by the whole team, also after a failure.
    UCCL_EP_DEVICE void finish() {
        const Span span(group_, Activity::kWaitsUntilSent, team_.leads(), place_.peer);
        if (team_.leads()) {
            *place_.counter = sent_;
            // The next operation starts with no tickets: what this one pushed must have left the outbox.
            for (uint64_t slot = 0; slot < group_.layout.num_slots; ++slot) {
                if ((used_ >> slot & 1) != 0 &&
                    !wait_completed(group_, place_.peer, place_.data_signal, tickets_[slot], phase_))
                    break;
            }
        }
        team_.sync();
    }

  private:
    const Group &group_;
    StreamPlace place_;
    Phase phase_;
    Team team_;
    uint64_t sent_;
    uint64_t used_ = 0;               // the leader: slots with a ticket below
    uint64_t tickets_[kMaxSlots];     // the leader, of a remote peer: command that last read each outbox slot
};

UCCL_EP_DEVICE const uint8_t *slot_at(const Group &group, const StreamPlace &place, uint64_t number) {
    return group.data + place.remote_ring + number % group.layout.num_slots * group.layout.slot_bytes;
}

// Check the header of message `number` against what this operation expects; called by one thread.
UCCL_EP_DEVICE bool check_message(const Group &group, const StreamPlace &place, Phase phase, uint64_t number,
                                  OperationKind kind, const RowFormat &rows) {
    const auto *header = reinterpret_cast<const MessageHeader *>(slot_at(group, place, number));
    const bool same_call = header->operation == group.operation && header->kind == static_cast<uint32_t>(kind);
    const RowFormat theirs{header->row_bytes, header->words[0], header->words[1], header->words[2]};
    if (same_call && theirs.row_bytes == rows.row_bytes && theirs.scale_bytes == rows.scale_bytes &&
        theirs.num_topk == rows.num_topk && theirs.dtype == rows.dtype) {
        return true;
    }
    if (!(same_call && fail_difference(group, phase, header->source, theirs, rows))) {
        uint64_t *detail = group.status->detail;
        detail[0] = header->operation;
        detail[1] = header->kind;
        detail[2] = header->row_bytes;
        detail[3] = rows.row_bytes;
        fail(group, Reason::kMismatch, {phase, header->source, place.data_signal, static_cast<uint64_t>(kind)},
             number + 1, 0);
    }
    return false;
}

// A message brings other rows than the handle of this rank has room for: the ranks use different handles. One thread.
UCCL_EP_DEVICE void refuse_rows(const Group &group, const StreamPlace &place, Phase phase, uint32_t source,
                                uint32_t rows, uint32_t room, OperationKind kind) {
    for (uint32_t i = 0; i < 4; ++i) group.status->detail[i] = 0;
    fail(group, Reason::kMismatch, {phase, source, place.data_signal, static_cast<uint64_t>(kind)}, rows, room);
}

class StreamReceiver {
  public:
    UCCL_EP_DEVICE StreamReceiver(const Group &group, const StreamPlace &place, Phase phase, Team team = {})
        : group_(group), place_(place), phase_(phase), team_(team), received_(*place.counter) {
        team_.sync();
    }

    // The next filled slot, its header checked against what this operation expects; null on failure. Called by the whole
    // team.
    UCCL_EP_DEVICE const uint8_t *acquire(OperationKind kind, const RowFormat &rows) {
        const Span span(group_, Activity::kWaitsForRows, team_.leads(), place_.peer);
        bool ok = true;
        if (team_.leads()) {
            ok = wait_signal(group_, {phase_, place_.peer, place_.data_signal, received_ + 1}) &&
                 check_message(group_, place_, phase_, received_, kind, rows);
        }
        return team_.all(ok) ? slot_at(group_, place_, received_) : nullptr;
    }

    UCCL_EP_DEVICE void refuse(uint32_t source, uint32_t rows, uint32_t room, OperationKind kind) {
        if (team_.leads()) refuse_rows(group_, place_, phase_, source, rows, room, kind);
    }

    // Give the slot back to the sender. Called by the whole team.
    UCCL_EP_DEVICE bool release() {
        const Span span(group_, Activity::kGivesBack, team_.leads(), place_.peer);
        team_.sync();
        ++received_;
        bool ok = true;
        if (team_.leads()) ok = raise_signal(group_, place_.peer, place_.credit_signal, received_, phase_);
        return group_.is_local(place_.peer) || team_.all(ok);
    }

    UCCL_EP_DEVICE void finish() {
        if (team_.leads()) *place_.counter = received_;
        team_.sync();
    }

  private:
    const Group &group_;
    StreamPlace place_;
    Phase phase_;
    Team team_;
    uint64_t received_;
};

}  // namespace uccl_ep
