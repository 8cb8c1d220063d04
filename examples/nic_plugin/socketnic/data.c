/* The data half of the socket NIC in C: what socketnic/__init__.py does in post_writes and progress,
 * called by proxy threads without the GIL. The set-up half stays Python and hands over sockets.
 *
 * A lane belongs to one thread, so nothing here is locked.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "uccl_ep/transport.h"

enum { DEPTH = 256, MAX_MESSAGE = 1 << 20, MAX_REGIONS = 4, MAX_RANKS = 64, ARRIVALS = 1 << 16 };
enum { DONE = 2 * MAX_RANKS * DEPTH }; /* completions that wait to be polled */
enum { WRITE, WRITE_IMMEDIATE, ACKNOWLEDGE };

typedef struct {
    uint32_t kind, region; /* an acknowledgement has its status for a region */
    uint64_t offset, bytes, immediate, token;
} frame;

typedef struct {
    frame head;
    const char *payload;
    uint64_t sent; /* bytes of the header and then of the payload */
} outgoing;

typedef struct {
    char *base;
    uint64_t bytes;
} region;

typedef struct {
    int fd, dead;
    outgoing queue[4 * DEPTH]; /* writes, and acknowledgements of the peer's: at most DEPTH of each unsent */
    uint64_t head, tail;
    uint64_t tokens[DEPTH], first, last; /* unacknowledged; TCP keeps order, so they end in order */
    frame in;                            /* the frame that is arriving */
    uint64_t in_have;                    /* bytes of it and of its payload so far */
    int in_bad;                          /* errno: its payload has no place and is thrown away */
} connection;

typedef struct {
    connection *links; /* by rank */
    uccl_ep_completion done[DONE];
    uccl_ep_arrival arrived[ARRIVALS];
    uint64_t done_head, done_tail, arrived_head, arrived_tail;
    char error[160];
} lane;

typedef struct {
    uccl_ep_transport_ops ops;
    uint32_t num_lanes, num_ranks;
    region regions[MAX_REGIONS];
    uint32_t num_regions;
    lane *lanes;
} nic;

static char *resolve(const nic *n, uint32_t number, uint64_t offset, uint64_t bytes) {
    if (number >= n->num_regions || offset > n->regions[number].bytes || bytes > n->regions[number].bytes - offset)
        return NULL;
    return n->regions[number].base + offset;
}

static void complete(lane *l, uint64_t token, uint32_t peer, int status) {
    l->done[l->done_tail++ % DONE] = (uccl_ep_completion){token, peer, status};
}

static void send_some(connection *k) {
    while (!k->dead && k->head != k->tail) {
        outgoing *o = &k->queue[k->head % (4 * DEPTH)];
        const uint64_t size = sizeof(frame) + (o->head.kind == ACKNOWLEDGE ? 0 : o->head.bytes);
        while (o->sent < size) {
            const int in_head = o->sent < sizeof(frame);
            const char *from = in_head ? (const char *)&o->head + o->sent : o->payload + (o->sent - sizeof(frame));
            const uint64_t length = in_head ? sizeof(frame) - o->sent : size - o->sent;
            const ssize_t sent = send(k->fd, from, length, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent < 0) {
                k->dead = errno != EAGAIN && errno != EINTR;
                return;
            }
            o->sent += (uint64_t)sent;
        }
        ++k->head;
    }
}

static void push(connection *k, frame head, const char *payload) {
    k->queue[k->tail++ % (4 * DEPTH)] = (outgoing){head, payload, 0};
}

/* A whole frame is here, its payload placed. */
static void take(lane *l, connection *k, uint32_t peer) {
    const frame f = k->in;
    k->in_have = 0;
    if (f.kind == ACKNOWLEDGE) {
        ++k->first;
        complete(l, f.token, peer, -(int)f.region);
        return;
    }
    if (f.kind == WRITE_IMMEDIATE && k->in_bad == 0)
        l->arrived[l->arrived_tail++ % ARRIVALS] = (uccl_ep_arrival){f.immediate, peer, 0};
    push(k, (frame){ACKNOWLEDGE, (uint32_t)k->in_bad, 0, 0, 0, f.token}, NULL);
}

static void receive_some(nic *n, lane *l, connection *k, uint32_t peer) {
    static _Thread_local char nowhere[65536];
    /* With no room for an acknowledgement or an arrival, nothing is read: TCP then holds the peer back. */
    while (!k->dead && k->tail - k->head < 4 * DEPTH && l->arrived_tail - l->arrived_head < ARRIVALS) {
        const int in_head = k->in_have < sizeof(frame);
        const uint64_t at = in_head ? 0 : k->in_have - sizeof(frame);
        char *to = in_head ? (char *)&k->in + k->in_have : resolve(n, k->in.region, k->in.offset, k->in.bytes);
        uint64_t length = in_head ? sizeof(frame) - k->in_have : k->in.bytes - at;
        uint64_t word = 0;
        const int is_word = !in_head && k->in.bytes == 8 && k->in.offset % 8 == 0 && to != NULL;
        if (!in_head && to != NULL) to += at;
        if (!in_head && to == NULL) {
            k->in_bad = EFAULT;
            to = nowhere;
            length = length < sizeof nowhere ? length : sizeof nowhere;
        }
        /* A word that somebody polls must not tear: it is taken whole and stored at once. */
        const ssize_t got = recv(k->fd, is_word ? (char *)&word : to, length, MSG_DONTWAIT | (is_word ? MSG_PEEK : 0));
        if (got <= 0) {
            k->dead = got == 0 || (errno != EAGAIN && errno != EINTR);
            return;
        }
        if (is_word) {
            if (got < 8) return;
            __atomic_store_n((uint64_t *)(void *)to, word, __ATOMIC_RELEASE);
            if (recv(k->fd, &word, 8, MSG_DONTWAIT) != 8) k->dead = 1;
        }
        k->in_have += (uint64_t)got;
        if (in_head && k->in_have == sizeof(frame)) k->in_bad = 0;
        const uint64_t payload = k->in.kind == ACKNOWLEDGE ? 0 : k->in.bytes;
        if (k->in_have >= sizeof(frame) && k->in_have == sizeof(frame) + payload) take(l, k, peer);
    }
}

