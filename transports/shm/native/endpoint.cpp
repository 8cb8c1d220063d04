#include "endpoint.hpp"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace uccl_ep_shm {
namespace {

Endpoint &self(void *context) { return *static_cast<Endpoint *>(context); }

}  // namespace

Endpoint::Endpoint(uint32_t num_ranks, uint32_t num_lanes) {
    for (uint32_t i = 0; i < num_ranks; ++i) {
        peers_.push_back(std::make_unique<Peer>());
        peers_.back()->outgoing.resize(num_lanes);
    }
    for (uint32_t i = 0; i < num_lanes; ++i) {
        lanes_.push_back(std::make_unique<Lane>());
    }
    ops_ = uccl_ep_transport_ops{
        UCCL_EP_TRANSPORT_MAGIC,
        sizeof(uccl_ep_transport_ops),
        this,
        [](void *context, uint32_t lane, const uccl_ep_write *writes, uint64_t count) {
            return self(context).post_writes(lane, writes, count);
        },
        [](void *context, uint32_t lane, const uccl_ep_signal *signals, uint64_t count) {
            return self(context).post_signals(lane, signals, count);
        },
        [](void *context, uint32_t lane, uccl_ep_completion *out, uint64_t capacity) {
            return self(context).poll_completions(lane, out, capacity);
        },
        [](void *context, uint32_t lane, uccl_ep_arrival *out, uint64_t capacity) {
            return self(context).poll_arrivals(lane, out, capacity);
        },
        [](void *context, uint32_t peer) { return self(context).peer_state(peer); },
        [](void *context, uint32_t lane) { return self(context).last_error(lane); },
        nullptr,
    };
}

Endpoint::~Endpoint() {
    for (const auto &peer : peers_) {
        if (peer->pidfd >= 0) {
            ::close(peer->pidfd);
        }
    }
}

void Endpoint::add_local_region(uint64_t pointer, uint64_t nbytes) {
    local_.push_back(Region{reinterpret_cast<char *>(pointer), nbytes});
}

void Endpoint::add_peer_region(uint32_t peer, uint64_t pointer, uint64_t nbytes) {
    peers_.at(peer)->regions.push_back(Region{reinterpret_cast<char *>(pointer), nbytes});
}

void Endpoint::set_rings(uint32_t peer, uint32_t lane, uint64_t outgoing, uint64_t incoming) {
    if (outgoing % alignof(ArrivalRing) != 0 || incoming % alignof(ArrivalRing) != 0) {
        throw std::invalid_argument("arrival rings must be aligned to 64 bytes");
    }
    peers_.at(peer)->outgoing.at(lane).ring = reinterpret_cast<ArrivalRing *>(outgoing);
    lanes_.at(lane)->incoming.emplace_back(peer, reinterpret_cast<ArrivalRing *>(incoming));
}

void Endpoint::watch(uint32_t peer, int pidfd) { peers_.at(peer)->pidfd = pidfd; }

char *Endpoint::resolve(const std::vector<Region> &regions, uint32_t region, uint64_t offset, uint64_t bytes) const {
    if (region >= regions.size() || offset > regions[region].nbytes || bytes > regions[region].nbytes - offset) {
        return nullptr;
    }
    return regions[region].base + offset;
}

int64_t Endpoint::refuse(Lane &lane, const char *what, uint32_t peer, uint64_t offset, uint64_t bytes) {
    std::snprintf(lane.error, sizeof(lane.error), "shm: %s (peer %" PRIu32 ", offset %" PRIu64 ", %" PRIu64 " bytes)",
                  what, peer, offset, bytes);
    return -EINVAL;
}

bool Endpoint::room(Outgoing &outgoing) {
    if (outgoing.tail - outgoing.head == ArrivalRing::kCapacity) {
        outgoing.head = outgoing.ring->head.load(std::memory_order_acquire);
    }
    return outgoing.tail - outgoing.head != ArrivalRing::kCapacity;
}

void Endpoint::publish(Outgoing &outgoing) {
    outgoing.ring->tail.store(outgoing.tail, std::memory_order_release);
    // The line of the immediates after the next ones was last in the receiver's cache, or in none: stores
    // behind one that waits for it would wait too.
    __builtin_prefetch(&outgoing.ring->immediates[(outgoing.tail + kPublishEvery) % ArrivalRing::kCapacity], 1);
}

