#include "lane_faults.hpp"

#include <cstring>

namespace uccl_ep {

std::string LaneFaults::words() const {
    const std::lock_guard lock(mutex_);
    return words_;
}

void LaneFaults::remember(const std::string &words) {
    const std::lock_guard lock(mutex_);
    if (words_.empty()) {
        words_ = "proxy " + std::to_string(lane_) + ": " + words;
    }
}

const char *LaneFaults::last_error() const {
    const char *words = shared_.ops->last_error != nullptr ? shared_.ops->last_error(shared_.ops->context, lane_) : "";
    return words != nullptr ? words : "";
}

void LaneFaults::lost(uint32_t peer) {
    const std::string words = last_error();
    if (!words.empty() && !shared_.verdicts->shrinks()) {
        remember("rank " + std::to_string(peer) + " was lost; " + words);
    }
}

void LaneFaults::fail(const Fault &fault) {
    remember(fault.words);
    shared_.verdicts->report(fault.culprit, fault.reason, fault.signal, fault.expected, fault.seen);
}

void LaneFaults::lane_broke(int64_t error, uint32_t peer, const char *what) {
    if (peer_failed(error, peer, what)) {
        broken_ = true;
    }
}

bool LaneFaults::peer_failed(int64_t error, uint32_t peer, const char *what) {
    const bool dead = shared_.ops->peer_state != nullptr && peer != shared_.rank &&
                      shared_.ops->peer_state(shared_.ops->context, peer) == UCCL_EP_PEER_DEAD;
    if (dead && shared_.verdicts->shrinks()) {
        shared_.verdicts->lost(peer, Reason::kDead, 0);
        return false;
    }
    const std::string words = last_error();
    fail(Fault{peer, dead ? Reason::kDead : Reason::kTransport, 0, 0, 0,
               std::string(what) + " towards rank " + std::to_string(peer) + ": " +
                   std::strerror(static_cast<int>(-error)) + (words.empty() ? "" : "; ") + words});
    return true;
}

}  // namespace uccl_ep
