// Python makes and configures a simulator; proxy threads then use its ops table without Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <stdexcept>
#include <utility>

#include "simulator.hpp"

namespace py = pybind11;
using namespace uccl_ep::sim;

namespace {

Distribution distribution_named(const std::string &name) {
    if (name == "constant") return Distribution::kConstant;
    if (name == "uniform") return Distribution::kUniform;
    if (name == "exponential") return Distribution::kExponential;
    if (name == "heavy") return Distribution::kHeavy;
    throw std::invalid_argument("distribution " + name + " is none of constant, uniform, exponential, heavy");
}

std::unique_ptr<Simulator> make(uint64_t inner, const Faults &faults, uint32_t rank, uint32_t num_ranks,
                                uint32_t num_lanes, const std::vector<std::pair<uint64_t, uint64_t>> &regions,
                                bool with_signals, bool with_immediates, bool with_peer_state) {
    const auto *ops = reinterpret_cast<const uccl_ep_transport_ops *>(inner);
    if (ops == nullptr || ops->magic != UCCL_EP_TRANSPORT_MAGIC ||
        ops->size < offsetof(uccl_ep_transport_ops, renew_lane)) {
        throw std::invalid_argument("the inner transport's native_ops is no uccl_ep_transport_ops of this version");
    }
    if (regions.empty()) throw std::invalid_argument("the last region must be the bounce region (it may be empty)");
    std::vector<Region> native;
    for (const auto &[pointer, bytes] : regions) native.push_back({reinterpret_cast<uint8_t *>(pointer), bytes});
    return std::make_unique<Simulator>(ops, faults, rank, num_ranks, num_lanes, std::move(native), with_signals,
                                       with_immediates, with_peer_state);
}

py::dict statistics_of(const Simulator &simulator) {
    const Statistics &s = simulator.statistics();
    py::dict out;
    const std::pair<const char *, const std::atomic<uint64_t> *> all[] = {
        {"writes", &s.writes},
        {"signals", &s.signals},
        {"early_completions", &s.early_completions},
        {"segments", &s.segments},
        {"duplicates", &s.duplicates},
        {"losses", &s.losses},
        {"reported_losses", &s.reported_losses},
        {"stalls", &s.stalls},
        {"refusals", &s.refusals},
        {"collapsed", &s.collapsed},
        {"overtakes", &s.overtakes},
        {"killed", &s.killed},
        {"breaks", &s.breaks},
        {"late_copies", &s.late_copies},
        {"revoked", &s.revoked},
        {"source_changed", &s.source_changed},
        {"held_arrivals", &s.held_arrivals},
        {"decisions", &s.decisions},
    };
    for (const auto &[name, counter] : all) out[name] = counter->load(std::memory_order_relaxed);
    return out;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The simulated device's data plane.";
    py::class_<Faults> faults(module, "Faults");
    faults.def(py::init<>());
#define UCCL_EP_SIM_FIELD(name) faults.def_readwrite(#name, &Faults::name)
    UCCL_EP_SIM_FIELD(seed);
    UCCL_EP_SIM_FIELD(microseconds);
    UCCL_EP_SIM_FIELD(ordered);
    UCCL_EP_SIM_FIELD(early_immediate);
    UCCL_EP_SIM_FIELD(delay);
    UCCL_EP_SIM_FIELD(completion_delay);
    UCCL_EP_SIM_FIELD(arrival_delay);
    UCCL_EP_SIM_FIELD(early_completion);
    UCCL_EP_SIM_FIELD(max_segments);
    UCCL_EP_SIM_FIELD(duplicate);
    UCCL_EP_SIM_FIELD(drop);
    UCCL_EP_SIM_FIELD(retry_delay);
    UCCL_EP_SIM_FIELD(report_drops);
    UCCL_EP_SIM_FIELD(stall);
    UCCL_EP_SIM_FIELD(stall_time);
    UCCL_EP_SIM_FIELD(refuse);
    UCCL_EP_SIM_FIELD(send_queue_depth);
    UCCL_EP_SIM_FIELD(inflight_limit);
    UCCL_EP_SIM_FIELD(collapse);
    UCCL_EP_SIM_FIELD(kill_peer);
    UCCL_EP_SIM_FIELD(kill_after);
    UCCL_EP_SIM_FIELD(break_every);
    UCCL_EP_SIM_FIELD(name_peers);
    UCCL_EP_SIM_FIELD(check_source);
    UCCL_EP_SIM_FIELD(imm_bits);
    UCCL_EP_SIM_FIELD(max_message);
    UCCL_EP_SIM_FIELD(alignment);
#undef UCCL_EP_SIM_FIELD
    faults.def_property(
        "distribution", [](const Faults &self) { return static_cast<uint32_t>(self.distribution); },
        [](Faults &self, const std::string &name) { self.distribution = distribution_named(name); });

    py::class_<Simulator>(module, "Simulator")
        .def(py::init(&make), py::arg("inner"), py::arg("faults"), py::arg("rank"), py::arg("num_ranks"),
             py::arg("num_lanes"), py::arg("regions"), py::arg("with_signals"), py::arg("with_immediates"),
             py::arg("with_peer_state"))
        .def_property_readonly("ops", [](const Simulator &self) { return reinterpret_cast<uint64_t>(self.ops()); })
        .def_property_readonly("statistics", &statistics_of)
        .def("drain", &Simulator::drain, py::arg("limit_us"), py::call_guard<py::gil_scoped_release>());
}
