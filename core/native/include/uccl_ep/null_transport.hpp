// A transport that moves nothing: every post completes at once. For measuring and testing the proxy.
#pragma once

#include <bit>
#include <memory>
#include <vector>

#include "uccl_ep/transport.h"

namespace uccl_ep {

class NullTransport {
  public:
    NullTransport(uint32_t lanes, uint64_t depth) : depth_(depth), mask_(std::bit_ceil(depth) - 1) {
        for (uint32_t i = 0; i < lanes; ++i) {
            lanes_.push_back(std::make_unique<Lane>());
            lanes_.back()->done.resize(mask_ + 1);
        }
        ops_ = uccl_ep_transport_ops{
            UCCL_EP_TRANSPORT_MAGIC,
            sizeof(uccl_ep_transport_ops),
            this,
            [](void *context, uint32_t lane, const uccl_ep_write *writes, uint64_t count) {
                return static_cast<NullTransport *>(context)->post(lane, writes, count);
            },
            [](void *context, uint32_t lane, const uccl_ep_signal *signals, uint64_t count) {
                return static_cast<NullTransport *>(context)->post(lane, signals, count);
            },
            [](void *context, uint32_t lane, uccl_ep_completion *out, uint64_t capacity) {
                return static_cast<NullTransport *>(context)->poll(lane, out, capacity);
            },
            [](void *, uint32_t, uccl_ep_arrival *, uint64_t) { return int64_t{0}; },
            [](void *, uint32_t) { return int32_t{UCCL_EP_PEER_ALIVE}; },
            [](void *, uint32_t) { return ""; },
            nullptr,
        };
    }
    NullTransport(const NullTransport &) = delete;

    const uccl_ep_transport_ops *ops() const { return &ops_; }

  private:
    struct alignas(64) Lane {
        std::vector<uccl_ep_completion> done;
        uint64_t head = 0;
        uint64_t tail = 0;
    };

    template <class Request>
    int64_t post(uint32_t index, const Request *requests, uint64_t count) {
        Lane &lane = *lanes_[index];
        const uint64_t room = depth_ - (lane.tail - lane.head);
        const uint64_t taken = count < room ? count : room;
        for (uint64_t i = 0; i < taken; ++i) {
            lane.done[lane.tail++ & mask_] = uccl_ep_completion{requests[i].token, requests[i].peer, 0};
        }
        return static_cast<int64_t>(taken);
    }
    int64_t poll(uint32_t index, uccl_ep_completion *out, uint64_t capacity) {
        Lane &lane = *lanes_[index];
        uint64_t count = 0;
        while (count < capacity && lane.head != lane.tail) {
            out[count++] = lane.done[lane.head++ & mask_];
        }
        return static_cast<int64_t>(count);
    }

    uint64_t depth_;
    uint64_t mask_;  // of the places, a power of two: a division would cost more than the rest
    std::vector<std::unique_ptr<Lane>> lanes_;
    uccl_ep_transport_ops ops_;
};

}  // namespace uccl_ep
