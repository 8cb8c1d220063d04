/* Types shared by the files of the libfabric data plane.
 *
 * One lane = one endpoint per rail, each with a domain, an address vector and two completion queues of
 * its own, so that lanes share no lock and FI_THREAD_DOMAIN holds. A lane is driven by one thread;
 * set-up runs before that thread exists.
 */
#ifndef UCCL_EP_LIBFABRIC_FABRIC_H
#define UCCL_EP_LIBFABRIC_FABRIC_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "interface.h"
#include "uccl_ep/transport.h"

/* dma-buf registration came with 1.20; older headers lack the types, so the feature is compiled out. */
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 20
#define FAB_DMABUF 1
#else
#define FAB_DMABUF 0
#endif

#define FAB_MAX_LANES 64u
#define FAB_MAX_RAILS 8u
#define FAB_MAX_REGIONS 8u
#define FAB_RECEIVES 64u  /* control receives posted on each endpoint, no more than `missing` has bits */
#define FAB_CQ_BATCH 32u  /* entries read from a completion queue at once */
#define FAB_NONE UINT32_MAX

struct fab_library {
    void *handle;
    uint32_t version;      /* of the library */
    uint32_t use_version;  /* what we speak: no newer than headers and library */
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const char *(*strerror)(int);
    char *(*tostr)(const void *, enum fi_type);
};

/* Kinds of control message, sent between endpoints beside the writes. */
enum fab_message_kind {
    FAB_HELLO = 1,    /* my address vector holds you */
    FAB_WELCOME = 2,  /* I have your HELLO */
    FAB_REVOKE = 3,   /* rail `argument` of this lane failed: give up yours, my writes come another way */
    FAB_REVOKED = 4,  /* rail `argument` is given up here, nothing of it can land any more */
    FAB_IMMEDIATE = 5, /* a write of nothing, whose immediate is `argument`; data.c says when */
};

enum fab_greeting {
    FAB_HELLO_SEEN = 1,
    FAB_WELCOME_SEEN = 2,
    FAB_HELLO_POSTED = 4,
    FAB_WELCOME_POSTED = 8,
    FAB_WELCOME_SENT = 16,
    FAB_GREETED = FAB_HELLO_SEEN | FAB_WELCOME_SEEN | FAB_WELCOME_SENT,
};

typedef struct fab_message {
    uint64_t group;  /* guards against a stray process of an earlier group */
    uint32_t kind;
    uint32_t rank;
    uint32_t lane;
    uint32_t argument;
} fab_message;

enum fab_operation_kind {
    FAB_FREE = 0,
    FAB_WRITE,      /* a whole write of the caller, or the tail of a striped one */
    FAB_CHUNK,      /* a part of a striped write */
    FAB_PARENT,     /* a striped write that waits for its parts; not posted itself */
    FAB_HELD_WRITE, /* its rail is lost; waits until the peer says that nothing of it can land any more */
    FAB_HELD_CHUNK,
    FAB_SEND,       /* a control message going out */
    FAB_ABANDONED,  /* nobody waits for it any more; the provider may still return it */
};

/* The provider's scratch space comes first and lives until the completion is read. What an ordinary write and its
 * completion touch fills the second cache line. */
typedef struct fab_operation {
    _Alignas(64) struct fi_context2 scratch;
    uccl_ep_write write; /* with one rail only peer, bytes and token, unless it waits to be posted */
    uint32_t next;       /* free list, or list of writes that wait to be posted */
    uint8_t kind;
    uint8_t rail;
    uint8_t posted;      /* the provider has it */
    uint32_t index;
    uint32_t parent;     /* of a chunk */
    uint32_t remaining;  /* of a parent: chunks in flight */
    int32_t status;      /* of a parent: first error of a chunk */
} fab_operation;

typedef struct fab_receive {
    struct fi_context2 scratch;
    uint32_t index;
} fab_receive;

typedef struct fab_remote {
    uint64_t key[FAB_MAX_REGIONS];
    uint64_t base[FAB_MAX_REGIONS];
    uint64_t bytes[FAB_MAX_REGIONS];
    fi_addr_t address;
    uint32_t regions;
    uint32_t pending;       /* writes that the provider has, towards this peer on this rail */
    uint32_t full_in;       /* the pass over what waits in which the provider took nothing for this peer */
    uint64_t refused_since; /* when the provider began to refuse writes, 0: it does not */
} fab_remote;

