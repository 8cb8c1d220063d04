// A lane that breaks, as the option break_every asks, and its renewal.
#include <algorithm>
#include <cerrno>

#include "simulator.hpp"

namespace uccl_ep::sim {

// All that is under way and was not reported yet fails at once, as when a queue pair goes into its error state;
// but its bytes are in the network still: some of them land all the same, before the lane is renewed.
void Lane::maybe_break() {
    if (faults_.break_every == 0 || down_ || number_ % faults_.break_every != 0) return;
    down_ = true;
    count(owner_.statistics_.breaks);
    error_ = "sim: the lane broke at operation " + std::to_string(number_ - 1) + ", as the option break_every asks";
    // A device that keeps order acknowledges in order: what was reported vouches for all that was posted before it
    // to the same peer, and behind what fails nothing succeeds.
    std::vector<uint64_t> vouched(owner_.num_ranks_, 0);  // operations, from the lane's first
    for (const Flight &flight : flights_) {
        if (!faults_.ordered || !flight.live || !flight.completed) continue;
        vouched[flight.peer()] = std::max(vouched[flight.peer()], flight.number + 1);
    }
    std::vector<std::vector<uint64_t>> failed(owner_.num_ranks_);  // operations, by peer
    for (uint32_t index = 0; index < flights_.size(); ++index) {
        Flight &flight = flights_[index];
        if (!flight.live || flight.completed || flight.unplaced == 0) continue;
        if (flight.early && !faults_.ordered) continue;
        if (flight.number < vouched[flight.peer()]) continue;
        flight.failed = true;
        flight.status = -EIO;
        failed[flight.peer()].push_back(flight.number);
        // The completion of an early one is on its way already.
        if (!flight.early) events_.push({now(), flight.number, Event::kComplete, index, 0, 0, true});
    }
    for (uint32_t peer = 0; peer < owner_.num_ranks_; ++peer) {
        std::sort(failed[peer].begin(), failed[peer].end());
        failed[peer].push_back(number_);
        const uint64_t draw = Draw(faults_.seed, owner_.rank_, index_, number_).bits(kFateOfPeer + peer);
        lost_from_[peer] = failed[peer][draw % failed[peer].size()];
    }
}

// Whether a piece of an operation that failed never lands. Draws decide, not who polls how soon: a device that
// keeps order lets all land that was posted before a certain operation, another lets each land or not; of what
// does not land whole, some pieces of the payload do, but never the last, which brings the immediate.
bool Lane::is_lost(const Event &event) const {
    const Flight &flight = flights_[event.flight];
    const uint64_t fate = Draw(faults_.seed, owner_.rank_, index_, flight.number).bits(kFate);
    const uint64_t lost_from = lost_from_[flight.peer()];
    if (faults_.ordered && flight.number > lost_from) return true;
    if (faults_.ordered ? flight.number < lost_from : fate % 2 == 0) return false;
    return event.last || mix(fate ^ event.begin) % 2 == 0;
}

// A new generation, as soon as nothing of the old one can land any more: what failed has landed, late, or is
// revoked here, and what was reported as done is waited for.
int64_t Lane::renew() {
    if (!down_) return 1;
    std::vector<Event> kept;
    while (!events_.empty()) {
        const Event event = events_.top();
        events_.pop();
        if (event.kind == Event::kPlace && flights_[event.flight].failed && is_lost(event)) {
            count(owner_.statistics_.revoked);
            piece_placed(event.flight, 0);
        } else {
            kept.push_back(event);
        }
    }
    for (const Event &event : kept) events_.push(event);
    if (!empty()) return 0;
    down_ = false;
    std::fill(last_due_.begin(), last_due_.end(), 0);
    return 1;
}

}  // namespace uccl_ep::sim
