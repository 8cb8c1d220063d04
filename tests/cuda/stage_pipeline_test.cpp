// The stage pipeline of the CUDA copy primitive against the model of a late engine. Prints what went wrong; 0: nothing.
#include "late_engine.hpp"
//
#include "stage_pipeline.hpp"

using namespace uccl_ep::device::detail;
using late::chance;
using late::generator;
using LateEngine = late::Engine;

namespace {
constexpr uint32_t kStageBytes = 256;
}

int main() {
    struct alignas(128) {
        WarpStages stages;
        uint8_t memory[kStages * kStageBytes];
    } block = {};
    std::vector<uint8_t> source(1 << 16), destination(1 << 16), want(1 << 16);
    for (uint8_t &byte : source) byte = static_cast<uint8_t>(generator());
    for (int round = 0; round < 2000 && late::wrong == 0; ++round) {
        std::fill(destination.begin(), destination.end(), 0xee);
        want = destination;
        uint64_t at = 0;
        const uint32_t copies = 1 + generator() % 12;
        for (uint32_t i = 0; i < copies; ++i) {
            const uint64_t bytes = 16 * (1 + generator() % 60), from = 16 * (generator() % 3000);
            if (at + bytes > destination.size()) break;
            if (chance(15)) {  // a store that does not come from a stage
                LateEngine::store(&destination[at], &source[from], static_cast<uint32_t>(bytes));
            } else {
                fetch_row<LateEngine>(&block.stages, kStageBytes, &destination[at], &source[from], bytes);
            }
            std::memcpy(&want[at], &source[from], bytes);
            at += bytes + 16 * (generator() % 3);
        }
        if (MUTANT != 3) store_fetched<LateEngine>(&block.stages, kStageBytes);
        LateEngine::wait_stored();
        if (destination != want) ++late::wrong, std::printf("round %d: a copy differs\n", round);
    }
    return late::wrong == 0 ? 0 : 1;
}
