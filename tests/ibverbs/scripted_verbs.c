/* A device of one process whose reliable connections do what a test says; no driver and no library of verbs is needed.
 *
 * A request is posted, then it travels, is carried out at the other end (bytes placed, a receive used up for an immediate),
 * and is acknowledged, in order. A queue pair that fails returns all it has with an error, whatever became of it: what
 * travels goes on and is carried out where the other end still takes it. A queue pair that is destroyed takes the entries
 * that nobody has polled with it, as drivers do.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kPairs = 4096, kDepth = 1024, kRing = 1 << 15 };

struct queue {
    struct ibv_cq cq;
    struct ibv_wc entries[kRing];
    uint32_t first, count;
};

struct request {
    uint64_t id, target, source;
    uint32_t length, immediate;
    bool signalled, with_immediate;
    uint8_t copy[16];
};

struct pair {
    struct ibv_qp qp;
    enum { kInit, kUp, kError, kGone } state;
    uint32_t other;
    struct request sends[kDepth];
    uint64_t posted, travelling, done, acknowledged; /* counts, each at most the one before */
    uint64_t receives[kDepth];
    uint64_t first_receive, num_receives;
};

static struct ibv_context context;
static struct ibv_pd domain;
static struct pair *pairs[kPairs];
static uint32_t num_pairs;
static uint64_t generator;
static int refuse_in_1000;

static uint32_t pick(uint32_t below) {
    generator = generator * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((generator >> 33) % below);
}

static void enter(struct ibv_cq *cq, struct ibv_wc entry) {
    struct queue *queue = (struct queue *)cq;
    queue->entries[(queue->first + queue->count++) % kRing] = entry;
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *out) {
    struct queue *queue = (struct queue *)cq;
    int got = 0;
    while (got < most && queue->count) {
        out[got++] = queue->entries[queue->first];
        queue->first = (queue->first + 1) % kRing;
        queue->count--;
    }
    return got;
}

static void flush(struct pair *pair, enum ibv_wc_status first) {
    while (pair->acknowledged < pair->posted) {
        const struct request *request = &pair->sends[pair->acknowledged++ % kDepth];
        enter(pair->qp.send_cq, (struct ibv_wc){.wr_id = request->id, .status = first, .qp_num = pair->qp.qp_num});
        first = IBV_WC_WR_FLUSH_ERR;
    }
    while (pair->first_receive < pair->num_receives) {
        enter(pair->qp.recv_cq, (struct ibv_wc){.wr_id = pair->receives[pair->first_receive++ % kDepth],
                                                .status = IBV_WC_WR_FLUSH_ERR,
                                                .qp_num = pair->qp.qp_num});
    }
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *work, struct ibv_send_wr **refused) {
    struct pair *pair = (struct pair *)qp;
    for (; work; work = work->next) {
        if (pair->state == kInit || pair->posted - pair->acknowledged >= kDepth ||
            (refuse_in_1000 && pick(1000) < (uint32_t)refuse_in_1000)) {
            *refused = work;
            return ENOMEM;
        }
        struct request *request = &pair->sends[pair->posted++ % kDepth];
        *request =
            (struct request){.id = work->wr_id,
                             .target = work->wr.rdma.remote_addr,
                             .source = work->num_sge ? work->sg_list->addr : 0,
                             .length = work->num_sge && work->opcode != IBV_WR_RDMA_READ ? work->sg_list->length : 0,
                             .immediate = work->imm_data,
                             .signalled = (work->send_flags & IBV_SEND_SIGNALED) != 0,
                             .with_immediate = work->opcode == IBV_WR_RDMA_WRITE_WITH_IMM};
        if (work->send_flags & IBV_SEND_INLINE) {
            memcpy(request->copy, (void *)request->source, request->length);
            request->source = 0;
        }
    }
    if (pair->state == kError) flush(pair, IBV_WC_WR_FLUSH_ERR);
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *work, struct ibv_recv_wr **refused) {
    struct pair *pair = (struct pair *)qp;
    for (; work; work = work->next) {
        if (pair->num_receives - pair->first_receive >= kDepth) {
            *refused = work;
            return ENOMEM;
        }
        pair->receives[pair->num_receives++ % kDepth] = work->wr_id;
    }
    if (pair->state == kError) flush(pair, IBV_WC_WR_FLUSH_ERR);
    return 0;
}

