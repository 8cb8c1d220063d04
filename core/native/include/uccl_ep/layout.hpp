// The one owner of every offset. Window offsets are equal on all ranks; the device kernels, the
// proxies and Python (through the bindings) all compute them here.
//
// Data window (payload; what the transport moves):
//   direct rings    [num_ranks][num_channels]   slots that rank s fills for me (or the transport on
//                                               its behalf): counts, high-throughput combine rows,
//                                               and dispatch rows from my own domain
//   rail rings      [num_domains][num_channels] dispatch rows that my rail peer in domain d sends me
//                                               to forward inside my domain
//   forward rings   [num_ranks][num_channels]   dispatch rows of rank s of another domain, forwarded
//                                               to me by a rank of my own domain; none in domains of one rank
//   outboxes        the sending side of direct and rail rings, for peers reached through a transport
//   low-latency     [2 parities] inbox and outbox of dispatch and of combine
//   local signals   those that ranks of my domain raise for me
//   direct flags    likewise, by the blocks of its direct low-latency kernels; only in a group of one domain
//
// Control window (host memory, mapped to the device):
//   header, verdicts, signals, signal outbox, verdict outbox, notices, notice outbox
#pragma once

#include "uccl_ep/command.hpp"
#include "uccl_ep/integers.hpp"

