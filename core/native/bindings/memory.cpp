// Shared memory and the channel.
#include <pybind11/pybind11.h>

#include "bindings.hpp"
#include "uccl_ep/channel.hpp"
#include "uccl_ep/shared_memory.hpp"

namespace py = pybind11;

namespace uccl_ep {

void bind_memory(py::module_ &module) {
    py::class_<SharedMemory>(module, "SharedMemory")
        .def_static("create", &SharedMemory::create, py::arg("nbytes"), py::arg("named") = false)
        .def_static(
            "attach", [](const py::bytes &handle) { return SharedMemory::attach(std::string(handle)); },
            py::arg("handle"))
        .def_property_readonly("pointer", &SharedMemory::pointer, "Address in this process; 0 after close().")
        .def_property_readonly("nbytes", &SharedMemory::nbytes)
        .def_property_readonly("named", &SharedMemory::named)
        .def(
            "handle", [](const SharedMemory &memory) { return py::bytes(memory.handle()); },
            "Bytes with which another process of this host attaches while this one lives.")
        .def(
            "view",
            [](const py::object &self) {
                // The array keeps `self` alive, but not mapped: close() ends its use.
                const auto &memory = self.cast<const SharedMemory &>();
                return py::memoryview::from_memory(reinterpret_cast<void *>(memory.pointer()),
                                                   static_cast<py::ssize_t>(memory.nbytes()));
            },
            py::keep_alive<0, 1>(), "The bytes, writable; not to be used after close().")
        .def("unlink", &SharedMemory::unlink, "Remove the name of a named memory, once all have attached.")
        .def("close", &SharedMemory::close, "Unmap; may be called twice.");

    py::class_<Channel>(module, "Channel")
        .def(py::init<uint32_t, uint64_t, uint64_t, uint64_t, uint64_t>(), py::arg("num_rings"), py::arg("capacity"),
             py::arg("host_pointer"), py::arg("host_device_pointer"), py::arg("state_device_pointer"))
        .def_static("host_bytes", &Channel::host_bytes, py::arg("num_rings"), py::arg("capacity"))
        .def_static("state_bytes", &Channel::state_bytes, py::arg("num_rings"))
        .def_property_readonly("num_rings", &Channel::num_rings)
        .def_property_readonly("capacity", &Channel::capacity)
        .def(
            "consumed",
            [](const Channel &channel, uint32_t ring) {
                channel.view(ring);  // checks the index
                return StdAtomics::load_acquire_system(channel.consumed(ring));
            },
            py::arg("ring"), "Commands of a ring that the proxy has popped.")
        .def(
            "completed",
            [](const Channel &channel, uint32_t ring) {
                channel.view(ring);
                return StdAtomics::load_acquire_system(channel.completed(ring));
            },
            py::arg("ring"), "Commands of a ring, in order, whose local bytes may be reused.")
        .def(
            "views",
            [](const Channel &channel) {
                std::string bytes;
                for (uint32_t ring = 0; ring < channel.num_rings(); ++ring) {
                    const RingView view = channel.view(ring);
                    bytes.append(reinterpret_cast<const char *>(&view), sizeof(view));
                }
                return py::bytes(bytes);
            },
            "RingView[num_rings] with device-side addresses, as kernels take it.")
        .def(
            "push",
            [](const Channel &channel, uint32_t ring, uint32_t peer, uint64_t local_offset, uint64_t remote_offset,
               uint64_t bytes, uint32_t signal, uint64_t value, bool last) -> py::object {
                // Only where the channel's state lies in host memory (host backend, tests). Never
                // waits: the caller holds the GIL. Single producer.
                const RingView view = channel.view(ring);
                if (StdAtomics::load_acquire_device(view.head) - StdAtomics::load_acquire_system(view.consumed) >=
                    view.capacity) {
                    return py::none();
                }
                if (peer >= kMaxRanks || bytes > kMaxWriteBytes || local_offset >= kMaxWindowBytes ||
                    remote_offset >= kMaxWindowBytes || signal >= kMaxSignals) {
                    throw std::invalid_argument("a field exceeds its width in a command");
                }
                const Command command{last ? Operation::kWriteSignal : Operation::kWrite,
                                      peer,
                                      signal,
                                      bytes,
                                      local_offset,
                                      remote_offset,
                                      value};
                return py::int_(ring_push<StdAtomics>(view, command, [] { return false; }));
            },
            py::arg("ring"), py::kw_only(), py::arg("peer"), py::arg("local_offset"), py::arg("remote_offset"),
            py::arg("bytes"), py::arg("signal"), py::arg("value"), py::arg("last") = true,
            "Push one command from the host (host memory only, one producer); the ticket, or None when full.");
}

}  // namespace uccl_ep
