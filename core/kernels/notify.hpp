// High-throughput notify: every rank tells every other how many rows it will send, by channel, and
// learns what it will receive. One block; it must be done before the output can be allocated.
#pragma once

#include "tokens.hpp"

namespace uccl_ep {

UCCL_EP_DEVICE void count_rows(const NotifyParameters &p, uint32_t first_rank, uint32_t rank_count, int32_t *out) {
    const uint32_t channels = p.group.layout.num_channels;
    for (uint32_t channel = 0; channel < channels; ++channel) {
        int32_t rows = 0;
        const TokenRange range = TokenRange::of(p.num_tokens, channel, channels);
        for (uint32_t base = range.begin; base < range.end; base += device::kWarpSize) {
            const uint32_t token = base + device::lane();
            rows += static_cast<int32_t>(device::population_count(device::ballot(
                token < range.end && goes_to(p.is_token_in_rank, p.group.num_ranks(), token, first_rank, rank_count))));
        }
        if (device::lane() == 0) out[channel] = rows;
    }
}

UCCL_EP_DEVICE bool notify_send(const NotifyParameters &p, uint32_t destination) {
    const Group &group = p.group;
    const Span role(group, Activity::kSends, device::lane() == 0, destination);
    const uint32_t channels = group.layout.num_channels;
    const uint32_t local_experts = p.shape.num_experts / group.num_ranks();
    StreamSender sender(group, direct_to(group, destination, 0), Phase::kNotify);
    uint8_t *slot = sender.acquire();
    bool ok = slot != nullptr;
    if (ok) {
        if (device::lane() == 0) {
            *reinterpret_cast<MessageHeader *>(slot) =
                MessageHeader{group.operation, static_cast<uint32_t>(OperationKind::kNotify), 0, 0, group.rank, {}};
            auto *words = reinterpret_cast<int32_t *>(slot + sizeof(MessageHeader));
            *reinterpret_cast<DispatchShape *>(words) = p.shape;
            words += sizeof(DispatchShape) / 4;
            const uint32_t domain = destination / group.layout.ranks_per_domain;
            const bool rail = domain != group.domain() && destination == rail_peer(group, domain);
            for (uint32_t c = 0; c < channels; ++c) {
                words[c] = p.send_rows[destination * channels + c];
                words[channels + c] = rail ? p.rail_send_rows[domain * channels + c] : 0;
            }
            for (uint32_t e = 0; e < local_experts; ++e) {
                words[2 * channels + e] = p.num_tokens_per_expert[destination * local_experts + e];
            }
        }
        ok = sender.commit(NotifyWords::bytes(channels, local_experts));
    }
    sender.finish();
    return ok;
}

UCCL_EP_DEVICE bool notify_receive(const NotifyParameters &p, uint32_t source, int32_t *expert_rows) {
    const Group &group = p.group;
    const Span role(group, Activity::kReceives, device::lane() == 0, source);
    const uint32_t channels = group.layout.num_channels;
    const uint32_t local_experts = p.shape.num_experts / group.num_ranks();
    StreamReceiver receiver(group, direct_from(group, source, 0), Phase::kNotify);
    const uint8_t *slot = receiver.acquire(OperationKind::kNotify, {0, 0, 0, 0});
    bool ok = slot != nullptr;
    if (ok) {
        const auto *words = reinterpret_cast<const int32_t *>(slot + sizeof(MessageHeader));
        const auto &theirs = *reinterpret_cast<const DispatchShape *>(words);
        if (theirs.row_bytes != p.shape.row_bytes || theirs.scale_bytes != p.shape.scale_bytes ||
            theirs.num_topk != p.shape.num_topk || theirs.num_experts != p.shape.num_experts ||
            theirs.dtype != p.shape.dtype || theirs.most_tokens != p.shape.most_tokens) {
            if (device::lane() == 0 &&
                !fail_difference(group, Phase::kNotify, source,
                                 {theirs.row_bytes, theirs.scale_bytes, theirs.num_topk, theirs.dtype},
                                 {p.shape.row_bytes, p.shape.scale_bytes, p.shape.num_topk, p.shape.dtype})) {
                const bool experts = theirs.num_experts != p.shape.num_experts;
                fail_difference(group, Phase::kNotify, source, experts ? Difference::kExperts : Difference::kMostTokens,
                                experts ? theirs.num_experts : theirs.most_tokens,
                                experts ? p.shape.num_experts : p.shape.most_tokens);
            }
            ok = false;
        } else {
            words += sizeof(DispatchShape) / 4;
            const uint32_t domain = source / group.layout.ranks_per_domain;
            const bool rail = domain != group.domain() && source == rail_peer(group, domain);
            if (device::lane() == 0) {
                for (uint32_t c = 0; c < channels; ++c) {
                    p.receive_rows[source * channels + c] = words[c];
                    if (rail) p.rail_rows[domain * channels + c] = words[channels + c];
                }
                for (uint32_t e = 0; e < local_experts; ++e) expert_rows[e] += words[2 * channels + e];
            }
            ok = receiver.release();
        }
    }
    receiver.finish();
    return ok;
}

// One warp does it all: messages are small, and one writer needs no atomics on the sums.
UCCL_EP_KERNEL(uccl_ep_notify, NotifyParameters) {
    const NotifyParameters &p = parameters;
    const Group &group = p.group;
    const uint32_t channels = group.layout.num_channels;
    const uint32_t ranks = group.num_ranks();
    const uint32_t per_domain = group.layout.ranks_per_domain;
    const uint32_t local_experts = p.shape.num_experts / ranks;
    const KernelSpan kernel(group, TracedKernel::kNotify);
    Span step(group, Activity::kCounts);
    // Counting is the work: a warp a destination.
    for (uint32_t rank = device::warp_in_block(); rank < ranks; rank += device::warps_per_block()) {
        count_rows(p, rank, 1, p.send_rows + rank * channels);
    }
    for (uint32_t domain = device::warp_in_block(); domain < group.layout.num_domains();
         domain += device::warps_per_block()) {
        count_rows(p, domain * per_domain, per_domain, p.rail_send_rows + domain * channels);
        if (device::lane() == 0) {
            for (uint32_t c = 0; c < channels; ++c) p.rail_rows[domain * channels + c] = 0;
        }
    }
    device::sync_block();
    if (device::warp_in_block() != 0) return;
    if (device::lane() == 0) {
        for (uint32_t e = 0; e < local_experts; ++e) {
            p.expert_rows[e] = p.num_tokens_per_expert[group.rank * local_experts + e];
        }
        for (uint32_t c = 0; c < channels; ++c) {
            p.receive_rows[group.rank * channels + c] = p.send_rows[group.rank * channels + c];
        }
    }
    step.end();
    bool ok = true;
    for (uint32_t i = 1; i < ranks && ok; ++i) ok = notify_send(p, (group.rank + i) % ranks);
    for (uint32_t i = 1; i < ranks && ok; ++i) ok = notify_receive(p, (group.rank + i) % ranks, p.expert_rows);
    if (!ok || device::lane() != 0) return;
    int32_t offset = 0;
    for (uint32_t i = 0; i < ranks * channels; ++i) {
        p.receive_offset[i] = offset;
        offset += p.receive_rows[i];
    }
    p.receive_offset[ranks * channels] = offset;
}

}  // namespace uccl_ep
