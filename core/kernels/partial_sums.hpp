// Sums of a token that are added up in two places: each rank sums the rows that its experts made, unrounded, and the
// token's own rank adds those sums up and rounds once. Both walk the same runs of elements.
#pragma once

#include "numerics.hpp"

namespace uccl_ep {

inline constexpr uint32_t kTermsAtOnce = 3;  // rows of a token that are loaded before the first is added

template <class AnyRun, class Element, class Ready, class Row, class Factor>
UCCL_EP_DEVICE uint32_t weigh_runs(typename Element::Accumulator *to, uint32_t begin, uint32_t end, uint32_t num_terms,
                                   Ready ready, Row row, Factor factor) {
    constexpr uint32_t kRun = AnyRun::kElements * device::kWarpSize;
    for (; end - begin >= kRun; begin += kRun) {
        AnyRun run;
        run.clear();
        for (uint32_t j = 0; j < num_terms; j += kTermsAtOnce) {
            typename AnyRun::Loaded loaded[kTermsAtOnce] = {};
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kTermsAtOnce; ++i) {
                if (j + i < num_terms) loaded[i] = AnyRun::load(row(j + i) + begin);
            }
            if (!ready()) return end;
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kTermsAtOnce; ++i) {
                if (j + i < num_terms) run.template add<true>(loaded[i], factor(j + i));
            }
        }
        run.store_partial(to + begin);
    }
    return begin;
}

// Elements that a warp sums at a time: pieces of a row that are shared out begin at multiples of it.
UCCL_EP_DEVICE constexpr uint32_t partial_step(uint32_t element_bytes) {
    return element_bytes == 2   ? MiddleRun<Bfloat16>::kElements * device::kWarpSize
           : element_bytes == 4 ? MiddleRun<Float32>::kElements * device::kWarpSize
                                : MiddleRun<Float64>::kElements * device::kWarpSize;
}

// to[i] = sum over terms, in order, of weight(j) * row(j)[i], for i in [begin, end). `begin` is a multiple of
// partial_step(). `ready()` is called while rows are on their way and before the first weight is asked for; when it says
// false, nothing more happens. The whole warp.
template <class Element, class Ready, class Row, class Weight>
UCCL_EP_DEVICE void weigh_rows(uint8_t *sums, uint32_t begin, uint32_t end, uint32_t num_terms, Ready ready, Row term,
                               Weight weight) {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
    auto *to = reinterpret_cast<Accumulator *>(sums);
    const auto row = [&](uint32_t j) { return reinterpret_cast<const Storage *>(term(j)); };
    const auto factor = [&](uint32_t j) { return static_cast<Accumulator>(weight(j)); };
    uint32_t whole = weigh_runs<MiddleRun<Element>, Element>(to, begin, end, num_terms, ready, row, factor);
    whole = weigh_runs<ShortRun<Element>, Element>(to, whole, end, num_terms, ready, row, factor);
    if (whole == end || !ready()) return;
    for (uint32_t i = whole + device::lane(); i < end; i += device::kWarpSize) {
        Accumulator sum = 0;
        for (uint32_t j = 0; j < num_terms; ++j) sum += Element::load(row(j)[i]) * factor(j);
        to[i] = sum;
    }
}

template <class AnyRun, class Element, class Sums>
UCCL_EP_DEVICE uint32_t add_runs(typename Element::Storage *to, uint32_t begin, uint32_t end, uint32_t num_sums,
                                 Sums sums) {
    constexpr uint32_t kRun = AnyRun::kElements * device::kWarpSize, kAtOnce = 2;
    for (; end - begin >= kRun; begin += kRun) {
        AnyRun run;
        run.clear();
        for (uint32_t j = 0; j < num_sums; j += kAtOnce) {
            typename AnyRun::Partial loaded[kAtOnce] = {};
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (j + i < num_sums) loaded[i] = AnyRun::load_partial(sums(j + i) + begin);
            }
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (j + i < num_sums) run.add_partial(loaded[i]);
            }
        }
        run.store(to + begin);
    }
    return begin;
}

// out[i] = round(sum over j, in order, of the sums at sums(j)), for i in [begin, end), which weigh_rows made in pieces
// that began at multiples of partial_step() too. The whole warp.
template <class Element, class Sums>
UCCL_EP_DEVICE void add_sums(uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_sums, Sums place) {
    using Accumulator = typename Element::Accumulator;
    auto *to = reinterpret_cast<typename Element::Storage *>(out);
    const auto sums = [&](uint32_t j) { return reinterpret_cast<const Accumulator *>(place(j)); };
    uint32_t whole = add_runs<MiddleRun<Element>, Element>(to, begin, end, num_sums, sums);
    whole = add_runs<ShortRun<Element>, Element>(to, whole, end, num_sums, sums);
    for (uint32_t i = whole + device::lane(); i < end; i += device::kWarpSize) {
        Accumulator sum = 0;
        for (uint32_t j = 0; j < num_sums; ++j) sum += sums(j)[i];
        to[i] = Element::store(sum);
    }
}

// Calls `use(Element{})` with the element type of a payload.
template <class Use>
UCCL_EP_DEVICE void with_element(uint32_t payload_type, Use use) {
    switch (static_cast<PayloadType>(payload_type)) {
        case PayloadType::kBfloat16:
            return use(Bfloat16{});
        case PayloadType::kFloat16:
            return use(Float16{});
        case PayloadType::kFloat32:
            return use(Float32{});
        case PayloadType::kFloat64:
            return use(Float64{});
        default:
            return;  // refused by the communicator before any launch
    }
}

}  // namespace uccl_ep