static void progress(nic *n, lane *l) {
    for (uint32_t peer = 0; peer < n->num_ranks; ++peer) {
        connection *k = &l->links[peer];
        if (k->fd < 0) continue;
        send_some(k);
        receive_some(n, l, k, peer);
        send_some(k);
        for (; k->dead && k->first != k->last; ++k->first) complete(l, k->tokens[k->first % DEPTH], peer, -ENOTCONN);
    }
}

static int64_t post_writes(void *context, uint32_t index, const uccl_ep_write *writes, uint64_t count) {
    nic *n = context;
    lane *l = &n->lanes[index];
    for (uint64_t i = 0; i < count; ++i) {
        const uccl_ep_write *w = &writes[i];
        connection *k = w->peer < n->num_ranks ? &l->links[w->peer] : NULL;
        char *source = resolve(n, w->local_region, w->local_offset, w->bytes);
        if (k == NULL || k->fd < 0 || source == NULL || w->bytes > MAX_MESSAGE) {
            snprintf(l->error, sizeof l->error, "socketnic: rank %u, %llu bytes at %llu of region %u cannot be sent",
                     w->peer, (unsigned long long)w->bytes, (unsigned long long)w->local_offset, w->local_region);
            return i != 0 ? (int64_t)i : w->bytes > MAX_MESSAGE ? -EMSGSIZE : -EINVAL;
        }
        if (k->last - k->first == DEPTH || k->tail - k->head >= 2 * DEPTH || l->done_tail - l->done_head > DONE / 2)
            return (int64_t)i;
        k->tokens[k->last++ % DEPTH] = w->token;
        push(k,
             (frame){w->flags & UCCL_EP_WRITE_IMMEDIATE ? WRITE_IMMEDIATE : WRITE, w->remote_region, w->remote_offset,
                     w->bytes, w->immediate, w->token},
             source);
        send_some(k);
    }
    return (int64_t)count;
}

static int64_t poll_completions(void *context, uint32_t index, uccl_ep_completion *out, uint64_t capacity) {
    nic *n = context;
    lane *l = &n->lanes[index];
    progress(n, l);
    uint64_t count = 0;
    while (count < capacity && l->done_head != l->done_tail) out[count++] = l->done[l->done_head++ % DONE];
    return (int64_t)count;
}

static int64_t poll_arrivals(void *context, uint32_t index, uccl_ep_arrival *out, uint64_t capacity) {
    nic *n = context;
    lane *l = &n->lanes[index];
    progress(n, l);
    uint64_t count = 0;
    while (count < capacity && l->arrived_head != l->arrived_tail)
        out[count++] = l->arrived[l->arrived_head++ % ARRIVALS];
    return (int64_t)count;
}

static const char *last_error(void *context, uint32_t index) { return ((nic *)context)->lanes[index].error; }

/* ---- for the set-up half ---- */

nic *socketnic_new(uint32_t num_ranks, uint32_t num_lanes) {
    if (num_ranks > MAX_RANKS) return NULL;
    nic *n = calloc(1, sizeof *n);
    /* By name: what a later table appends, and what this transport lacks, is NULL. */
    n->ops = (uccl_ep_transport_ops){
        .magic = UCCL_EP_TRANSPORT_MAGIC,
        .size = sizeof n->ops,
        .context = n,
        .post_writes = post_writes,
        .poll_completions = poll_completions,
        .poll_arrivals = poll_arrivals,
        .last_error = last_error,
    };
    n->num_ranks = num_ranks;
    n->num_lanes = num_lanes;
    n->lanes = calloc(num_lanes, sizeof *n->lanes);
    for (uint32_t i = 0; i < num_lanes; ++i) {
        n->lanes[i].links = calloc(num_ranks, sizeof(connection));
        for (uint32_t peer = 0; peer < num_ranks; ++peer) n->lanes[i].links[peer].fd = -1;
    }
    return n;
}

void socketnic_region(nic *n, uint64_t pointer, uint64_t bytes) {
    if (n->num_regions < MAX_REGIONS) n->regions[n->num_regions++] = (region){(char *)(uintptr_t)pointer, bytes};
}

void socketnic_link(nic *n, uint32_t index, uint32_t peer, int fd) { n->lanes[index].links[peer].fd = fd; }

const uccl_ep_transport_ops *socketnic_ops(nic *n) { return &n->ops; }

void socketnic_free(nic *n) {
    for (uint32_t i = 0; i < n->num_lanes; ++i) {
        for (uint32_t peer = 0; peer < n->num_ranks; ++peer)
            if (n->lanes[i].links[peer].fd >= 0) close(n->lanes[i].links[peer].fd);
        free(n->lanes[i].links);
    }
    free(n->lanes);
    free(n);
}
