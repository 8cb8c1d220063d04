/* Control messages between endpoints, and the handshake made of them.
 *
 * HELLO says "my address vector holds you": a NIC of the SRD kind refuses writes from an endpoint it has
 * no entry for, so no rank may write before every peer has said it. WELCOME answers HELLO. A rank leaves
 * the handshake when it has both from everybody and its own WELCOMEs have left, so that nobody waits for
 * a rank that no longer polls.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

static ssize_t send_message(fab_lane *lane, fab_operation *operation, uint32_t peer, uint32_t kind, uint32_t argument,
                            uint64_t flags) {
    fab_rail *rail = &lane->rails[operation->rail];
    fab_message *content = &rail->messages[FAB_RECEIVES + operation->index];
    *content = (fab_message){.group = lane->context->group,
                             .kind = kind,
                             .rank = lane->context->rank,
                             .lane = lane->index,
                             .argument = argument};
    struct iovec piece = {.iov_base = content, .iov_len = sizeof *content};
    void *descriptor = fi_mr_desc(rail->message_mr);
    struct fi_msg message = {.msg_iov = &piece,
                             .desc = &descriptor,
                             .iov_count = 1,
                             .addr = rail->remote[peer].address,
                             .context = operation};
    const ssize_t status = fi_sendmsg(rail->endpoint, &message, flags);
    if (status == 0) {
        rail->remote[peer].refused_since = 0;
    }
    return status;
}

/* A write of nothing with an immediate, completed when the peer has taken it in. */
ssize_t fab_send_immediate(fab_lane *lane, fab_operation *operation, const uccl_ep_write *write) {
    return send_message(lane, operation, write->peer, FAB_IMMEDIATE, (uint32_t)write->immediate, FI_DELIVERY_COMPLETE);
}

ssize_t fab_post_message(fab_lane *lane, fab_operation *operation) {
    const uccl_ep_write *write = &operation->write;
    const ssize_t status =
        send_message(lane, operation, write->peer, (uint32_t)write->token, (uint32_t)write->immediate, 0);
    operation->posted = status == 0;
    return status;
}

/* `rail` FAB_MAX_RAILS: whichever is left. Kept and sent later where the queue is full. */
int fab_send_message(fab_lane *lane, uint32_t rail, uint32_t peer, uint32_t kind, uint32_t argument) {
    fab_operation *operation = fab_take(lane);
    if (!operation) {
        return -FI_EAGAIN;
    }
    operation->kind = FAB_SEND;
    operation->rail = (uint8_t)rail;
    memset(&operation->write, 0, sizeof operation->write);
    operation->write.peer = peer;
    operation->write.token = kind;
    operation->write.immediate = argument;
    fab_wait_to_post(lane, operation);
    return 0;
}

/* A message about a lost rail goes out as soon as there is room: without it the other side would hold its writes for good.
 * It goes over every rail that is left, since the other side may have given up any of them and not said so yet, and to get
 * it more than once does no harm. It may be lost all the same: a provider completes a message when a socket has taken it,
 * and makes a connection that breaks afterwards again without a word. So the question is asked again (fab_ask_again). */
void fab_owe(fab_lane *lane, uint32_t peer, uint32_t kind, uint32_t rail) {
    (kind == FAB_REVOKE ? lane->owed_revoke : lane->owed_revoked)[peer] |= (uint8_t)(1u << rail);
    lane->owes = true;
}

static void pay(fab_lane *lane, uint32_t peer, uint32_t kind, uint8_t *owed) {
    for (uint32_t r = 0; *owed >> r; r++) {
        if (!(*owed >> r & 1u)) {
            continue;
        }
        for (uint32_t way = 0; way < lane->num_rails; way++) {
            if (fab_is_way(lane, way, peer) && fab_send_message(lane, way, peer, kind, r)) {
                lane->owes = true; /* the pool is empty: all of it later */
                return;
            }
        }
        *owed &= (uint8_t)~(1u << r);
    }
}

