/* A libfabric of one process whose network does what a test says: writes and messages move one step at a time, in any
 * order, and connections break at any moment. The plugin opens it as it opens any libfabric.so.1.
 *
 * A packet is queued, then it leaves (its bytes are read), lands (bytes placed, an entry for the receiver), and is
 * acknowledged (an entry for the sender). `scripted_step` moves packets picked by a seeded generator. When a connection
 * breaks, each packet on it is lost, or lands without an acknowledgement, or stays and lands some time later: in all
 * three cases its sender gets an error. What needs no acknowledgement is lost without a word, and the connection is there
 * again at once.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

enum { kEndpoints = 256, kRing = 1 << 14, kKeys = 16, kReceives = 256, kMostDelay = 5, kSlow = 64 };

enum state { kQueued, kUnderWay, kLanded };

struct queue {
    struct fid_cq cq;
    struct fi_cq_data_entry entries[kRing];
    uint32_t delay[kRing]; /* reads until the entry shows */
    uint32_t first, count;
    struct fi_cq_err_entry errors[kRing];
    uint32_t first_error, num_errors;
    int broken;
    struct endpoint *endpoint;
};

struct memory {
    struct fid_mr mr;
    struct domain *domain;
    uint8_t *bytes;
    uint64_t length;
};

struct domain {
    struct fid_domain domain;
    struct memory *keys[kKeys];
};

struct endpoint {
    struct fid_ep ep;
    uint32_t id;
    struct domain *domain;
    struct queue *tx, *rx;
    struct {
        void *buffer;
        size_t length;
        void *context;
    } receives[kReceives];
    uint32_t num_receives;
    bool closed;
};

struct packet {
    struct packet *next;
    struct endpoint *from, *to;
    enum state state;
    bool message, acknowledged, orphan; /* orphan: the sender has its completion or error */
    bool immediate, slow; /* slow: others overtake it many times */
    const uint8_t *source;
    uint8_t *copy;
    uint64_t length, offset, key, data;
    void *context;
};

static struct endpoint *endpoints[kEndpoints];
static uint32_t num_endpoints;
static struct packet *packets;
static uint64_t num_packets;
static uint64_t generator;
static bool held[kEndpoints][kEndpoints]; /* nothing moves from one to the other */
static int manual, refusal = FI_EACCES, window = 1 << 30, again_in_1000, short_receives_in_1000;

static uint32_t pick(uint32_t below) {
    generator = generator * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((generator >> 33) % below);
}

/* A device acknowledges a write before the receiver sees its entry. What lands in a call shows in that call. */
static uint32_t delay(void) { return manual ? 0 : pick(kMostDelay); }

static void complete(struct queue *queue, void *context, uint64_t flags, size_t length, uint64_t data, uint32_t delay) {
    const uint32_t at = (queue->first + queue->count++) % kRing;
    queue->entries[at] = (struct fi_cq_data_entry){context, flags, length, NULL, data};
    queue->delay[at] = delay;
}

static void fail(struct queue *queue, void *context, int error) {
    queue->errors[(queue->first_error + queue->num_errors++) % kRing] =
        (struct fi_cq_err_entry){.op_context = context, .err = error, .prov_errno = error};
}

static void drop(struct packet *packet) {
    for (struct packet **at = &packets; *at; at = &(*at)->next) {
        if (*at == packet) {
            *at = packet->next;
            break;
        }
    }
    num_packets--;
    free(packet->copy);
    free(packet);
}

static void error_of(struct packet *packet, int error) {
    if (!packet->orphan) {
        fail(packet->from->tx, packet->context, error);
    }
    packet->orphan = true;
}

static void leave(struct packet *packet) {
    packet->copy = malloc(packet->length + 1);
    memcpy(packet->copy, packet->source, packet->length);
    packet->state = kUnderWay;
    if (!packet->acknowledged && !packet->orphan) {
        complete(packet->from->tx, packet->context, 0, 0, 0, 0);
        packet->orphan = true;
    }
}

/* False: it is gone, or must wait. */
static bool land(struct packet *packet) {
    struct endpoint *to = packet->to;
    if (to->closed) {
        error_of(packet, FI_ECONNRESET);
        drop(packet);
        return false;
    }
    if (packet->message) {
        if (to->num_receives == 0) {
            return false;
        }
        to->num_receives--;
        memcpy(to->receives[to->num_receives].buffer, packet->copy, packet->length);
        complete(to->rx, to->receives[to->num_receives].context, FI_MSG | FI_RECV, packet->length, 0, delay());
    } else {
        struct memory *memory = packet->key < kKeys ? to->domain->keys[packet->key] : NULL;
        if (!memory && !manual) {
            error_of(packet, refusal);
            drop(packet);
            return false;
        }
        if (memory) {
            memcpy(memory->bytes + packet->offset, packet->copy, packet->length);
        }
        if (packet->immediate) {
            complete(to->rx, NULL, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, packet->length, packet->data, delay());
        }
    }
    packet->state = kLanded;
    if (packet->orphan) {
        drop(packet);
        return false;
    }
    return true;
}

