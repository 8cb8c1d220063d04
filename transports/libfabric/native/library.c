/* Opening libfabric at run time, and asking it what it has.
 *
 * Seven symbols are looked up; everything else is an inline function over tables inside libfabric's
 * objects, so this module has no link dependency and one binary serves 1.17 and 2.x.
 */
#include "fabric.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int kSignals[FAB_SIGNALS] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGINT, SIGTERM, SIGPIPE};

void fab_keep_handlers(fab_handlers *handlers) {
    for (int i = 0; i < FAB_SIGNALS; i++) {
        sigaction(kSignals[i], NULL, &handlers->actions[i]);
    }
}

void fab_restore_handlers(const fab_handlers *handlers) {
    for (int i = 0; i < FAB_SIGNALS; i++) {
        sigaction(kSignals[i], &handlers->actions[i], NULL);
    }
}

uint64_t fab_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void fab_get_constants(fab_constants *out) {
    memset(out, 0, sizeof *out);
    out->header_version = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    out->dmabuf = FAB_DMABUF;
    out->order_waw = FI_ORDER_WAW;
    out->delivery_complete = FI_DELIVERY_COMPLETE;
    out->address_string = FI_ADDR_STR;
    out->mr_virtual_address = FI_MR_VIRT_ADDR;
    out->mr_provider_key = FI_MR_PROV_KEY;
    out->mr_local = FI_MR_LOCAL;
    out->mr_endpoint = FI_MR_ENDPOINT;
    out->mode_receive_data = FI_RX_CQ_DATA;
    out->sockaddr_in = FI_SOCKADDR_IN;
    out->sockaddr_in6 = FI_SOCKADDR_IN6;
    out->error_no_data = FI_ENODATA;
}

/* The library is never closed again: providers leave threads and signal handlers behind. */
fab_library *fab_library_open(const char *path, char *error, size_t error_bytes) {
    fab_handlers handlers;
    fab_keep_handlers(&handlers);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    fab_restore_handlers(&handlers);
    if (!handle) {
        const char *words = dlerror();
        snprintf(error, error_bytes, "%s", words ? words : "unknown error of dlopen");
        return NULL;
    }
    fab_library *library = calloc(1, sizeof *library);
    if (!library) {
        snprintf(error, error_bytes, "out of memory");
        return NULL;
    }
    library->handle = handle;
    uint32_t (*version)(void);
    const struct {
        const char *name;
        void **target;
    } symbols[] = {
        {"fi_version", (void **)&version},
        {"fi_getinfo", (void **)&library->getinfo},
        {"fi_freeinfo", (void **)&library->freeinfo},
        {"fi_dupinfo", (void **)&library->dupinfo},
        {"fi_fabric", (void **)&library->fabric},
        {"fi_strerror", (void **)&library->strerror},
        {"fi_tostr", (void **)&library->tostr},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        *symbols[i].target = dlsym(handle, symbols[i].name);
        if (!*symbols[i].target) {
            snprintf(error, error_bytes, "it has no %s, so it is no libfabric", symbols[i].name);
            free(library);
            return NULL;
        }
    }
    const uint32_t headers = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    library->version = version();
    library->use_version = library->version < headers ? library->version : headers;
    return library;
}

uint32_t fab_library_version(const fab_library *library) { return library->version; }

const char *fab_library_file(const fab_library *library) {
    Dl_info place;
    return dladdr((void *)library->getinfo, &place) && place.dli_fname ? place.dli_fname : "";
}

const char *fab_error_text(const fab_library *library, int error) {
    return library->strerror(error < 0 ? -error : error);
}

static char *copy_of(const char *text) { return text[0] ? strdup(text) : NULL; }