typedef struct fab_rail {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_ep *endpoint;
    struct fid_av *av;
    struct fid_cq *tx_cq;
    struct fid_cq *rx_cq;
    struct fid_mr *mr[FAB_MAX_REGIONS];
    void *desc[FAB_MAX_REGIONS];
    uint8_t *local[FAB_MAX_REGIONS];
    uint64_t local_bytes[FAB_MAX_REGIONS];
    fab_remote *remote; /* by rank */
    struct fid_mr *message_mr;
    fab_message *messages; /* receives first, then one per operation that may be a send */
    fab_receive receives[FAB_RECEIVES];
    uint64_t missing; /* bit i set: receive i is to be posted again */
    uint64_t outstanding_bytes;
    uint32_t outstanding; /* writes that the provider has */
    bool virtual_address;
    bool receive_data; /* every arrival consumes a posted receive */
    bool open;    /* in use */
    bool retired; /* given up: its memory is deregistered, it is never polled again, and it is never closed */
} fab_rail;

/* Operations to be posted from poll, by their `next`. */
typedef struct fab_queue {
    uint32_t head, tail;
} fab_queue;

typedef struct fab_stash {
    uint64_t *immediates;
    uint64_t first, count, capacity;
} fab_stash;

typedef struct fab_question {
    uint64_t since_ns, next_ns, pause_ns;
} fab_question;

typedef struct fab_lane {
    struct fab_context *context;
    uint32_t index;
    uint32_t num_rails;
    fab_rail rails[FAB_MAX_RAILS];
    fab_operation *operations;
    uint32_t num_operations;
    uint32_t free_head;
    uint32_t in_flight; /* writes accepted and not yet reported */
    fab_queue messages, waiting; /* the second: parts, immediates of striped writes, writes moved from a lost rail */
    uint32_t *num_waiting; /* [rank]: operations to it in either */
    uint32_t peers_waited; /* ranks with any */
    uint32_t pass;         /* over either */
    uint32_t first_rail;   /* arrivals are read from this one first */
    uccl_ep_completion *done; /* ring of completions made here, not by a queue */
    uint32_t done_first, done_count;
    uint8_t *lost;     /* [rank]: bit r set: rail r to that rank is gone */
    uint8_t *revoking; /* [rank]: bit r set: waiting for that rank's FAB_REVOKED */
    fab_question *questions; /* [rank]: since when, and when to ask again */
    bool asks;         /* any bit of `revoking` may be set */
    uint8_t *owed_revoke, *owed_revoked; /* [rank]: bit r set: that message about rail r is still to be sent */
    bool owes;         /* any of these bits is set */
    int broken;        /* negative errno of an arrival queue that cannot be read any more */
    uint8_t *greeted;  /* [rank * rails + rail]: fab_greeting bits */
    uint32_t deaths_seen;
    _Atomic uint32_t break_request; /* bit r set: close rail r at the next poll (tests) */
    fab_stash stash;
    fab_statistics statistics;
    char error[256];
} fab_lane;

typedef struct fab_watch {
    int32_t pidfd;
    _Atomic uint64_t next_ns; /* when to look at the pidfd again */
} fab_watch;

struct fab_context {
    const fab_library *library;
    uccl_ep_transport_ops table;
    fab_lane *lanes;
    uint32_t num_lanes;
    uint32_t num_rails;
    uint32_t send_depth, receive_depth;
    uint64_t stripe_bytes, max_message;
    uint64_t patience_ns;
    uint64_t revoke_ns;   /* a peer answers FAB_REVOKE in this time, or counts as dead */
    uint64_t write_flags; /* of every write: FI_DELIVERY_COMPLETE or 0 */
    bool network;         /* the provider reaches other machines */
    uint32_t rank, num_ranks;
    uint64_t group;
    _Atomic int32_t *dead;    /* by rank: uccl_ep_peer_state */
    _Atomic uint32_t deaths;  /* how many are dead; lanes look for new ones when it moves */
    uint8_t *expected;        /* by rank: 1 where a peer was added */
    fab_watch *watches;       /* by rank */
    char words[512];
};

static inline uint64_t fab_remote_address(const fab_rail *rail, const fab_remote *remote, uint32_t region,
                                          uint64_t offset) {
    return rail->virtual_address ? remote->base[region] + offset : offset;
}

/* Whether this rank and, for all that it knows, the peer still use a rail of this lane. */
static inline bool fab_is_way(const fab_lane *lane, uint32_t rail, uint32_t peer) {
    return rail < lane->num_rails && lane->rails[rail].open && !(lane->lost[peer] & (1u << rail));
}

static inline bool fab_has_waiting(const fab_lane *lane) {
    return lane->messages.head != FAB_NONE || lane->waiting.head != FAB_NONE;
}

