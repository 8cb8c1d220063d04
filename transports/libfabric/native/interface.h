/* What Python sees of the C half, through cffi. Read by two programs: the C compiler (from fabric.h)
 * and build_interface.py, which hands everything between the two markers to cffi. No preprocessor
 * lines, no types of libfabric.
 */
#ifndef UCCL_EP_LIBFABRIC_INTERFACE_H
#define UCCL_EP_LIBFABRIC_INTERFACE_H

#include <stddef.h>
#include <stdint.h>

/* cffi begins */

typedef struct fab_library fab_library;
typedef struct fab_context fab_context;

/* What to ask of fi_getinfo. Empty strings and zeros ask for nothing. */
typedef struct fab_query {
    char provider[64];     /* e.g. "tcp" or "tcp;ofi_rxm" */
    char fabric[128];
    char domain[128];
    char node[64];         /* numeric local address to bind to */
    uint64_t capabilities; /* beside FI_MSG | FI_RMA */
    uint64_t order;        /* FI_ORDER_* that must be granted to writes */
    uint64_t default_flags; /* FI_DELIVERY_COMPLETE ... that writes must accept */
    int32_t receive_mode;  /* 1: accept a provider that wants receives posted for immediate data */
    int32_t device_memory; /* 1: the provider must take GPU memory */
    int32_t auto_progress; /* 1: ask for a progress thread inside the provider */
    int32_t reserved;
} fab_query;

/* One answer, flattened. */
typedef struct fab_info {
    char provider[64];
    char fabric[128];
    char domain[128];
    char source[128];      /* local address in libfabric's words */
    char protocol[64];
    char nic_name[64];
    char nic_driver[64];
    uint64_t capabilities;
    uint64_t mode;
    uint64_t mr_mode;
    uint64_t tx_order;
    uint64_t rx_order;
    uint64_t max_message;
    uint64_t max_ordered_write;
    uint64_t immediate_bytes;
    uint64_t inject_bytes;
    uint64_t tx_size;
    uint64_t rx_size;
    uint64_t key_bytes;
    uint64_t link_bits_per_second;
    uint32_t endpoint_count;
    uint32_t address_format; /* FI_SOCKADDR_IN ... */
    int32_t data_progress;
    int32_t has_pci;
    uint32_t pci_domain;
    uint32_t pci_bus;
    uint32_t pci_device;
    uint32_t pci_function;
    int32_t link_up;         /* 1 up, 0 down, -1 unknown */
} fab_info;

/* Facts of the headers this module was compiled with, and flags that Python needs by value. */
typedef struct fab_constants {
    uint32_t header_version;
    int32_t dmabuf; /* 1: the headers know dma-buf registration */
    uint64_t order_waw;
    uint64_t delivery_complete;
    uint32_t address_string; /* FI_ADDR_STR: names that mean something on one machine only */
    uint32_t reserved;
    uint64_t mr_virtual_address;
    uint64_t mr_provider_key;
    uint64_t mr_local;
    uint64_t mr_endpoint;
    uint64_t mode_receive_data;
    uint32_t sockaddr_in;
    uint32_t sockaddr_in6;
    uint32_t error_no_data;
} fab_constants;

typedef struct fab_statistics {
    uint64_t posted;
    uint64_t posted_bytes;
    uint64_t completed;
    uint64_t failed;
    uint64_t arrived;
    uint64_t again;       /* posts that the provider refused for now */
    uint64_t split;       /* writes striped over several rails */
    uint64_t moved;       /* writes sent again over another rail */
    uint64_t rails_lost;
} fab_statistics;

void fab_get_constants(fab_constants *out);

/* Open a library by path or soname; NULL and words in `error` where that fails. */
fab_library *fab_library_open(const char *path, char *error, size_t error_bytes);
uint32_t fab_library_version(const fab_library *library);
/* The file that was opened. */
const char *fab_library_file(const fab_library *library);
const char *fab_error_text(const fab_library *library, int error);

/* Answers of fi_getinfo in the provider's order; how many, or a negative errno. */
int fab_query_infos(const fab_library *library, const fab_query *query, fab_info *out, int capacity);