namespace uccl_ep {

inline constexpr uint64_t kCacheLine = 64;  // bytes

UCCL_EP_DEVICE constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// What a signal counts. Every signal has one writer and counts messages from 1, for the life of the
// group: it is never reset, so a stale value can never be taken for a new one, and the value itself
// is the epoch.
enum class SignalKind : uint32_t {
    kDirectData = 0,      // slots of direct ring [peer][channel] filled by that peer
    kDirectCredit = 1,    // slots of my direct ring at that peer it has emptied
    kRailData = 2,        // likewise for rail rings (peer = the rail peer's rank)
    kRailCredit = 3,
    kForwardData = 4,     // slots of forward ring [source rank][channel] filled by my domain's forwarder
    kForwardCredit = 5,   // "peer" is [source domain * ranks_per_domain + receiver's place in its domain]
    kLowLatencyDispatch = 6,        // low-latency dispatch messages from that peer (channel: a part of them)
    kLowLatencyDispatchCredit = 7,  // low-latency dispatch messages of mine it has expanded
    kLowLatencyCombine = 8,
    kLowLatencyCombineCredit = 9,
    kBarrier = 10,
    kCount = 11,
};

// What a block of a direct low-latency kernel tells the block of the same number on another rank, or all of its blocks.
// A flag's value is the number of the operation; it only grows.
enum class DirectFlag : uint32_t {
    kDispatchRows = 0,  // its rows of this dispatch are written
    kDispatchRead = 1,  // all its blocks have read my rows, and words, of this dispatch
    kCombineRows = 2,
    kCombineRead = 3,
    kCount = 4,
};
inline constexpr uint32_t kDirectBlocks = 256;  // most blocks of a direct low-latency kernel
inline constexpr uint32_t kPackedBlocks = 512;  // most blocks of a packed one
inline constexpr uint32_t kDirectHead = kDirectBlocks;  // the "block" whose rows are the header of a dispatch
inline constexpr uint32_t kDirectFlags = kDirectBlocks + 8;  // of a kind and a rank: whole cache lines

// Words of 8 bytes that direct low-latency kernels send ahead of rows; each says of which operation it is.
enum class DirectWords : uint32_t {
    kPicks = 0,    // of a dispatch
    kWeights = 1,  // of a combine
    kCount = 2,
};
inline constexpr uint32_t kDirectPicks = 16384;  // most picks of all ranks in a direct operation

// A verdict: which rank failed, in the words of the rank that noticed. Written by rank w into entry w
// of every peer's control window, `state` last.
struct Verdict {
    uint64_t state;      // 0: none, 1: valid
    uint32_t culprit;    // rank
    uint32_t reason;     // Reason
    uint32_t phase;      // Phase
    uint32_t reporter;   // rank
    uint64_t signal;     // index of the signal that was waited for
    uint64_t expected;   // its value waited for
    uint64_t seen;       // its value at the time
    uint64_t operation;  // sequence number of the reporter's operation
    uint64_t elapsed_ns;
};
static_assert(sizeof(Verdict) == 64, "one verdict fills one cache line");

enum class Reason : uint32_t {
    kNone = 0,
    kTimeout = 1,        // the culprit did not signal in time
    kDead = 2,           // the culprit's process is gone
    kMismatch = 3,       // the culprit is in another operation, or passed other shapes
    kTransport = 4,      // the transport reported an error towards the culprit
    kBadCommand = 5,     // a command outside its window was refused (culprit: the rank itself)
    kProtocol = 6,       // duplicate, closed epoch, or immediate that names no signal
    kClosed = 7,         // the culprit closed its buffer
    kInterrupted = 8,    // a signal handler of the culprit's process raised while it waited
};

enum class Phase : uint32_t {
    kNone = 0,
    kNotify = 1,
    kDispatch = 2,
    kForward = 3,
    kCombine = 4,
    kLowLatencyDispatchSend = 5,
    kLowLatencyDispatchReceive = 6,
    kLowLatencyCombineSend = 7,
    kLowLatencyCombineReceive = 8,
    kBarrier = 9,
    kTransport = 10,
    kIdle = 11,
};

// First line of the control window.
struct ControlHeader {
    uint64_t aborted;    // non-zero: somebody failed, every wait ends; see the verdicts
    uint64_t heartbeat;  // raised by this rank's proxies; peers of `peer_failure: none` transports watch it
    uint64_t closed;     // non-zero: this rank destroyed its buffer
    uint64_t operation;  // sequence number of the operation the rank is in (diagnosis)
    uint64_t phase;      // Phase (diagnosis)
    uint64_t waiting_for;  // 1 + rank this rank waits for, 0 if none (diagnosis)
    uint64_t gone;  // how many ranks this rank has found gone, where the group goes on without them (enable_shrink)
    uint64_t reserved;
};
static_assert(sizeof(ControlHeader) == 64, "the header fills one cache line");

// What a peer reached through a transport tells about itself; written by that peer, a word at a time,
// into my entry for it, but for `gone`. All words only grow.
inline constexpr uint32_t kMaxLanes = 16;  // lanes of one engine; one proxy drives each
struct PeerNotice {
    uint64_t heartbeat;  // a beat count; only where the transport cannot tell that a peer died
    uint64_t closed;  // 1: the peer closed its buffer in order
    uint64_t gone;  // written by this rank: 1: the peer is gone, and the group goes on without it
    uint64_t reserved[5];
    uint64_t consumed[kMaxLanes];  // per lane: immediates of mine that the peer has polled (arrival credit)
};
static_assert(sizeof(PeerNotice) == 192, "three cache lines");

struct Layout {
    // Chosen by the communicator, equal on all ranks.
    uint32_t num_ranks;
    uint32_t ranks_per_domain;
    uint32_t num_channels;
    uint32_t num_slots;  // per ring; at most kMaxSlots
    uint64_t slot_bytes;  // a multiple of 64
    uint64_t ll_dispatch_bytes;  // one peer's low-latency dispatch message, 0: no low-latency mode
    uint64_t ll_combine_bytes;  // all low-latency combine rows that come home to a rank
    uint64_t ll_outbox_bytes;  // all rows a rank sends home in one combine (0: no transport peers)
    uint32_t has_remote;  // 1: some peer is reached through a transport, outboxes exist
    uint32_t ll_parts;  // of a packed low-latency message that a transport carries; 1 to num_channels

    // Where the parts of the data window begin, in bytes: what arrange() makes of the above. Kept, since a kernel that
    // worked it out at each address would run a hundred instructions for one that it wants.
    uint64_t rail_rings, forward_rings, direct_outboxes, rail_outboxes;
    uint64_t ll_dispatch_inboxes, ll_combine_inboxes, ll_combine_outboxes;
    uint64_t local_signals, direct_flags, direct_word_table, data_end;

