/* Two loops of the same shape for benchmarks: one straight on libfabric, one through the table. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

static bool late(uint64_t end, uint32_t *turn) {
    if ((++*turn & 63u) != 0) {
        return false;
    }
    sched_yield();
    return fab_now_ns() > end;
}

static double seconds_since(uint64_t begin) { return (double)(fab_now_ns() - begin) * 1e-9; }

double fab_bench_bare_send(fab_context *context, uint32_t lane_index, uint32_t peer, uint64_t bytes, uint64_t count,
                           uint32_t window, double timeout_s) {
    fab_rail *rail = &context->lanes[lane_index].rails[0];
    const fab_remote *remote = &rail->remote[peer];
    struct fi_context2 *scratch = calloc(window, sizeof *scratch);
    if (!scratch) {
        return -1.0;
    }
    const uint64_t begin = fab_now_ns();
    const uint64_t end = begin + (uint64_t)(timeout_s * 1e9);
    uint64_t posted = 0, completed = 0;
    uint32_t turn = 0;
    double result = 0.0;
    while (completed < count && result == 0.0) {
        while (posted < count && posted - completed < window) {
            struct iovec piece = {rail->local[0], bytes};
            struct fi_rma_iov target = {fab_remote_address(rail, remote, 0, 0), bytes, remote->key[0]};
            struct fi_msg_rma message = {
                &piece, &rail->desc[0], 1, remote->address, &target, 1, &scratch[posted % window], posted & UINT32_MAX};
            const ssize_t status = fi_writemsg(rail->endpoint, &message, FI_REMOTE_CQ_DATA);
            if (status == -FI_EAGAIN) {
                break;
            }
            if (status) {
                result = (double)status;
                break;
            }
            posted++;
        }
        struct fi_cq_data_entry entries[FAB_CQ_BATCH];
        const ssize_t got = fi_cq_read(rail->tx_cq, entries, FAB_CQ_BATCH);
        if (got > 0) {
            completed += (uint64_t)got;
        } else if (got != -FI_EAGAIN) {
            result = (double)(got ? got : -FI_EIO);
        } else if (late(end, &turn)) {
            result = -FI_ETIMEDOUT;
        }
    }
    free(scratch);
    return result < 0.0 ? result : seconds_since(begin);
}

double fab_bench_bare_receive(fab_context *context, uint32_t lane_index, uint64_t count, double timeout_s) {
    fab_rail *rail = &context->lanes[lane_index].rails[0];
    const uint64_t begin = fab_now_ns();
    const uint64_t end = begin + (uint64_t)(timeout_s * 1e9);
    uint32_t turn = 0;
    for (uint64_t seen = 0; seen < count;) {
        struct fi_cq_data_entry entries[FAB_CQ_BATCH];
        const ssize_t got = fi_cq_read(rail->rx_cq, entries, FAB_CQ_BATCH);
        if (got > 0) {
            seen += (uint64_t)got;
        } else if (got != -FI_EAGAIN) {
            return (double)(got ? got : -FI_EIO);
        } else if (late(end, &turn)) {
            return -FI_ETIMEDOUT;
        }
    }
    return seconds_since(begin);
}

double fab_bench_send(void *operations, uint32_t lane, uint32_t peer, uint64_t bytes, uint64_t count, uint32_t window,
                      uint32_t batch, double timeout_s) {
    const uccl_ep_transport_ops *table = operations;
    uccl_ep_write *writes = calloc(batch, sizeof *writes);
    if (!writes) {
        return -1.0;
    }
    for (uint32_t i = 0; i < batch; i++) {
        writes[i] = (uccl_ep_write){.peer = peer, .flags = UCCL_EP_WRITE_IMMEDIATE, .bytes = bytes};
    }
    const uint64_t begin = fab_now_ns();
    const uint64_t end = begin + (uint64_t)(timeout_s * 1e9);
    uint64_t posted = 0, completed = 0;
    uint32_t turn = 0;
    double result = 0.0;
    while (completed < count && result == 0.0) {
        uint64_t wanted = window - (posted - completed);
        wanted = wanted < batch ? wanted : batch;
        wanted = wanted < count - posted ? wanted : count - posted;
        for (uint64_t i = 0; i < wanted; i++) {
            writes[i].immediate = (posted + i) & UINT32_MAX;
            writes[i].token = posted + i;
        }
        if (wanted) {
            const int64_t accepted = table->post_writes(table->context, lane, writes, wanted);
            if (accepted < 0) {
                result = (double)accepted;
                break;
            }
            posted += (uint64_t)accepted;
        }
        uccl_ep_completion entries[FAB_CQ_BATCH];
        const int64_t got = table->poll_completions(table->context, lane, entries, FAB_CQ_BATCH);
        for (int64_t i = 0; i < got; i++) {
            result = entries[i].status ? (double)entries[i].status : result;
        }
        if (got > 0) {
            completed += (uint64_t)got;
        } else if (got < 0) {
            result = (double)got;
        } else if (late(end, &turn)) {
            result = -FI_ETIMEDOUT;
        }
    }
    free(writes);
    return result < 0.0 ? result : seconds_since(begin);
}

double fab_bench_receive(void *operations, uint32_t lane, uint64_t count, double timeout_s) {
    const uccl_ep_transport_ops *table = operations;
    const uint64_t begin = fab_now_ns();
    const uint64_t end = begin + (uint64_t)(timeout_s * 1e9);
    uint32_t turn = 0;
    for (uint64_t seen = 0; seen < count;) {
        uccl_ep_arrival entries[FAB_CQ_BATCH];
        const int64_t got = table->poll_arrivals(table->context, lane, entries, FAB_CQ_BATCH);
        if (got > 0) {
            seen += (uint64_t)got;
        } else if (got < 0) {
            return (double)got;
        } else if (late(end, &turn)) {
            return -FI_ETIMEDOUT;
        }
    }
    return seconds_since(begin);
}
