// The Python module uccl_ep_ibverbs._native: what setup, in Python, tells the data plane.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "measure.hpp"
#include "plane.hpp"

namespace py = pybind11;

namespace {

using namespace uccl_ep::ibverbs;

// Checks before anything is read: an address that does not hold a completion channel of this
// context would otherwise give a descriptor number out of thin air.
int channel_fd(uint64_t channel, uint64_t queue) {
    const auto *raw = reinterpret_cast<const ibv_comp_channel *>(channel);
    const auto *completions = reinterpret_cast<const ibv_cq *>(queue);
    if (raw == nullptr || completions == nullptr || completions->channel != raw ||
        raw->context != completions->context) {
        throw std::invalid_argument("the completion channel's handle does not agree with its completion queue");
    }
    return raw->fd;
}

py::dict to_dict(const Statistics &statistics) {
    py::dict out;
    out["requests"] = statistics.requests;
    out["doorbells"] = statistics.doorbells;
    out["completions"] = statistics.completions;
    out["flushes"] = statistics.flushes;
    out["refills"] = statistics.refills;
    out["renewals"] = statistics.renewals;
    return out;
}

Lane &lane_of(Plane &plane, uint32_t lane) {
    Lane *found = plane.lane(lane);
    if (found == nullptr) throw std::invalid_argument("there is no lane " + std::to_string(lane));
    return *found;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "Data plane of the ibverbs transport: posts and polls on queues that pyverbs made.";

    py::class_<Region>(module, "Region")
        .def(py::init([](uint64_t base, uint64_t bytes, uint64_t chunk_bytes, std::vector<uint32_t> keys,
                         bool readable) { return Region{base, bytes, chunk_bytes, std::move(keys), readable}; }),
             py::kw_only(), py::arg("base"), py::arg("bytes"), py::arg("chunk_bytes"), py::arg("keys"),
             py::arg("readable") = false);

    py::enum_<Stage>(module, "Stage")
        .value("UP", Stage::kUp)
        .value("BROKEN", Stage::kBroken)
        .value("DRAINED", Stage::kDrained)
        .value("CONNECTED", Stage::kConnected)
        .value("READY", Stage::kReady)
        .value("FINAL", Stage::kFinal);

    py::class_<Plane>(module, "Plane")
        .def(py::init<uint32_t, uint64_t, bool, bool, bool>(), py::kw_only(), py::arg("num_ranks"),
             py::arg("max_message"), py::arg("immediates"), py::arg("signals"), py::arg("renewals"))
        .def(
            "add_lane",
            [](Plane &plane, std::string device, std::vector<Region> local, uint64_t flush_address, uint32_t flush_key,
               uint64_t send_queue, uint64_t receive_queue, int wake_fd) {
                LaneSettings settings{std::move(device), std::move(local), flush_address, flush_key, 0, wake_fd};
                plane.add_lane(std::move(settings), send_queue, receive_queue);
            },
            py::kw_only(), py::arg("device"), py::arg("local"), py::arg("flush_address"), py::arg("flush_key"),
            py::arg("send_queue"), py::arg("receive_queue"), py::arg("wake_fd"))
        .def(
            "add_pair",
            [](Plane &plane, uint32_t lane, uint32_t peer, uint64_t queue_pair, uint64_t protection_domain,
               uint32_t qp_num, uint32_t send_depth, uint32_t receive_depth, uint32_t inline_bytes,
               std::vector<Region> remote) {
                plane.add_pair(lane, peer, Handles{queue_pair, protection_domain, qp_num},
                               PairSettings{send_depth, receive_depth, inline_bytes, std::move(remote)});
            },
            py::kw_only(), py::arg("lane"), py::arg("peer"), py::arg("queue_pair"), py::arg("protection_domain"),
            py::arg("qp_num"), py::arg("send_depth"), py::arg("receive_depth"), py::arg("inline_bytes"),
            py::arg("remote"))
        .def(
            "prepare_pair",
            [](Plane &plane, uint32_t lane, uint32_t peer, uint64_t queue_pair, uint64_t protection_domain,
               uint32_t qp_num) { plane.prepare_pair(lane, peer, Handles{queue_pair, protection_domain, qp_num}); },
            py::kw_only(), py::arg("lane"), py::arg("peer"), py::arg("queue_pair"), py::arg("protection_domain"),
            py::arg("qp_num"))
        .def("stage", [](Plane &plane, uint32_t lane, uint32_t peer) { return lane_of(plane, lane).stage(peer); })
        .def("ask", [](Plane &plane, uint32_t lane, uint32_t peer,
                       uint32_t generation) { lane_of(plane, lane).ask(peer, generation); })
        .def("connected", [](Plane &plane, uint32_t lane, uint32_t peer,
                             uint32_t generation) { lane_of(plane, lane).connected(peer, generation); })
        .def("ready", [](Plane &plane, uint32_t lane, uint32_t peer) { lane_of(plane, lane).ready(peer); })
        .def("give_up", [](Plane &plane, uint32_t lane, uint32_t peer,
                           std::string words) { lane_of(plane, lane).give_up(peer, std::move(words)); })
        .def("end_renewals",
             [](Plane &plane, uint32_t lane, const std::string &words) { lane_of(plane, lane).end_renewals(words); })
        .def_property_readonly("ops_address",
                               [](const Plane &plane) { return reinterpret_cast<uintptr_t>(plane.ops()); })
        .def("statistics", [](const Plane &plane, uint32_t lane) { return to_dict(plane.statistics(lane)); });

    module.def(
        "measure",
        [](uint64_t sender, uint64_t receiver, uint32_t peer, uint32_t flags, uint64_t bytes, uint64_t count,
           uint64_t depth, uint64_t batch, double limit_s) {
            const auto *from = reinterpret_cast<const uccl_ep_transport_ops *>(sender);
            const auto *to = reinterpret_cast<const uccl_ep_transport_ops *>(receiver);
            py::gil_scoped_release release;
            return measure(*from, to, Workload{peer, flags, bytes, count, depth, batch, limit_s});
        },
        py::kw_only(), py::arg("sender"), py::arg("receiver") = 0, py::arg("peer"), py::arg("flags") = 0,
        py::arg("bytes"), py::arg("count"), py::arg("depth"), py::arg("batch"), py::arg("limit_s") = 60.0,
        "Seconds for a number of writes on lane 0; the tables are given by address.");
    module.def(
        "ping_pong",
        [](uint64_t table, uint32_t peer, uint64_t bytes, uint64_t count, uint64_t local_offset, uint64_t remote_offset,
           uint64_t sent, uint64_t landed, bool first, bool yields, double limit_s) {
            const auto *ops = reinterpret_cast<const uccl_ep_transport_ops *>(table);
            const PingPong work{peer,
                                bytes,
                                count,
                                local_offset,
                                remote_offset,
                                reinterpret_cast<uint8_t *>(sent),
                                reinterpret_cast<const uint8_t *>(landed),
                                first,
                                yields,
                                limit_s};
            py::gil_scoped_release release;
            return ping_pong(*ops, work);
        },
        py::kw_only(), py::arg("table"), py::arg("peer"), py::arg("bytes"), py::arg("count"), py::arg("local_offset"),
        py::arg("remote_offset"), py::arg("sent"), py::arg("landed"), py::arg("first"), py::arg("yields"),
        py::arg("limit_s") = 60.0,
        "One end of a ping-pong on lane 0; half the seconds of each exchange, of the side that begins.");
    module.def("channel_fd", &channel_fd, py::arg("channel"), py::arg("queue"));
    module.def(
        "describe_completion",
        [](int status, const std::string &device, uint32_t peer, uint32_t lane, uint32_t qp_num) {
            return describe_completion(static_cast<ibv_wc_status>(status), 0, Place{device, peer, lane, qp_num});
        },
        py::arg("status"), py::arg("device"), py::arg("peer"), py::arg("lane"), py::arg("qp_num"));
}
