/* Polling: completions of our writes, immediates of others', and control messages between the two. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

/* ---- completions ---- */

static uint64_t take_done(fab_lane *lane, uccl_ep_completion *out, uint64_t capacity) {
    uint64_t count = 0;
    while (count < capacity && lane->done_count > 0) {
        out[count++] = lane->done[lane->done_first];
        lane->done_first = (lane->done_first + 1) % lane->context->send_depth;
        lane->done_count--;
    }
    lane->in_flight -= (uint32_t)count;
    return count;
}

/* One failed operation off a queue. The operation ends here, or moves to another rail. */
static void take_error(fab_lane *lane, uint32_t rail_index, struct fid_cq *queue, bool sending) {
    fab_rail *rail = &lane->rails[rail_index];
    struct fi_cq_err_entry entry;
    memset(&entry, 0, sizeof entry);
    if (fi_cq_readerr(queue, &entry, 0) < 0) {
        return;
    }
    const char *detail = fi_cq_strerror(queue, entry.prov_errno, entry.err_data, NULL, 0);
    const int error = entry.err ? -entry.err : -FI_EIO;
    char words[160];
    snprintf(words, sizeof words, "%s (%s)", fab_error_text(lane->context->library, error), detail ? detail : "");
    if (!sending) {
        /* A receive that ended with its connection. It is posted again, since other peers still send here, but not in
         * this call, which would never return where it fails at once. */
        fab_receive *receive = entry.op_context;
        if (receive && receive >= rail->receives && receive < rail->receives + FAB_RECEIVES) {
            rail->missing |= UINT64_C(1) << receive->index;
        }
        return;
    }
    fab_operation *operation = entry.op_context;
    if (!operation) {
        snprintf(lane->error, sizeof lane->error, "rail %u: %s", rail_index, words);
        return;
    }
    if (operation->kind == FAB_SEND) {
        operation->posted = 0;
    } else {
        fab_returned(rail, operation);
    }
    if (operation->kind == FAB_ABANDONED) {
        fab_give(lane, operation);
        return;
    }
    const uint32_t peer = operation->write.peer;
    /* Over several rails each error is one of the rail: the peer may have taken its memory off it, and what that looks
     * like differs (EFA: FI_EINVAL). What is wrong with the write itself shows on every rail, and ends with the last. A
     * message is never wrong in itself, and without it the other side would wait. */
    if (fab_is_peer_error(error) || lane->num_rails > 1 || operation->kind == FAB_SEND) {
        if (operation->kind == FAB_SEND) {
            fab_give(lane, operation);
        } else {
            fab_hold(lane, operation);
        }
        fab_lose_rail(lane, rail_index, peer, error, words);
        return;
    }
    snprintf(lane->error, sizeof lane->error, "rail %u to rank %u: %s", rail_index, peer, words);
    if (operation->kind == FAB_SEND) {
        fab_give(lane, operation);
    } else {
        fab_finish(lane, operation, error);
    }
}

int64_t fab_poll_completions(void *opaque, uint32_t lane_index, uccl_ep_completion *out, uint64_t capacity) {
    fab_context *context = opaque;
    fab_lane *lane = &context->lanes[lane_index];
    if (atomic_load_explicit(&context->deaths, memory_order_relaxed) != lane->deaths_seen) {
        fab_forget_dead(lane);
    }
    uint64_t count = lane->done_count ? take_done(lane, out, capacity) : 0;
    if (lane->asks) {
        fab_ask_again(lane);
    }
    if (lane->owes) {
        fab_pay(lane);
    }
    if (fab_has_waiting(lane)) {
        fab_post_waiting(lane);
    }
    const uint32_t broken = atomic_load_explicit(&lane->break_request, memory_order_relaxed);
    for (uint32_t r = 0; broken >> r; r++) {
        if (broken & (1u << r)) {
            atomic_fetch_and_explicit(&lane->break_request, ~(1u << r), memory_order_relaxed);
            fab_shut_rail(lane, r, "it was broken on purpose");
        }
    }
    for (uint32_t r = 0; r < lane->num_rails; r++) {
        fab_rail *rail = &lane->rails[r];
        while (rail->open && count < capacity) {
            struct fi_cq_data_entry entries[FAB_CQ_BATCH];
            uint32_t completed = 0;
            const uint64_t room = capacity - count < FAB_CQ_BATCH ? capacity - count : FAB_CQ_BATCH;
            const ssize_t got = fi_cq_read(rail->tx_cq, entries, room);
            if (got == -FI_EAVAIL) {
                take_error(lane, r, rail->tx_cq, true);
                continue;
            }
            if (got <= 0) {
                if (got != 0 && got != -FI_EAGAIN) {
                    char words[128];
                    snprintf(words, sizeof words, "its completion queue broke: %s",
                             fab_error_text(context->library, (int)got));
                    fab_shut_rail(lane, r, words); /* what it has completed is sent again over another */
                }
                break;
            }
            for (ssize_t i = 0; i < got; i++) {
                fab_operation *operation = entries[i].op_context;
                if (!operation) {
                    continue;
                }
                if (operation->kind == FAB_WRITE) {
                    fab_returned(rail, operation);
                    out[count++] = (uccl_ep_completion){operation->write.token, operation->write.peer, 0};
                    completed++;
                    fab_give(lane, operation);
                } else if (operation->kind == FAB_CHUNK) {
                    fab_returned(rail, operation);
                    fab_finish(lane, operation, 0);
                } else if (operation->kind == FAB_SEND) {
                    fab_message_sent(lane, operation);
                } else {
                    fab_returned(rail, operation);
                    fab_give(lane, operation);
                }
            }
            lane->in_flight -= completed;
            if ((uint64_t)got < room) {
                break;
            }
        }
    }
    if (fab_has_waiting(lane)) {
        fab_post_waiting(lane);
    }
    if (lane->done_count && count < capacity) {
        count += take_done(lane, out + count, capacity - count);
    }
    lane->statistics.completed += count;
    return (int64_t)count;
}