static void move(struct packet *packet, bool polled) {
    if (held[packet->from->id][packet->to->id] || (packet->slow && pick(kSlow))) {
        return;
    }
    if (packet->state == kQueued) {
        leave(packet);
    } else if (packet->state == kUnderWay) {
        if (!manual || polled) {
            land(packet);
        }
    } else if (!held[packet->to->id][packet->from->id]) {
        complete(packet->from->tx, packet->context, 0, 0, 0, 0);
        drop(packet);
    }
}

/* ---- what a test calls ---- */

void scripted_begin(uint64_t seed, int land_in_reads, int error_of_refused_writes, int most_under_way,
                    int thousandths_again) {
    generator = seed * 2 + 1;
    manual = land_in_reads;
    refusal = error_of_refused_writes;
    window = most_under_way;
    again_in_1000 = thousandths_again;
    short_receives_in_1000 = 0;
    while (packets) {
        drop(packets);
    }
    num_endpoints = 0; /* what the last test opened is left alone */
    memset(held, 0, sizeof held);
}

uint64_t scripted_step(uint32_t steps) {
    while (steps-- && num_packets) {
        struct packet *packet = packets;
        for (uint32_t skip = pick((uint32_t)(num_packets < 64 ? num_packets : 64)); skip; skip--) {
            packet = packet->next;
        }
        move(packet, false);
    }
    return num_packets;
}

/* Both ways. */
void scripted_cut(uint32_t one, uint32_t other) {
    for (struct packet *packet = packets, *next; packet; packet = next) {
        next = packet->next;
        const uint32_t from = packet->from->id, to = packet->to->id;
        if (!((from == one && to == other) || (from == other && to == one))) {
            continue;
        }
        const uint32_t fate = pick(3);
        const bool silent = packet->orphan;
        if (packet->state == kQueued) {
            leave(packet);
            error_of(packet, FI_ECONNRESET);
            drop(packet);
            continue;
        }
        error_of(packet, FI_ECONNRESET);
        if (packet->state == kLanded || fate == 0 || (silent && packet->message)) {
            drop(packet);
        } else if (fate == 1 && !manual) {
            if (!land(packet) && packet->state == kUnderWay) {
                continue;
            }
        } else { /* it lands late */
            packet->slow = true;
        }
    }
}

/* A connection that breaks with nothing under way that is acknowledged, and is made again: only messages are lost. False:
 * there was something else. */
int scripted_lose_messages(uint32_t one, uint32_t other) {
    for (int dropping = 0; dropping < 2; dropping++) {
        for (struct packet *packet = packets, *next; packet; packet = next) {
            next = packet->next;
            const uint32_t from = packet->from->id, to = packet->to->id;
            if (!((from == one && to == other) || (from == other && to == one))) {
                continue;
            }
            if (dropping) {
                drop(packet);
            } else if (!packet->orphan || !packet->message) {
                return 0;
            }
        }
    }
    return 1;
}

/* Nothing moves from one to the other: a rank that does not poll, a cable that was pulled. */
void scripted_hold(uint32_t from, uint32_t to, int on) { held[from][to] = on != 0; }
void scripted_break_queue(uint32_t endpoint, int receiving, int error) {
    (receiving ? endpoints[endpoint]->rx : endpoints[endpoint]->tx)->broken = error;
}
/* Its process was killed: what comes to it is refused, and its messages take no more receives. */
void scripted_kill(uint32_t endpoint) { endpoints[endpoint]->closed = true; }
void scripted_refuse_receives(int thousandths) { short_receives_in_1000 = thousandths; }

/* ---- libfabric ---- */

static int no_close(struct fid *fid) {
    (void)fid;
    return 0;
}
static int bind(struct fid *fid, struct fid *other, uint64_t flags) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (other->fclass == FI_CLASS_CQ) {
        struct queue *queue = (struct queue *)other;
        queue->endpoint = endpoint;
        if (flags & FI_TRANSMIT) {
            endpoint->tx = queue;
        } else {
            endpoint->rx = queue;
        }
    }
    return 0;
}
static int control(struct fid *fid, int command, void *argument) {
    (void)fid, (void)command, (void)argument;
    return 0;
}
static int close_endpoint(struct fid *fid) {
    ((struct endpoint *)fid)->closed = true;
    return 0;
}
static int close_memory(struct fid *fid) {
    struct memory *memory = (struct memory *)fid;
    memory->domain->keys[memory->mr.key] = NULL;
    return 0;
}
static struct fi_ops plain_ops = {.size = sizeof(struct fi_ops), .close = no_close, .bind = bind, .control = control};
static struct fi_ops endpoint_ops = {
    .size = sizeof(struct fi_ops), .close = close_endpoint, .bind = bind, .control = control};
