// Arithmetic whose bits are part of the contract. Compiled without contraction of multiply and add
// (-ffp-contract=off, -fmad=false): a fused one would round once instead of twice.
#pragma once

#include "parameters.hpp"

namespace uccl_ep {

// Round to nearest even; a NaN becomes the quiet NaN that torch makes of it.
UCCL_EP_DEVICE uint16_t float_to_bfloat16(float value) {
    const uint32_t bits = device::float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
UCCL_EP_DEVICE float bfloat16_to_float(uint16_t bits) { return device::bits_to_float(uint32_t{bits} << 16); }

// e4m3fn: 4 exponent bits, bias 7, no infinity, largest finite value 448; round to nearest even,
// saturating. Branch-free, so that the host compiler makes vector code of it.
UCCL_EP_DEVICE uint8_t float_to_float8(float value) {
    const uint32_t bits = device::float_to_bits(value);
    const uint32_t sign = bits >> 24 & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal: drop 20 mantissa bits with rounding, rebias the exponent from 127 to 7.
    const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
    // Subnormal (below 2^-6): adding 2^14 leaves multiples of 2^-9 in the low mantissa bits, rounded by the adder.
    const uint32_t subnormal = device::float_to_bits(device::bits_to_float(magnitude) + 16384.0f) - 0x46800000u;
    uint32_t result = magnitude < 0x3c800000u ? subnormal : normal;
    result = magnitude >= 0x43e80000u ? 0x7eu : result;  // 464, halfway to the missing 480, and above
    result = magnitude > 0x7f800000u ? 0x7fu : result;   // NaN
    return static_cast<uint8_t>(sign | result);
}

// The same of several. A backend whose device converts two at a time, to the same bits, names it.
template <uint32_t kCount>
UCCL_EP_DEVICE void floats_to_float8(uint8_t *to, const float *from) {
#ifdef UCCL_EP_DEVICE_FLOAT8_PAIR
    if constexpr (kCount % 2 == 0) {
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kCount; i += 2) {
            const uint16_t pair = UCCL_EP_DEVICE_FLOAT8_PAIR(from[i], from[i + 1]);
            to[i] = static_cast<uint8_t>(pair);
            to[i + 1] = static_cast<uint8_t>(pair >> 8);
        }
        return;
    }
#endif
    UCCL_EP_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) to[i] = float_to_float8(from[i]);
}

