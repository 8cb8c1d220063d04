// What a launch must know of the kernels, from the headers that they are compiled from, so that Python computes no size
// itself: bytes of messages, of the memory of a block and of the counters, and how many teams work a channel.
#include "bindings.hpp"
#include "block_memory.hpp"
#include "counters.hpp"
#include "messages.hpp"
#include "roles.hpp"

namespace py = pybind11;

namespace uccl_ep {

namespace {

void bind_messages(py::module_ &kernels) {
    kernels.def("notify_message_bytes", &NotifyWords::bytes, py::arg("num_channels"), py::arg("local_experts"));
    kernels.def(
        "dispatch_slot_bytes",
        [](uint64_t row_bytes, uint64_t scale_bytes, uint64_t num_topk) {
            return DispatchRows::fixed_bytes() + DispatchRows::bytes_of_row(row_bytes, scale_bytes, num_topk, true);
        },
        py::arg("row_bytes"), py::arg("scale_bytes"), py::arg("num_topk"), "The least slot that holds a row.");
    kernels.def(
        "combine_slot_bytes",
        [](uint64_t row_bytes, uint64_t num_topk) {
            return CombineRows::fixed_bytes() + CombineRows::bytes_of_row(row_bytes, num_topk);
        },
        py::arg("row_bytes"), py::arg("num_topk"), "The least slot that holds a row.");
    kernels.def(
        "low_latency_message_bytes",
        [](uint64_t local_experts, uint64_t rows, uint64_t row_bytes, uint64_t scale_bytes, uint64_t num_topk) {
            return LowLatencyRows::of(local_experts, rows, row_bytes, scale_bytes, num_topk).end;
        },
        py::arg("local_experts"), py::arg("rows"), py::arg("row_bytes"), py::arg("scale_bytes"), py::arg("num_topk"));
    kernels.def(
        "direct_combine_bytes",
        [](uint64_t num_ranks, uint64_t max_tokens, uint64_t hidden, uint64_t accumulator_bytes, uint64_t num_topk) {
            return DirectCombineInbox::of(num_ranks, max_tokens, hidden, accumulator_bytes, num_topk).end;
        },
        py::arg("num_ranks"), py::arg("max_tokens"), py::arg("hidden"), py::arg("accumulator_bytes"),
        py::arg("num_topk"));
}

void bind_block_memory(py::module_ &kernels) {
    kernels.def("low_latency_placing_bytes", &LowLatencyPlacing::bytes, py::arg("experts"), py::arg("ranks"),
                py::arg("chunks"), py::arg("entries"));
    kernels.def("low_latency_arrivals_bytes", &LowLatencyArrivals::bytes, py::arg("experts"), py::arg("ranks"),
                py::arg("warps"), py::arg("topk"));
    kernels.def("low_latency_terms_bytes", &WeightedRow::bytes, py::arg("warps"), py::arg("topk"));
    kernels.def("direct_placing_bytes", &DirectPlacing::bytes, py::arg("ranks"), py::arg("warps"), py::arg("topk"),
                py::arg("max_tokens"));
    kernels.def("combine_progress_bytes", &CombineProgress::bytes, py::arg("warps"), py::arg("ranks"));
    kernels.def("fold_terms_bytes", &FoldTerms::bytes, py::arg("warps"), py::arg("num_terms"));
}

}  // namespace

void bind_kernels(py::module_ &module) {
    py::module_ kernels = module.def_submodule("kernels", "Sizes that launches of kernels need.");
    kernels.attr("SCALE_GROUP") = kScaleGroup;
    kernels.attr("MOST_LOW_LATENCY_TOKENS") = (uint64_t{1} << kLowLatencyTokenBits) - 1;
    kernels.attr("DIRECT_BLOCKS") = kDirectBlocks;
    kernels.attr("PACKED_BLOCKS") = kPackedBlocks;
    kernels.attr("DIRECT_PICKS") = kDirectPicks;
    bind_messages(kernels);
    bind_block_memory(kernels);
    kernels.def("counters_bytes", &Counters::bytes, py::arg("layout"));
    const auto layout_of = [](uint32_t num_ranks, uint32_t ranks_per_domain) {
        Layout layout{};
        layout.num_ranks = num_ranks;
        layout.ranks_per_domain = ranks_per_domain;
        return layout;
    };
    kernels.def(
        "dispatch_roles",
        [layout_of](uint32_t num_ranks, uint32_t ranks_per_domain) {
            return dispatch_roles(layout_of(num_ranks, ranks_per_domain));
        },
        py::arg("num_ranks"), py::arg("ranks_per_domain"));
    kernels.def(
        "combine_roles", [layout_of](uint32_t num_ranks) { return combine_roles(layout_of(num_ranks, 1)); },
        py::arg("num_ranks"));
    kernels.attr("MOST_TEAMS") = TeamOfWarp::kMostTeams;
    kernels.def(
        "channel_teams",
        [](uint64_t team_ends, uint32_t channels, uint32_t block, uint32_t num_blocks, uint32_t warp,
           uint32_t num_warps) {
            const auto mine = TeamOfWarp::of(team_ends, warp, num_warps);
            const auto at = ChannelTeams::of(mine, channels, block, num_blocks);
            return py::make_tuple(at.channel, at.first, at.count, mine.first_warp, mine.size);
        },
        py::arg("team_ends"), py::arg("channels"), py::arg("block"), py::arg("num_blocks"), py::arg("warp"),
        py::arg("num_warps"),
        "The channel that the team of a warp works for, its first role, and the step to the next; the first warp of "
        "the team and how many it has.");
}

}  // namespace uccl_ep
