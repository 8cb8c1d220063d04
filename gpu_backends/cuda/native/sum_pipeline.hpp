// The order in which a bulk copy engine is told to fetch rows into stages from which a warp sums them. Pieces of the
// next stages, also those of the next sum, are on their way while one is summed: a sum over rows that the warp loads
// itself stands still for a memory latency with each few kilobytes.
//
// Separate from the engine's instructions, like stage_pipeline.hpp. `Engine` provides (all static): lane(), kLanes,
// expect(barrier, bytes), fetch_part(stage, barrier, source, bytes), wait_filled(barrier, phase), all of one lane, and
// of the whole warp
//   - stages_read(), after which the engine may write what the lanes have read;
//   - sync(), after which each lane sees what another wrote.
#pragma once

#include "stage_pipeline.hpp"

namespace uccl_ep::device::detail {

inline constexpr uint32_t kSumUnit = 16;        // bytes that a lane takes of a row at a time
inline constexpr uint32_t kSumUnitsAtOnce = 32;  // that a warp does
inline constexpr uint32_t kSumLeastUnits = 24;   // in one go; with fewer, too many lanes have nothing to add

// Bytes of each row that one stage holds; 0 where there are too many rows for pieces worth fetching.
UCCL_EP_DEVICE constexpr uint32_t sum_piece_bytes(uint32_t bytes_of_stage, uint32_t num_terms) {
    const uint32_t units = bytes_of_stage / (num_terms * kSumUnit), last = units % kSumUnitsAtOnce;
    return (last < kSumLeastUnits ? units - last : units) * kSumUnit;
}

// Fetch the rows of a sum, row(j) of `bytes` bytes each, and sum what has to make room: sum(out, stage, bytes, terms)
// sums pieces that lie one behind the other. What is on its way at the end is summed by a later call, or by this one
// if `finish` says so. No row may change before it is summed, and the stages are for sums alone until then.
// `bytes` and all addresses are multiples of 16; 0 bytes: only finish. The whole warp.
template <class Engine, class Row, class Sum>
UCCL_EP_DEVICE void sum_ahead(WarpStages *stages, uint32_t bytes_of_stage, uint8_t *out, uint32_t bytes,
                              uint32_t num_terms, Row row, Sum sum, bool finish) {
    WarpSums &ring = stages->sums;
    uint32_t fetched = ring.fetched, summed = ring.summed;
    const uint32_t most = bytes == 0 ? 0 : sum_piece_bytes(bytes_of_stage, num_terms);
    for (uint32_t at = 0;;) {
        if (at < bytes && fetched - summed < kStages) {
            const uint32_t place = fetched % kStages, part = bytes - at < most ? bytes - at : most;
            uint8_t *stage = stage_of(stages, bytes_of_stage, place);
            uint64_t *filled = &ring.filled[place];
            if (Engine::lane() == 0) {
                // Before the barrier, which then shows it to the other lanes together with the rows.
                ring.piece[place] = {reinterpret_cast<uint64_t>(out + at), part, num_terms};
                Engine::expect(filled, part * num_terms);
            }
            for (uint32_t j = Engine::lane(); j < num_terms; j += Engine::kLanes)
                Engine::fetch_part(stage + j * part, filled, row(j) + at, part);
            at += part;
            ++fetched;
        } else if (fetched != summed && (at < bytes || finish)) {
            const uint32_t place = summed % kStages;
            Engine::wait_filled(&ring.filled[place], summed / kStages & 1);
            const StagedTerms piece = ring.piece[place];
            sum(reinterpret_cast<uint8_t *>(piece.destination), stage_of(stages, bytes_of_stage, place), piece.bytes,
                piece.terms);
            Engine::stages_read();  // all lanes have taken what they need from the stage, and know its piece no more
            ++summed;
        } else {
            break;
        }
    }
    Engine::sync();  // all lanes have read the counts
    if (Engine::lane() == 0) {
        ring.fetched = fetched;
        ring.summed = summed;
    }
    Engine::sync();
}

}  // namespace uccl_ep::device::detail