static struct fi_ops memory_ops = {
    .size = sizeof(struct fi_ops), .close = close_memory, .bind = bind, .control = control};

static ssize_t read_queue(struct fid_cq *cq, void *buffer, size_t count) {
    struct queue *queue = (struct queue *)cq;
    if (queue->broken) {
        return -queue->broken;
    }
    if (manual) {
        for (struct packet *packet = packets, *next; packet; packet = next) {
            next = packet->next;
            if (packet->to == queue->endpoint && packet->state == kUnderWay && pick(2)) {
                move(packet, true);
            }
        }
    }
    if (queue->num_errors) {
        return -FI_EAVAIL;
    }
    size_t got = 0;
    while (got < count && queue->count) {
        if (queue->delay[queue->first]) {
            queue->delay[queue->first]--;
            break;
        }
        ((struct fi_cq_data_entry *)buffer)[got++] = queue->entries[queue->first];
        queue->first = (queue->first + 1) % kRing;
        queue->count--;
    }
    return got ? (ssize_t)got : -FI_EAGAIN;
}
static ssize_t read_error(struct fid_cq *cq, struct fi_cq_err_entry *entry, uint64_t flags) {
    (void)flags;
    struct queue *queue = (struct queue *)cq;
    if (!queue->num_errors) {
        return -FI_EAGAIN;
    }
    *entry = queue->errors[queue->first_error];
    queue->first_error = (queue->first_error + 1) % kRing;
    queue->num_errors--;
    return 1;
}
static const char *error_words(struct fid_cq *cq, int provider, const void *data, char *buffer, size_t length) {
    (void)cq, (void)provider, (void)data, (void)buffer, (void)length;
    return "as the test says";
}
static struct fi_ops_cq cq_ops = {
    .size = sizeof(struct fi_ops_cq), .read = read_queue, .readerr = read_error, .strerror = error_words};

static ssize_t post(struct endpoint *from, fi_addr_t address, struct packet fields, uint64_t flags) {
    struct endpoint *to = endpoints[address];
    int under_way = 0;
    for (const struct packet *packet = packets; packet; packet = packet->next) {
        under_way += packet->from == from && packet->to == to;
    }
    if (under_way >= window || (again_in_1000 && pick(1000) < (uint32_t)again_in_1000)) {
        return -FI_EAGAIN;
    }
    struct packet *packet = malloc(sizeof *packet);
    *packet = fields;
    packet->from = from;
    packet->to = to;
    packet->acknowledged = (flags & FI_DELIVERY_COMPLETE) != 0;
    packet->slow = pick(4) == 0;
    packet->next = packets;
    packets = packet;
    num_packets++;
    return 0;
}
static ssize_t send_message(struct fid_ep *ep, const struct fi_msg *message, uint64_t flags) {
    return post((struct endpoint *)ep, message->addr,
                (struct packet){.message = true,
                                .source = message->msg_iov->iov_base,
                                .length = message->msg_iov->iov_len,
                                .context = message->context},
                flags);
}
static ssize_t write_message(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags) {
    return post((struct endpoint *)ep, message->addr,
                (struct packet){.immediate = (flags & FI_REMOTE_CQ_DATA) != 0,
                                .source = message->msg_iov->iov_base,
                                .length = message->msg_iov->iov_len,
                                .offset = message->rma_iov->addr,
                                .key = message->rma_iov->key,
                                .data = message->data,
                                .context = message->context},
                flags);
}
static ssize_t receive(struct fid_ep *ep, void *buffer, size_t length, void *descriptor, fi_addr_t from,
                       void *context) {
    (void)descriptor, (void)from;
    struct endpoint *endpoint = (struct endpoint *)ep;
    if (short_receives_in_1000 && pick(1000) < (uint32_t)short_receives_in_1000) {
        return -FI_EAGAIN;
    }
    endpoint->receives[endpoint->num_receives].buffer = buffer;
    endpoint->receives[endpoint->num_receives].length = length;
    endpoint->receives[endpoint->num_receives++].context = context;
    return 0;
}
static struct fi_ops_msg msg_ops = {.size = sizeof(struct fi_ops_msg), .recv = receive, .sendmsg = send_message};
static struct fi_ops_rma rma_ops = {.size = sizeof(struct fi_ops_rma), .writemsg = write_message};

static int name_of(struct fid *fid, void *name, size_t *length) {
    memcpy(name, &((struct endpoint *)fid)->id, sizeof(uint32_t));
    *length = sizeof(uint32_t);
    return 0;
}
static struct fi_ops_cm cm_ops = {.size = sizeof(struct fi_ops_cm), .getname = name_of};

