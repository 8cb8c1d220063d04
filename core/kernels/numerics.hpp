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

// The sums of one run of elements, in one lane: 16 bytes of bf16 a load.
template <class Element>
class ScalarRun {
  public:
    static constexpr uint32_t kElements = 8;
    UCCL_EP_DEVICE void clear() {
        for (uint32_t i = 0; i < kElements; ++i) sums_[i] = 0;
    }
    template <bool kWeighted>
    UCCL_EP_DEVICE void add(const typename Element::Storage *from, typename Element::Accumulator factor) {
        for (uint32_t i = 0; i < kElements; ++i) {
            const typename Element::Accumulator value = Element::load(from[i]);
            sums_[i] += kWeighted ? value * factor : value;
        }
    }
    UCCL_EP_DEVICE void store(typename Element::Storage *to) const {
        for (uint32_t i = 0; i < kElements; ++i) to[i] = Element::store(sums_[i]);
    }

  private:
    typename Element::Accumulator sums_[kElements];
};

// A backend whose primitives know a faster form with the same bits names it.
#ifdef UCCL_EP_DEVICE_RUN
template <class Element>
using Run = UCCL_EP_DEVICE_RUN<Element>;
#else
template <class Element>
using Run = ScalarRun<Element>;
#endif

// out[i] = round(sum over terms, in order, of term j's element i), the whole warp together.
// `term(j)` gives the row of term j, `weight(j)` its factor where kWeighted; both are called with j
// increasing from 0, once for each run of elements.
template <class Element, bool kWeighted, class Term, class Weight>
UCCL_EP_DEVICE void sum_rows(uint8_t *out, uint32_t hidden, uint32_t num_terms, Term term, Weight weight) {
    using Storage = typename Element::Storage;
    using Accumulator = typename Element::Accumulator;
    constexpr uint32_t kRun = Run<Element>::kElements;
    auto *to = reinterpret_cast<Storage *>(out);
    const uint32_t whole = hidden / kRun * kRun;
    for (uint32_t base = device::lane() * kRun; base < whole; base += device::kWarpSize * kRun) {
        Run<Element> run;
        run.clear();
        for (uint32_t j = 0; j < num_terms; ++j) {
            const auto *from = reinterpret_cast<const Storage *>(term(j)) + base;
            run.template add<kWeighted>(from, kWeighted ? static_cast<Accumulator>(weight(j)) : Accumulator{1});
        }
        run.store(to + base);
    }
    for (uint32_t i = whole + device::lane(); i < hidden; i += device::kWarpSize) {
        Accumulator sum = 0;
        for (uint32_t j = 0; j < num_terms; ++j) {
            const Accumulator value = Element::load(reinterpret_cast<const Storage *>(term(j))[i]);
            sum += kWeighted ? value * static_cast<Accumulator>(weight(j)) : value;
        }
        to[i] = Element::store(sum);
    }
}

template <bool kWeighted, class Term, class Weight>
UCCL_EP_DEVICE void sum_payload(uint32_t payload_type, uint8_t *out, uint32_t hidden, uint32_t num_terms, Term term,
                                Weight weight) {
    switch (static_cast<PayloadType>(payload_type)) {
        case PayloadType::kBfloat16:
            return sum_rows<Bfloat16, kWeighted>(out, hidden, num_terms, term, weight);
        case PayloadType::kFloat16:
            return sum_rows<Float16, kWeighted>(out, hidden, num_terms, term, weight);
        case PayloadType::kFloat32:
            return sum_rows<Float32, kWeighted>(out, hidden, num_terms, term, weight);
        case PayloadType::kFloat64:
            return sum_rows<Float64, kWeighted>(out, hidden, num_terms, term, weight);
        default:
            return;  // refused by the communicator before any launch
    }
}

inline constexpr uint32_t kScaleGroup = 128;  // elements that share a scale

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

// Quantize a row to e4m3 with a float32 scale for each 128 elements; the whole warp. A lane has neighbouring
// elements of each group, as many as the warp size leaves it.
template <class Element>
UCCL_EP_DEVICE void quantize_elements(const typename Element::Storage *row, uint32_t hidden, bool power_of_two,
                                      uint8_t *out, float *scales) {
    constexpr uint32_t kMine = kScaleGroup / device::kWarpSize;
    for (uint32_t group = 0; group < scale_groups(hidden); ++group) {
        const uint32_t begin = group * kScaleGroup + device::lane() * kMine;
        const uint32_t count = begin >= hidden ? 0 : hidden - begin < kMine ? hidden - begin : kMine;
        float values[kMine];
        if (count == kMine) {
            for (uint32_t i = 0; i < kMine; ++i) values[i] = static_cast<float>(Element::load(row[begin + i]));
        } else {
            for (uint32_t i = 0; i < kMine; ++i)
                values[i] = i < count ? static_cast<float>(Element::load(row[begin + i])) : 0.0f;
        }
        uint32_t largest = 0;  // as bits: magnitudes order like integers, and a NaN above all
        for (uint32_t i = 0; i < kMine; ++i) {
            const uint32_t magnitude = device::float_to_bits(values[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float amax = device::reduce_max(device::bits_to_float(largest));
        const Scale scale = scale_of(amax, power_of_two);
        uint8_t quantized[kMine];
        for (uint32_t i = 0; i < kMine; ++i) quantized[i] = float_to_float8(values[i] * scale.multiplier);
        if (count == kMine) {
            for (uint32_t i = 0; i < kMine; ++i) out[begin + i] = quantized[i];
        } else {
            for (uint32_t i = 0; i < count; ++i) out[begin + i] = quantized[i];
        }
        if (device::lane() == 0) scales[group] = scale.stored;
    }
}

UCCL_EP_DEVICE void quantize_row(uint32_t payload_type, const uint8_t *row, uint32_t hidden, bool power_of_two,
                                 uint8_t *out, float *scales) {
    switch (static_cast<PayloadType>(payload_type)) {
        case PayloadType::kBfloat16:
            return quantize_elements<Bfloat16>(reinterpret_cast<const uint16_t *>(row), hidden, power_of_two, out,
                                               scales);
        case PayloadType::kFloat16:
            return quantize_elements<Float16>(reinterpret_cast<const uint16_t *>(row), hidden, power_of_two, out,
                                              scales);
        default:
            return quantize_elements<Float32>(reinterpret_cast<const float *>(row), hidden, power_of_two, out, scales);
    }
}

}  // namespace uccl_ep