    // To be called when everything above it is chosen.
    UCCL_EP_DEVICE void arrange() {
        const uint64_t ring = ring_bytes() * num_channels, ranks = num_ranks;
        const uint64_t other_domains = num_domains() > 1 ? num_domains() : 0, remote = has_remote;
        const uint64_t forwarded = other_domains != 0 && ranks_per_domain > 1 ? ranks : 0;
        const bool direct = has_remote == 0 && ll_dispatch_bytes != 0;
        rail_rings = ranks * ring;
        forward_rings = rail_rings + other_domains * ring;
        direct_outboxes = forward_rings + forwarded * ring;
        rail_outboxes = direct_outboxes + remote * ranks * ring;
        ll_dispatch_inboxes = rail_outboxes + remote * num_domains() * ring;
        ll_combine_inboxes = ll_dispatch_inboxes + (2 + 2 * remote) * ranks * ll_dispatch_bytes;
        ll_combine_outboxes = ll_combine_inboxes + 2 * ll_combine_bytes;
        local_signals = align_up(ll_combine_outboxes + 2 * ll_outbox_bytes, kCacheLine);
        direct_flags = local_signals + num_signals() * uint64_t{kCacheLine};
        direct_word_table = direct ? direct_flag_offset(DirectFlag::kCount, 0, 0) : direct_flags;
        data_end = align_up(direct ? direct_word_offset(DirectWords::kCount, 0, 0, 0) : direct_flags, 4096);
    }

    UCCL_EP_DEVICE uint32_t num_domains() const { return num_ranks / ranks_per_domain; }
    UCCL_EP_DEVICE uint64_t ring_bytes() const { return num_slots * slot_bytes; }

    // ---- data window ----
    UCCL_EP_DEVICE uint64_t ring(uint64_t peer, uint32_t channel) const {
        return (peer * num_channels + channel) * ring_bytes();
    }
    UCCL_EP_DEVICE uint64_t direct_ring(uint32_t source, uint32_t channel) const { return ring(source, channel); }
    UCCL_EP_DEVICE uint64_t rail_ring(uint32_t source_domain, uint32_t channel) const {
        return rail_rings + ring(source_domain, channel);
    }
    UCCL_EP_DEVICE uint64_t forward_ring(uint32_t source, uint32_t channel) const {
        return forward_rings + ring(source, channel);
    }
    UCCL_EP_DEVICE uint64_t direct_outbox(uint32_t destination, uint32_t channel) const {
        return direct_outboxes + ring(destination, channel);
    }
    UCCL_EP_DEVICE uint64_t rail_outbox(uint32_t destination_domain, uint32_t channel) const {
        return rail_outboxes + ring(destination_domain, channel);
    }
    UCCL_EP_DEVICE uint64_t ll_dispatch_inbox(uint32_t parity, uint32_t source) const {
        return ll_dispatch_inboxes + (parity * num_ranks + source) * ll_dispatch_bytes;
    }
    UCCL_EP_DEVICE uint64_t ll_dispatch_outbox(uint32_t parity, uint32_t destination) const {
        return ll_dispatch_inboxes + ((2 + parity) * num_ranks + destination) * ll_dispatch_bytes;
    }
    UCCL_EP_DEVICE uint64_t ll_combine_inbox(uint32_t parity) const {
        return ll_combine_inboxes + parity * ll_combine_bytes;
    }
    UCCL_EP_DEVICE uint64_t ll_combine_outbox(uint32_t parity) const {
        return ll_combine_outboxes + parity * ll_outbox_bytes;
    }
    // Signals that ranks of the same scale-up domain raise for each other: beside the payload, so that a GPU
    // polls its own memory. Those that a proxy raises lie in the control window, in host memory.
    UCCL_EP_DEVICE uint64_t local_signal_offset(uint32_t index) const {
        return local_signals + uint64_t{index} * kCacheLine;
    }
    UCCL_EP_DEVICE uint64_t direct_flag_offset(DirectFlag flag, uint32_t peer, uint32_t block) const {
        return direct_flags + ((static_cast<uint32_t>(flag) * num_ranks + peer) * kDirectFlags + block) * uint64_t{8};
    }
    // Words of a kind and a parity that a rank has from each other rank: a pick takes one or less.
    UCCL_EP_DEVICE uint32_t direct_words() const { return kDirectPicks / num_ranks; }
    // Nothing else ever lies there: what another shape, or a packed message, left could pass for a word.
    UCCL_EP_DEVICE uint64_t direct_word_offset(DirectWords kind, uint32_t parity, uint32_t source,
                                               uint32_t index) const {
        const uint32_t table = (static_cast<uint32_t>(kind) * 2 + parity) * num_ranks + source;
        return direct_word_table + (table * direct_words() + index) * uint64_t{8};
    }
    UCCL_EP_DEVICE uint64_t data_bytes() const { return data_end; }

