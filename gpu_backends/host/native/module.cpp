// Python's view of the host backend's native part; one module for each lane count and instruction set.
#include <pybind11/pybind11.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "launcher.hpp"

namespace py = pybind11;
using namespace uccl_ep::host;

PYBIND11_MODULE(UCCL_EP_HOST_MODULE, module) {
    module.attr("num_lanes") = UCCL_EP_HOST_LANES;
    // Local: a process may load the modules of several lane counts.
    py::class_<Launcher>(module, "Launcher", py::module_local())
        .def(py::init([] { return std::make_unique<Launcher>(UCCL_EP_HOST_LANES); }))
        .def(
            "share_cores",
            [](Launcher &launcher) {
                void (*const ring)(void *) = &Doorbell::ring;
                return py::make_tuple(reinterpret_cast<uintptr_t>(ring),
                                      reinterpret_cast<uintptr_t>(launcher.share_cores()));
            },
            "Waits give their core away from now on; returns the function and argument that end them early.")
        .def(
            "launch",
            [](Launcher &launcher, const std::string &name, const std::string &parameters, uint32_t num_blocks,
               uint32_t num_warps, size_t shared_bytes) {
                const Kernel *kernel = find_kernel(name.c_str());
                if (kernel == nullptr) throw py::key_error("no kernel is called " + name);
                if (parameters.size() != kernel->parameter_bytes) {
                    throw py::value_error(name + " takes " + std::to_string(kernel->parameter_bytes) +
                                          " bytes of parameters, not " + std::to_string(parameters.size()));
                }
                // Runs Python's signal handlers; one that raises (Ctrl-C) ends the kernel's waits.
                const std::function<bool()> handlers_raised = [] {
                    const py::gil_scoped_acquire acquire;
                    return PyErr_CheckSignals() != 0;
                };
                bool interrupted = false;
                {
                    const py::gil_scoped_release release;
                    interrupted = launcher.launch(*kernel, parameters.data(), num_blocks, num_warps, shared_bytes,
                                                  handlers_raised);
                }
                if (interrupted) throw py::error_already_set();
            },
            py::arg("name"), py::arg("parameters"), py::arg("num_blocks"), py::arg("num_warps"),
            py::arg("shared_bytes"));
}
