// A model of a bulk copy engine that does everything as late as it may: a fetch lands when its barrier is waited for, a
// store reads its stage when a wait demands it, and writes at the very end; and of lanes whose reads of a stage are as
// late. Sometimes, at random, all of them are early. The tests run the code that drives the engine against it.
//
// With -DMUTANT=n one mechanism is taken out, and the test must fail.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#define UCCL_EP_DEVICE inline
#ifndef MUTANT
#define MUTANT 0
#endif

namespace late {

inline std::mt19937 generator(1);
inline bool chance(uint32_t percent) { return generator() % 100 < percent; }

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

inline std::vector<Fetch> fetches;
inline std::deque<Store> stores;
inline std::vector<std::function<void()>> reads;  // of lanes, not yet made
inline int wrong = 0;

// A barrier's word: the phases that have ended, and in the high half the bytes that the running one still expects.
inline void land(size_t index) {
    const Fetch fetch = fetches[index];
    fetches.erase(fetches.begin() + static_cast<long>(index));
    // What has not read this stage yet loses its bytes here.
    std::memcpy(fetch.stage, fetch.source, fetch.bytes);
    *fetch.filled -= uint64_t{fetch.bytes} << 32;
    if (*fetch.filled >> 32 == 0) ++*fetch.filled;
}

inline void read(Store &store) {
    if (store.read) return;
    store.held.assign(store.stage, store.stage + store.bytes);
    store.read = true;
}

inline void whatever_happens() {
    while (!fetches.empty() && chance(20)) land(generator() % fetches.size());
    for (Store &store : stores) {
        if (chance(10)) read(store);
    }
    if (chance(10)) {
        for (const auto &make : reads) make();
        reads.clear();
    }
}

struct Engine {
    // One lane, which does what all do; the others' reads are those that it leaves for later.
    static constexpr uint32_t kLanes = 1;
    static uint32_t lane() { return 0; }

    template <uint32_t kAllowed>
    static void wait_stages_read() {
        whatever_happens();
        const uint32_t allowed = kAllowed + (MUTANT == 1 ? 1 : 0);
        for (size_t i = 0; i + allowed < stores.size(); ++i) read(stores[i]);
    }
    static void expect(uint64_t *filled, uint32_t bytes) {
        if (*filled >> 32 != 0) ++wrong, std::printf("a phase is begun before the one before it has ended\n");
        *filled += uint64_t{bytes} << 32;
    }
    static void fetch_part(void *stage, uint64_t *filled, const void *source, uint32_t bytes) {
        fetches.push_back({static_cast<uint8_t *>(stage), filled, static_cast<const uint8_t *>(source), bytes});
    }
    static void fetch(void *stage, uint64_t *filled, const void *source, uint32_t bytes) {
        expect(filled, bytes);
        fetch_part(stage, filled, source, bytes);
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
    static void stages_read() {
        if (MUTANT != 4) {
            for (const auto &make : reads) make();
            reads.clear();
        }
        whatever_happens();
    }
    static void sync() { whatever_happens(); }
};

}  // namespace late
