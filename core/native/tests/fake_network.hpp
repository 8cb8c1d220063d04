// A network of ranks in one process that keeps only the promises a test asks for: it delivers in any
// order, late, twice, and takes as few posts as it likes.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "check.hpp"
#include "uccl_ep/std_atomics.hpp"
#include "uccl_ep/transport.h"

namespace fake {

struct Behaviour {
    bool ordered = false;           // deliver each lane in order (write_order, signal_order)
    bool complete_early = false;    // completions may come before delivery, except of fenced writes
    uint32_t duplicate_percent = 0; // writes with immediate that arrive twice
    uint64_t depth = 64;            // posted and not completed, per lane
    uint64_t fail_write = 0;        // the n-th write completes with an error, 0: none
};

class Network {
  public:
    Network(uint32_t num_ranks, uint32_t lanes, const Behaviour &behaviour, uint64_t seed)
        : behaviour_(behaviour), random_(seed), lanes_(lanes) {
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            nodes_.push_back(std::make_unique<Node>());
            Node &node = *nodes_.back();
            node.network = this;
            node.rank = rank;
            node.done.resize(lanes);
            node.arrived.resize(lanes);
            node.posted.resize(lanes, 0);
            node.ops = uccl_ep_transport_ops{
                UCCL_EP_TRANSPORT_MAGIC,
                sizeof(uccl_ep_transport_ops),
                &node,
                [](void *n, uint32_t lane, const uccl_ep_write *w, uint64_t count) {
                    return self(n).network->post_writes(self(n), lane, w, count);
                },
                [](void *n, uint32_t lane, const uccl_ep_signal *s, uint64_t count) {
                    return self(n).network->post_signals(self(n), lane, s, count);
                },
                [](void *n, uint32_t lane, uccl_ep_completion *out, uint64_t capacity) {
                    return self(n).network->poll(self(n), self(n).done[lane], out, capacity, &self(n).posted[lane]);
                },
                [](void *n, uint32_t lane, uccl_ep_arrival *out, uint64_t capacity) {
                    return self(n).network->poll(self(n), self(n).arrived[lane], out, capacity, nullptr);
                },
                nullptr,
                [](void *, uint32_t) { return "fake: asked to fail"; },
                nullptr,
            };
        }
    }

    void region(uint32_t rank, uint32_t index, uint64_t pointer) { nodes_[rank]->regions[index] = pointer; }
    uccl_ep_transport_ops *ops(uint32_t rank) { return &nodes_[rank]->ops; }
    uint64_t largest_batch() const { return largest_batch_; }
    uint64_t most_posted() const { return most_posted_; }

  private:
    struct Node {
        Network *network;
        uint32_t rank;
        uint64_t regions[2] = {};
        uccl_ep_transport_ops ops;
        std::vector<std::vector<uccl_ep_completion>> done;
        std::vector<std::vector<uccl_ep_arrival>> arrived;
        std::vector<uint64_t> posted;
    };
    struct Flight {
        Node *from;
        uint32_t lane;
        bool signal;
        bool completed;
        uccl_ep_write write;
        uint64_t value;
    };

    static Node &self(void *context) { return *static_cast<Node *>(context); }

    bool room(Node &from, uint32_t lane) {
        if (from.posted[lane] >= behaviour_.depth) {
            return false;
        }
        ++from.posted[lane];
        most_posted_ = std::max(most_posted_, from.posted[lane]);
        return true;
    }

    int64_t post_writes(Node &from, uint32_t lane, const uccl_ep_write *writes, uint64_t count) {
        const std::lock_guard lock(mutex_);
        largest_batch_ = std::max(largest_batch_, count);
        // Now and then fewer than there is room for.
        const uint64_t most = random_.below(8) == 0 ? random_.below(count + 1) : count;
        for (uint64_t i = 0; i < most; ++i) {
            if (!room(from, lane)) {
                return static_cast<int64_t>(i);
            }
            flights_.push_back(Flight{&from, lane, false, false, writes[i], 0});
            ++posted_writes_;
            if (posted_writes_ == behaviour_.fail_write) {
                from.done[lane].push_back(uccl_ep_completion{writes[i].token, writes[i].peer, -EIO});
                flights_.pop_back();
            }
        }
        return static_cast<int64_t>(most);
    }