static int insert(struct fid_av *av, const void *name, size_t count, fi_addr_t *address, uint64_t flags,
                  void *context) {
    (void)av, (void)flags, (void)context;
    uint32_t id;
    memcpy(&id, name, sizeof id);
    *address = id;
    return (int)count;
}
static struct fi_ops_av av_ops = {.size = sizeof(struct fi_ops_av), .insert = insert};

static int open_av(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context) {
    (void)domain, (void)attr, (void)context;
    *av = calloc(1, sizeof **av);
    (*av)->fid.fclass = FI_CLASS_AV;
    (*av)->fid.ops = &plain_ops;
    (*av)->ops = &av_ops;
    return 0;
}
static int open_cq(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context) {
    (void)domain, (void)attr, (void)context;
    struct queue *queue = calloc(1, sizeof *queue);
    queue->cq.fid.fclass = FI_CLASS_CQ;
    queue->cq.fid.ops = &plain_ops;
    queue->cq.ops = &cq_ops;
    *cq = &queue->cq;
    return 0;
}
static int open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context) {
    (void)info, (void)context;
    struct endpoint *endpoint = calloc(1, sizeof *endpoint);
    endpoint->id = num_endpoints;
    endpoint->domain = (struct domain *)domain;
    endpoint->ep.fid.fclass = FI_CLASS_EP;
    endpoint->ep.fid.ops = &endpoint_ops;
    endpoint->ep.msg = &msg_ops;
    endpoint->ep.rma = &rma_ops;
    endpoint->ep.cm = &cm_ops;
    endpoints[num_endpoints++] = endpoint;
    *ep = &endpoint->ep;
    return 0;
}
static struct fi_ops_domain domain_ops = {
    .size = sizeof(struct fi_ops_domain), .av_open = open_av, .cq_open = open_cq, .endpoint = open_endpoint};

static int register_memory(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr) {
    (void)flags;
    struct memory *memory = calloc(1, sizeof *memory);
    memory->domain = (struct domain *)fid;
    memory->bytes = attr->mr_iov->iov_base;
    memory->length = attr->mr_iov->iov_len;
    memory->mr.fid.fclass = FI_CLASS_MR;
    memory->mr.fid.ops = &memory_ops;
    memory->mr.key = attr->requested_key;
    memory->domain->keys[memory->mr.key] = memory;
    *mr = &memory->mr;
    return 0;
}
static struct fi_ops_mr mr_ops = {.size = sizeof(struct fi_ops_mr), .regattr = register_memory};

static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context) {
    (void)fabric, (void)info, (void)context;
    struct domain *made = calloc(1, sizeof *made);
    made->domain.fid.fclass = FI_CLASS_DOMAIN;
    made->domain.fid.ops = &plain_ops;
    made->domain.ops = &domain_ops;
    made->domain.mr = &mr_ops;
    *domain = &made->domain;
    return 0;
}
static struct fi_ops_fabric fabric_ops = {.size = sizeof(struct fi_ops_fabric), .domain = open_domain};

struct description {
    struct fi_info info;
    struct fi_tx_attr tx;
    struct fi_rx_attr rx;
    struct fi_ep_attr ep;
    struct fi_domain_attr domain;
    struct fi_fabric_attr fabric;
};

struct fi_info *fi_dupinfo(const struct fi_info *info) {
    (void)info; /* there is one kind of endpoint */
    struct description *made = calloc(1, sizeof *made);
    made->info = (struct fi_info){.caps = FI_MSG | FI_RMA,
                                  .tx_attr = &made->tx,
                                  .rx_attr = &made->rx,
                                  .ep_attr = &made->ep,
                                  .domain_attr = &made->domain,
                                  .fabric_attr = &made->fabric};
    made->tx.size = made->rx.size = 1 << 14;
    made->ep.max_msg_size = 1 << 30;
    made->domain.cq_data_size = 4;
    return &made->info;
}
void fi_freeinfo(struct fi_info *info) {
    free(info->fabric_attr->prov_name);
    free(info->fabric_attr->name);
    free(info->domain_attr->name);
    free(info);
}
int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **info) {
    (void)version, (void)node, (void)service, (void)flags, (void)hints;
    *info = fi_dupinfo(NULL);
    (*info)->fabric_attr->prov_name = strdup("scripted");
    return 0;
}
int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context) {
    (void)attr, (void)context;
    *fabric = calloc(1, sizeof **fabric);
    (*fabric)->fid.fclass = FI_CLASS_FABRIC;
    (*fabric)->fid.ops = &plain_ops;
    (*fabric)->ops = &fabric_ops;
    return 0;
}
const char *fi_strerror(int error) { return strerror(error); }
char *fi_tostr(const void *data, enum fi_type type) {
    (void)data, (void)type;
    return "scripted";
}
uint32_t fi_version(void) { return FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION); }
