/* Posting writes. */
#include <stdio.h>

#include "fabric.h"

/* ---- completions made here, and writes that wait ---- */

/* There is always room: every accepted write counts in in_flight until it is polled. */
static void fab_report(fab_lane *lane, uint64_t token, uint32_t peer, int32_t status) {
    lane->statistics.failed += status != 0;
    const uint32_t capacity = lane->context->send_depth;
    lane->done[(lane->done_first + lane->done_count++) % capacity] =
        (uccl_ep_completion){.token = token, .peer = peer, .status = status};
}

void fab_wait_to_post(fab_lane *lane, fab_operation *operation) {
    fab_queue *queue = operation->kind == FAB_SEND ? &lane->messages : &lane->waiting;
    operation->next = FAB_NONE;
    lane->peers_waited += lane->num_waiting[operation->write.peer]++ == 0;
    if (queue->tail == FAB_NONE) {
        queue->head = operation->index;
    } else {
        lane->operations[queue->tail].next = operation->index;
    }
    queue->tail = operation->index;
}

/* ---- one write ---- */

/* The rail with the fewest bytes on the way to anybody; FAB_NONE where none is left to this peer. */
uint32_t fab_choose_rail(const fab_lane *lane, uint32_t peer) {
    uint32_t best = FAB_NONE;
    for (uint32_t r = 0; r < lane->num_rails; r++) {
        const fab_rail *rail = &lane->rails[r];
        if (fab_is_way(lane, r, peer) &&
            (best == FAB_NONE || rail->outstanding_bytes < lane->rails[best].outstanding_bytes)) {
            best = r;
        }
    }
    return best;
}

/* `write`: of the operation, here or still where the caller has it. */
static inline ssize_t write_operation(fab_lane *lane, fab_operation *operation, const uccl_ep_write *write, bool more) {
    fab_rail *rail = &lane->rails[operation->rail];
    fab_remote *remote = &rail->remote[write->peer];
    struct iovec piece = {.iov_base = rail->local[write->local_region] + write->local_offset, .iov_len = write->bytes};
    struct fi_rma_iov target = {.addr = fab_remote_address(rail, remote, write->remote_region, write->remote_offset),
                                .len = write->bytes,
                                .key = remote->key[write->remote_region]};
    struct fi_msg_rma message = {.msg_iov = &piece,
                                 .desc = &rail->desc[write->local_region],
                                 .iov_count = 1,
                                 .addr = remote->address,
                                 .rma_iov = &target,
                                 .rma_iov_count = 1,
                                 .context = operation,
                                 .data = write->immediate & UINT32_MAX};
    uint64_t flags = lane->context->write_flags | (more ? FI_MORE : 0);
    if (write->flags & UCCL_EP_WRITE_IMMEDIATE) {
        flags |= FI_REMOTE_CQ_DATA;
    }
    if (write->flags & UCCL_EP_WRITE_FENCED) {
        flags |= FI_DELIVERY_COMPLETE;
    }
    const bool nothing = write->bytes == 0 && !lane->context->network && (flags & FI_DELIVERY_COMPLETE);
    if (nothing) {
        flags &= ~FI_DELIVERY_COMPLETE; /* the shm provider of 1.17 never completes such a write */
    }
    /* Without it the completion says only that the immediate lies in the peer's queue, where it stays if the peer
     * gives up that rail: an immediate that can be lost so goes as a message. */
    const ssize_t status = nothing && lane->context->write_flags && (flags & FI_REMOTE_CQ_DATA)
                               ? fab_send_immediate(lane, operation, write)
                               : fi_writemsg(rail->endpoint, &message, flags);
    if (status == 0) {
        operation->posted = 1;
        rail->outstanding++;
        rail->outstanding_bytes += write->bytes;
        remote->pending++;
        remote->refused_since = 0;
    }
    return status;
}

