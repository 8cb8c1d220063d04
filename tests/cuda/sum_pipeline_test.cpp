// The order in which rows are fetched ahead of their sums, against the model of a late engine and late lanes, in turn
// with copies through the same stages. Prints what went wrong; 0: nothing.
#include "late_engine.hpp"
//
#include "sum_pipeline.hpp"

using namespace uccl_ep::device::detail;
using late::chance;
using late::generator;
using late::wrong;
using LateEngine = late::Engine;

namespace {

// Every size of stage that the staging memory of a warp gives, from the least to the largest.
int check_pieces() {
    int bad = 0;
    for (const uint32_t stage : {1280u, 1920u, 3968u, 6016u, 8064u, 12160u, 24448u}) {
        for (uint32_t terms = 1; terms < 200; ++terms) {
            const uint32_t bytes = sum_piece_bytes(stage, terms), whole = bytes / 512 * 512;
            const bool fits = uint64_t{bytes} * terms <= stage && bytes % 16 == 0;
            // Whole steps of the warp, or a last one that most lanes have a part in; at least a step if there is room.
            const bool worth = bytes == whole || bytes - whole >= 384;
            const bool none = bytes == 0 && stage / terms >= 512;
            if (!fits || !worth || none) ++bad, std::printf("stage %u, %u terms: %u bytes\n", stage, terms, bytes);
        }
    }
    return bad;
}

}  // namespace

int main() {
    constexpr uint32_t kStageBytes = 3968;
    static struct alignas(128) {
        WarpStages stages;
        uint8_t memory[kStages * kStageBytes];
    } block = {};
    wrong += check_pieces();
    std::vector<uint8_t> source(1 << 18), destination(1 << 18), want;
    for (uint8_t &byte : source) byte = static_cast<uint8_t>(generator());
    // A sum of bytes, which each lane reads when it must.
    const auto sum = [](uint8_t *out, const uint8_t *stage, uint32_t bytes, uint32_t terms) {
        for (uint32_t lane = 0; lane < 4; ++lane) {
            late::reads.push_back([=] {
                for (uint32_t i = lane; i < bytes; i += 4) {
                    uint8_t total = 0;
                    for (uint32_t j = 0; j < terms; ++j) total = static_cast<uint8_t>(3 * total + stage[j * bytes + i]);
                    out[i] = total;
                }
            });
        }
    };
    for (int round = 0; round < 300 && wrong == 0; ++round) {
        std::fill(destination.begin(), destination.end(), 0xee);
        want = destination;
        uint64_t at = 0;
        const uint32_t sums = 1 + generator() % 6;
        for (uint32_t i = 0; i < sums; ++i) {
            const uint32_t terms = 1 + generator() % 10, bytes = 16 * (generator() % 1000);
            std::vector<const uint8_t *> rows;
            for (uint32_t j = 0; j < terms; ++j) rows.push_back(&source[16 * (generator() % 15000)]);
            const bool finish = i + 1 == sums ? MUTANT != 3 : chance(20);
            sum_ahead<LateEngine>(
                &block.stages, kStageBytes, &destination[at], bytes, terms, [&](uint32_t j) { return rows[j]; }, sum,
                finish);
            if (finish && (block.stages.sums.fetched != block.stages.sums.summed || !late::fetches.empty()))
                ++wrong, std::printf("round %d: a sum is left over\n", round);
            for (uint32_t b = 0; b < bytes; ++b) {
                uint8_t total = 0;
                for (const uint8_t *row : rows) total = static_cast<uint8_t>(3 * total + row[b]);
                want[at + b] = total;
            }
            at += bytes + 16 * (generator() % 3);
            std::fill(rows.begin(), rows.end(), nullptr);  // a list is asked in its own call alone
        }
        if (chance(50)) {
            const uint64_t bytes = 16 * (1 + generator() % 600), from = 16 * (generator() % 3000);
            fetch_row<LateEngine>(&block.stages, kStageBytes, &destination[at], &source[from], bytes);
            store_fetched<LateEngine>(&block.stages, kStageBytes);
            LateEngine::wait_stored();
            std::memcpy(&want[at], &source[from], bytes);
        }
        if (destination != want) ++wrong, std::printf("round %d: a sum or a copy differs\n", round);
    }
    return wrong == 0 ? 0 : 1;
}
