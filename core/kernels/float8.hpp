// The cast of a row to e4m3, a scale for each group of its elements. Its bits are part of the contract: numerics.hpp.
#pragma once

#include "numerics.hpp"

namespace uccl_ep {

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
    result = magnitude > 0x7f800000u ? 0x7fu : result;  // NaN
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

UCCL_EP_DEVICE uint32_t scale_groups(uint32_t hidden) { return (hidden + kScaleGroup - 1) / kScaleGroup; }

struct Scale {
    float multiplier;  // of the values
    float stored;  // what the receiver multiplies with
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