// Element types of a payload, with the type in which sums are accumulated.
struct Bfloat16 {
    static constexpr bool kIsBfloat16 = true;
    using Storage = uint16_t;
    using Accumulator = float;
    UCCL_EP_DEVICE static float load(uint16_t bits) { return bfloat16_to_float(bits); }
    UCCL_EP_DEVICE static uint16_t store(float value) { return float_to_bfloat16(value); }
};
struct Float16 {
    static constexpr bool kIsBfloat16 = false;
    using Storage = uint16_t;
    using Accumulator = float;
    UCCL_EP_DEVICE static float load(uint16_t bits) { return device::half_to_float(bits); }
    UCCL_EP_DEVICE static uint16_t store(float value) { return device::float_to_half(value); }
};
struct Float32 {
    static constexpr bool kIsBfloat16 = false;
    using Storage = float;
    using Accumulator = float;
    UCCL_EP_DEVICE static float load(float value) { return value; }
    UCCL_EP_DEVICE static float store(float value) { return value; }
};
struct Float64 {
    static constexpr bool kIsBfloat16 = false;
    using Storage = double;
    using Accumulator = double;
    UCCL_EP_DEVICE static double load(double value) { return value; }
    UCCL_EP_DEVICE static double store(double value) { return value; }
};

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
// more rows at hand, and a short one for what is left.
#ifdef UCCL_EP_DEVICE_RUN
template <class Element>
using Run = UCCL_EP_DEVICE_RUN<Element>;
template <class Element>
using MiddleRun = UCCL_EP_DEVICE_MIDDLE_RUN<Element>;
template <class Element>
using ShortRun = UCCL_EP_DEVICE_SHORT_RUN<Element>;
#else
template <class Element>
using Run = ScalarRun<Element>;
template <class Element>
using MiddleRun = ScalarRun<Element>;
template <class Element>
using ShortRun = ScalarRun<Element>;
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
// so they should be cheap.
template <class Element, bool kWeighted, class Term, class Weight>
UCCL_EP_DEVICE void sum_rows(uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_terms, Term term, Weight weight) {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
    auto *to = reinterpret_cast<Storage *>(out);
    const auto row = [&](uint32_t j) { return reinterpret_cast<const Storage *>(term(j)); };
    const auto factor = [&](uint32_t j) { return kWeighted ? static_cast<Accumulator>(weight(j)) : Accumulator{1}; };
    uint32_t whole = sum_runs<Run<Element>, kWeighted>(to, begin, end, num_terms, row, factor);
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

// Elements of a row that a warp sums at a time: pieces of a row that are shared out should be multiples of it.
UCCL_EP_DEVICE constexpr uint32_t sum_step(uint32_t element_bytes) {
    return element_bytes == 2   ? Run<Bfloat16>::kElements * device::kWarpSize
           : element_bytes == 4 ? Run<Float32>::kElements * device::kWarpSize
                                : Run<Float64>::kElements * device::kWarpSize;
}

template <bool kWeighted, class Term, class Weight>
UCCL_EP_DEVICE void sum_payload(uint32_t payload_type, uint8_t *out, uint32_t begin, uint32_t end, uint32_t num_terms,
                                Term term, Weight weight) {
    switch (static_cast<PayloadType>(payload_type)) {
        case PayloadType::kBfloat16:
            return sum_rows<Bfloat16, kWeighted>(out, begin, end, num_terms, term, weight);
        case PayloadType::kFloat16:
            return sum_rows<Float16, kWeighted>(out, begin, end, num_terms, term, weight);
        case PayloadType::kFloat32:
            return sum_rows<Float32, kWeighted>(out, begin, end, num_terms, term, weight);
        case PayloadType::kFloat64:
            return sum_rows<Float64, kWeighted>(out, begin, end, num_terms, term, weight);
        default:
            return;  // refused by the communicator before any launch
    }
}

UCCL_EP_DEVICE uint32_t scale_groups(uint32_t hidden) { return (hidden + kScaleGroup - 1) / kScaleGroup; }

struct Scale {
    float multiplier;  // of the values
    float stored;      // what the receiver multiplies with
};

// amax / 448, and its inverse; or that rounded up to a power of two, whose inverse is exact.
UCCL_EP_DEVICE Scale scale_of(float amax, bool power_of_two) {
    amax = amax > 1e-4f ? amax : 1e-4f;  // a row of zeros has a scale too
    if (!power_of_two) return {448.0f / amax, amax / 448.0f};
    const uint32_t bits = device::float_to_bits(amax / 448.0f);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
    return {device::bits_to_float((254u - exponent) << 23), device::bits_to_float(exponent << 23)};
}

// Neighbouring elements of a lane, moved by one load or store where their address allows.
template <class T, uint32_t kCount>
struct alignas(sizeof(T) * kCount <= 16 ? sizeof(T) * kCount : alignof(T)) Pack {
    T value[kCount];
};

template <class T, uint32_t kCount>
UCCL_EP_DEVICE bool pack_is_aligned(const T *address) {
    return sizeof(T) * kCount > 16 || reinterpret_cast<uint64_t>(address) % alignof(Pack<T, kCount>) == 0;
}

// The cast of one group of kScaleGroup elements to e4m3, with its scale; the whole warp. A lane has neighbouring
// elements, as many as the warp size leaves it.
class GroupCast {
    static constexpr uint32_t kMine = kScaleGroup / device::kWarpSize;

  public:
    template <class Element>
    UCCL_EP_DEVICE void load(const uint8_t *bytes, uint32_t hidden, uint32_t group) {
        using Storage = typename Element::Storage;
        const auto *row = reinterpret_cast<const Storage *>(bytes);
        const uint32_t begin = group * kScaleGroup + device::lane() * kMine;
        const uint32_t count = count_of(hidden, begin);
        if (count == kMine && pack_is_aligned<Storage, kMine>(row + begin)) {
            const auto pack = *reinterpret_cast<const Pack<Storage, kMine> *>(row + begin);
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kMine; ++i) values_[i] = static_cast<float>(Element::load(pack.value[i]));
        } else {
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kMine; ++i)
                values_[i] = i < count ? static_cast<float>(Element::load(row[begin + i])) : 0.0f;
        }
    }

    UCCL_EP_DEVICE void cast(bool power_of_two) {
        uint32_t largest = 0;  // as bits: magnitudes order like integers, and a NaN above all
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) {
            const uint32_t magnitude = device::float_to_bits(values_[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const Scale scale = scale_of(device::reduce_max(device::bits_to_float(largest)), power_of_two);
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) values_[i] *= scale.multiplier;
        floats_to_float8<kMine>(cast_.value, values_);
        scale_ = scale.stored;
    }

    UCCL_EP_DEVICE void store(uint8_t *out, uint32_t hidden, uint32_t group) const {
        const uint32_t begin = group * kScaleGroup + device::lane() * kMine;
        const uint32_t count = count_of(hidden, begin);
        if (count == kMine && pack_is_aligned<uint8_t, kMine>(out + begin)) {
            *reinterpret_cast<Pack<uint8_t, kMine> *>(out + begin) = cast_;
        } else {
            UCCL_EP_UNROLL
            for (uint32_t i = 0; i < kMine; ++i) {
                if (i < count) out[begin + i] = cast_.value[i];
            }
        }
    }

    UCCL_EP_DEVICE float scale() const { return scale_; }

  private:
    UCCL_EP_DEVICE static uint32_t count_of(uint32_t hidden, uint32_t begin) {
        return begin >= hidden ? 0 : hidden - begin < kMine ? hidden - begin : kMine;
    }

    float values_[kMine];
    Pack<uint8_t, kMine> cast_;
    float scale_;
};

}  // namespace uccl_ep
