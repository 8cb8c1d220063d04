// Engine, Verdicts and PeerMonitor.
#include "../src/engine.hpp"

#include <pybind11/stl.h>

#include <cmath>
#include <map>

#include "../src/peer_monitor.hpp"
#include "bindings.hpp"
#include "uccl_ep/null_transport.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace py = pybind11;

namespace uccl_ep {
namespace {

// Both join threads when they go, and a pure-Python transport needs the GIL for its last call.
template <class T>
struct WithoutGil {
    void operator()(T *object) const {
        const py::gil_scoped_release release;
        delete object;
    }
};

TransportLimits limits_of(const py::object &capabilities) {
    TransportLimits limits;
    limits.imm_bits = capabilities.attr("imm_bits").cast<uint32_t>();
    limits.lanes = capabilities.attr("lanes").cast<uint32_t>();
    limits.exactly_once = capabilities.attr("exactly_once").cast<bool>();
    limits.placement_proof =
        capabilities.attr("delivery_complete").cast<bool>() || capabilities.attr("flush").cast<std::string>() != "none";
    limits.host_signals = capabilities.attr("native_signal").cast<std::string>() != "none";
    limits.max_message = capabilities.attr("max_message").cast<uint64_t>();
    limits.max_inflight = capabilities.attr("max_inflight").cast<uint64_t>();
    limits.send_queue_depth = capabilities.attr("send_queue_depth").cast<uint64_t>();
    limits.remote_queue_depth = capabilities.attr("remote_queue_depth").cast<uint64_t>();
    limits.alignment = capabilities.attr("alignment").cast<uint64_t>();
    return limits;
}

EngineOptions options_of(const py::dict &given) {
    EngineOptions options;
    for (const auto &[key, value] : given) {
        const std::string name = key.cast<std::string>();
        if (name == "timeout_s") {
            options.timeout_s = value.cast<double>();
        } else if (name == "heartbeat_timeout_s") {
            options.heartbeat_timeout_s = value.cast<double>();
        } else if (name == "max_inflight_peer") {
            options.max_inflight_peer = value.cast<uint64_t>();
        } else if (name == "max_inflight_nic") {
            options.max_inflight_nic = value.cast<uint64_t>();
        } else if (name == "batch") {
            options.batch = std::max(1u, value.cast<uint32_t>());
        } else if (name == "look_ns") {
            options.look_ns = value.cast<uint64_t>();
        } else if (name == "crowded") {
            options.crowded = value.cast<bool>();
        } else if (name == "over_bus") {
            options.over_bus = value.cast<bool>();
        } else if (name == "wake_function") {
            options.wake_function = value.cast<uint64_t>();
        } else if (name == "wake_context") {
            options.wake_context = value.cast<uint64_t>();
        } else if (name == "pin") {
            options.pin = value.cast<bool>();
        } else if (name == "first_cpu") {
            options.first_cpu = value.cast<uint32_t>();
        } else if (name == "cpus") {
            options.cpus = value.cast<std::vector<uint32_t>>();
        } else if (name == "flush_function") {
            options.flush_function = value.cast<uint64_t>();
        } else if (name == "flush_context") {
            options.flush_context = value.cast<uint64_t>();
        } else if (name == "trace") {
            options.trace_path = value.cast<std::string>();
        } else {
            throw std::invalid_argument("engine option '" + name +
                                        "' is unknown: use timeout_s, heartbeat_timeout_s, max_inflight_peer, "
                                        "max_inflight_nic, batch, look_ns, crowded, over_bus, pin, first_cpu, "
                                        "cpus, flush_function, flush_context, wake_function, wake_context or trace");
        }
    }
    return options;
}

py::dict stats_of(const Engine &engine) {
    std::map<std::string, uint64_t> sums;
    py::list busy;
    const std::pair<const char *, Counter ProxyStats::*> fields[] = {
        {"commands", &ProxyStats::commands},
        {"writes", &ProxyStats::writes},
        {"merged", &ProxyStats::merged},
        {"split", &ProxyStats::split},
        {"bytes", &ProxyStats::bytes},
        {"native_signals", &ProxyStats::native_signals},
        {"coalesced_signals", &ProxyStats::coalesced_signals},
        {"signals_raised", &ProxyStats::signals_raised},
        {"arrivals", &ProxyStats::arrivals},
        {"emulated_immediates", &ProxyStats::emulated_immediates},
        {"emulated_gaps", &ProxyStats::emulated_gaps},
        {"emulated_counts", &ProxyStats::emulated_counts},
        {"emulated_duplicates", &ProxyStats::emulated_duplicates},
        {"emulated_closed", &ProxyStats::emulated_closed},
        {"emulated_credits", &ProxyStats::emulated_credits},
        {"emulated_fences", &ProxyStats::emulated_fences},
        {"emulated_signal_writes", &ProxyStats::emulated_signal_writes},
        {"heartbeats", &ProxyStats::heartbeats},
        {"verdicts_forwarded", &ProxyStats::verdicts_forwarded},
        {"completions", &ProxyStats::completions},
        {"lane_generations", &ProxyStats::lane_generations},
        {"retried", &ProxyStats::retried},
    };
    for (const auto &proxy : engine.proxies()) {
        for (const auto &[name, field] : fields) {
            sums[name] += (proxy->stats().*field).get();
        }
        busy.append(static_cast<double>(proxy->stats().busy_ns.get()) * 1e-9);
    }
    py::dict result;
    for (const auto &[name, field] : fields) {
        result[name] = sums[name];
    }
    result["busy_s"] = busy;
    result["proxies"] = engine.proxies().size();
    return result;
}

}  // namespace

PlanKind plan_kind(const std::string &name) {
    if (name == "native") {
        return PlanKind::kNative;
    }
    if (name == "counted") {
        return PlanKind::kCounted;
    }
    if (name == "fenced") {
        return PlanKind::kFenced;
    }
    throw std::invalid_argument("ordering plan '" + name + "' is unknown: use native, counted or fenced");
}

void bind_engine(py::module_ &module) {
    py::class_<Verdict>(module, "Verdict", "Which rank failed, and what the reporting rank saw.")
        .def_readonly("culprit", &Verdict::culprit)
        .def_property_readonly("reason", [](const Verdict &v) { return static_cast<Reason>(v.reason); })
        .def_property_readonly("phase", [](const Verdict &v) { return static_cast<Phase>(v.phase); })
        .def_readonly("reporter", &Verdict::reporter)
        .def_readonly("signal", &Verdict::signal)
        .def_readonly("expected", &Verdict::expected)
        .def_readonly("seen", &Verdict::seen)
        .def_readonly("operation", &Verdict::operation)
        .def_readonly("elapsed_ns", &Verdict::elapsed_ns)
        .def("__repr__", [](const Verdict &v) {
            return "Verdict(culprit=" + std::to_string(v.culprit) + ", reason=" + std::to_string(v.reason) +
                   ", phase=" + std::to_string(v.phase) + ", reporter=" + std::to_string(v.reporter) +
                   ", signal=" + std::to_string(v.signal) + ", expected=" + std::to_string(v.expected) +
                   ", seen=" + std::to_string(v.seen) + ")";
        });

    py::class_<Verdicts, std::shared_ptr<Verdicts>>(module, "Verdicts")
        .def(py::init([](uint32_t rank, const Layout &layout, uint64_t control_pointer,
                         const std::map<uint32_t, uint64_t> &peer_controls, bool shrink) {
                 std::vector<uint64_t> pointers(layout.num_ranks, 0);
                 for (const auto &[peer, pointer] : peer_controls) {
                     pointers.at(peer) = pointer;
                 }
                 auto verdicts = std::make_shared<Verdicts>(rank, layout, control_pointer, std::move(pointers));
                 if (shrink) {
                     verdicts->go_on_without_the_dead();
                 }
                 return verdicts;
             }),
             py::arg("rank"), py::arg("layout"), py::arg("control_pointer"),
             py::arg("peer_controls") = std::map<uint32_t, uint64_t>{}, py::arg("shrink") = false,
             "peer_controls: rank -> address of its control window in this process, for ranks of the domain. "
             "shrink: go on without ranks that are gone.")
        .def("enter", &Verdicts::enter, py::arg("operation"), "Which operation this rank is in from now on.")
        .def(
            "report",
            [](Verdicts &verdicts, uint32_t culprit, uint32_t reason, uint32_t phase, uint64_t signal,
               uint64_t expected, uint64_t seen, uint64_t operation, uint64_t elapsed_ns) {
                if (culprit >= verdicts.layout().num_ranks) {
                    throw std::invalid_argument("culprit " + std::to_string(culprit) + " is no rank of the group");
                }
                Verdict verdict{};
                verdict.culprit = culprit;
                verdict.reason = reason;
                verdict.phase = phase;
                verdict.signal = signal;
                verdict.expected = expected;
                verdict.seen = seen;
                verdict.operation = operation;
                verdict.elapsed_ns = elapsed_ns;
                return verdicts.report(verdict);
            },
            py::arg("culprit"), py::arg("reason"), py::arg("phase") = 0, py::arg("signal") = 0, py::arg("expected") = 0,
            py::arg("seen") = 0, py::arg("operation") = 0, py::arg("elapsed_ns") = 0,
            "Write this rank's verdict; False when it wrote one before.")
        .def("agree", &Verdicts::agree, py::arg("grace_s"), py::call_guard<py::gil_scoped_release>(),
             "The verdict that all survivors pick, after waiting for theirs; None when nobody failed.")
        .def("scan", &Verdicts::scan, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("aborted", &Verdicts::aborted)
        .def("entry", &Verdicts::entry, py::arg("reporter"))
        .def("peer_closed", &Verdicts::peer_closed, py::arg("peer"))
        .def(
            "close", [](Verdicts &verdicts) { StdAtomics::store_release_system(&verdicts.header()->closed, 1); },
            "Say that this rank closes its buffer in order: its end is then no death.")
        .def_static("choose", &choose_verdict, py::arg("verdicts"));

    py::class_<PeerMonitor, std::unique_ptr<PeerMonitor, WithoutGil<PeerMonitor>>>(module, "PeerMonitor")
        .def(py::init([](std::shared_ptr<Verdicts> verdicts, const std::map<uint32_t, py::bytes> &identities,
                         double heartbeat_timeout_s) {
                 std::vector<std::string> list(verdicts->layout().num_ranks);
                 for (const auto &[rank, identity] : identities) {
                     list.at(rank) = std::string(identity);
                 }
                 return std::unique_ptr<PeerMonitor, WithoutGil<PeerMonitor>>(
                     new PeerMonitor(std::move(verdicts), list, heartbeat_timeout_s));
             }),
             py::arg("verdicts"), py::arg("identities"), py::arg("heartbeat_timeout_s") = 5.0)
        .def_static(
            "identity", [] { return py::bytes(PeerMonitor::identity()); },
            "Names this process for good; exchanged with the addresses.")
        .def_property_readonly("unwatched", &PeerMonitor::unwatched, "Ranks whose death cannot be noticed here.")
        .def("start", &PeerMonitor::start)
        .def("stop", &PeerMonitor::stop, py::call_guard<py::gil_scoped_release>());

    py::class_<NullTransport>(module, "NullTransport", "Moves nothing; for measuring the proxy.")
        .def(py::init<uint32_t, uint64_t>(), py::arg("lanes"), py::arg("depth") = 1024)
        .def_property_readonly(
            "ops", [](const NullTransport &transport) { return reinterpret_cast<uint64_t>(transport.ops()); });

    py::class_<Engine, std::unique_ptr<Engine, WithoutGil<Engine>>>(module, "Engine")
        .def(py::init([](uint32_t rank, const Layout &layout, uint64_t data_pointer, uint64_t control_pointer,
                         uint64_t ops_pointer, const std::string &plan, const py::object &capabilities,
                         const std::vector<uint32_t> &remote_peers, const Channel &channel, uint32_t num_proxies,
                         std::shared_ptr<Verdicts> verdicts, const py::dict &options) {
                 (void)data_pointer;  // commands carry offsets; the transport knows the memory
                 auto shared = std::make_shared<EngineShared>();
                 shared->rank = rank;
                 shared->layout = layout;
                 shared->control = control_pointer;
                 shared->ops = reinterpret_cast<const uccl_ep_transport_ops *>(ops_pointer);
                 shared->plan = plan_kind(plan);
                 shared->limits = limits_of(capabilities);
                 shared->options = options_of(options);
                 shared->remote_peers = remote_peers;
                 shared->channel = std::make_shared<Channel>(channel);
                 shared->num_proxies = num_proxies;
                 shared->verdicts = verdicts != nullptr ? std::move(verdicts)
                                                        : std::make_shared<Verdicts>(rank, layout, control_pointer,
                                                                                     std::vector<uint64_t>{});
                 return std::unique_ptr<Engine, WithoutGil<Engine>>(new Engine(std::move(shared)));
             }),
             py::arg("rank"), py::arg("layout"), py::arg("data_pointer"), py::arg("control_pointer"),
             py::arg("ops_pointer"), py::arg("plan"), py::arg("capabilities"), py::arg("remote_peers"),
             py::arg("channel"), py::arg("num_proxies"), py::arg("verdicts") = nullptr, py::arg("options") = py::dict())
        .def("start", &Engine::start)
        .def("stop", &Engine::stop, py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>(),
             "Send what was pushed, say goodbye to transport peers, end the threads; False when they did not end.")
        .def(
            "add_to_trace",
            [](Engine &engine, const std::string &json, uint64_t lost, uint64_t clock_error_ns) {
                engine.add_to_trace({json, lost, clock_error_ns});
            },
            py::arg("json"), py::arg("lost"), py::arg("clock_error_ns"), "What kernels did, for the file of stop().")
        .def_property_readonly("running", &Engine::running)
        .def_property_readonly("stop_error", &Engine::stop_error, "After stop() returned False: which proxy stayed.")
        .def("error", &Engine::error, "The first error of a proxy in words, or ''.")
        .def("stats", &stats_of);
}

}  // namespace uccl_ep
