// Verdicts: which rank failed. Every rank writes at most one, into its entry of every control window it
// can reach; `agree` picks the same one on all survivors from the entries.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "uccl_ep/layout.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {

class Verdicts {
  public:
    // `peer_controls[r]` is the address of rank r's control window in this process, 0 where it cannot be
    // loaded and stored (then the engine carries verdicts through the transport).
    Verdicts(uint32_t rank, const Layout &layout, uint64_t control, std::vector<uint64_t> peer_controls);

    // This rank is in that operation from now on.
    void enter(uint64_t operation) { StdAtomics::store_release_system(&header()->operation, operation); }

    // Write this rank's verdict, unless it has written one before. Returns whether this one counts.
    bool report(const Verdict &verdict);
    // The same with the phase and operation that the header shows.
    bool report(uint32_t culprit, Reason reason, uint64_t signal = 0, uint64_t expected = 0, uint64_t seen = 0,
                uint64_t elapsed_ns = 0);

    bool aborted() const;

    // Go on without ranks that are gone, rather than end the group (enable_shrink). Set before any thread starts.
    void go_on_without_the_dead() { shrinks_ = true; }
    // A rank is gone, or closed while it is waited for: the verdict, or where the group goes on, the note that
    // kernels and proxies look at.
    void lost(uint32_t rank, Reason reason, uint64_t silent_ns);
    bool shrinks() const { return shrinks_; }
    // Whether the group goes on without any rank, and without this one; cheap.
    bool any_gone() const { return StdAtomics::load_relaxed_system(&header()->gone) != 0; }
    bool gone(uint32_t rank) const;

    // Take in entries that kernels or transports wrote: mark the group aborted here and pass them on to
    // the domain. Cheap; called about once a millisecond.
    void scan();

    // The entry of a reporter, if it is complete.
    std::optional<Verdict> entry(uint32_t reporter) const;

    // Wait up to `grace_s` for the verdicts of others (a death is waited for no longer than 20 ms), then
    // pick. Nothing when nobody failed.
    std::optional<Verdict> agree(double grace_s);

    uint32_t rank() const { return rank_; }
    const Layout &layout() const { return layout_; }
    uint64_t control() const { return control_; }
    // Rank `peer`'s header where it can be loaded, else nullptr.
    const ControlHeader *peer_header(uint32_t peer) const;
    ControlHeader *header() const { return reinterpret_cast<ControlHeader *>(control_ + Layout::header_offset()); }
    // Whether the peer said that it closed its buffer, in its header or in its notice.
    bool peer_closed(uint32_t peer) const;

  private:
    Verdict *entry_in(uint64_t control, uint32_t reporter) const;
    void spread(const Verdict &verdict);

    uint32_t rank_;
    Layout layout_;
    uint64_t control_;
    std::vector<uint64_t> peer_controls_;
    std::mutex mutex_;  // scan() may be called by a proxy, the monitor and agree()
    std::condition_variable changed_;
    bool shrinks_ = false;
    std::vector<uint8_t> looks_;  // per reporter: 0 nothing, 1 seen once, 2 taken in
};

// The choice among verdicts, a pure function of them: the dead before refused, refused before late;
// of these, a rank that accuses nobody; the lowest rank on ties.
std::optional<Verdict> choose_verdict(const std::vector<Verdict> &verdicts);

}  // namespace uccl_ep
