#include "verdict.hpp"

#include <algorithm>
#include <chrono>

#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {
namespace {

constexpr uint64_t kValid = 1;
constexpr uint64_t kWriting = 2;
constexpr auto kDeathGrace = std::chrono::milliseconds(20);
constexpr auto kLook = std::chrono::milliseconds(1);

// A verdict's fields but `state`, as words: several threads and processes may look while one writes.
constexpr uint32_t kWords = sizeof(Verdict) / 8;

void store_fields(Verdict *target, const Verdict &source) {
    const auto *from = reinterpret_cast<const uint64_t *>(&source);
    auto *to = reinterpret_cast<uint64_t *>(target);
    for (uint32_t i = 1; i < kWords; ++i) {
        StdAtomics::store_relaxed_system(to + i, from[i]);
    }
}

Verdict load_fields(const Verdict *source) {
    Verdict verdict{};
    const auto *from = reinterpret_cast<const uint64_t *>(source);
    auto *to = reinterpret_cast<uint64_t *>(&verdict);
    for (uint32_t i = 1; i < kWords; ++i) {
        to[i] = StdAtomics::load_relaxed_system(from + i);
    }
    verdict.state = kValid;
    return verdict;
}

// Write an entry once; false when somebody did before.
bool write_once(Verdict *entry, const Verdict &verdict) {
    uint64_t none = 0;
    if (!std::atomic_ref<uint64_t>(entry->state).compare_exchange_strong(none, kWriting)) {
        return false;
    }
    store_fields(entry, verdict);
    StdAtomics::store_release_system(&entry->state, kValid);
    return true;
}

int severity(uint32_t reason) {
    switch (static_cast<Reason>(reason)) {
        case Reason::kDead:
            return 0;
        case Reason::kBadCommand:
        case Reason::kMismatch:
        case Reason::kProtocol:
        case Reason::kTransport:
        case Reason::kInterrupted:
            return 1;
        default:
            return 2;
    }
}

}  // namespace

Verdicts::Verdicts(uint32_t rank, const Layout &layout, uint64_t control, std::vector<uint64_t> peer_controls)
    : rank_(rank),
      layout_(layout),
      control_(control),
      peer_controls_(std::move(peer_controls)),
      looks_(layout.num_ranks, 0) {
    peer_controls_.resize(layout.num_ranks, 0);
    peer_controls_[rank] = 0;
}

Verdict *Verdicts::entry_in(uint64_t control, uint32_t reporter) const {
    return reinterpret_cast<Verdict *>(control + Layout::verdict_offset(reporter));
}

const ControlHeader *Verdicts::peer_header(uint32_t peer) const {
    return peer_controls_[peer] == 0 ? nullptr : reinterpret_cast<const ControlHeader *>(peer_controls_[peer]);
}

bool Verdicts::peer_closed(uint32_t peer) const {
    if (const ControlHeader *peer_words = peer_header(peer)) {
        return StdAtomics::load_acquire_system(&peer_words->closed) != 0;
    }
    const auto *notice = reinterpret_cast<const PeerNotice *>(control_ + layout_.notice_offset(peer));
    return StdAtomics::load_acquire_system(&notice->closed) != 0;
}

bool Verdicts::aborted() const { return StdAtomics::load_acquire_system(&header()->aborted) != 0; }

void Verdicts::spread(const Verdict &verdict) {
    for (uint32_t peer = 0; peer < layout_.num_ranks; ++peer) {
        if (peer_controls_[peer] != 0) {
            write_once(entry_in(peer_controls_[peer], verdict.reporter), verdict);
            StdAtomics::store_release_system(&reinterpret_cast<ControlHeader *>(peer_controls_[peer])->aborted, 1);
        }
    }
    StdAtomics::store_release_system(&header()->aborted, 1);
}

bool Verdicts::report(const Verdict &verdict) {
    Verdict own = verdict;
    own.reporter = rank_;
    if (!write_once(entry_in(control_, rank_), own)) {
        return false;
    }
    spread(own);
    changed_.notify_all();
    return true;
}

bool Verdicts::report(uint32_t culprit, Reason reason, uint64_t signal, uint64_t expected, uint64_t seen,
                      uint64_t elapsed_ns) {
    Verdict verdict{};
    verdict.culprit = culprit;
    verdict.reason = static_cast<uint32_t>(reason);
    verdict.phase = static_cast<uint32_t>(StdAtomics::load_acquire_system(&header()->phase));
    verdict.operation = StdAtomics::load_acquire_system(&header()->operation);
    verdict.signal = signal;
    verdict.expected = expected;
    verdict.seen = seen;
    verdict.elapsed_ns = elapsed_ns;
    return report(verdict);
}