/* The list of answers, to be freed with freeinfo; NULL and a negative errno where there is none. */
struct fi_info *fab_ask(const fab_library *library, const fab_query *query, int *error) {
    struct fi_info *hints = library->dupinfo(NULL);
    if (!hints) {
        *error = -FI_ENOMEM;
        return NULL;
    }
    hints->caps = FI_MSG | FI_RMA | query->capabilities | (query->device_memory ? FI_HMEM : 0);
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | (query->receive_mode ? FI_RX_CQ_DATA : 0);
    hints->ep_attr->type = FI_EP_RDM;
    /* All memory modes but RAW keys, which would need a call per peer, and RMA events, which we do not use. */
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT |
                                  (query->device_memory ? FI_MR_HMEM : 0);
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->av_type = FI_AV_TABLE;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->data_progress = query->auto_progress ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
    hints->tx_attr->msg_order = query->order;
    hints->rx_attr->msg_order = query->order;
    hints->tx_attr->op_flags = query->default_flags;
    hints->fabric_attr->prov_name = copy_of(query->provider);
    hints->fabric_attr->name = copy_of(query->fabric);
    hints->domain_attr->name = copy_of(query->domain);
    struct fi_info *list = NULL;
    const char *node = query->node[0] ? query->node : NULL;
    fab_handlers handlers;
    fab_keep_handlers(&handlers);
    *error = library->getinfo(library->use_version, node, NULL, node ? FI_SOURCE | FI_NUMERICHOST : 0, hints, &list);
    fab_restore_handlers(&handlers);
    library->freeinfo(hints);
    return *error ? NULL : list;
}

static void copy_text(char *out, size_t bytes, const char *text) { snprintf(out, bytes, "%s", text ? text : ""); }

static void flatten(const fab_library *library, const struct fi_info *info, fab_info *out) {
    memset(out, 0, sizeof *out);
    copy_text(out->provider, sizeof out->provider, info->fabric_attr->prov_name);
    copy_text(out->fabric, sizeof out->fabric, info->fabric_attr->name);
    copy_text(out->domain, sizeof out->domain, info->domain_attr->name);
    copy_text(out->protocol, sizeof out->protocol, library->tostr(&info->ep_attr->protocol, FI_TYPE_PROTOCOL));
    if (info->src_addr) {
        /* fi_tostr has no type for a bare address: take the field out of the whole text. */
        const char *text = library->tostr(info, FI_TYPE_INFO);
        const char *begin = text ? strstr(text, "src_addr: ") : NULL;
        if (begin) {
            begin += strlen("src_addr: ");
            const size_t bytes = strcspn(begin, "\n");
            snprintf(out->source, sizeof out->source, "%.*s", (int)(bytes < 120 ? bytes : 120), begin);
        }
    }
    out->capabilities = info->caps;
    out->mode = info->mode;
    out->mr_mode = (uint64_t)info->domain_attr->mr_mode;
    out->tx_order = info->tx_attr->msg_order;
    out->rx_order = info->rx_attr->msg_order;
    out->max_message = info->ep_attr->max_msg_size;
    out->max_ordered_write = info->ep_attr->max_order_waw_size;
    out->immediate_bytes = info->domain_attr->cq_data_size;
    out->inject_bytes = info->tx_attr->inject_size;
    out->tx_size = info->tx_attr->size;
    out->rx_size = info->rx_attr->size;
    out->key_bytes = info->domain_attr->mr_key_size;
    out->endpoint_count = (uint32_t)(info->domain_attr->ep_cnt > UINT32_MAX ? UINT32_MAX : info->domain_attr->ep_cnt);
    out->address_format = info->addr_format;
    out->data_progress = (int32_t)info->domain_attr->data_progress;
    out->link_up = -1;
    const struct fid_nic *nic = info->nic;
    if (!nic) {
        return;
    }
    if (nic->device_attr) {
        copy_text(out->nic_name, sizeof out->nic_name, nic->device_attr->name);
        copy_text(out->nic_driver, sizeof out->nic_driver, nic->device_attr->driver);
    }
    if (nic->bus_attr && nic->bus_attr->bus_type == FI_BUS_PCI) {
        out->has_pci = 1;
        out->pci_domain = nic->bus_attr->attr.pci.domain_id;
        out->pci_bus = nic->bus_attr->attr.pci.bus_id;
        out->pci_device = nic->bus_attr->attr.pci.device_id;
        out->pci_function = nic->bus_attr->attr.pci.function_id;
    }
    if (nic->link_attr) {
        out->link_bits_per_second = nic->link_attr->speed;
        out->link_up = nic->link_attr->state == FI_LINK_UP ? 1 : nic->link_attr->state == FI_LINK_DOWN ? 0 : -1;
    }
}

int fab_query_infos(const fab_library *library, const fab_query *query, fab_info *out, int capacity) {
    int error = 0;
    struct fi_info *list = fab_ask(library, query, &error);
    if (!list) {
        return error;
    }
    int count = 0;
    for (const struct fi_info *info = list; info && count < capacity; info = info->next) {
        flatten(library, info, &out[count++]);
    }
    library->freeinfo(list);
    return count;
}
