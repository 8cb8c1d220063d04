#include "notices.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "clock.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {
namespace {

constexpr uint64_t kPeersPerTick = 64;  // peer_state calls in a millisecond

}  // namespace

Notices::Notices(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats,
                 std::function<void(uint32_t)> on_lost)
    : shared_(shared),
      lane_(lane),
      outbound_(outbound),
      stats_(stats),
      active_(lane == 0 && !shared.remote_peers.empty()),
      beats_(active_ && shared.ops->peer_state == nullptr),
      beat_timeout_ns_(
          static_cast<uint64_t>(std::min(shared.options.heartbeat_timeout_s, shared.options.timeout_s) * 1e9)),
      on_lost_(std::move(on_lost)),
      forwarded_(shared.layout.num_ranks, 0),
      beat_in_flight_(shared.layout.num_ranks, 0),
      seen_beat_(shared.layout.num_ranks, 0),
      silent_ns_(shared.layout.num_ranks, 0),
      dead_looks_(shared.layout.num_ranks, 0),
      given_up_(shared.layout.num_ranks, 0) {
    beat_interval_ns_ = std::max<uint64_t>(beat_timeout_ns_ / 20, 1'000'000);
}

void Notices::tick(uint64_t now) {
    if (!active_) {
        return;
    }
    shared_.verdicts->scan();
    if (shared_.verdicts->aborted()) {
        forward_verdicts();
    }
    if (shared_.ops->peer_state != nullptr) {
        watch_states();
    } else if (beats_) {
        heartbeats(now);
    }
}

void Notices::forward_verdicts() {
    for (uint32_t reporter = 0; reporter < shared_.layout.num_ranks; ++reporter) {
        if (forwarded_[reporter] != 0 || !shared_.verdicts->entry(reporter)) {
            continue;
        }
        if (!outbound_.room(shared_.remote_peers.size() + 1)) {
            return;
        }
        forwarded_[reporter] = 1;
        for (const uint32_t peer : shared_.remote_peers) {
            if (peer == reporter || given_up_[peer] != 0) {
                continue;
            }
            // The entry itself is the source: it never changes once written.
            const uint64_t offset = Layout::verdict_offset(reporter);
            outbound_.stage_control(OpKind::kVerdict, peer, offset, offset, sizeof(Verdict), false);
            stats_.verdicts_forwarded.add(1);
            ++in_flight_;
        }
    }
}

void Notices::died(uint32_t peer, uint64_t silent_ns) {
    given_up_[peer] = 1;
    if (!shared_.verdicts->peer_closed(peer)) {
        shared_.verdicts->lost(peer, Reason::kDead, silent_ns);
    }
}

void Notices::watch_states() {
    const uint64_t count = std::min<uint64_t>(kPeersPerTick, shared_.remote_peers.size());
    for (uint64_t i = 0; i < count; ++i) {
        const uint32_t peer = shared_.remote_peers[next_peer_];
        next_peer_ = (next_peer_ + 1) % shared_.remote_peers.size();
        if (given_up_[peer] == 0 && shared_.ops->peer_state(shared_.ops->context, peer) == UCCL_EP_PEER_DEAD) {
            // It may have closed in order just before it left: its notice then precedes its end, but is
            // taken in no later than now only where the transport placed it; look once more next time.
            if (dead_looks_[peer]++ != 0) {
                if (!shared_.verdicts->peer_closed(peer)) {
                    on_lost_(peer);
                }
                died(peer, 0);
            }
        }
    }
}

void Notices::tell(uint32_t peer, uint64_t field, uint64_t value) {
    const uint64_t local = shared_.layout.notice_outbox_offset(peer) + field;
    StdAtomics::store_release_system(shared_.word(local), value);
    Op &op = outbound_.stage_control(OpKind::kNotice, peer, local, shared_.layout.notice_offset(shared_.rank) + field,
                                     8, false);
    op.value = field;
    ++in_flight_;
}

void Notices::heartbeats(uint64_t now) {
    const uint64_t passed = watched_ns_ == 0 ? 0 : silence_ns(watched_ns_, now);
    watched_ns_ = now;
    for (const uint32_t peer : shared_.remote_peers) {
        const auto *notice = reinterpret_cast<const PeerNotice *>(shared_.control + shared_.layout.notice_offset(peer));
        const uint64_t beat = StdAtomics::load_acquire_system(&notice->heartbeat);
        silent_ns_[peer] = beat != seen_beat_[peer] ? 0 : silent_ns_[peer] + passed;
        seen_beat_[peer] = beat;
        if (given_up_[peer] == 0 && silent_ns_[peer] > beat_timeout_ns_) {
            died(peer, silent_ns_[peer]);
        }
    }
    if (now - last_beat_ns_ < beat_interval_ns_) {
        return;
    }
    last_beat_ns_ = now;
    ++beat_;
    for (const uint32_t peer : shared_.remote_peers) {
        if (beat_in_flight_[peer] == 0 && given_up_[peer] == 0 && outbound_.room(Outbound::kReserve / 2)) {
            beat_in_flight_[peer] = 1;
            tell(peer, offsetof(PeerNotice, heartbeat), beat_);
            stats_.heartbeats.add(1);
        }
    }
}

void Notices::completed(const Op &op) {
    --in_flight_;
    if (op.kind == OpKind::kNotice && op.value == offsetof(PeerNotice, heartbeat)) {
        beat_in_flight_[op.peer] = 0;
    }
}

bool Notices::tell_closed() {
    if (!active_) {
        return true;
    }
    while (told_closed_ < shared_.remote_peers.size()) {
        if (!outbound_.room(1)) {
            return false;
        }
        const uint32_t peer = shared_.remote_peers[told_closed_++];
        if (given_up_[peer] == 0) {
            tell(peer, offsetof(PeerNotice, closed), 1);
        }
    }
    return true;
}

}  // namespace uccl_ep
