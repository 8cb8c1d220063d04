// Sums over the rows of a token, element by element, in order: the loop over runs of elements, and the runs. All forms
// of a run give the same bits.
#pragma once

#include "numerics.hpp"

namespace uccl_ep {

// The sums of one run of elements of a warp, a lane's part of it: neighbouring elements.
template <class Element>
class ScalarRun {
  public:
    static constexpr uint32_t kElements = 8;  // of a lane
    static constexpr uint32_t kTerms = 1;     // rows that are loaded before the first is added
    using Loaded = const typename Element::Storage *;
    // `from` and `to` are where the warp's run begins.
    UCCL_EP_DEVICE static Loaded load(const typename Element::Storage *from) {
        return from + device::lane() * kElements;
    }
    UCCL_EP_DEVICE void clear() {
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] = 0;
    }
    template <bool kWeighted>
    UCCL_EP_DEVICE void add(Loaded from, typename Element::Accumulator factor) {
        for (uint32_t i = 0; i < kElements; ++i) {
            const typename Element::Accumulator value = Element::load(from[i]);
            sums_[i] += kWeighted ? value * factor : value;
        }
    }
    UCCL_EP_DEVICE void store(typename Element::Storage *to) const {
        to += device::lane() * kElements;
        for (uint32_t i = 0; i < kElements; ++i) to[i] = Element::store(sums_[i]);
    }

    // Sums on their way to be added to others: not rounded. Only another run of the same kind reads them.
    using Partial = const typename Element::Accumulator *;
    UCCL_EP_DEVICE static Partial load_partial(const typename Element::Accumulator *from) {
        return from + device::lane() * kElements;
    }
    UCCL_EP_DEVICE void add_partial(Partial from) {
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] += from[i];
    }
    UCCL_EP_DEVICE void store_partial(typename Element::Accumulator *to) const {
        to += device::lane() * kElements;
        for (uint32_t i = 0; i < kElements; ++i) to[i] = sums_[i];
    }

  private:
    typename Element::Accumulator sums_[kElements];
};

// A backend whose primitives know a faster form with the same bits names it, a shorter one for sums that keep
// more rows at hand, a short one for what is left, and a short one that has more rows under way; and
// UCCL_EP_DEVICE_SUM_OF_TWO(to, a, b, elements), which sums what it can of two rows of bfloat16, and returns where the
// rest begins.
#ifdef UCCL_EP_DEVICE_RUN
template <class Element>
using Run = UCCL_EP_DEVICE_RUN<Element>;
template <class Element>
using MiddleRun = UCCL_EP_DEVICE_MIDDLE_RUN<Element>;
template <class Element>
using ShortRun = UCCL_EP_DEVICE_SHORT_RUN<Element>;
template <class Element>
using PieceRun = UCCL_EP_DEVICE_PIECE_RUN<Element>;
#else
template <class Element>
using Run = ScalarRun<Element>;
template <class Element>
using MiddleRun = ScalarRun<Element>;
template <class Element>
using ShortRun = ScalarRun<Element>;
template <class Element>
using PieceRun = ScalarRun<Element>;
#endif

// Sum whole runs of [begin, end); returns where the first that is not whole begins.
template <class AnyRun, bool kWeighted, class Storage, class Row, class Factor>
UCCL_EP_DEVICE uint32_t sum_runs(Storage *to, uint32_t begin, uint32_t end, uint32_t num_terms, Row row,
                                 Factor factor) {
    constexpr uint32_t kRun = AnyRun::kElements * device::kWarpSize, kTerms = AnyRun::kTerms;
    for (; end - begin >= kRun; begin += kRun) {
        AnyRun run;
        run.clear();
        uint32_t j = 0;
        if constexpr (kTerms > 1) {
            for (; j + kTerms <= num_terms; j += kTerms) {
                typename AnyRun::Loaded loaded[kTerms];
                UCCL_EP_UNROLL
                for (uint32_t i = 0; i < kTerms; ++i) loaded[i] = AnyRun::load(row(j + i) + begin);
                UCCL_EP_UNROLL
                for (uint32_t i = 0; i < kTerms; ++i) run.template add<kWeighted>(loaded[i], factor(j + i));
            }
        }
        for (; j < num_terms; ++j) run.template add<kWeighted>(AnyRun::load(row(j) + begin), factor(j));
        run.store(to + begin);
    }
    return begin;
}

