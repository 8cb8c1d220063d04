/* A rail that fails.
 *
 * With several rails every write is posted with FI_DELIVERY_COMPLETE: a completion that only says "handed
 * to the socket" would be given for bytes that die with the rail. Where the provider has no such
 * completion, the loss of one rail is the loss of the peer, and a clear error.
 *
 * A write whose rail failed may have landed, may still lie in some queue and land later, or may be gone.
 * It is sent again over another rail only after the receiver has given up its side of the failed one, so
 * that no late copy can overwrite newer data. The receiver's answer (FAB_REVOKED) proves that. A write
 * that did land then lands once more, with the same bytes and the same immediate: with more than one
 * rail the transport does not promise `exactly_once`, and the counted plan tells the copy by its index.
 *
 * One broken path takes the rail away from this lane altogether, on both sides: simple, and right. With
 * no rail left the peer counts as dead, for good: a connection that comes back proves nothing about the
 * writes that were on it.
 */
#include <stdio.h>

#include "fabric.h"

enum { kQuietCalls = 64 };
static const uint64_t kFirstPauseNs = 20000000; /* before a question is asked again; doubled each time */

/* Errors that speak of the peer or the path, not of what we asked for. */
bool fab_is_peer_error(int error) {
    switch (error < 0 ? -error : error) {
        case 0:
        case FI_EAGAIN:
        case FI_EINVAL:
        case FI_EACCES:
        case FI_EPERM:
        case FI_EMSGSIZE:
        case FI_ENOMEM:
        case FI_EBADFLAGS:
        case FI_EKEYREJECTED:
        case FI_ENOKEY:
        case FI_ENOSYS:
        case FI_EOPNOTSUPP:
        case FI_ETRUNC:
        case FI_ENOAV:
            return false;
        default:
            return true;
    }
}

void fab_hold(fab_lane *lane, fab_operation *operation) {
    (void)lane;
    operation->kind = operation->kind == FAB_CHUNK ? FAB_HELD_CHUNK : FAB_HELD_WRITE;
}

static bool is_held(const fab_operation *operation) {
    return operation->kind == FAB_HELD_WRITE || operation->kind == FAB_HELD_CHUNK;
}

/* Writes on this rail to this peer that the provider has: hold a copy of each, and forget the original. */
static void hold_posted(fab_lane *lane, uint32_t rail, uint32_t peer) {
    for (uint32_t i = 0; i < lane->num_operations; i++) {
        fab_operation *operation = &lane->operations[i];
        if ((operation->kind != FAB_WRITE && operation->kind != FAB_CHUNK) || !operation->posted ||
            operation->rail != rail || operation->write.peer != peer) {
            continue;
        }
        fab_operation *copy = fab_take(lane);
        if (!copy) {
            fab_finish(lane, operation, -FI_ENOTCONN);
            continue;
        }
        copy->kind = operation->kind;
        copy->parent = operation->parent;
        copy->write = operation->write;
        copy->rail = (uint8_t)rail;
        fab_hold(lane, copy);
        operation->kind = FAB_ABANDONED;
    }
}

static void release_held(fab_lane *lane, uint32_t rail, uint32_t peer, int32_t failure) {
    for (uint32_t i = 0; i < lane->num_operations; i++) {
        fab_operation *operation = &lane->operations[i];
        if (!is_held(operation) || operation->write.peer != peer || (!failure && operation->rail != rail)) {
            continue;
        }
        if (failure) {
            fab_finish(lane, operation, failure);
            continue;
        }
        operation->kind = operation->kind == FAB_HELD_CHUNK ? FAB_CHUNK : FAB_WRITE;
        operation->rail = (uint8_t)FAB_MAX_RAILS;
        lane->statistics.moved++;
        fab_wait_to_post(lane, operation);
    }
}

/* Any thread: a peer is dead, for good. */
void fab_bury(fab_context *context, uint32_t peer) {
    if (!atomic_exchange_explicit(&context->dead[peer], UCCL_EP_PEER_DEAD, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&context->deaths, 1, memory_order_release);
    }
}

/* Writes towards the dead end here, also those of which the provider will never say a word. */
void fab_forget_dead(fab_lane *lane) {
    lane->deaths_seen = atomic_load_explicit(&lane->context->deaths, memory_order_acquire);
    for (uint32_t peer = 0; peer < lane->context->num_ranks; peer++) {
        if (!atomic_load_explicit(&lane->context->dead[peer], memory_order_relaxed)) {
            continue;
        }
        lane->lost[peer] = UINT8_MAX;
        for (uint32_t r = 0; r < lane->num_rails; r++) {
            hold_posted(lane, r, peer);
        }
        release_held(lane, 0, peer, -FI_ENOTCONN);
    }
}

void fab_lose_rail(fab_lane *lane, uint32_t rail, uint32_t peer, int error, const char *words) {
    const uint8_t bit = (uint8_t)(1u << rail);
    const bool first = !(lane->lost[peer] & bit);
    if (first) {
        lane->lost[peer] |= bit;
        lane->statistics.rails_lost++;
        snprintf(lane->error, sizeof lane->error, "rail %u of lane %u to rank %u failed: %s: %s", rail, lane->index,
                 peer, fab_error_text(lane->context->library, error), words);
        hold_posted(lane, rail, peer);
    }
    if (!lane->context->write_flags) {
        lane->lost[peer] = UINT8_MAX;
    }
    if (fab_choose_rail(lane, peer) == FAB_NONE) {
        fab_bury(lane->context, peer);
        release_held(lane, rail, peer, -FI_ENOTCONN);
    } else if (first) {
        const uint64_t now = fab_now_ns();
        lane->revoking[peer] |= bit;
        lane->questions[peer] = (fab_question){now, now + kFirstPauseNs, kFirstPauseNs};
        lane->asks = true;
        fab_owe(lane, peer, FAB_REVOKE, rail);
    } else if (!(lane->revoking[peer] & bit)) {
        release_held(lane, rail, peer, 0);
    }
}

