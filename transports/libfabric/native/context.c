/* A context: all lanes of one rank of one buffer. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fabric.h"

static int build_lane(fab_context *context, fab_lane *lane, uint32_t index) {
    lane->context = context;
    lane->index = index;
    /* Twice the depth, since writes that were given up keep their slot until the provider returns it. Over several
     * rails a write is itself and a part for each; as many copies are made when a rail is lost, and the originals of
     * all rails lost so far keep their slots: for r rails that share the parts evenly at most r (1/r + ... + 1/2) times
     * the depth, less than 2 r. */
    const uint32_t whole_and_parts = context->num_rails == 1 ? 2 : 1 + 3 * context->num_rails;
    lane->num_operations = whole_and_parts * context->send_depth + 64;
    if (posix_memalign((void **)&lane->operations, 64, lane->num_operations * sizeof(fab_operation))) {
        lane->operations = NULL;
        return -1;
    }
    memset(lane->operations, 0, lane->num_operations * sizeof(fab_operation));
    for (uint32_t i = 0; i < lane->num_operations; i++) {
        lane->operations[i].index = i;
        lane->operations[i].next = i + 1 < lane->num_operations ? i + 1 : FAB_NONE;
    }
    lane->free_head = 0;
    lane->messages = lane->waiting = (fab_queue){FAB_NONE, FAB_NONE};
    lane->done = calloc(context->send_depth, sizeof *lane->done);
    return lane->done ? 0 : -1;
}

fab_context *fab_create(const fab_library *library, uint32_t lanes, uint32_t rails, uint32_t send_depth,
                        uint32_t receive_depth, uint64_t stripe_bytes, uint64_t max_message) {
    if (lanes == 0 || lanes > FAB_MAX_LANES || rails == 0 || rails > FAB_MAX_RAILS || send_depth == 0) {
        return NULL;
    }
    fab_context *context = calloc(1, sizeof *context);
    if (!context) {
        return NULL;
    }
    context->library = library;
    context->num_rails = rails;
    context->send_depth = send_depth;
    context->receive_depth = receive_depth;
    context->stripe_bytes = stripe_bytes;
    context->max_message = max_message;
    context->lanes = calloc(lanes, sizeof *context->lanes);
    if (!context->lanes) {
        free(context);
        return NULL;
    }
    context->num_lanes = lanes;
    context->revoke_ns = UINT64_C(30000000000);
    for (uint32_t i = 0; i < lanes; i++) {
        if (build_lane(context, &context->lanes[i], i)) {
            fab_close(context);
            return NULL;
        }
    }
    context->table = (uccl_ep_transport_ops){
        .magic = UCCL_EP_TRANSPORT_MAGIC,
        .size = sizeof(uccl_ep_transport_ops),
        .context = context,
        .post_writes = fab_post_writes,
        .poll_completions = fab_poll_completions,
        .poll_arrivals = fab_poll_arrivals,
        .peer_state = fab_peer_state,
        .last_error = fab_last_error,
    };
    return context;
}

int fab_open_rail(fab_context *context, uint32_t rail, const fab_query *query, int choice) {
    int error = 0;
    struct fi_info *list = fab_ask(context->library, query, &error);
    const struct fi_info *info = list;
    for (int i = 0; info && i < choice; i++) {
        info = info->next;
    }
    if (!info) {
        snprintf(context->words, sizeof context->words, "fi_getinfo no longer has the answer it had: %s",
                 fab_error_text(context->library, error));
        error = error ? error : -FI_ENODATA;
    }
    fab_handlers handlers;
    fab_keep_handlers(&handlers);
    for (uint32_t l = 0; info && !error && l < context->num_lanes; l++) {
        fab_lane *lane = &context->lanes[l];
        error = fab_rail_open(context, lane, &lane->rails[rail], info);
        lane->num_rails = rail + 1;
    }
    fab_restore_handlers(&handlers);
    if (list) {
        context->library->freeinfo(list);
    }
    return error;
}

