// Layout and the numbers of command.hpp and layout.hpp, so that Python computes no offset itself.
#include "uccl_ep/layout.hpp"

#include <pybind11/stl.h>

#include "bindings.hpp"

namespace py = pybind11;

namespace uccl_ep {

void bind_layout(py::module_ &module) {
    py::enum_<SignalKind>(module, "SignalKind", py::arithmetic())
        .value("DIRECT_DATA", SignalKind::kDirectData)
        .value("DIRECT_CREDIT", SignalKind::kDirectCredit)
        .value("RAIL_DATA", SignalKind::kRailData)
        .value("RAIL_CREDIT", SignalKind::kRailCredit)
        .value("FORWARD_DATA", SignalKind::kForwardData)
        .value("FORWARD_CREDIT", SignalKind::kForwardCredit)
        .value("LOW_LATENCY_DISPATCH", SignalKind::kLowLatencyDispatch)
        .value("LOW_LATENCY_DISPATCH_CREDIT", SignalKind::kLowLatencyDispatchCredit)
        .value("LOW_LATENCY_COMBINE", SignalKind::kLowLatencyCombine)
        .value("LOW_LATENCY_COMBINE_CREDIT", SignalKind::kLowLatencyCombineCredit)
        .value("BARRIER", SignalKind::kBarrier);
    py::enum_<Reason>(module, "Reason", py::arithmetic())
        .value("NONE", Reason::kNone)
        .value("TIMEOUT", Reason::kTimeout)
        .value("DEAD", Reason::kDead)
        .value("MISMATCH", Reason::kMismatch)
        .value("TRANSPORT", Reason::kTransport)
        .value("BAD_COMMAND", Reason::kBadCommand)
        .value("PROTOCOL", Reason::kProtocol)
        .value("CLOSED", Reason::kClosed)
        .value("INTERRUPTED", Reason::kInterrupted);
    py::enum_<Phase>(module, "Phase", py::arithmetic())
        .value("NONE", Phase::kNone)
        .value("NOTIFY", Phase::kNotify)
        .value("DISPATCH", Phase::kDispatch)
        .value("FORWARD", Phase::kForward)
        .value("COMBINE", Phase::kCombine)
        .value("LOW_LATENCY_DISPATCH_SEND", Phase::kLowLatencyDispatchSend)
        .value("LOW_LATENCY_DISPATCH_RECEIVE", Phase::kLowLatencyDispatchReceive)
        .value("LOW_LATENCY_COMBINE_SEND", Phase::kLowLatencyCombineSend)
        .value("LOW_LATENCY_COMBINE_RECEIVE", Phase::kLowLatencyCombineReceive)
        .value("BARRIER", Phase::kBarrier)
        .value("TRANSPORT", Phase::kTransport)
        .value("IDLE", Phase::kIdle);

    module.attr("MAX_RANKS") = kMaxRanks;
    module.attr("MAX_SLOTS") = kMaxSlots;
    module.attr("MAX_LANES") = kMaxLanes;
    module.attr("MAX_SIGNALS") = kMaxSignals;
    module.attr("MAX_WRITE_BYTES") = kMaxWriteBytes;
    module.attr("MAX_WINDOW_BYTES") = kMaxWindowBytes;
    module.attr("CONTROL_HEADER_BYTES") = sizeof(ControlHeader);
    module.attr("VERDICT_BYTES") = sizeof(Verdict);
    module.attr("RING_VIEW_BYTES") = sizeof(RingView);

    py::class_<Layout>(module, "Layout")
        .def(py::init([](uint32_t num_ranks, uint32_t ranks_per_domain, uint32_t num_channels, uint32_t num_slots,
                         uint64_t slot_bytes, uint64_t ll_dispatch_bytes, uint64_t ll_combine_bytes,
                         uint64_t ll_outbox_bytes, bool has_remote, uint32_t ll_parts) {
                 Layout layout{};
                 layout.num_ranks = num_ranks;
                 layout.ranks_per_domain = ranks_per_domain;
                 layout.num_channels = num_channels;
                 layout.num_slots = num_slots;
                 layout.slot_bytes = slot_bytes;
                 layout.ll_dispatch_bytes = ll_dispatch_bytes;
                 layout.ll_combine_bytes = ll_combine_bytes;
                 layout.ll_outbox_bytes = ll_outbox_bytes;
                 layout.has_remote = has_remote ? 1 : 0;
                 layout.ll_parts = ll_parts;
                 layout.arrange();
                 return layout;
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("ranks_per_domain"), py::arg("num_channels"),
             py::arg("num_slots"), py::arg("slot_bytes"), py::arg("ll_dispatch_bytes") = 0,
             py::arg("ll_combine_bytes") = 0, py::arg("ll_outbox_bytes") = 0, py::arg("has_remote") = false,
             py::arg("ll_parts") = 1)
        .def_readonly("num_ranks", &Layout::num_ranks)
        .def_readonly("ranks_per_domain", &Layout::ranks_per_domain)
        .def_readonly("num_channels", &Layout::num_channels)
        .def_readonly("num_slots", &Layout::num_slots)
        .def_readonly("slot_bytes", &Layout::slot_bytes)
        .def_readonly("ll_dispatch_bytes", &Layout::ll_dispatch_bytes)
        .def_readonly("ll_parts", &Layout::ll_parts)
        .def_readonly("ll_combine_bytes", &Layout::ll_combine_bytes)
        .def_readonly("ll_outbox_bytes", &Layout::ll_outbox_bytes)
        .def_property_readonly("has_remote", [](const Layout &layout) { return layout.has_remote != 0; })
        .def("num_domains", &Layout::num_domains)
        .def("ring_bytes", &Layout::ring_bytes)
        .def("direct_ring", &Layout::direct_ring, py::arg("source"), py::arg("channel"))
        .def("rail_ring", &Layout::rail_ring, py::arg("source_domain"), py::arg("channel"))
        .def("forward_ring", &Layout::forward_ring, py::arg("source"), py::arg("channel"))
        .def("direct_outbox", &Layout::direct_outbox, py::arg("destination"), py::arg("channel"))
        .def("rail_outbox", &Layout::rail_outbox, py::arg("destination_domain"), py::arg("channel"))
        .def("ll_dispatch_inbox", &Layout::ll_dispatch_inbox, py::arg("parity"), py::arg("source"))
        .def("ll_dispatch_outbox", &Layout::ll_dispatch_outbox, py::arg("parity"), py::arg("destination"))
        .def("ll_combine_inbox", &Layout::ll_combine_inbox, py::arg("parity"))
        .def("ll_combine_outbox", &Layout::ll_combine_outbox, py::arg("parity"))
        .def("direct_words", &Layout::direct_words)
        .def(
            "direct_word_offset",
            [](const Layout &layout, uint32_t kind, uint32_t parity, uint32_t source, uint32_t index) {
                return layout.direct_word_offset(static_cast<DirectWords>(kind), parity, source, index);
            },
            py::arg("kind"), py::arg("parity"), py::arg("source"), py::arg("index"))
        .def("data_bytes", &Layout::data_bytes)
        .def_static("header_offset", &Layout::header_offset)
        .def_static("verdict_offset", &Layout::verdict_offset, py::arg("reporter"))
        .def("signals_per_kind", &Layout::signals_per_kind)
        .def("num_signals", &Layout::num_signals)
        .def(
            "signal_index",
            [](const Layout &layout, uint32_t kind, uint32_t peer, uint32_t channel) {
                return layout.signal_index(static_cast<SignalKind>(kind), peer, channel);
            },
            py::arg("kind"), py::arg("peer"), py::arg("channel"))
        .def("ring_index", &Layout::ring_index, py::arg("peer"), py::arg("signal"), py::arg("num_rings"))
        .def("signal_offset", &Layout::signal_offset, py::arg("index"))
        .def("outbox_offset", &Layout::outbox_offset, py::arg("peer"), py::arg("entry"))
        .def("outbox_entries", &Layout::outbox_entries)
        .def("verdict_outbox_offset", &Layout::verdict_outbox_offset)
        .def("notice_offset", &Layout::notice_offset, py::arg("peer"))
        .def("notice_outbox_offset", &Layout::notice_outbox_offset, py::arg("peer"))
        .def("control_bytes", &Layout::control_bytes)
        .def(
            "to_bytes",
            [](const Layout &layout) { return py::bytes(reinterpret_cast<const char *>(&layout), sizeof(layout)); },
            "The struct as kernels take it.")
        .def("__repr__", [](const Layout &layout) {
            return "Layout(num_ranks=" + std::to_string(layout.num_ranks) +
                   ", ranks_per_domain=" + std::to_string(layout.ranks_per_domain) +
                   ", num_channels=" + std::to_string(layout.num_channels) +
                   ", num_slots=" + std::to_string(layout.num_slots) +
                   ", slot_bytes=" + std::to_string(layout.slot_bytes) +
                   ", data_bytes=" + std::to_string(layout.data_bytes()) +
                   ", control_bytes=" + std::to_string(layout.control_bytes()) + ")";
        });
}

}  // namespace uccl_ep