void fab_pay(fab_lane *lane) {
    lane->owes = false;
    for (uint32_t peer = 0; peer < lane->context->num_ranks; peer++) {
        pay(lane, peer, FAB_REVOKE, &lane->owed_revoke[peer]);
        pay(lane, peer, FAB_REVOKED, &lane->owed_revoked[peer]);
    }
}

void fab_message_sent(fab_lane *lane, fab_operation *operation) {
    if (operation->write.token == FAB_WELCOME) {
        const size_t slot = (size_t)operation->write.peer * FAB_MAX_RAILS + operation->write.immediate;
        lane->greeted[slot] |= FAB_WELCOME_SENT;
    }
    fab_give(lane, operation);
}

/* True: the message was an immediate. */
bool fab_handle_message(fab_lane *lane, const fab_message *message) {
    fab_context *context = lane->context;
    const uint32_t peer = message->rank;
    if (message->group != context->group || peer >= context->num_ranks || !context->expected[peer] ||
        message->lane != lane->index) {
        return false; /* a stray of another group */
    }
    if (message->kind == FAB_IMMEDIATE) {
        return true;
    }
    if (message->argument >= lane->num_rails) {
        return false;
    }
    uint8_t *greeted = &lane->greeted[(size_t)peer * FAB_MAX_RAILS + message->argument];
    switch (message->kind) {
        case FAB_HELLO:
            *greeted |= FAB_HELLO_SEEN;
            break;
        case FAB_WELCOME:
            *greeted |= FAB_WELCOME_SEEN;
            break;
        case FAB_REVOKE:
            fab_shut_rail(lane, message->argument, "the peer reported it");
            fab_owe(lane, peer, FAB_REVOKED, message->argument);
            break;
        case FAB_REVOKED:
            fab_revoked(lane, message->argument, peer);
            break;
        default:
            break;
    }
    return false;
}

int fab_begin_connect(fab_context *context, uint32_t rank, uint32_t ranks, uint32_t lanes, uint64_t group) {
    context->rank = rank;
    context->group = group;
    /* Endpoints that nobody will use: closed now, so that they take no part in anything. */
    for (uint32_t l = lanes; l < context->num_lanes; l++) {
        for (uint32_t r = 0; r < context->lanes[l].num_rails; r++) {
            fab_rail_close(&context->lanes[l].rails[r]);
        }
        context->lanes[l].num_rails = 0;
    }
    context->dead = calloc(ranks, sizeof *context->dead);
    context->expected = calloc(ranks, 1);
    context->watches = calloc(ranks, sizeof *context->watches);
    bool complete = context->dead && context->expected && context->watches;
    for (uint32_t l = 0; l < lanes; l++) {
        fab_lane *lane = &context->lanes[l];
        lane->lost = calloc(ranks, 1);
        lane->revoking = calloc(ranks, 1);
        lane->questions = calloc(ranks, sizeof *lane->questions);
        lane->num_waiting = calloc(ranks, sizeof *lane->num_waiting);
        lane->owed_revoke = calloc(ranks, 1);
        lane->owed_revoked = calloc(ranks, 1);
        lane->greeted = calloc((size_t)ranks * FAB_MAX_RAILS, 1);
        complete = complete && lane->lost && lane->revoking && lane->questions && lane->num_waiting;
        complete = complete && lane->owed_revoke && lane->owed_revoked && lane->greeted;
        for (uint32_t r = 0; r < lane->num_rails; r++) {
            lane->rails[r].remote = calloc(ranks, sizeof *lane->rails[r].remote);
            complete = complete && lane->rails[r].remote;
        }
    }
    for (uint32_t i = 0; context->watches && i < ranks; i++) {
        context->watches[i].pidfd = -1;
    }
    context->num_ranks = ranks;
    if (!complete) {
        snprintf(context->words, sizeof context->words, "out of memory for %u ranks", ranks);
        return -FI_ENOMEM;
    }
    return 0;
}

