/* Cutting a large write over the rails of a lane. */
#include "fabric.h"

uint32_t fab_living_rails(const fab_lane *lane, uint32_t peer) {
    uint32_t count = 0;
    for (uint32_t r = 0; r < lane->num_rails; r++) {
        count += fab_is_way(lane, r, peer);
    }
    return count;
}

/* Cut a large write over the rails; false where the pool has no room now. Parts start at multiples of
 * 4096 bytes of the write, so that no two rails write into one page. */
bool fab_stripe(fab_lane *lane, const uccl_ep_write *write, uint32_t rails) {
    const uint64_t part = ((write->bytes + rails - 1) / rails + 4095u) & ~UINT64_C(4095);
    fab_operation *parent = fab_take(lane);
    if (!parent) {
        return false;
    }
    parent->kind = FAB_PARENT;
    parent->write = *write;
    parent->status = 0;
    parent->remaining = 0;
    uint32_t first = FAB_NONE;
    for (uint64_t offset = 0; offset < write->bytes; offset += part) {
        fab_operation *chunk = fab_take(lane);
        if (!chunk) {
            while (first != FAB_NONE) {
                fab_operation *taken = &lane->operations[first];
                first = taken->next;
                fab_give(lane, taken);
            }
            fab_give(lane, parent);
            return false;
        }
        chunk->kind = FAB_CHUNK;
        chunk->parent = parent->index;
        chunk->write = *write;
        chunk->write.local_offset += offset;
        chunk->write.remote_offset += offset;
        chunk->write.bytes = write->bytes - offset < part ? write->bytes - offset : part;
        chunk->write.flags = UCCL_EP_WRITE_FENCED;
        chunk->next = first;
        first = chunk->index;
        parent->remaining++;
    }
    uint32_t rail = 0;
    while (first != FAB_NONE) {
        fab_operation *chunk = &lane->operations[first];
        first = chunk->next;
        while (!fab_is_way(lane, rail % lane->num_rails, write->peer)) {
            rail++;
        }
        chunk->rail = (uint8_t)(rail++ % lane->num_rails);
        fab_wait_to_post(lane, chunk);
    }
    lane->statistics.split++;
    return true;
}