// out[i] = round(sum over terms, in order, of term j's element i) for i in [begin, end), the whole warp together.
// `term(j)` gives the row of term j, `weight(j)` its factor where kWeighted; both are called for each run of elements,
// so they should be cheap. By runs of the kind `WholeRun`, as far as they are whole.
template <class Element, template <class> class WholeRun, bool kWeighted, class Term, class Weight>
UCCL_EP_DEVICE void sum_rows(uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_terms, Term term, Weight weight) {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
    auto *to = reinterpret_cast<Storage *>(out);
    const auto row = [&](uint32_t j) { return reinterpret_cast<const Storage *>(term(j)); };
    const auto factor = [&](uint32_t j) { return kWeighted ? static_cast<Accumulator>(weight(j)) : Accumulator{1}; };
    uint32_t whole = sum_runs<WholeRun<Element>, kWeighted>(to, begin, end, num_terms, row, factor);
    whole = sum_runs<ShortRun<Element>, kWeighted>(to, whole, end, num_terms, row, factor);
    for (uint32_t i = whole + device::lane(); i < end; i += device::kWarpSize) {
        Accumulator sum = 0;
        for (uint32_t j = 0; j < num_terms; ++j) {
            const Accumulator value = Element::load(row(j)[i]);
            sum += kWeighted ? value * factor(j) : value;
        }
        to[i] = Element::store(sum);
    }
}

template <bool kWeighted, template <class> class WholeRun = Run, class Term, class Weight>
UCCL_EP_DEVICE void sum_payload(uint32_t payload_type, uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_terms,
                                Term term, Weight weight) {
    with_element(payload_type, [&](auto element) {
        sum_rows<decltype(element), WholeRun, kWeighted>(out, begin, end, num_terms, term, weight);
    });
}

// The same, not weighted.
template <class Term>
UCCL_EP_DEVICE void sum_all(uint32_t payload_type, uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_terms,
                            Term term) {
    sum_payload<false>(payload_type, out, begin, end, num_terms, term, [](uint32_t) { return 1.0f; });
}

// The sum of whole rows of `elements`, not weighted. `term` is copied.
template <class Term>
UCCL_EP_DEVICE void sum_token(uint32_t payload_type, uint8_t *out, uint32_t elements, uint32_t num_terms, Term term) {
    uint32_t begin = 0;
#ifdef UCCL_EP_DEVICE_SUM_OF_TWO
    if (num_terms == 2 && payload_type == static_cast<uint32_t>(PayloadType::kBfloat16)) {
        begin =
            UCCL_EP_DEVICE_SUM_OF_TWO(reinterpret_cast<uint16_t *>(out), reinterpret_cast<const uint16_t *>(term(0)),
                                      reinterpret_cast<const uint16_t *>(term(1)), elements);
        if (begin == elements) return;
    }
#endif
    sum_all(payload_type, out, begin, elements, num_terms, term);
}

// Elements that a warp sums at a time, by the runs given: pieces of a row that are shared out begin at multiples of
// it.
template <template <class> class AnyRun>
UCCL_EP_DEVICE constexpr uint32_t step_of(uint32_t element_bytes) {
    return device::kWarpSize * (element_bytes == 2   ? AnyRun<Bfloat16>::kElements
                                : element_bytes == 4 ? AnyRun<Float32>::kElements
                                                     : AnyRun<Float64>::kElements);
}

}  // namespace uccl_ep
