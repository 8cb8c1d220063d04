/* Rails: an endpoint with its domain, queues and address vector, and memory registered on it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

static int say(fab_context *context, int error, const char *what, const struct fi_info *info) {
    snprintf(context->words, sizeof context->words, "%s of provider %s, domain %s: %s", what,
             info->fabric_attr->prov_name, info->domain_attr->name, fab_error_text(context->library, error));
    return error;
}

/* Keys that we choose must differ within a domain; where the provider chooses, this is ignored. Low
 * numbers, since some NICs treat small keys as the fast ones. */
static int register_memory(fab_rail *rail, void *pointer, uint64_t bytes, uint64_t access, uint64_t wanted_key,
                           int32_t device, int32_t dmabuf_fd, struct fid_mr **mr) {
    struct iovec piece = {.iov_base = pointer, .iov_len = bytes};
    /* A newer library may read fields behind the end of our headers' struct: they must be zeros. */
    union {
        struct fi_mr_attr attr;
        char room[512];
    } request;
    memset(&request, 0, sizeof request);
    request.attr.mr_iov = &piece;
    request.attr.iov_count = 1;
    request.attr.access = access;
    request.attr.requested_key = wanted_key;
    uint64_t flags = 0;
    if (device >= 0) {
#if FAB_DMABUF
        struct fi_mr_dmabuf buffer = {.fd = dmabuf_fd, .offset = 0, .len = bytes, .base_addr = pointer};
        request.attr.dmabuf = &buffer;
        flags = FI_MR_DMABUF;
        int error = fi_mr_regattr(rail->domain, &request.attr, flags, mr);
        return error;
#else
        (void)dmabuf_fd;
        return -FI_ENOSYS;
#endif
    }
    return fi_mr_regattr(rail->domain, &request.attr, flags, mr);
}

/* Some providers want memory bound to the endpoint that will use it before the key is valid. */
static int activate(fab_rail *rail, struct fid_mr *mr) {
    if (!(rail->info->domain_attr->mr_mode & FI_MR_ENDPOINT)) {
        return 0;
    }
    int error = fi_mr_bind(mr, &rail->endpoint->fid, 0);
    return error ? error : fi_mr_enable(mr);
}

/* One that is refused for now is posted later: too few receives, and no message arrives any more. */
int fab_post_receive(fab_rail *rail, uint32_t index) {
    fab_receive *receive = &rail->receives[index];
    receive->index = index;
    const int error = (int)fi_recv(rail->endpoint, &rail->messages[index], sizeof(fab_message),
                                   rail->message_mr ? fi_mr_desc(rail->message_mr) : NULL, FI_ADDR_UNSPEC, receive);
    const uint64_t bit = UINT64_C(1) << index;
    rail->missing = error ? rail->missing | bit : rail->missing & ~bit;
    return error;
}

void fab_post_missing(fab_rail *rail) {
    for (uint32_t i = 0; i < FAB_RECEIVES && rail->missing; i++) {
        if (rail->missing >> i & 1u && fab_post_receive(rail, i)) {
            return;
        }
    }
}

static int open_queues(fab_context *context, fab_lane *lane, fab_rail *rail) {
    struct fi_cq_attr attr = {.format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    attr.size = lane->num_operations;
    int error = fi_cq_open(rail->domain, &attr, &rail->tx_cq, NULL);
    if (error) {
        return say(context, error, "a completion queue for writes", rail->info);
    }
    /* Over several rails a write may arrive twice, and only one of the two was given credit for. */
    attr.size = (context->num_rails > 1 ? 2 : 1) * (size_t)context->receive_depth + FAB_RECEIVES;
    error = fi_cq_open(rail->domain, &attr, &rail->rx_cq, NULL);
    return error ? say(context, error, "a completion queue for arrivals", rail->info) : 0;
}

int fab_rail_open(fab_context *context, fab_lane *lane, fab_rail *rail, const struct fi_info *info) {
    const fab_library *library = context->library;
    rail->info = library->dupinfo(info);
    if (!rail->info) {
        return say(context, -FI_ENOMEM, "a copy of the description", info);
    }
    rail->virtual_address = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    rail->receive_data = (info->mode & FI_RX_CQ_DATA) != 0;
    if (rail->info->tx_attr->size > lane->num_operations) {
        rail->info->tx_attr->size = lane->num_operations;
    }
    int error = library->fabric(rail->info->fabric_attr, &rail->fabric, NULL);
    if (error) {
        return say(context, error, "the fabric", info);
    }
    error = fi_domain(rail->fabric, rail->info, &rail->domain, NULL);
    if (error) {
        return say(context, error, "the domain", info);
    }
    error = open_queues(context, lane, rail);
    if (error) {
        return error;
    }
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 64};
    if (rail->info->domain_attr->av_type == FI_AV_MAP) {
        av.type = FI_AV_MAP;
    }
    error = fi_av_open(rail->domain, &av, &rail->av, NULL);
    if (error) {
        return say(context, error, "the address vector", info);
    }
    error = fi_endpoint(rail->domain, rail->info, &rail->endpoint, NULL);
    if (error) {
        return say(context, error, "the endpoint", info);
    }
    error = fi_ep_bind(rail->endpoint, &rail->tx_cq->fid, FI_TRANSMIT);
    error = error ? error : fi_ep_bind(rail->endpoint, &rail->rx_cq->fid, FI_RECV);
    error = error ? error : fi_ep_bind(rail->endpoint, &rail->av->fid, 0);
    error = error ? error : fi_enable(rail->endpoint);
    if (error) {
        return say(context, error, "enabling the endpoint", info);
    }
    rail->open = true;
    const size_t count = FAB_RECEIVES + lane->num_operations;
    rail->messages = calloc(count, sizeof(fab_message));
    if (!rail->messages) {
        return say(context, -FI_ENOMEM, "control messages", info);
    }
    error = register_memory(rail, rail->messages, count * sizeof(fab_message), FI_SEND | FI_RECV, FAB_MAX_REGIONS, -1,
                            -1, &rail->message_mr);
    error = error ? error : activate(rail, rail->message_mr);
    if (error) {
        return say(context, error, "registering control messages", info);
    }
    for (uint32_t i = 0; i < FAB_RECEIVES; i++) {
        error = fab_post_receive(rail, i);
        if (error) {
            return say(context, error, "posting a receive", info);
        }
    }
    return 0;
}

