// The stage pipeline of the CUDA copy primitive against a model of the engine that does everything as late
// as it may: a fetch lands when its barrier is waited for, a store reads its stage when a wait demands it, and
// writes at the very end. Sometimes, at random, the model is early. Prints what went wrong; 0: nothing.
//
// With -DMUTANT=n one mechanism is taken out, and the test must fail.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#define UCCL_EP_DEVICE inline
#ifndef MUTANT
#define MUTANT 0
#endif
#include "stage_pipeline.hpp"

using namespace uccl_ep::device::detail;

namespace {

constexpr uint32_t kStageBytes = 256;

std::mt19937 generator(1);
bool chance(uint32_t percent) { return generator() % 100 < percent; }

struct Fetch {
    uint8_t *stage;
    uint64_t *filled;
    const uint8_t *source;
    uint32_t bytes;
};
struct Store {
    uint8_t *destination;
    const uint8_t *stage;
    uint32_t bytes;
    bool read;
    std::vector<uint8_t> held;
};

std::vector<Fetch> fetches;
std::deque<Store> stores;
int wrong = 0;

void land(size_t index) {
    const Fetch fetch = fetches[index];
    fetches.erase(fetches.begin() + static_cast<long>(index));
    // A store that has not read this stage yet loses its bytes here.
    std::memcpy(fetch.stage, fetch.source, fetch.bytes);
    ++*fetch.filled;
}

void read(Store &store) {
    if (store.read) return;
    store.held.assign(store.stage, store.stage + store.bytes);
    store.read = true;
}

void whatever_happens() {
    while (!fetches.empty() && chance(20)) land(generator() % fetches.size());
    for (Store &store : stores) {
        if (chance(10)) read(store);
    }
}

struct LateEngine {
    template <uint32_t kAllowed>
    static void wait_stages_read() {
        whatever_happens();
        const uint32_t allowed = kAllowed + (MUTANT == 1 ? 1 : 0);
        for (size_t i = 0; i + allowed < stores.size(); ++i) read(stores[i]);
    }
    static void fetch(void *stage, uint64_t *filled, const void *source, uint32_t bytes) {
        fetches.push_back({static_cast<uint8_t *>(stage), filled, static_cast<const uint8_t *>(source), bytes});
        whatever_happens();
    }
    static void wait_filled(uint64_t *filled, uint32_t phase) {
        whatever_happens();
        if (MUTANT == 2) return;
        // The barrier counts its phases; the one waited for is complete when the count has passed it.
        for (size_t i = 0; i < fetches.size() && *filled % 2 == phase;) {
            if (fetches[i].filled == filled) {
                land(i);
            } else {
                ++i;
            }
        }
        if (*filled % 2 == phase) ++wrong, std::printf("waits for a fetch that was never asked for\n");
    }
    static void store(void *destination, const void *stage, uint32_t bytes) {
        stores.push_back({static_cast<uint8_t *>(destination), static_cast<const uint8_t *>(stage), bytes, false, {}});
        whatever_happens();
    }
    static void wait_stored() {
        for (Store &store : stores) {
            read(store);
            std::memcpy(store.destination, store.held.data(), store.bytes);
        }
        stores.clear();
    }
};

}  // namespace

int main() {
    struct alignas(128) {
        WarpStages stages;
        uint8_t memory[kStages * kStageBytes];
    } block = {};
    std::vector<uint8_t> source(1 << 16), destination(1 << 16), want(1 << 16);
    for (uint8_t &byte : source) byte = static_cast<uint8_t>(generator());
    for (int round = 0; round < 2000 && wrong == 0; ++round) {
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
        if (destination != want) ++wrong, std::printf("round %d: a copy differs\n", round);
    }
    return wrong == 0 ? 0 : 1;
}
