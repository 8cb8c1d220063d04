// The loops of `uccl-ep bench channel` and `uccl-ep bench ordering`.
#include <pybind11/stl.h>

#include "../src/channel_bench.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace uccl_ep {
namespace {

bench::Stream stream(const std::string &plan, uint32_t contiguous, uint32_t signals, const std::string &trace) {
    return {plan_kind(plan), contiguous, signals, trace};
}

}  // namespace

void bind_benchmarks(py::module_ &module) {
    using Release = py::call_guard<py::gil_scoped_release>;
    module.def(
        "bench_proxy",
        [](const std::string &plan, uint32_t contiguous, uint32_t signals, const std::string &trace, uint64_t rounds) {
            return bench::proxy_rate(stream(plan, contiguous, signals, trace), rounds);
        },
        py::arg("plan") = "native", py::arg("contiguous") = 1, py::arg("signals") = 1, py::arg("trace") = "",
        py::arg("rounds") = 100, Release(), "Million commands a second of CPU time through one proxy.");
    module.def(
        "bench_pop",
        [](uint32_t contiguous, uint32_t signals, uint64_t rounds) {
            return bench::pop_rate(stream("native", contiguous, signals, ""), rounds);
        },
        py::arg("contiguous") = 1, py::arg("signals") = 1, py::arg("rounds") = 100, Release(),
        "The same commands, only popped and decoded.");
    module.def("bench_ring", &bench::ring_rate, py::arg("batch"), py::arg("bare"), py::arg("commands") = 1u << 21,
               Release(), "Million commands a second, wall clock, between two threads.");
    module.def("bench_round_trip", &bench::round_trip_us, py::arg("bare"), py::arg("rounds") = 20000, Release(),
               "Microseconds from a push to the sight of the answer.");
    module.def(
        "bench_payload",
        [](Engine &sender, Engine &receiver, uint32_t signal, uint64_t nbytes, uint32_t writes, uint64_t messages,
           uint64_t window_bytes, uint64_t first_value) {
            const bench::Shares shares =
                bench::payload_seconds(sender, receiver, {signal, nbytes, writes, messages, window_bytes, first_value});
            return std::pair(shares.sender, shares.receiver);
        },
        py::arg("sender"), py::arg("receiver"), py::arg("signal"), py::arg("nbytes"), py::arg("writes"),
        py::arg("messages"), py::arg("window_bytes"), py::arg("first_value"), Release(),
        "CPU seconds of the sending and of the receiving proxy for a stream of writes between two engines that were "
        "not started.");
}

}  // namespace uccl_ep
