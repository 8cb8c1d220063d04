// The data half of a transport written in Python: each function takes the GIL once per batch and calls
// the method of the same name. Slow, and meant for a NIC author's first day.
#include <pybind11/stl.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../src/clock.hpp"
#include "bindings.hpp"
#include "uccl_ep/transport.h"

namespace py = pybind11;

extern "C" int _Py_IsFinalizing(void) __attribute__((weak));
extern "C" int Py_IsFinalizing(void) __attribute__((weak));

namespace uccl_ep {
namespace {

// After an empty look the interpreter is left alone for this long, so that proxies that wait do not
// starve the program's own threads.
constexpr uint64_t kPauseNs = 50'000;
constexpr uint64_t kPeerStatePauseNs = 20'000'000;

bool finalizing() {
    if (Py_IsFinalizing != nullptr) {
        return Py_IsFinalizing() != 0;
    }
    return _Py_IsFinalizing != nullptr && _Py_IsFinalizing() != 0;
}

class PythonOps {
  public:
    // `target` is borrowed: it owns this object.
    PythonOps(py::handle target, py::object write_type, py::object signal_type, uint32_t lanes, uint32_t num_ranks)
        : target_(target),
          write_type_(std::move(write_type)),
          signal_type_(std::move(signal_type)),
          lanes_(lanes),
          peers_(num_ranks) {
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
            [](void *context, uint32_t lane) { return self(context).lanes_[lane].error.c_str(); },
            [](void *context, uint32_t lane) { return self(context).renew_lane(lane); },
        };
        if (!py::hasattr(target, "post_signals")) {
            ops_.post_signals = nullptr;
        }
        if (!py::hasattr(target, "poll_arrivals")) {
            ops_.poll_arrivals = nullptr;
        }
        if (!py::hasattr(target, "peer_alive")) {
            ops_.peer_state = nullptr;
        }
        if (!py::hasattr(target, "renew_lane")) {
            ops_.renew_lane = nullptr;
        }
    }

    uint64_t address() const { return reinterpret_cast<uint64_t>(&ops_); }

  private:
    struct Lane {
        std::string error;
        uint64_t no_completions_ns = 0;  // when the last look found none
        uint64_t no_arrivals_ns = 0;
    };
    struct Peer {
        std::mutex mutex;
        uint64_t asked_ns = 0;
        bool dead = false;
    };

    static PythonOps &self(void *context) { return *static_cast<PythonOps *>(context); }

    // Run `body` with the GIL; an exception becomes the lane's error.
    template <class Body>
    int64_t guarded(uint32_t lane, Body &&body) {
        if (finalizing()) {
            return -ECANCELED;
        }
        const py::gil_scoped_acquire gil;
        try {
            return body();
        } catch (const std::exception &error) {
            lanes_[lane].error = error.what();
            return -EIO;
        }
    }

    int64_t post_writes(uint32_t lane, const uccl_ep_write *writes, uint64_t count) {
        return guarded(lane, [&] {
            py::list list;
            for (uint64_t i = 0; i < count; ++i) {
                const uccl_ep_write &w = writes[i];
                const bool immediate = (w.flags & UCCL_EP_WRITE_IMMEDIATE) != 0;
                list.append(write_type_(w.peer, w.local_region, w.local_offset, w.remote_region, w.remote_offset,
                                        w.bytes, immediate ? py::object(py::int_(w.immediate)) : py::none(),
                                        (w.flags & UCCL_EP_WRITE_FENCED) != 0, w.token));
            }
            lanes_[lane].no_completions_ns = 0;
            return target_.attr("post_writes")(lane, list).cast<int64_t>();
        });
    }

    int64_t post_signals(uint32_t lane, const uccl_ep_signal *signals, uint64_t count) {
        return guarded(lane, [&] {
            py::list list;
            for (uint64_t i = 0; i < count; ++i) {
                const uccl_ep_signal &s = signals[i];
                list.append(signal_type_(s.peer, s.remote_region, s.remote_offset, s.value, s.token));
            }
            lanes_[lane].no_completions_ns = 0;
            return target_.attr("post_signals")(lane, list).cast<int64_t>();
        });
    }