/* A write that ended: a part tells its whole, a whole tells the caller. */
void fab_finish(fab_lane *lane, fab_operation *operation, int32_t status) {
    const uccl_ep_write write = operation->write;
    const bool chunk = operation->kind == FAB_CHUNK || operation->kind == FAB_HELD_CHUNK;
    fab_operation *parent = chunk ? &lane->operations[operation->parent] : NULL;
    if (operation->posted) {
        operation->kind = FAB_ABANDONED; /* the provider returns it later, or never */
    } else {
        fab_give(lane, operation);
    }
    if (!parent) {
        fab_report(lane, write.token, write.peer, status);
        return;
    }
    if (status && !parent->status) {
        parent->status = status;
    }
    if (--parent->remaining > 0) {
        return;
    }
    if (!parent->status && (parent->write.flags & UCCL_EP_WRITE_IMMEDIATE)) {
        /* All bytes are placed (parts are posted with FI_DELIVERY_COMPLETE): now the immediate, with the
         * last byte once more, since not every provider can prove that a write of nothing arrived. */
        parent->kind = FAB_WRITE;
        parent->write.local_offset += parent->write.bytes - 1;
        parent->write.remote_offset += parent->write.bytes - 1;
        parent->write.bytes = 1;
        parent->rail = (uint8_t)FAB_MAX_RAILS;
        fab_wait_to_post(lane, parent);
        return;
    }
    fab_report(lane, parent->write.token, parent->write.peer, parent->status);
    fab_give(lane, parent);
}

/* Over its own rail, or where that is lost over another. */
static ssize_t post_waiting(fab_lane *lane, fab_operation *operation) {
    const uint32_t peer = operation->write.peer;
    if (!fab_is_way(lane, operation->rail, peer)) {
        const uint32_t rail = fab_choose_rail(lane, peer);
        operation->rail = (uint8_t)(rail == FAB_NONE ? FAB_MAX_RAILS : rail);
    }
    if (operation->rail >= lane->num_rails) {
        return -FI_ENOTCONN;
    }
    if (operation->kind == FAB_SEND) {
        return fab_post_message(lane, operation);
    }
    if (lane->rails[operation->rail].remote[peer].full_in == lane->pass) {
        return -FI_EAGAIN;
    }
    return write_operation(lane, operation, &operation->write, false);
}

static void post_queue(fab_lane *lane, fab_queue *queue) {
    uint32_t open = 0, full = 0, previous = FAB_NONE;
    for (uint32_t r = 0; r < lane->num_rails; r++) {
        open += lane->rails[r].open;
    }
    lane->pass++;
    for (uint32_t index = queue->head; index != FAB_NONE && (!open || full < open * lane->peers_waited);) {
        fab_operation *operation = &lane->operations[index];
        const uint32_t peer = operation->write.peer;
        const ssize_t status = post_waiting(lane, operation);
        const uint32_t rail = operation->rail;
        if (status == -FI_EAGAIN) {
            fab_remote *remote = &lane->rails[rail].remote[peer];
            if (remote->full_in != lane->pass) {
                remote->full_in = lane->pass;
                full++;
                lane->statistics.again++;
                fab_refused(lane, rail, peer);
            }
            previous = index;
            index = operation->next;
            continue;
        }
        index = operation->next;
        lane->peers_waited -= --lane->num_waiting[peer] == 0;
        if (previous == FAB_NONE) {
            queue->head = index;
        } else {
            lane->operations[previous].next = index;
        }
        if (index == FAB_NONE) {
            queue->tail = previous;
        }
        if (!status) {
            continue;
        }
        const bool lost = rail < lane->num_rails && (fab_is_peer_error((int)status) || operation->kind == FAB_SEND);
        if (operation->kind == FAB_SEND) {
            fab_give(lane, operation);
        } else if (lost) {
            fab_wait_to_post(lane, operation); /* on another rail, or it fails for good */
        } else {
            fab_finish(lane, operation, (int32_t)status);
        }
        if (lost) {
            fab_lose_rail(lane, rail, peer, (int)status, "a post was refused");
        }
    }
}

/* Post what had to wait: messages, then immediates of striped writes, parts, writes moved from a lost rail. One whose rail
 * is full holds up nothing on other rails, and no message: the other side may have given up that rail, and the message that
 * says so to it, or that answers its own, may come behind. Nor does it hold up anything to other ranks: this one may have
 * gone without a word. */
void fab_post_waiting(fab_lane *lane) {
    post_queue(lane, &lane->messages);
    post_queue(lane, &lane->waiting);
}

/* ---- the table's entry ---- */

static bool within(uint64_t offset, uint64_t bytes, uint64_t size) { return bytes <= size && offset <= size - bytes; }

/* Words for a write that no retry mends; NULL for a good one. */
static inline const char *fault_of(const fab_context *context, const fab_lane *lane, const uccl_ep_write *write) {
    if (write->peer >= context->num_ranks || !context->expected[write->peer]) {
        return "a write names a rank that was not connected";
    }
    const fab_rail *rail = &lane->rails[0];
    const fab_remote *remote = &rail->remote[write->peer];
    if (write->local_region >= FAB_MAX_REGIONS || write->remote_region >= remote->regions) {
        return "a write names memory that was not registered";
    }
    if (!within(write->local_offset, write->bytes, rail->local_bytes[write->local_region])) {
        return "a write begins or ends outside its source";
    }
    if (!within(write->remote_offset, write->bytes, remote->bytes[write->remote_region])) {
        return "a write begins or ends outside its target";
    }
    return write->bytes > context->max_message ? "a write is larger than max_message" : NULL;
}