/* The provider said "again". With a queue of ours full that is flow control. With nothing in flight to
 * this peer, and room on the rail, no queue is full: the connection itself is missing, and a provider that
 * reconnects by itself would try for ever once the peer is gone. */
void fab_refused(fab_lane *lane, uint32_t rail_index, uint32_t peer) {
    fab_context *context = lane->context;
    fab_rail *rail = &lane->rails[rail_index];
    fab_remote *remote = &rail->remote[peer];
    if (remote->pending || rail->outstanding > context->send_depth / 2 || !context->patience_ns) {
        remote->refused_since = 0;
        return;
    }
    const uint64_t now = fab_now_ns();
    if (!remote->refused_since) {
        remote->refused_since = now;
    } else if (now - remote->refused_since > context->patience_ns ||
               fab_peer_state(context, peer) == UCCL_EP_PEER_DEAD) {
        fab_lose_rail(lane, rail_index, peer, -FI_ECONNRESET,
                      "the provider refuses writes although none is in flight, so the connection is gone");
    }
}

/* Take in what has landed. A provider may need several calls before it shows an immediate whose write it
 * has already acknowledged, hence the quiet ones; where writes land in our calls, up to the last one, they show in the
 * call that lands them. The bound is that of the library's credits and no time: a thread that has lost its core for so
 * long would leave arrivals behind for good. */
static void drain(fab_lane *lane, uint32_t rail) {
    uint64_t taken = 0;
    const uint64_t most = 2 * (uint64_t)lane->context->receive_depth; /* what was moved here may be there twice */
    for (uint32_t quiet = 0; quiet < kQuietCalls && taken <= most; quiet++) {
        uccl_ep_arrival arrivals[FAB_CQ_BATCH];
        const uint64_t count = fab_read_arrivals(lane, rail, arrivals, FAB_CQ_BATCH);
        for (uint64_t i = 0; i < count; i++) {
            fab_stash_push(lane, arrivals[i].immediate);
            quiet = 0;
        }
        taken += count;
    }
}

/* Give up our side of a rail: new writes are shut out, what has landed is taken in, and from then on the
 * endpoint is never polled again. Within one machine writes land in our calls or in the sender's, who has
 * stopped, so that not calling shuts them out; deregistering first would make shm of 2.5 report success for
 * what it refused. */
void fab_shut_rail(fab_lane *lane, uint32_t rail_index, const char *words) {
    fab_rail *rail = &lane->rails[rail_index];
    if (!rail->open) {
        return;
    }
    if (rail->retired) {
        return; /* a message among the arrivals below asks for the same */
    }
    rail->retired = true;
    if (!lane->context->network) {
        drain(lane, rail_index);
    }
    fab_rail_revoke(rail);
    if (lane->context->network) {
        drain(lane, rail_index);
    }
    rail->open = false;
    for (uint32_t peer = 0; peer < lane->context->num_ranks; peer++) {
        if (lane->context->expected[peer]) {
            fab_lose_rail(lane, rail_index, peer, -FI_ENOTCONN, words);
        }
    }
    /* Operations that the provider still has keep their slots for good: it may write into them. */
}

/* The peer has given up its side: what was held can go another way. */
void fab_revoked(fab_lane *lane, uint32_t rail, uint32_t peer) {
    lane->revoking[peer] &= (uint8_t)~(1u << rail);
    release_held(lane, rail, peer, 0);
}

/* Until it is answered: a message can be lost, and the answer too. Where no answer comes there is no way left that both
 * sides use, or the peer is gone without a word. */
void fab_ask_again(fab_lane *lane) {
    const uint64_t now = fab_now_ns();
    lane->asks = false;
    for (uint32_t peer = 0; peer < lane->context->num_ranks; peer++) {
        fab_question *question = &lane->questions[peer];
        const uint8_t open = lane->revoking[peer];
        if (!open || atomic_load_explicit(&lane->context->dead[peer], memory_order_relaxed)) {
            continue;
        }
        lane->asks = true;
        if (now - question->since_ns > lane->context->revoke_ns) {
            snprintf(lane->error, sizeof lane->error,
                     "rank %u did not say within %.3g s that it gave up rail %d of lane %u: it is gone, or no rail is "
                     "left that both ranks use",
                     peer, (double)lane->context->revoke_ns * 1e-9, __builtin_ctz(open), lane->index);
            fab_bury(lane->context, peer);
        } else if (now >= question->next_ns) {
            question->pause_ns *= 2;
            question->next_ns = now + question->pause_ns;
            lane->owed_revoke[peer] |= open;
            lane->owes = true;
        }
    }
}

void fab_break_rail(fab_context *context, uint32_t lane, uint32_t rail) {
    atomic_fetch_or_explicit(&context->lanes[lane].break_request, 1u << rail, memory_order_relaxed);
}
