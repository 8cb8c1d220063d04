#include "plane.hpp"

#include <cerrno>
#include <stdexcept>
#include <utility>

namespace uccl_ep::ibverbs {
namespace {

Lane *lane_of(void *context, uint32_t lane) { return static_cast<Plane *>(context)->lane(lane); }

// Nothing may be thrown through the C interface; the one thing that can fail here is memory.
template <typename Function>
int64_t guarded(void *context, uint32_t index, Function function) {
    Lane *lane = lane_of(context, index);
    if (lane == nullptr) return -EINVAL;
    try {
        return function(*lane);
    } catch (...) {
        return -ENOMEM;
    }
}

int64_t post_writes(void *context, uint32_t lane, const uccl_ep_write *writes, uint64_t count) {
    return guarded(context, lane, [&](Lane &it) { return it.post_writes(writes, count); });
}

int64_t post_signals(void *context, uint32_t lane, const uccl_ep_signal *signals, uint64_t count) {
    return guarded(context, lane, [&](Lane &it) { return it.post_signals(signals, count); });
}

int64_t poll_completions(void *context, uint32_t lane, uccl_ep_completion *out, uint64_t capacity) {
    return guarded(context, lane, [&](Lane &it) { return it.poll_completions(out, capacity); });
}

int64_t poll_arrivals(void *context, uint32_t lane, uccl_ep_arrival *out, uint64_t capacity) {
    return guarded(context, lane, [&](Lane &it) { return it.poll_arrivals(out, capacity); });
}

int64_t renew_lane(void *context, uint32_t lane) {
    return guarded(context, lane, [](Lane &it) { return it.renew(); });
}

int32_t peer_state(void *context, uint32_t peer) { return static_cast<const Plane *>(context)->peer_state(peer); }

const char *last_error(void *context, uint32_t lane) {
    const Lane *it = lane_of(context, lane);
    return it == nullptr ? "there is no such lane" : it->last_error();
}

template <typename Handle>
Handle *handle(uint64_t address, const char *what) {
    if (address == 0 || address % alignof(Handle) != 0) {
        throw std::invalid_argument(std::string("pyverbs gave no ") + what + " handle");
    }
    return reinterpret_cast<Handle *>(address);
}

}  // namespace

Plane::Plane(uint32_t num_ranks, uint64_t max_message, bool immediates, bool signals, bool renewals)
    : num_ranks_(num_ranks),
      max_message_(max_message),
      dead_(std::make_unique<std::atomic<uint8_t>[]>(num_ranks)),
      ops_{} {
    ops_.magic = UCCL_EP_TRANSPORT_MAGIC;
    ops_.size = sizeof(ops_);
    ops_.context = this;
    ops_.post_writes = post_writes;
    ops_.post_signals = signals ? post_signals : nullptr;
    ops_.poll_completions = poll_completions;
    ops_.poll_arrivals = immediates ? poll_arrivals : nullptr;
    ops_.peer_state = ibverbs::peer_state;
    ops_.last_error = last_error;
    ops_.renew_lane = renewals ? renew_lane : nullptr;
}

void Plane::add_lane(LaneSettings settings, uint64_t send_queue, uint64_t receive_queue) {
    settings.max_message = max_message_;
    const Queues queues{handle<ibv_cq>(send_queue, "completion queue"), handle<ibv_cq>(receive_queue, "arrival queue")};
    lanes_.push_back(std::make_unique<Lane>(static_cast<uint32_t>(lanes_.size()), num_ranks_, dead_.get(),
                                            std::move(settings), queues.send, queues.receive));
    queues_.push_back(queues);
}

ibv_qp *Plane::checked(uint32_t lane, const Handles &handles) const {
    ibv_qp *raw = handle<ibv_qp>(handles.queue_pair, "queue pair");
    const ibv_pd *domain = handle<ibv_pd>(handles.protection_domain, "protection domain");
    const Queues &queues = queues_.at(lane);
    const bool consistent = raw->qp_num == handles.qp_num && raw->pd == domain && raw->send_cq == queues.send &&
                            raw->recv_cq == queues.receive && domain->context == raw->context &&
                            queues.send->context == raw->context && queues.receive->context == raw->context;
    if (!consistent) {
        throw std::invalid_argument("the queue pair's handle does not agree with what pyverbs says of it (number " +
                                    std::to_string(handles.qp_num) +
                                    "): this pyverbs lays its objects out differently");
    }
    return raw;
}

void Plane::add_pair(uint32_t lane, uint32_t peer, const Handles &handles, PairSettings settings) {
    lanes_.at(lane)->add_pair(peer, checked(lane, handles), std::move(settings));
}

void Plane::prepare_pair(uint32_t lane, uint32_t peer, const Handles &handles) {
    lanes_.at(lane)->prepare(peer, checked(lane, handles));
}

int32_t Plane::peer_state(uint32_t peer) const {
    if (peer >= num_ranks_) return UCCL_EP_PEER_ALIVE;
    return dead_[peer].load(std::memory_order_acquire) != 0 ? UCCL_EP_PEER_DEAD : UCCL_EP_PEER_ALIVE;
}

}  // namespace uccl_ep::ibverbs