/* A post that failed for good: over another rail, or with an error to the caller. */
static void refused(fab_lane *lane, fab_operation *operation, const uccl_ep_write *write, ssize_t status) {
    operation->write = *write;
    if (!fab_is_peer_error((int)status)) {
        fab_finish(lane, operation, (int32_t)status);
        return;
    }
    const uint32_t rail = operation->rail;
    fab_wait_to_post(lane, operation);
    fab_lose_rail(lane, rail, write->peer, (int)status, "a post was refused");
}

/* Post one write over a rail of several, or cut it over all; false: not now. */
static bool post_over(fab_lane *lane, const uccl_ep_write *write, uint32_t rail, bool more) {
    const fab_context *context = lane->context;
    if (context->stripe_bytes && write->bytes >= context->stripe_bytes) {
        const uint32_t rails = fab_living_rails(lane, write->peer);
        if (rails > 1) {
            return fab_stripe(lane, write, rails);
        }
    }
    fab_operation *operation = fab_take(lane);
    if (!operation) {
        return false;
    }
    operation->kind = FAB_WRITE;
    operation->rail = (uint8_t)rail;
    operation->write = *write;
    const ssize_t status = write_operation(lane, operation, write, more);
    if (status == -FI_EAGAIN) {
        /* The depth is a promise for the lane, whichever of its rails is full now. */
        lane->statistics.again++;
        fab_refused(lane, rail, write->peer);
        fab_wait_to_post(lane, operation);
    } else if (status) {
        refused(lane, operation, write, status);
    }
    return true;
}

/* The same over the only rail: a queue that is full is the caller's to wait for, and no write moves anywhere. */
static inline bool post_alone(fab_lane *lane, const uccl_ep_write *write, bool more) {
    fab_operation *operation = fab_take(lane);
    if (!operation) {
        return false;
    }
    operation->kind = FAB_WRITE;
    operation->rail = 0;
    operation->write.peer = write->peer;
    operation->write.bytes = write->bytes;
    operation->write.token = write->token;
    const ssize_t status = write_operation(lane, operation, write, more);
    if (status == -FI_EAGAIN) {
        lane->statistics.again++;
        fab_refused(lane, 0, write->peer);
        fab_give(lane, operation);
        return false;
    }
    if (status) {
        refused(lane, operation, write, status);
    }
    return true;
}

int64_t fab_post_writes(void *opaque, uint32_t lane_index, const uccl_ep_write *writes, uint64_t count) {
    fab_context *context = opaque;
    fab_lane *lane = &context->lanes[lane_index];
    const uint32_t room = context->send_depth - lane->in_flight;
    /* A doorbell held back by FI_MORE is rung by the last write of the batch; where the queue may fill
     * up before that one, every write rings its own. */
    const bool batch = count <= room;
    if (count > room) {
        count = room;
    }
    const bool single = lane->num_rails == 1;
    uint64_t accepted = 0, posted = 0, bytes = 0;
    for (; accepted < count; accepted++) {
        const uccl_ep_write *write = &writes[accepted];
        const uint32_t peer = write->peer;
        const char *fault = fault_of(context, lane, write);
        if (fault) {
            if (accepted == 0) {
                snprintf(lane->error, sizeof lane->error, "%s (rank %u, %llu bytes)", fault, peer,
                         (unsigned long long)write->bytes);
                return -FI_EINVAL;
            }
            break; /* it is refused when it comes first */
        }
        const uint32_t rail =
            single ? (lane->lost[peer] || !lane->rails[0].open ? FAB_NONE : 0) : fab_choose_rail(lane, peer);
        if (rail == FAB_NONE || atomic_load_explicit(&context->dead[peer], memory_order_relaxed)) {
            fab_report(lane, write->token, peer, -FI_ENOTCONN);
            continue;
        }
        const bool more = batch && accepted + 1 < count;
        if (!(single ? post_alone(lane, write, more) : post_over(lane, write, rail, more))) {
            break;
        }
        posted++;
        bytes += write->bytes;
    }
    lane->in_flight += (uint32_t)accepted;
    lane->statistics.posted += posted;
    lane->statistics.posted_bytes += bytes;
    if (fab_has_waiting(lane)) {
        fab_post_waiting(lane);
    }
    return (int64_t)accepted;
}