/* The pool of operations. In the header because two files call it for every write. */
static inline fab_operation *fab_take(fab_lane *lane) {
    if (lane->free_head == FAB_NONE) {
        return NULL;
    }
    fab_operation *operation = &lane->operations[lane->free_head];
    lane->free_head = operation->next;
    return operation;
}

static inline void fab_give(fab_lane *lane, fab_operation *operation) {
    operation->kind = FAB_FREE;
    operation->posted = 0;
    operation->next = lane->free_head;
    lane->free_head = (uint32_t)(operation - lane->operations);
}

uint64_t fab_now_ns(void);

/* library.c. Some libraries that libfabric pulls in (PSM) or providers (shm) take over the signal handlers
 * of the process: SIGTERM or a crash then ends in exit() from inside a handler, which hangs. Every call
 * that may load or start one is put between these two. Set-up only, never in parallel with itself. */
#define FAB_SIGNALS 8
typedef struct fab_handlers {
    struct sigaction actions[FAB_SIGNALS];
} fab_handlers;
void fab_keep_handlers(fab_handlers *handlers);
void fab_restore_handlers(const fab_handlers *handlers);

/* The provider gave a write back. */
static inline void fab_returned(fab_rail *rail, fab_operation *operation) {
    operation->posted = 0;
    rail->outstanding--;
    rail->outstanding_bytes -= operation->write.bytes;
    rail->remote[operation->write.peer].pending--;
}

/* library.c */
struct fi_info *fab_ask(const fab_library *library, const fab_query *query, int *error);

/* endpoint.c */
int fab_rail_open(fab_context *context, fab_lane *lane, fab_rail *rail, const struct fi_info *info);
void fab_rail_close(fab_rail *rail);
void fab_rail_revoke(fab_rail *rail);
int fab_post_receive(fab_rail *rail, uint32_t index);
void fab_post_missing(fab_rail *rail);

/* data.c */
void fab_wait_to_post(fab_lane *lane, fab_operation *operation);
void fab_post_waiting(fab_lane *lane);
uint32_t fab_choose_rail(const fab_lane *lane, uint32_t peer);
void fab_finish(fab_lane *lane, fab_operation *operation, int32_t status);
int64_t fab_post_writes(void *context, uint32_t lane, const uccl_ep_write *writes, uint64_t count);

/* stripe.c */
uint32_t fab_living_rails(const fab_lane *lane, uint32_t peer);
bool fab_stripe(fab_lane *lane, const uccl_ep_write *write, uint32_t rails);

/* poll.c */
void fab_stash_push(fab_lane *lane, uint64_t immediate);
uint64_t fab_read_arrivals(fab_lane *lane, uint32_t rail, uccl_ep_arrival *out, uint64_t capacity);
int64_t fab_poll_completions(void *context, uint32_t lane, uccl_ep_completion *out, uint64_t capacity);
int64_t fab_poll_arrivals(void *context, uint32_t lane, uccl_ep_arrival *out, uint64_t capacity);

/* context.c */
int32_t fab_peer_state(void *context, uint32_t peer);
const char *fab_last_error(void *context, uint32_t lane);

/* connect.c: control messages and the handshake */
bool fab_handle_message(fab_lane *lane, const fab_message *message);
ssize_t fab_send_immediate(fab_lane *lane, fab_operation *operation, const uccl_ep_write *write);
void fab_message_sent(fab_lane *lane, fab_operation *operation);
int fab_send_message(fab_lane *lane, uint32_t rail, uint32_t peer, uint32_t kind, uint32_t argument);
ssize_t fab_post_message(fab_lane *lane, fab_operation *operation);
void fab_owe(fab_lane *lane, uint32_t peer, uint32_t kind, uint32_t rail);
void fab_pay(fab_lane *lane);

/* failover.c */
bool fab_is_peer_error(int error);
void fab_bury(fab_context *context, uint32_t peer);
void fab_forget_dead(fab_lane *lane);
void fab_hold(fab_lane *lane, fab_operation *operation);
void fab_lose_rail(fab_lane *lane, uint32_t rail, uint32_t peer, int error, const char *words);
void fab_refused(fab_lane *lane, uint32_t rail, uint32_t peer);
void fab_shut_rail(fab_lane *lane, uint32_t rail, const char *words);
void fab_revoked(fab_lane *lane, uint32_t rail, uint32_t peer);
void fab_ask_again(fab_lane *lane);

#endif /* UCCL_EP_LIBFABRIC_FABRIC_H */
