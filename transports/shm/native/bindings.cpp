#include <pybind11/pybind11.h>

#include "endpoint.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_native, module) {
    module.doc() = "Data half of the shm transport.";
    module.attr("ARRIVAL_RING_BYTES") = sizeof(uccl_ep_shm::ArrivalRing);
    module.attr("ARRIVAL_RING_CAPACITY") = uccl_ep_shm::ArrivalRing::kCapacity;
    module.attr("QUEUE_DEPTH") = uccl_ep_shm::Endpoint::kQueueDepth;
    module.attr("BYTES_PER_POST") = uccl_ep_shm::Endpoint::kBytesPerPost;
    py::class_<uccl_ep_shm::Endpoint>(module, "Endpoint")
        .def(py::init<uint32_t, uint32_t>(), py::arg("num_ranks"), py::arg("num_lanes"))
        .def("add_local_region", &uccl_ep_shm::Endpoint::add_local_region, py::arg("pointer"), py::arg("nbytes"))
        .def("add_peer_region", &uccl_ep_shm::Endpoint::add_peer_region, py::arg("peer"), py::arg("pointer"),
             py::arg("nbytes"))
        .def("set_rings", &uccl_ep_shm::Endpoint::set_rings, py::arg("peer"), py::arg("lane"), py::arg("outgoing"),
             py::arg("incoming"))
        .def("watch", &uccl_ep_shm::Endpoint::watch, py::arg("peer"), py::arg("pidfd"))
        .def_property_readonly(
            "ops", [](const uccl_ep_shm::Endpoint &endpoint) { return reinterpret_cast<uint64_t>(endpoint.ops()); });
}