    // ---- control window ----
    UCCL_EP_DEVICE static constexpr uint64_t header_offset() { return 0; }
    UCCL_EP_DEVICE static constexpr uint64_t verdict_offset(uint32_t reporter) {
        return sizeof(ControlHeader) + uint64_t{reporter} * sizeof(Verdict);
    }
    UCCL_EP_DEVICE uint64_t signals_per_kind() const { return uint64_t{num_ranks} * num_channels; }
    UCCL_EP_DEVICE uint32_t num_signals() const {
        return static_cast<uint32_t>(SignalKind::kCount) * static_cast<uint32_t>(signals_per_kind());
    }
    // The signal that rank `peer` raises in my window for this kind and channel.
    UCCL_EP_DEVICE uint32_t signal_index(SignalKind kind, uint32_t peer, uint32_t channel) const {
        return static_cast<uint32_t>(kind) * static_cast<uint32_t>(signals_per_kind()) + peer * num_channels + channel;
    }
    // Which ring the messages of a signal to `peer` go through: always the same one, so that they keep their
    // order and one proxy owns their state. Counting through the peers and channels that a phase uses, so that
    // no ring, and no proxy, gets more than its share and one: a hash gave some rings seven times theirs.
    UCCL_EP_DEVICE uint32_t ring_index(uint32_t peer, uint32_t signal, uint32_t num_rings) const {
        const uint32_t kind = signal / static_cast<uint32_t>(signals_per_kind());
        if (kind >= static_cast<uint32_t>(SignalKind::kLowLatencyDispatch)) {
            // Low latency and barrier: one signal a peer, or one a part of its messages.
            const bool data = kind == static_cast<uint32_t>(SignalKind::kLowLatencyDispatch) ||
                              kind == static_cast<uint32_t>(SignalKind::kLowLatencyCombine);
            return (data ? peer * ll_parts + signal % num_channels : peer) % num_rings;
        }
        const bool rail = kind == static_cast<uint32_t>(SignalKind::kRailData) ||
                          kind == static_cast<uint32_t>(SignalKind::kRailCredit);
        return ((rail ? peer / ranks_per_domain : peer) * num_channels + signal % num_channels) % num_rings;
    }
    UCCL_EP_DEVICE uint64_t signal_offset(uint32_t index) const {
        return verdict_offset(num_ranks) + uint64_t{index} * kCacheLine;
    }
    // Where the proxy keeps the 8 bytes of a signal it writes itself (fenced plan): one per
    // destination rank and signal kind and channel, since only one such write may be in flight.
    UCCL_EP_DEVICE uint64_t outbox_offset(uint32_t peer, uint32_t entry) const {
        return signal_offset(num_signals()) + (uint64_t{peer} * outbox_entries() + entry) * 8;
    }
    UCCL_EP_DEVICE uint32_t outbox_entries() const { return static_cast<uint32_t>(SignalKind::kCount) * num_channels; }
    // A verdict on its way to a transport peer, likewise.
    UCCL_EP_DEVICE uint64_t verdict_outbox_offset() const { return align_up(outbox_offset(num_ranks, 0), kCacheLine); }
    // What rank `peer` tells me about itself, and the source of what I tell rank `peer`.
    UCCL_EP_DEVICE uint64_t notice_offset(uint32_t peer) const {
        return verdict_outbox_offset() + kCacheLine + uint64_t{peer} * sizeof(PeerNotice);
    }
    UCCL_EP_DEVICE uint64_t notice_outbox_offset(uint32_t peer) const { return notice_offset(num_ranks + peer); }
    UCCL_EP_DEVICE uint64_t control_bytes() const { return align_up(notice_offset(2 * num_ranks), 4096); }
};

inline constexpr uint32_t kMaxSlots = 32;  // so that a 6-bit epoch covers twice the window (counted plan)

}  // namespace uccl_ep