/* `lanes` lanes over up to `rails` rails; nothing is opened yet. NULL: out of memory. */
fab_context *fab_create(const fab_library *library, uint32_t lanes, uint32_t rails, uint32_t send_depth,
                        uint32_t receive_depth, uint64_t stripe_bytes, uint64_t max_message);
/* `always`: post every write with FI_DELIVERY_COMPLETE, which is what lets another rail take over from a
 * lost one. `network`: the provider reaches other machines, not just the memory of this one. */
void fab_set_delivery(fab_context *context, int always, int network);
/* Take a connection for lost when the provider refuses writes this long though nothing is in flight; 0: never. */
void fab_set_patience(fab_context *context, uint64_t nanoseconds);
/* A peer that does not say within this time that it gave up a failed rail counts as dead. */
void fab_set_revoke_limit(fab_context *context, uint64_t nanoseconds);
/* Open rail `rail` of every lane on answer number `choice` of `query`. 0, or a negative errno and fab_words. */
int fab_open_rail(fab_context *context, uint32_t rail, const fab_query *query, int choice);
/* Words about the last failure of a set-up function. */
const char *fab_words(const fab_context *context);

/* Register memory on every rail of every lane. `device` < 0: host memory; else `dmabuf_fd` covers it. */
int fab_register(fab_context *context, uint32_t region, uint64_t pointer, uint64_t bytes, int32_t device,
                 int32_t dmabuf_fd);
int fab_region_key(const fab_context *context, uint32_t lane, uint32_t rail, uint32_t region, uint64_t *key,
                   uint64_t *base);
/* The endpoint's address; its length, or a negative errno. */
int fab_endpoint_name(const fab_context *context, uint32_t lane, uint32_t rail, uint8_t *out, size_t capacity);

/* Prepare for `ranks` peers. `group` is a number that only this group's members know. */
int fab_begin_connect(fab_context *context, uint32_t rank, uint32_t ranks, uint32_t lanes, uint64_t group);
int fab_add_peer(fab_context *context, uint32_t lane, uint32_t rail, uint32_t peer, const uint8_t *name,
                 size_t name_bytes, uint32_t regions, const uint64_t *keys, const uint64_t *bases,
                 const uint64_t *bytes);
/* Notice the death of a process of this host through its pidfd; the context owns the fd. */
void fab_watch_peer(fab_context *context, uint32_t peer, int32_t pidfd);
/* Work on the handshake for at most `budget_us`; 1: done, 0: going on, negative errno: failed. */
int fab_handshake(fab_context *context, uint32_t budget_us);
/* A peer whose handshake is not done, or -1. */
int32_t fab_handshake_missing(const fab_context *context);

void *fab_operations(fab_context *context);
void fab_get_statistics(const fab_context *context, fab_statistics *out);
int32_t fab_peer_is_dead(fab_context *context, uint32_t peer);
/* Give up a rail of one lane on purpose, for tests. */
void fab_break_rail(fab_context *context, uint32_t lane, uint32_t rail);
void fab_close(fab_context *context);

/* Benchmarks (bare.c): a bare loop of the library on one rail, and the same loop through the table.
 * Both send `count` writes with immediate of `bytes` bytes to `peer`, `window` in flight, and return
 * seconds, or a negative number on error. The receiver runs bench_receive with the same count. */
double fab_bench_bare_send(fab_context *context, uint32_t lane, uint32_t peer, uint64_t bytes, uint64_t count,
                           uint32_t window, double timeout_s);
double fab_bench_bare_receive(fab_context *context, uint32_t lane, uint64_t count, double timeout_s);
double fab_bench_send(void *operations, uint32_t lane, uint32_t peer, uint64_t bytes, uint64_t count, uint32_t window,
                      uint32_t batch, double timeout_s);
double fab_bench_receive(void *operations, uint32_t lane, uint64_t count, double timeout_s);

/* cffi ends */

#endif /* UCCL_EP_LIBFABRIC_INTERFACE_H */