/* ---- arrivals ---- */

void fab_stash_push(fab_lane *lane, uint64_t immediate) {
    fab_stash *stash = &lane->stash;
    if (stash->first + stash->count == stash->capacity) {
        const uint64_t capacity = stash->capacity ? stash->capacity * 2 : 64;
        uint64_t *grown = realloc(stash->immediates, capacity * sizeof *grown);
        if (!grown) {
            snprintf(lane->error, sizeof lane->error, "out of memory for early arrivals");
            return;
        }
        stash->immediates = grown;
        stash->capacity = capacity;
    }
    stash->immediates[stash->first + stash->count++] = immediate;
}

static uint64_t take_stash(fab_stash *stash, uccl_ep_arrival *out, uint64_t capacity) {
    uint64_t count = 0;
    while (count < capacity && stash->count > 0) {
        out[count++] = (uccl_ep_arrival){stash->immediates[stash->first++], UCCL_EP_PEER_UNKNOWN, 0};
        stash->count--;
    }
    if (stash->count == 0) {
        stash->first = 0;
    }
    return count;
}

/* What one queue has. Messages may close this very rail, so the loop looks at `open` each time. */
uint64_t fab_read_arrivals(fab_lane *lane, uint32_t rail_index, uccl_ep_arrival *out, uint64_t capacity) {
    fab_rail *rail = &lane->rails[rail_index];
    uint64_t count = 0;
    if (rail->missing && rail->open) {
        fab_post_missing(rail);
    }
    while (rail->open && count < capacity) {
        struct fi_cq_data_entry entries[FAB_CQ_BATCH];
        const uint64_t room = capacity - count < FAB_CQ_BATCH ? capacity - count : FAB_CQ_BATCH;
        const ssize_t got = fi_cq_read(rail->rx_cq, entries, room);
        if (got == -FI_EAVAIL) {
            take_error(lane, rail_index, rail->rx_cq, false);
            continue;
        }
        if (got <= 0) {
            if (got != 0 && got != -FI_EAGAIN) {
                /* Its senders take for arrived what lies in there and nobody will ever read: that is the end. */
                snprintf(lane->error, sizeof lane->error, "rail %u: its arrival queue broke: %s", rail_index,
                         fab_error_text(lane->context->library, (int)got));
                lane->broken = (int)got;
            }
            break;
        }
        for (ssize_t i = 0; i < got; i++) {
            fab_receive *receive = entries[i].op_context;
            if (entries[i].flags & FI_REMOTE_CQ_DATA) {
                out[count++] = (uccl_ep_arrival){entries[i].data & UINT32_MAX, UCCL_EP_PEER_UNKNOWN, 0};
                if (rail->receive_data && receive && rail->open) {
                    fab_post_receive(rail, receive->index);
                }
            } else if ((entries[i].flags & FI_RECV) && receive) {
                const fab_message message = rail->messages[receive->index];
                if (rail->open) {
                    fab_post_receive(rail, receive->index);
                }
                if (fab_handle_message(lane, &message)) {
                    out[count++] = (uccl_ep_arrival){message.argument, UCCL_EP_PEER_UNKNOWN, 0};
                }
            }
        }
        if ((uint64_t)got < room) {
            break;
        }
    }
    return count;
}

int64_t fab_poll_arrivals(void *opaque, uint32_t lane_index, uccl_ep_arrival *out, uint64_t capacity) {
    fab_context *context = opaque;
    fab_lane *lane = &context->lanes[lane_index];
    uint64_t count = lane->stash.count ? take_stash(&lane->stash, out, capacity) : 0;
    /* In turn, so that a rail with ever more arrivals keeps no copy of a moved write waiting in another's queue until its
     * number is used again. */
    for (uint32_t i = 0; i < lane->num_rails && count < capacity; i++) {
        const uint32_t rail = lane->first_rail;
        lane->first_rail = rail + 1 < lane->num_rails ? rail + 1 : 0;
        count += fab_read_arrivals(lane, rail, out + count, capacity - count);
    }
    lane->statistics.arrived += count;
    return count || !lane->broken ? (int64_t)count : lane->broken;
}
