// Sums of a token that are added up in two places: each rank sums the rows that its experts made, unrounded, and the
// token's own rank adds those sums up and rounds once. Both walk the same runs of elements.
#pragma once

#include "sums.hpp"

namespace uccl_ep {

// Sum whole runs of [begin, end); returns where the first that is not whole begins. A token has few terms here, so the
// last ones, fewer than kAtOnce, are on their way together as well; sum_runs, without that, takes fewer registers.
// `load(run, j, at)` gives term j's elements from `at` on in the run's form, `add(run, loaded, j)` adds them, and
// `store(run, at)` writes the sums. `ready()` is asked while terms are on their way; when it says false, nothing more
// happens, and nothing is left.
template <class AnyRun, uint32_t kAtOnce, class Load, class Ready, class Add, class Store>
UCCL_EP_DEVICE uint32_t sum_few(uint32_t begin, uint32_t end, uint32_t num_terms, Load load, Ready ready, Add add,
                                Store store) {
    constexpr uint32_t kRun = AnyRun::kElements * device::kWarpSize;
    for (; end - begin >= kRun; begin += kRun) {
        AnyRun run;
        run.clear();
        for (uint32_t j = 0; j < num_terms; j += kAtOnce) {
            decltype(load(run, j, begin)) loaded[kAtOnce] = {};
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (j + i < num_terms) loaded[i] = load(run, j + i, begin);
            }
            if (!ready()) return end;
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (j + i < num_terms) add(run, loaded[i], j + i);
            }
        }
        store(run, begin);
    }
    return begin;
}

// Elements that a warp sums at a time: pieces of a row that are shared out begin at multiples of it.
UCCL_EP_DEVICE constexpr uint32_t partial_step(uint32_t element_bytes) { return step_of<MiddleRun>(element_bytes); }

// to[i] = sum over terms, in order, of weight(j) * row(j)[i], for i in [begin, end). `begin` is a multiple of
// partial_step(). `ready()` is called while rows are on their way and before the first weight is asked for; when it
// says false, nothing more happens. The whole warp.
template <class Element, class Ready, class Row, class Weight>
UCCL_EP_DEVICE void weigh_rows(uint8_t *sums, uint32_t begin, uint32_t end, uint32_t num_terms, Ready ready, Row term,
                               Weight weight) {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
#ifdef UCCL_EP_DEVICE_ROWS_AT_ONCE
    constexpr uint32_t kAtOnce = UCCL_EP_DEVICE_ROWS_AT_ONCE;
#else
    constexpr uint32_t kAtOnce = 3;
#endif
    auto *to = reinterpret_cast<Accumulator *>(sums);
    const auto row = [&](uint32_t j) { return reinterpret_cast<const Storage *>(term(j)); };
    const auto factor = [&](uint32_t j) { return static_cast<Accumulator>(weight(j)); };
    const auto load = [&](const auto &run, uint32_t j, uint32_t at) { return run.load(row(j) + at); };
    const auto add = [&](auto &run, const auto &loaded, uint32_t j) { run.template add<true>(loaded, factor(j)); };
    const auto store = [&](const auto &run, uint32_t at) { run.store_partial(to + at); };
    uint32_t whole = sum_few<MiddleRun<Element>, kAtOnce>(begin, end, num_terms, load, ready, add, store);
    whole = sum_few<ShortRun<Element>, kAtOnce>(whole, end, num_terms, load, ready, add, store);
    if (whole == end || !ready()) return;
    for (uint32_t i = whole + device::lane(); i < end; i += device::kWarpSize) {
        Accumulator sum = 0;
        for (uint32_t j = 0; j < num_terms; ++j) sum += Element::load(row(j)[i]) * factor(j);
        to[i] = sum;
    }
}

// out[i] = round(sum over j, in order, of the sums at sums(j)), for i in [begin, end), which weigh_rows made in pieces
// that began at multiples of partial_step() too. The whole warp.
template <class Element, class Sums>
UCCL_EP_DEVICE void add_sums(uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_sums, Sums place) {
    using Accumulator = typename Element::Accumulator;
    constexpr uint32_t kAtOnce = 2;
    auto *to = reinterpret_cast<typename Element::Storage *>(out);
    const auto sums = [&](uint32_t j) { return reinterpret_cast<const Accumulator *>(place(j)); };
    const auto load = [&](const auto &run, uint32_t j, uint32_t at) { return run.load_partial(sums(j) + at); };
    const auto ready = [] { return true; };
    const auto add = [](auto &run, const auto &loaded, uint32_t) { run.add_partial(loaded); };
    const auto store = [&](const auto &run, uint32_t at) { run.store(to + at); };
    uint32_t whole = sum_few<MiddleRun<Element>, kAtOnce>(begin, end, num_sums, load, ready, add, store);
    whole = sum_few<ShortRun<Element>, kAtOnce>(whole, end, num_sums, load, ready, add, store);
    for (uint32_t i = whole + device::lane(); i < end; i += device::kWarpSize) {
        Accumulator sum = 0;
        for (uint32_t j = 0; j < num_sums; ++j) sum += sums(j)[i];
        to[i] = Element::store(sum);
    }
}

}  // namespace uccl_ep