void Verdicts::lost(uint32_t rank, Reason reason, uint64_t silent_ns) {
    if (!shrinks_) {
        report(rank, reason, 0, 0, 0, silent_ns);
        return;
    }
    auto *notice = reinterpret_cast<PeerNotice *>(control_ + layout_.notice_offset(rank));
    const std::lock_guard lock(mutex_);
    if (StdAtomics::load_acquire_system(&notice->gone) == 0) {
        StdAtomics::store_release_system(&notice->gone, 1);
        StdAtomics::store_release_system(&header()->gone, StdAtomics::load_acquire_system(&header()->gone) + 1);
    }
}

bool Verdicts::gone(uint32_t rank) const {
    if (!any_gone() || rank >= layout_.num_ranks) {
        return false;
    }
    const auto *notice = reinterpret_cast<const PeerNotice *>(control_ + layout_.notice_offset(rank));
    return StdAtomics::load_acquire_system(&notice->gone) != 0;
}

std::optional<Verdict> Verdicts::entry(uint32_t reporter) const {
    const Verdict *words = entry_in(control_, reporter);
    if (StdAtomics::load_acquire_system(&words->state) != kValid) {
        return std::nullopt;
    }
    const Verdict verdict = load_fields(words);
    // A transport may place the first word before the others: an entry without a reason is not there yet.
    if (verdict.reason == 0 || verdict.reporter != reporter || verdict.culprit >= layout_.num_ranks) {
        return std::nullopt;
    }
    return verdict;
}

void Verdicts::scan() {
    const std::lock_guard lock(mutex_);
    for (uint32_t reporter = 0; reporter < layout_.num_ranks; ++reporter) {
        if (looks_[reporter] == 2) {
            continue;
        }
        if (const auto verdict = entry(reporter)) {
            // What came by a transport may still be torn at the first look.
            const bool whole = reporter == rank_ || peer_controls_[reporter] != 0 || looks_[reporter] == 1;
            looks_[reporter] = whole ? 2 : 1;
            if (whole) {
                spread(*verdict);
                changed_.notify_all();
            }
        }
    }
}

std::optional<Verdict> Verdicts::agree(double grace_s) {
    using Clock = std::chrono::steady_clock;
    scan();
    // Say whom this rank was waiting for: the chain of waits leads the others past it to the culprit.
    const uint64_t waiting_for = StdAtomics::load_acquire_system(&header()->waiting_for);
    if (aborted() && waiting_for != 0 && waiting_for <= layout_.num_ranks) {
        report(static_cast<uint32_t>(waiting_for - 1), Reason::kTimeout);
    }
    const auto start = Clock::now();
    auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(grace_s));
    std::vector<Verdict> verdicts;
    bool dead_seen = false;
    for (;;) {
        scan();
        verdicts.clear();
        for (uint32_t reporter = 0; reporter < layout_.num_ranks; ++reporter) {
            if (const auto verdict = entry(reporter)) {
                verdicts.push_back(*verdict);
                if (severity(verdict->reason) == 0 && !dead_seen) {
                    dead_seen = true;
                    deadline = std::min(deadline, Clock::now() + kDeathGrace);
                }
            }
        }
        if (Clock::now() >= deadline || (verdicts.empty() && !aborted())) {
            return choose_verdict(verdicts);
        }
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, kLook);
    }
}

std::optional<Verdict> choose_verdict(const std::vector<Verdict> &verdicts) {
    const auto accuses = [&](uint32_t rank) {
        return std::any_of(verdicts.begin(), verdicts.end(),
                           [&](const Verdict &v) { return v.reporter == rank && v.culprit != rank; });
    };
    const Verdict *best = nullptr;
    const auto order = [&](const Verdict &v) {
        const int level = severity(v.reason);
        // A refusal names a fault that was seen, not a wait: whoever else the culprit accuses.
        const int guilty = level != 1 && accuses(v.culprit) ? 1 : 0;
        // Who was told to end has less to say of a late rank than whoever waited to the end.
        const bool cut_short = level == 2 && v.elapsed_ns == 0;
        return std::tuple(level, guilty, v.culprit, cut_short, v.reporter);
    };
    for (const Verdict &verdict : verdicts) {
        if (best == nullptr || order(verdict) < order(*best)) {
            best = &verdict;
        }
    }
    return best == nullptr ? std::nullopt : std::optional<Verdict>(*best);
}

}  // namespace uccl_ep
