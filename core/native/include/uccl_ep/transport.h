/* The data half of a uccl_ep transport: a table of C function pointers.
 *
 * Proxy threads call these functions without the Python GIL. The set-up half (opening a device,
 * registering memory, exchanging addresses) is Python and is described in uccl_ep_core.transport;
 * its `native_ops` property returns the address of one `uccl_ep_transport_ops`.
 *
 * Threading. A lane belongs to exactly one proxy thread after connect: every function that takes a
 * lane is called by that thread alone. Functions without a lane may be called from any thread.
 * No function may block, sleep, abort or exit; one that cannot go on returns and is called again. One that never
 * returns is survived, at the price of its thread and of all memory that it may touch.
 *
 * Growth. `magic` and `size` come first; fields are only ever appended. A caller must treat a
 * pointer that lies beyond `size`, and any pointer that is NULL, as "not provided".
 */
#ifndef UCCL_EP_TRANSPORT_H
#define UCCL_EP_TRANSPORT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCCL_EP_TRANSPORT_MAGIC UINT64_C(0x5543434c45505431) /* "UCCLEPT1" */

/* Which registered memory an offset is relative to: the order of register() calls, on all ranks. */
enum uccl_ep_region {
    UCCL_EP_REGION_DATA = 0,    /* payload; GPU memory or host memory */
    UCCL_EP_REGION_CONTROL = 1, /* signals, announced counts, credits, verdicts; host memory */
};

enum uccl_ep_write_flags {
    UCCL_EP_WRITE_IMMEDIATE = 1, /* carry `immediate` to the receiver's poll_arrivals */
    UCCL_EP_WRITE_FENCED = 2,    /* complete only when the bytes are placed at the target
                                    (needs `delivery_complete` or `flush`) */
};

/* One one-sided write of `bytes` bytes (0 is legal with an immediate) to rank `peer`.
 * The local bytes stay unchanged until the completion that carries `token` was polled. */
typedef struct uccl_ep_write {
    uint32_t peer;
    uint32_t flags;         /* uccl_ep_write_flags */
    uint32_t local_region;  /* uccl_ep_region */
    uint32_t remote_region; /* uccl_ep_region */
    uint64_t local_offset;  /* bytes */
    uint64_t remote_offset; /* bytes */
    uint64_t bytes;         /* at most capabilities.max_message */
    uint64_t immediate;     /* low imm_bits bits travel */
    uint64_t token;         /* returned by poll_completions, opaque to the transport */
} uccl_ep_write;

/* Raise the 64-bit word at `remote_offset` of the peer's control (or data) window to `value`,
 * after all writes this lane posted before to this peer (capability `signal_order`). Values for
 * one word never decrease, so a transport may write or add. */
typedef struct uccl_ep_signal {
    uint32_t peer;
    uint32_t remote_region;
    uint64_t remote_offset; /* bytes, a multiple of 8 */
    uint64_t value;
    uint64_t token;
} uccl_ep_signal;

#define UCCL_EP_PEER_UNKNOWN UINT32_MAX

typedef struct uccl_ep_completion {
    uint64_t token;
    uint32_t peer;  /* of the operation, or UCCL_EP_PEER_UNKNOWN */
    int32_t status; /* 0, or a negative errno: the write may or may not have arrived */
} uccl_ep_completion;

/* A write with immediate that arrived here, its payload already visible to this CPU where the
 * transport promises `imm_after_payload`. */
typedef struct uccl_ep_arrival {
    uint64_t immediate;
    uint32_t peer; /* UCCL_EP_PEER_UNKNOWN where the transport cannot tell */
    uint32_t reserved;
} uccl_ep_arrival;

enum uccl_ep_peer_state {
    UCCL_EP_PEER_ALIVE = 0,
    UCCL_EP_PEER_DEAD = 1, /* final */
};

typedef struct uccl_ep_transport_ops {
    uint64_t magic; /* UCCL_EP_TRANSPORT_MAGIC */
    uint64_t size;  /* sizeof(uccl_ep_transport_ops) the plugin was compiled with */
    void *context;  /* first argument of every function */

    /* Post a batch; returns how many of them, from the first, were accepted (0: queue full, poll
     * and call again), or a negative errno for an error that no retry mends. */
    int64_t (*post_writes)(void *context, uint32_t lane, const uccl_ep_write *writes, uint64_t count);

    /* The same for native signals. NULL without the capability `native_signal`. */
    int64_t (*post_signals)(void *context, uint32_t lane, const uccl_ep_signal *signals, uint64_t count);

    /* Fill up to `capacity` entries, return how many; never blocks. Every accepted write and signal
     * yields exactly one completion. Negative errno: the lane is broken, see last_error.
     * Called again and again for every lane, also with nothing posted, so that a transport without
     * threads of its own can make progress here, as sender and as receiver. */
    int64_t (*poll_completions)(void *context, uint32_t lane, uccl_ep_completion *out, uint64_t capacity);

    /* Likewise for arrived immediates. NULL where `imm_bits` is 0. */
    int64_t (*poll_arrivals)(void *context, uint32_t lane, uccl_ep_arrival *out, uint64_t capacity);

    /* uccl_ep_peer_state of a rank. NULL where the transport cannot notice (`peer_failure` none). */
    int32_t (*peer_state)(void *context, uint32_t peer);

    /* One line of words about the last error of this lane, valid until the lane's next call. */
    const char *(*last_error)(void *context, uint32_t lane);

    /* Begin a new generation of a lane on which an operation completed with an error. Called when all that
     * was accepted on the lane has completed, and again until it returns anything but 0.
     *   1: nothing that was posted before and failed can still land at a peer, whatever it did so far; what
     *      completed without an error has landed, or lands before anything that is posted from now on. The
     *      caller posts what failed again. An immediate that had arrived may still wait in the peer's queue.
     *   0: not yet; poll_completions goes on being called in between.
     *   a negative errno: this lane cannot be renewed; the group then fails.
     * Until then every post on the lane completes with an error.
     * Where `write_order` or `signal_order` is promised, nothing posted behind an operation that failed may
     * complete without an error, or land where the failed one did not, before this was called.
     * NULL (the usual case): errors are final. */
    int64_t (*renew_lane)(void *context, uint32_t lane);
} uccl_ep_transport_ops;

#ifdef __cplusplus
} /* extern "C" */

static_assert(sizeof(uccl_ep_write) == 56, "the ABI of uccl_ep_write is frozen");
static_assert(sizeof(uccl_ep_signal) == 32, "the ABI of uccl_ep_signal is frozen");
static_assert(sizeof(uccl_ep_completion) == 16, "the ABI of uccl_ep_completion is frozen");
static_assert(sizeof(uccl_ep_arrival) == 16, "the ABI of uccl_ep_arrival is frozen");
static_assert(sizeof(uccl_ep_transport_ops) == 10 * 8, "append only: raise this with each new field");
#endif

#endif /* UCCL_EP_TRANSPORT_H */
