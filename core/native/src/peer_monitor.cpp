#include "peer_monitor.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "clock.hpp"
#include "uccl_ep/std_atomics.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace uccl_ep {
namespace {

constexpr int kTickMs = 50;  // heartbeats and closed words; deaths wake poll() at once
// A peer may close right after its last signal. Waiters read the signal themselves; only a wait that
// stays after this time is one that can never end.
constexpr uint64_t kClosedGraceNs = 1'000'000'000;

struct Identity {
    uint64_t pid;
    uint64_t start_time;  // clock ticks after boot
    uint64_t pid_namespace;
    char boot[40];
};

uint64_t start_time(uint64_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const size_t close = text.rfind(')');
    if (close == std::string::npos) {
        return 0;
    }
    size_t at = close + 1;
    for (int field = 0; field < 20; ++field) {  // the name is field 2, the start time field 22
        at = text.find(' ', at);
        if (at == std::string::npos) {
            return 0;
        }
        if (field == 19) {
            break;
        }
        ++at;
    }
    return std::strtoull(text.c_str() + at, nullptr, 10);
}

Identity own_identity() {
    Identity identity{};
    identity.pid = static_cast<uint64_t>(getpid());
    identity.start_time = start_time(identity.pid);
    struct stat status{};
    if (stat("/proc/self/ns/pid", &status) == 0) {
        identity.pid_namespace = status.st_ino;
    }
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::strncpy(identity.boot, boot.c_str(), sizeof(identity.boot) - 1);
    return identity;
}

}  // namespace

std::string PeerMonitor::identity() {
    const Identity identity = own_identity();
    return std::string(reinterpret_cast<const char *>(&identity), sizeof(identity));
}

PeerMonitor::PeerMonitor(std::shared_ptr<Verdicts> verdicts, const std::vector<std::string> &identities,
                         double heartbeat_timeout_s)
    : verdicts_(std::move(verdicts)), heartbeat_timeout_ns_(static_cast<uint64_t>(heartbeat_timeout_s * 1e9)) {
    const Identity own = own_identity();
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) {
        throw std::runtime_error("eventfd failed");
    }
    for (uint32_t rank = 0; rank < identities.size(); ++rank) {
        if (rank == verdicts_->rank() || identities[rank].empty()) {
            continue;
        }
        Identity peer{};
        if (identities[rank].size() != sizeof(peer)) {
            throw std::invalid_argument("not an identity of this library's version: rank " + std::to_string(rank));
        }
        std::memcpy(&peer, identities[rank].data(), sizeof(peer));
        int fd = -1;
        if (std::memcmp(peer.boot, own.boot, sizeof(own.boot)) == 0 && peer.pid_namespace == own.pid_namespace) {
            fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0));
            // The process may have died, and another one have taken its number, before the call above.
            if ((fd < 0 && errno == ESRCH) || (fd >= 0 && start_time(peer.pid) != peer.start_time)) {
                if (fd >= 0) {
                    ::close(fd);
                }
                fd = -2;
            }
        }
        if (fd == -2) {
            died(rank, 0);
        } else if (fd >= 0) {
            watched_.push_back(Watched{rank, fd});
        } else if (verdicts_->peer_header(rank) != nullptr) {
            beats_.push_back(Beat{rank, 0, 0});
        } else {
            unwatched_.push_back(rank);
        }
    }
}

PeerMonitor::~PeerMonitor() {
    stop();
    for (const Watched &watched : watched_) {
        ::close(watched.pidfd);
    }
    ::close(wake_);
}

void PeerMonitor::start() {
    if (!thread_.joinable()) {
        stopping_ = false;
        thread_ = std::thread([this] { run(); });
    }
}

void PeerMonitor::stop() {
    if (thread_.joinable()) {
        stopping_ = true;
        const uint64_t one = 1;
        (void)!::write(wake_, &one, sizeof(one));
        thread_.join();
    }
}

void PeerMonitor::died(uint32_t rank, uint64_t silent_ns) {
    const bool closing = StdAtomics::load_acquire_system(&verdicts_->header()->closed) != 0;
    if (!closing && !verdicts_->peer_closed(rank)) {
        verdicts_->lost(rank, Reason::kDead, silent_ns);
    }
}

void PeerMonitor::tick(uint64_t now) {
    ControlHeader *header = verdicts_->header();
    StdAtomics::store_release_system(&header->heartbeat, StdAtomics::load_acquire_system(&header->heartbeat) + 1);
    verdicts_->scan();
    const uint64_t passed = ticked_ns_ == 0 ? 0 : silence_ns(ticked_ns_, now);
    ticked_ns_ = now;
    for (Beat &beat : beats_) {
        const uint64_t value = StdAtomics::load_acquire_system(&verdicts_->peer_header(beat.rank)->heartbeat);
        beat.silent_ns = value != beat.value ? 0 : beat.silent_ns + passed;
        beat.value = value;
        if (beat.silent_ns > heartbeat_timeout_ns_) {
            died(beat.rank, beat.silent_ns);
        }
    }
    const uint64_t waiting_for = StdAtomics::load_acquire_system(&header->waiting_for);
    if (waiting_for == 0 || waiting_for > verdicts_->layout().num_ranks || waiting_for - 1 == verdicts_->rank() ||
        !verdicts_->peer_closed(static_cast<uint32_t>(waiting_for - 1))) {
        closed_wait_ = 0;
    } else if (closed_wait_ != waiting_for) {
        closed_wait_ = waiting_for;
        closed_ns_ = 0;
    } else if ((closed_ns_ += passed) > kClosedGraceNs) {
        verdicts_->lost(static_cast<uint32_t>(waiting_for - 1), Reason::kClosed, closed_ns_);
    }
}

void PeerMonitor::run() {
    std::vector<pollfd> entries;
    for (const Watched &watched : watched_) {
        entries.push_back(pollfd{watched.pidfd, POLLIN, 0});
    }
    entries.push_back(pollfd{wake_, POLLIN, 0});
    while (!stopping_) {
        const int ready = ::poll(entries.data(), entries.size(), kTickMs);
        for (size_t i = 0; ready > 0 && i < watched_.size(); ++i) {
            if (entries[i].revents != 0) {
                entries[i].fd = -1;  // poll() skips it from now on
                entries[i].revents = 0;
                died(watched_[i].rank, 0);
            }
        }
        if (!stopping_) {
            tick(now_ns());
        }
    }
    uint64_t drained = 0;
    (void)!::read(wake_, &drained, sizeof(drained));
}

}  // namespace uccl_ep
