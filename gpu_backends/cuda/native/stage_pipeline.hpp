// The order in which a bulk copy engine is told to fetch pieces into stages and to store them from there.
// Separate from the engine's instructions, so that a test runs this very code against a model of an engine
// that is late wherever it may be.
//
// `Engine` provides (all static): fetch, store, wait_filled(barrier, phase), and wait_stages_read<N>(), which
// returns when the engine has read the stages of all stores but the last N.
#pragma once

#include "uccl_ep/integers.hpp"

namespace uccl_ep::device::detail {

inline constexpr uint32_t kStages = 4;

struct StagedPiece {
    uint64_t destination;
    uint64_t bytes;
};

// Lane 0 of the warp alone works with it. The stages lie behind it.
struct alignas(128) WarpStages {
    uint64_t filled[kStages];    // barriers, one phase a fetch
    StagedPiece piece[kStages];  // what each stage holds, or will
    uint32_t fetched, stored;    // pieces, ever; those between the two are on their way into a stage
};
static_assert(sizeof(WarpStages) == 128, "stages behind it stay aligned");

UCCL_EP_DEVICE uint8_t *stage_of(WarpStages *stages, uint32_t bytes_of_stage, uint32_t place) {
    return reinterpret_cast<uint8_t *>(stages + 1) + place * bytes_of_stage;
}

// The oldest fetched piece goes on to its destination.
template <class Engine>
UCCL_EP_DEVICE void store_oldest(WarpStages *stages, uint32_t bytes_of_stage) {
    const uint32_t place = stages->stored % kStages;
    const StagedPiece piece = stages->piece[place];
    Engine::wait_filled(&stages->filled[place], stages->stored / kStages & 1);
    Engine::store(reinterpret_cast<void *>(piece.destination), stage_of(stages, bytes_of_stage, place),
                  static_cast<uint32_t>(piece.bytes));
    ++stages->stored;
}

// Fetch a piece; it is stored when a later piece needs the room, or at the end. So copies that follow one
// another overlap, and a warp has three pieces on their way whatever the size of a row.
template <class Engine>
UCCL_EP_DEVICE void fetch_piece(WarpStages *stages, uint32_t bytes_of_stage, uint8_t *destination,
                                const uint8_t *source, uint32_t bytes) {
    if (stages->fetched - stages->stored == kStages - 1) store_oldest<Engine>(stages, bytes_of_stage);
    // The stage was last read by the store of piece `fetched - kStages`. Newer than that one are as many
    // stores as there are stages neither on their way nor this one; stores of other origin only add to them.
    static_assert(kStages == 4, "the waits are written out, since their count must be a constant");
    switch (stages->fetched - stages->stored) {
        case 0:
            Engine::template wait_stages_read<3>();
            break;
        case 1:
            Engine::template wait_stages_read<2>();
            break;
        default:
            Engine::template wait_stages_read<1>();
            break;
    }
    const uint32_t place = stages->fetched % kStages;
    stages->piece[place] = {reinterpret_cast<uint64_t>(destination), bytes};
    Engine::fetch(stage_of(stages, bytes_of_stage, place), &stages->filled[place], source, bytes);
    ++stages->fetched;
}

// All pieces of one copy.
template <class Engine>
UCCL_EP_DEVICE void fetch_row(WarpStages *stages, uint32_t bytes_of_stage, uint8_t *destination, const uint8_t *source,
                              uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += bytes_of_stage) {
        const uint64_t rest = bytes - at;
        fetch_piece<Engine>(stages, bytes_of_stage, destination + at, source + at,
                            static_cast<uint32_t>(rest < bytes_of_stage ? rest : bytes_of_stage));
    }
}

// Store what is fetched; the caller waits for the stores.
template <class Engine>
UCCL_EP_DEVICE void store_fetched(WarpStages *stages, uint32_t bytes_of_stage) {
    while (stages->stored != stages->fetched) store_oldest<Engine>(stages, bytes_of_stage);
}

}  // namespace uccl_ep::device::detail