    int64_t poll_completions(uint32_t lane, uccl_ep_completion *out, uint64_t capacity) {
        if (now_ns() - lanes_[lane].no_completions_ns < kPauseNs) {
            return 0;
        }
        return guarded(lane, [&]() -> int64_t {
            const auto done =
                target_.attr("poll_completions")(lane, capacity).cast<std::vector<std::pair<uint64_t, int32_t>>>();
            if (done.size() > capacity) {
                throw std::length_error("poll_completions returned more than it was asked for");
            }
            for (size_t i = 0; i < done.size(); ++i) {
                out[i] = uccl_ep_completion{done[i].first, UCCL_EP_PEER_UNKNOWN, done[i].second};
            }
            lanes_[lane].no_completions_ns = done.empty() ? now_ns() : 0;
            return static_cast<int64_t>(done.size());
        });
    }

    int64_t poll_arrivals(uint32_t lane, uccl_ep_arrival *out, uint64_t capacity) {
        if (now_ns() - lanes_[lane].no_arrivals_ns < kPauseNs) {
            return 0;
        }
        return guarded(lane, [&]() -> int64_t {
            const auto arrived =
                target_.attr("poll_arrivals")(lane, capacity).cast<std::vector<std::pair<uint64_t, int64_t>>>();
            if (arrived.size() > capacity) {
                throw std::length_error("poll_arrivals returned more than it was asked for");
            }
            for (size_t i = 0; i < arrived.size(); ++i) {
                const uint32_t peer =
                    arrived[i].second < 0 ? UCCL_EP_PEER_UNKNOWN : static_cast<uint32_t>(arrived[i].second);
                out[i] = uccl_ep_arrival{arrived[i].first, peer, 0};
            }
            lanes_[lane].no_arrivals_ns = arrived.empty() ? now_ns() : 0;
            return static_cast<int64_t>(arrived.size());
        });
    }

    int64_t renew_lane(uint32_t lane) {
        return guarded(lane, [&]() -> int64_t { return target_.attr("renew_lane")(lane).cast<bool>() ? 1 : 0; });
    }

    int32_t peer_state(uint32_t index) {
        Peer &peer = peers_[index];
        {
            const std::lock_guard lock(peer.mutex);
            const uint64_t now = now_ns();
            if (peer.dead || now - peer.asked_ns < kPeerStatePauseNs || finalizing()) {
                return peer.dead ? UCCL_EP_PEER_DEAD : UCCL_EP_PEER_ALIVE;
            }
            peer.asked_ns = now;
        }
        bool alive = true;
        guarded(0, [&]() -> int64_t {
            alive = target_.attr("peer_alive")(index).cast<bool>();
            return 0;
        });
        const std::lock_guard lock(peer.mutex);
        peer.dead = peer.dead || !alive;
        return peer.dead ? UCCL_EP_PEER_DEAD : UCCL_EP_PEER_ALIVE;
    }

    py::handle target_;
    py::object write_type_;
    py::object signal_type_;
    std::vector<Lane> lanes_;
    std::vector<Peer> peers_;
    uccl_ep_transport_ops ops_;
};

}  // namespace

void bind_python_ops(py::module_ &module) {
    py::class_<PythonOps>(module, "PythonOps")
        .def(py::init([](const py::object &target, py::object write_type, py::object signal_type, uint32_t lanes,
                         uint32_t num_ranks) {
                 return std::make_unique<PythonOps>(py::handle(target), std::move(write_type), std::move(signal_type),
                                                    lanes, num_ranks);
             }),
             py::arg("target"), py::arg("write_type"), py::arg("signal_type"), py::arg("lanes"), py::arg("num_ranks"))
        .def_property_readonly("address", &PythonOps::address);
}

}  // namespace uccl_ep