void fab_set_patience(fab_context *context, uint64_t nanoseconds) { context->patience_ns = nanoseconds; }
void fab_set_revoke_limit(fab_context *context, uint64_t nanoseconds) { context->revoke_ns = nanoseconds; }
void fab_set_delivery(fab_context *context, int always, int network) {
    context->write_flags = always ? FI_DELIVERY_COMPLETE : 0;
    context->network = network != 0;
}
const char *fab_words(const fab_context *context) { return context->words; }
void *fab_operations(fab_context *context) { return &context->table; }

void fab_watch_peer(fab_context *context, uint32_t peer, int32_t pidfd) { context->watches[peer].pidfd = pidfd; }

/* Any thread. A process of this host is asked through its pidfd, at most once a millisecond. */
int32_t fab_peer_state(void *opaque, uint32_t peer) {
    fab_context *context = opaque;
    if (peer >= context->num_ranks) {
        return UCCL_EP_PEER_ALIVE;
    }
    if (atomic_load_explicit(&context->dead[peer], memory_order_relaxed)) {
        return UCCL_EP_PEER_DEAD;
    }
    fab_watch *watch = &context->watches[peer];
    if (watch->pidfd < 0) {
        return UCCL_EP_PEER_ALIVE;
    }
    const uint64_t now = fab_now_ns();
    if (now < atomic_load_explicit(&watch->next_ns, memory_order_relaxed)) {
        return UCCL_EP_PEER_ALIVE;
    }
    atomic_store_explicit(&watch->next_ns, now + 1000000u, memory_order_relaxed);
    struct pollfd entry = {.fd = watch->pidfd, .events = POLLIN};
    if (poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN)) {
        fab_bury(context, peer);
        return UCCL_EP_PEER_DEAD;
    }
    return UCCL_EP_PEER_ALIVE;
}

int32_t fab_peer_is_dead(fab_context *context, uint32_t peer) { return fab_peer_state(context, peer); }

const char *fab_last_error(void *opaque, uint32_t lane) {
    const fab_context *context = opaque;
    return lane < context->num_lanes ? context->lanes[lane].error : "no such lane";
}

void fab_get_statistics(const fab_context *context, fab_statistics *out) {
    memset(out, 0, sizeof *out);
    for (uint32_t l = 0; l < context->num_lanes; l++) {
        const fab_statistics *from = &context->lanes[l].statistics;
        out->posted += from->posted;
        out->posted_bytes += from->posted_bytes;
        out->completed += from->completed;
        out->failed += from->failed;
        out->arrived += from->arrived;
        out->again += from->again;
        out->split += from->split;
        out->moved += from->moved;
        out->rails_lost += from->rails_lost;
    }
}

void fab_close(fab_context *context) {
    if (!context) {
        return;
    }
    bool any_retired = false;
    for (uint32_t l = 0; l < context->num_lanes; l++) {
        fab_lane *lane = &context->lanes[l];
        bool retired = false;
        for (uint32_t r = 0; r < FAB_MAX_RAILS; r++) {
            fab_rail *rail = &lane->rails[r];
            fab_rail_close(rail);
            if (rail->retired) { /* its endpoint still points to what is below */
                retired = true;
                free(rail->remote);
                continue;
            }
            if (rail->info) {
                context->library->freeinfo(rail->info);
            }
            free(rail->messages);
            free(rail->remote);
        }
        if (!retired) {
            free(lane->operations);
        }
        any_retired = any_retired || retired;
        free(lane->done);
        free(lane->lost);
        free(lane->revoking);
        free(lane->questions);
        free(lane->num_waiting);
        free(lane->owed_revoke);
        free(lane->owed_revoked);
        free(lane->greeted);
        free(lane->stash.immediates);
    }
    for (uint32_t i = 0; context->watches && i < context->num_ranks; i++) {
        if (context->watches[i].pidfd >= 0) {
            close(context->watches[i].pidfd);
        }
    }
    free(context->watches);
    free((void *)context->dead);
    free(context->expected);
    if (!any_retired) { /* else receives that the provider has lie in it */
        free(context->lanes);
    }
    free(context);
}
