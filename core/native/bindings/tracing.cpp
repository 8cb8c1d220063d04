// What uccl_ep.tracing needs of C++: the host's end of a comparison of clocks, and the file of a rank without proxies.
#include "../src/clock_answers.hpp"
#include "../src/trace.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace uccl_ep {

void bind_tracing(py::module_ &module) {
    py::class_<ClockAnswers>(module, "ClockAnswers", "A thread that tells a device the host's clock.")
        .def(py::init([](uint64_t question, uint64_t answer, double limit_s) {
                 return std::make_unique<ClockAnswers>(reinterpret_cast<uint64_t *>(question),
                                                       reinterpret_cast<uint64_t *>(answer),
                                                       static_cast<uint64_t>(limit_s * 1e9));
             }),
             py::arg("question"), py::arg("answer"), py::arg("limit_s"))
        .def("stop", &ClockAnswers::stop, py::call_guard<py::gil_scoped_release>());
    module.def("trace_path", &trace_path, py::arg("path"), py::arg("rank"), "The file of a rank.");
    module.def(
        "write_trace",
        [](const std::string &path, uint32_t rank, const std::string &json, uint64_t lost, uint64_t clock_error_ns) {
            return write_trace(trace_path(path, rank), rank, {}, {json, lost, clock_error_ns});
        },
        py::arg("path"), py::arg("rank"), py::arg("json"), py::arg("lost"), py::arg("clock_error_ns"),
        "Write what kernels did where there are no proxies; returns an error in words, or ''.");
}

}  // namespace uccl_ep