    int64_t post_signals(Node &from, uint32_t lane, const uccl_ep_signal *signals, uint64_t count) {
        const std::lock_guard lock(mutex_);
        for (uint64_t i = 0; i < count; ++i) {
            if (!room(from, lane)) {
                return static_cast<int64_t>(i);
            }
            uccl_ep_write write{};
            write.peer = signals[i].peer;
            write.remote_region = signals[i].remote_region;
            write.remote_offset = signals[i].remote_offset;
            write.token = signals[i].token;
            flights_.push_back(Flight{&from, lane, true, false, write, signals[i].value});
        }
        return static_cast<int64_t>(count);
    }

    template <class T>
    int64_t poll(Node &, std::vector<T> &queue, T *out, uint64_t capacity, uint64_t *posted) {
        const std::lock_guard lock(mutex_);
        for (uint64_t steps = random_.below(4); steps != 0; --steps) {
            step();
        }
        const uint64_t count = std::min<uint64_t>(capacity, queue.size());
        std::copy_n(queue.begin(), count, out);
        queue.erase(queue.begin(), queue.begin() + static_cast<int64_t>(count));
        if (posted != nullptr) {
            *posted -= count;
        }
        return static_cast<int64_t>(count);
    }

    // Deliver one, or complete one that is not delivered yet.
    void step() {
        if (flights_.empty()) {
            return;
        }
        size_t index = random_.below(flights_.size());
        if (behaviour_.ordered) {
            for (size_t i = 0; i < index; ++i) {
                if (flights_[i].from == flights_[index].from && flights_[i].lane == flights_[index].lane) {
                    index = i;
                }
            }
        }
        Flight &flight = flights_[index];
        const bool fenced = (flight.write.flags & UCCL_EP_WRITE_FENCED) != 0;
        if (behaviour_.complete_early && !fenced && !flight.completed && random_.below(2) == 0) {
            complete(flight);
            return;
        }
        deliver(flight);
        if (!flight.completed) {
            complete(flight);
        }
        if ((flight.write.flags & UCCL_EP_WRITE_IMMEDIATE) != 0 && random_.below(100) < behaviour_.duplicate_percent) {
            return;  // and once more later
        }
        flights_.erase(flights_.begin() + static_cast<int64_t>(index));
    }

    void complete(Flight &flight) {
        flight.completed = true;
        flight.from->done[flight.lane].push_back(uccl_ep_completion{flight.write.token, flight.write.peer, 0});
    }

    void deliver(const Flight &flight) {
        Node &to = *nodes_[flight.write.peer];
        const uint64_t target = to.regions[flight.write.remote_region] + flight.write.remote_offset;
        if (flight.signal) {
            uccl_ep::StdAtomics::store_release_system(reinterpret_cast<uint64_t *>(target), flight.value);
            return;
        }
        const uint64_t source = flight.from->regions[flight.write.local_region] + flight.write.local_offset;
        if (flight.write.bytes % 8 == 0 && source % 8 == 0 && target % 8 == 0) {
            for (uint64_t i = 0; i < flight.write.bytes; i += 8) {
                uccl_ep::StdAtomics::store_release_system(
                    reinterpret_cast<uint64_t *>(target + i),
                    uccl_ep::StdAtomics::load_acquire_system(reinterpret_cast<uint64_t *>(source + i)));
            }
        } else {
            std::memcpy(reinterpret_cast<void *>(target), reinterpret_cast<const void *>(source), flight.write.bytes);
        }
        if ((flight.write.flags & UCCL_EP_WRITE_IMMEDIATE) != 0) {
            to.arrived[flight.lane].push_back(
                uccl_ep_arrival{flight.write.immediate & 0xffffffffu, flight.from->rank, 0});
        }
    }

    Behaviour behaviour_;
    check::Random random_;
    uint32_t lanes_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Node>> nodes_;
    std::vector<Flight> flights_;
    uint64_t posted_writes_ = 0;
    uint64_t largest_batch_ = 0;
    uint64_t most_posted_ = 0;
};

}  // namespace fake