/* ---- what a test calls ---- */

void scripted_begin(uint64_t seed, int thousandths_refused) {
    generator = seed * 2 + 1;
    refuse_in_1000 = thousandths_refused;
    num_pairs = 1; /* what the last test made is left alone */
    context.ops.poll_cq = poll_cq;
    context.ops.post_send = post_send;
    context.ops.post_recv = post_recv;
    domain.context = &context;
}
void *scripted_domain(void) { return &domain; }
void *scripted_queue(void) {
    struct queue *queue = calloc(1, sizeof *queue);
    queue->cq.context = &context;
    return queue;
}
void *scripted_pair(void *send_queue, void *receive_queue) {
    struct pair *pair = calloc(1, sizeof *pair);
    pair->qp.context = &context;
    pair->qp.pd = &domain;
    pair->qp.send_cq = send_queue;
    pair->qp.recv_cq = receive_queue;
    pair->qp.qp_num = num_pairs;
    pairs[num_pairs++] = pair;
    return pair;
}
uint32_t scripted_number(void *pair) { return ((struct pair *)pair)->qp.qp_num; }
void scripted_connect(void *pair, uint32_t other) {
    ((struct pair *)pair)->other = other;
    if (((struct pair *)pair)->state == kInit) ((struct pair *)pair)->state = kUp;
}
static void fail(struct pair *pair, enum ibv_wc_status first) {
    if (pair->state == kInit || pair->state == kUp) {
        pair->state = kError;
        flush(pair, first);
    }
}
void scripted_fail(void *pair) { fail(pair, IBV_WC_WR_FLUSH_ERR); }
/* By its number; `broken_link`: as one whose writes nobody acknowledges. */
void scripted_fail_number(uint32_t number, int broken_link) {
    fail(pairs[number], broken_link ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR);
}
static void forget(struct queue *queue, uint32_t number) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < queue->count; i++) {
        const struct ibv_wc entry = queue->entries[(queue->first + i) % kRing];
        if (entry.qp_num != number) queue->entries[(queue->first + kept++) % kRing] = entry;
    }
    queue->count = kept;
}
void scripted_destroy(void *handle) {
    struct pair *pair = handle;
    pair->state = kGone;
    forget((struct queue *)pair->qp.send_cq, pair->qp.qp_num);
    forget((struct queue *)pair->qp.recv_cq, pair->qp.qp_num);
}

static void step_of(struct pair *pair) {
    struct pair *other = pair->other ? pairs[pair->other] : NULL;
    const uint32_t what = pick(3);
    if (what == 0 && pair->state == kUp && pair->travelling < pair->posted) {
        pair->travelling++;
    } else if (what == 1 && pair->done < pair->travelling && other) {
        struct request *request = &pair->sends[pair->done % kDepth];
        if (other->state == kGone || other->state == kError ||
            (other->state == kUp && other->other != pair->qp.qp_num)) {
            if (pair->state == kUp && pick(20) == 0) fail(pair, IBV_WC_RETRY_EXC_ERR);
            if (pair->state != kUp) pair->done++;
            return;
        }
        if (other->state == kInit) return; /* not connected yet: tried again */
        if (request->with_immediate) {
            if (other->first_receive == other->num_receives) return;
            enter(other->qp.recv_cq, (struct ibv_wc){.wr_id = other->receives[other->first_receive++ % kDepth],
                                                     .status = IBV_WC_SUCCESS,
                                                     .imm_data = request->immediate,
                                                     .qp_num = other->qp.qp_num});
        }
        memcpy((void *)request->target, request->source ? (void *)request->source : request->copy, request->length);
        pair->done++;
    } else if (what == 2 && pair->state == kUp && pair->acknowledged < pair->done) {
        const struct request *request = &pair->sends[pair->acknowledged++ % kDepth];
        if (request->signalled) {
            enter(pair->qp.send_cq,
                  (struct ibv_wc){.wr_id = request->id, .status = IBV_WC_SUCCESS, .qp_num = pair->qp.qp_num});
        }
    }
}
void scripted_step(uint32_t steps) {
    while (steps-- && num_pairs > 1) {
        const uint32_t number = 1 + pick(num_pairs - 1);
        step_of(pairs[number]);
    }
}
uint32_t scripted_pairs(void) { return num_pairs; }