static void close_fid(struct fid *fid) {
    if (fid) {
        fi_close(fid);
    }
}

/* No write can begin to land through this rail after this: no NIC accepts a key that was deregistered. The
 * endpoint itself stays: with transfers under way in it, closing it crashes some releases (tcp;ofi_rxm of
 * 1.17). */
void fab_rail_revoke(fab_rail *rail) {
    for (uint32_t i = 0; i < FAB_MAX_REGIONS; i++) {
        if (rail->mr[i]) {
            fi_close(&rail->mr[i]->fid);
            rail->mr[i] = NULL;
        }
    }
}

/* Order matters: what is bound goes before what it is bound to. After this nothing can land here. */
void fab_rail_close(fab_rail *rail) {
    if (rail->retired) {
        return;
    }
    rail->open = false;
    const bool bound = rail->info && (rail->info->domain_attr->mr_mode & FI_MR_ENDPOINT);
    for (int round = 0; round < 2; round++) {
        if (round == (bound ? 1 : 0)) {
            close_fid(rail->endpoint ? &rail->endpoint->fid : NULL);
            rail->endpoint = NULL;
        }
        if (round == (bound ? 0 : 1)) {
            for (uint32_t i = 0; i < FAB_MAX_REGIONS; i++) {
                close_fid(rail->mr[i] ? &rail->mr[i]->fid : NULL);
                rail->mr[i] = NULL;
            }
            close_fid(rail->message_mr ? &rail->message_mr->fid : NULL);
            rail->message_mr = NULL;
        }
    }
    close_fid(rail->av ? &rail->av->fid : NULL);
    close_fid(rail->rx_cq ? &rail->rx_cq->fid : NULL);
    close_fid(rail->tx_cq ? &rail->tx_cq->fid : NULL);
    close_fid(rail->domain ? &rail->domain->fid : NULL);
    close_fid(rail->fabric ? &rail->fabric->fid : NULL);
    rail->av = NULL;
    rail->rx_cq = rail->tx_cq = NULL;
    rail->domain = NULL;
    rail->fabric = NULL;
}

int fab_register(fab_context *context, uint32_t region, uint64_t pointer, uint64_t bytes, int32_t device,
                 int32_t dmabuf_fd) {
    if (region >= FAB_MAX_REGIONS) {
        snprintf(context->words, sizeof context->words, "at most %u pieces of memory can be registered",
                 FAB_MAX_REGIONS);
        return -FI_EINVAL;
    }
    for (uint32_t l = 0; l < context->num_lanes; l++) {
        for (uint32_t r = 0; r < context->lanes[l].num_rails; r++) {
            fab_rail *rail = &context->lanes[l].rails[r];
            struct fid_mr *mr = NULL;
            int error = register_memory(rail, (void *)(uintptr_t)pointer, bytes, FI_WRITE | FI_REMOTE_WRITE, region,
                                        device, dmabuf_fd, &mr);
            if (error) {
                return say(context, error, "registering memory", rail->info);
            }
            rail->mr[region] = mr;
            error = activate(rail, mr);
            if (error) {
                return say(context, error, "binding memory to the endpoint", rail->info);
            }
            rail->desc[region] = fi_mr_desc(mr);
            rail->local[region] = (uint8_t *)(uintptr_t)pointer;
            rail->local_bytes[region] = bytes;
        }
    }
    return 0;
}

int fab_region_key(const fab_context *context, uint32_t lane, uint32_t rail, uint32_t region, uint64_t *key,
                   uint64_t *base) {
    const fab_rail *place = &context->lanes[lane].rails[rail];
    if (!place->mr[region]) {
        return -FI_EINVAL;
    }
    *key = fi_mr_key(place->mr[region]);
    *base = (uint64_t)(uintptr_t)place->local[region];
    return *key == FI_KEY_NOTAVAIL ? -FI_EKEYREJECTED : 0;
}

int fab_endpoint_name(const fab_context *context, uint32_t lane, uint32_t rail, uint8_t *out, size_t capacity) {
    size_t bytes = capacity;
    const int error = fi_getname(&context->lanes[lane].rails[rail].endpoint->fid, out, &bytes);
    return error ? error : (int)bytes;
}