int64_t Endpoint::post_writes(uint32_t lane_index, const uccl_ep_write *writes, uint64_t count) {
    Lane &lane = *lanes_[lane_index];
    Outgoing *unpublished = nullptr;
    uint64_t copied = 0;
    uint64_t taken = 0;
    int64_t error = 0;
    for (; taken < count; ++taken) {
        const uccl_ep_write &write = writes[taken];
        if (lane.tail - lane.head == kQueueDepth || (copied != 0 && copied + write.bytes > kBytesPerPost)) {
            break;
        }
        if (write.bytes > kBytesPerPost) {
            refuse(lane, "larger than max_message", write.peer, write.remote_offset, write.bytes);
            error = -EMSGSIZE;
            break;
        }
        if (write.peer >= peers_.size() || peers_[write.peer]->regions.empty()) {
            error = refuse(lane, "not connected to the peer", write.peer, 0, 0);
            break;
        }
        Peer &peer = *peers_[write.peer];
        const char *source = resolve(local_, write.local_region, write.local_offset, write.bytes);
        char *target = resolve(peer.regions, write.remote_region, write.remote_offset, write.bytes);
        if (source == nullptr || target == nullptr) {
            error = refuse(lane, source == nullptr ? "local bytes outside the region" : "outside the peer's region",
                           write.peer, source == nullptr ? write.local_offset : write.remote_offset, write.bytes);
            break;
        }
        Outgoing *outgoing = nullptr;
        if ((write.flags & UCCL_EP_WRITE_IMMEDIATE) != 0) {
            outgoing = &peer.outgoing[lane_index];
            if (!room(*outgoing)) {
                break;
            }
        }
        if (write.bytes == 8 && (reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source)) % 8 == 0) {
            // A signal, heartbeat or credit: a word that somebody polls.
            std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t *>(target));
            word.store(std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t *>(const_cast<char *>(source)))
                           .load(std::memory_order_relaxed),
                       std::memory_order_release);
        } else {
            std::memcpy(target, source, write.bytes);
        }
        copied += write.bytes;
        lane.completions[lane.tail++ % kQueueDepth] = uccl_ep_completion{write.token, write.peer, 0};
        if (outgoing != nullptr) {
            if (unpublished != outgoing && unpublished != nullptr) {
                publish(*unpublished);
            }
            unpublished = outgoing;
            const uint64_t tail = outgoing->tail++;
            outgoing->ring->immediates[tail % ArrivalRing::kCapacity] = write.immediate;
            if (tail % kPublishEvery == kPublishEvery - 1 || write.bytes >= kPublishBytes) {
                publish(*outgoing);
                unpublished = nullptr;
            }
        }
    }
    if (unpublished != nullptr) {
        publish(*unpublished);
    }
    return taken == 0 ? error : static_cast<int64_t>(taken);
}

int64_t Endpoint::post_signals(uint32_t lane_index, const uccl_ep_signal *signals, uint64_t count) {
    Lane &lane = *lanes_[lane_index];
    for (uint64_t i = 0; i < count; ++i) {
        const uccl_ep_signal &signal = signals[i];
        if (lane.tail - lane.head == kQueueDepth) {
            return static_cast<int64_t>(i);
        }
        char *target = signal.peer >= peers_.size() || signal.remote_offset % 8 != 0
                           ? nullptr
                           : resolve(peers_[signal.peer]->regions, signal.remote_region, signal.remote_offset, 8);
        if (target == nullptr) {
            return i != 0 ? static_cast<int64_t>(i)
                          : refuse(lane, "no such signal word", signal.peer, signal.remote_offset, 8);
        }
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t *>(target)).store(signal.value, std::memory_order_release);
        lane.completions[lane.tail++ % kQueueDepth] = uccl_ep_completion{signal.token, signal.peer, 0};
    }
    return static_cast<int64_t>(count);
}

int64_t Endpoint::poll_completions(uint32_t lane_index, uccl_ep_completion *out, uint64_t capacity) {
    Lane &lane = *lanes_[lane_index];
    uint64_t count = 0;
    while (count < capacity && lane.head != lane.tail) {
        out[count++] = lane.completions[lane.head++ % kQueueDepth];
    }
    return static_cast<int64_t>(count);
}

int64_t Endpoint::poll_arrivals(uint32_t lane_index, uccl_ep_arrival *out, uint64_t capacity) {
    Lane &lane = *lanes_[lane_index];
    uint64_t count = 0;
    const uint64_t num_rings = lane.incoming.size();
    for (uint64_t i = 0; i < num_rings && count < capacity; ++i) {
        const auto &[peer, ring] = lane.incoming[(lane.next_incoming + i) % num_rings];
        uint64_t head = ring->head.load(std::memory_order_relaxed);
        const uint64_t tail = ring->tail.load(std::memory_order_acquire);
        if (head == tail) {
            continue;
        }
        while (count < capacity && head != tail) {
            out[count++] = uccl_ep_arrival{ring->immediates[head++ % ArrivalRing::kCapacity], peer, 0};
        }
        ring->head.store(head, std::memory_order_release);
    }
    if (num_rings != 0) {
        lane.next_incoming = (lane.next_incoming + 1) % num_rings;
    }
    return static_cast<int64_t>(count);
}

int32_t Endpoint::peer_state(uint32_t index) {
    if (index >= peers_.size()) {
        return UCCL_EP_PEER_ALIVE;
    }
    Peer &peer = *peers_[index];
    if (peer.pidfd < 0 || peer.dead.load(std::memory_order_relaxed)) {
        return peer.dead.load(std::memory_order_relaxed) ? UCCL_EP_PEER_DEAD : UCCL_EP_PEER_ALIVE;
    }
    pollfd entry{peer.pidfd, POLLIN, 0};
    if (::poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0) {
        peer.dead.store(true, std::memory_order_relaxed);
        return UCCL_EP_PEER_DEAD;
    }
    return UCCL_EP_PEER_ALIVE;
}

const char *Endpoint::last_error(uint32_t lane) const { return lanes_[lane]->error; }

}  // namespace uccl_ep_shm