int fab_add_peer(fab_context *context, uint32_t lane, uint32_t rail_index, uint32_t peer, const uint8_t *name,
                 size_t name_bytes, uint32_t regions, const uint64_t *keys, const uint64_t *bases,
                 const uint64_t *bytes) {
    fab_rail *rail = &context->lanes[lane].rails[rail_index];
    fab_remote *remote = &rail->remote[peer];
    /* Providers differ in how much they read of a short address: give them room. */
    uint8_t room[256] = {0};
    if (name_bytes > sizeof room || regions > FAB_MAX_REGIONS || peer >= context->num_ranks) {
        snprintf(context->words, sizeof context->words, "the address of rank %u is malformed", peer);
        return -FI_EINVAL;
    }
    memcpy(room, name, name_bytes);
    const int inserted = fi_av_insert(rail->av, room, 1, &remote->address, 0, NULL);
    if (inserted != 1) {
        snprintf(context->words, sizeof context->words, "the provider refused the address of rank %u: %s", peer,
                 inserted < 0 ? fab_error_text(context->library, inserted) : "not inserted");
        return inserted < 0 ? inserted : -FI_EINVAL;
    }
    remote->regions = regions;
    memcpy(remote->key, keys, regions * sizeof *keys);
    memcpy(remote->base, bases, regions * sizeof *bases);
    memcpy(remote->bytes, bytes, regions * sizeof *bytes);
    context->expected[peer] = 1;
    return 0;
}

/* Greet on every rail of a lane whatever has not been greeted; 1 when all is done. */
static int greet(fab_lane *lane) {
    int done = 1;
    for (uint32_t peer = 0; peer < lane->context->num_ranks; peer++) {
        for (uint32_t r = 0; lane->context->expected[peer] && r < lane->num_rails; r++) {
            uint8_t *greeted = &lane->greeted[(size_t)peer * FAB_MAX_RAILS + r];
            if (!(*greeted & FAB_HELLO_POSTED) && !fab_send_message(lane, r, peer, FAB_HELLO, r)) {
                *greeted |= FAB_HELLO_POSTED;
            }
            if ((*greeted & FAB_HELLO_SEEN) && !(*greeted & FAB_WELCOME_POSTED) &&
                !fab_send_message(lane, r, peer, FAB_WELCOME, r)) {
                *greeted |= FAB_WELCOME_POSTED;
            }
            done = done && (*greeted & FAB_GREETED) == FAB_GREETED;
        }
    }
    return done;
}

int fab_handshake(fab_context *context, uint32_t budget_us) {
    const uint64_t end = fab_now_ns() + (uint64_t)budget_us * 1000u;
    do {
        int done = 1;
        for (uint32_t l = 0; l < context->num_lanes; l++) {
            fab_lane *lane = &context->lanes[l];
            if (lane->num_rails == 0) {
                continue;
            }
            uccl_ep_completion completions[FAB_CQ_BATCH];
            uccl_ep_arrival arrivals[FAB_CQ_BATCH];
            const int64_t failed = fab_poll_completions(context, l, completions, FAB_CQ_BATCH);
            if (failed < 0) {
                snprintf(context->words, sizeof context->words, "%s", lane->error);
                return (int)failed;
            }
            for (uint32_t r = 0; r < lane->num_rails; r++) {
                const uint64_t early = fab_read_arrivals(lane, r, arrivals, FAB_CQ_BATCH);
                for (uint64_t i = 0; i < early; i++) {
                    fab_stash_push(lane, arrivals[i].immediate);
                }
            }
            done = greet(lane) && done;
            if (lane->statistics.rails_lost) {
                snprintf(context->words, sizeof context->words, "%s", lane->error);
                return -FI_ENOTCONN;
            }
        }
        if (done) {
            return 1;
        }
        sched_yield();
    } while (fab_now_ns() < end);
    return 0;
}

int32_t fab_handshake_missing(const fab_context *context) {
    for (uint32_t l = 0; l < context->num_lanes; l++) {
        const fab_lane *lane = &context->lanes[l];
        for (uint32_t peer = 0; lane->num_rails && peer < context->num_ranks; peer++) {
            for (uint32_t r = 0; context->expected[peer] && r < lane->num_rails; r++) {
                if ((lane->greeted[(size_t)peer * FAB_MAX_RAILS + r] & FAB_GREETED) != FAB_GREETED) {
                    return (int32_t)peer;
                }
            }
        }
    }
    return -1;
}
