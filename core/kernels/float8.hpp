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

// amax / 448, and its inverse; or that rounded up to a power of two, whose inverse is exact. A NaN stays one.
UCCL_EP_DEVICE Scale scale_of(float amax, bool power_of_two) {
    amax = amax < 1e-4f ? 1e-4f : amax;  // a row of zeros has a scale too
    const float scale = amax / 448.0f;
    if (!power_of_two) return {448.0f / amax, scale};
    const uint32_t bits = device::float_to_bits(scale);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
    if (exponent > 254) return {device::bits_to_float(0x7fc00000u), device::bits_to_float(255u << 23)};
    return {device::bits_to_float((254u - exponent) << 23), device::bits_to_float(exponent << 23)};
}

// Neighbouring elements of a lane, moved by one load or store where their address allows.
template <class T, uint32_t kCount>
struct alignas(sizeof(T) * kCount <= 16 ? sizeof(T) * kCount : alignof(T)) Pack {
    T value[kCount];
};

// The same bits in few registers: a GPU would keep each element of a pack in one of its own.
template <uint32_t kBytes>
struct Words {
    uint32_t word[kBytes / 4];
};
template <>
struct Words<2> {
    uint16_t word[1];
};

template <class T, uint32_t kCount>
UCCL_EP_DEVICE bool pack_is_aligned(const T *address) {
    return sizeof(T) * kCount > 16 || reinterpret_cast<uint64_t>(address) % alignof(Pack<T, kCount>) == 0;
}

// The cast of kGroups groups of kScaleGroup elements to e4m3, each with its scale; the whole warp. A lane has neighbouring
// elements of each, as many as the warp size leaves it. They stay as they were loaded until the cast, so that all loads
// are under way together, and lane i works out the scale of group i, since a division is a long chain.
// kWhole: all groups are whole, and lie as one load has them.
template <class Storage, uint32_t kGroups, bool kWhole>
class GroupCasts {
    static_assert(kGroups <= device::kWarpSize, "a lane has one scale at most");
    static constexpr uint32_t kMine = kScaleGroup / device::kWarpSize;

  public:
    // Groups first, first + step, ... below those of the row.
    UCCL_EP_DEVICE GroupCasts(uint32_t hidden, uint32_t first, uint32_t step)
        : hidden_(hidden), groups_(scale_groups(hidden)), first_(first), step_(step) {}

    UCCL_EP_DEVICE static bool is_whole(const Storage *row, uint32_t hidden) {
        return hidden % kScaleGroup == 0 && pack_is_aligned<Storage, kMine>(row);
    }

    UCCL_EP_DEVICE void load(const Storage *row) {
        for_each([&](uint32_t i, uint32_t begin) {
            Pack<Storage, kMine> pack;
            if constexpr (kWhole) {
                pack = *reinterpret_cast<const Pack<Storage, kMine> *>(row + begin);
            } else {
                UCCL_EP_UNROLL
                for (uint32_t j = 0; j < kMine; ++j) pack.value[j] = begin + j < hidden_ ? row[begin + j] : Storage{0};
            }
            device::copy_bits(loaded_[i], pack);
        });
    }

    template <class ToFloat>
    UCCL_EP_DEVICE void cast(ToFloat to_float, bool power_of_two) {
        const auto values_of = [&](uint32_t i, float *values) {
            Pack<Storage, kMine> pack;
            device::copy_bits(pack, loaded_[i]);
            UCCL_EP_UNROLL
            for (uint32_t j = 0; j < kMine; ++j) values[j] = to_float(pack.value[j]);
        };
        uint32_t amax = 0;  // of this lane's group; as bits, magnitudes order like integers, and a NaN above all
        for_each([&](uint32_t i, uint32_t) {
            float values[kMine];
            values_of(i, values);
            uint32_t largest = 0;
            UCCL_EP_UNROLL
            for (uint32_t j = 0; j < kMine; ++j) {
                const uint32_t magnitude = device::float_to_bits(values[j]) & 0x7fffffffu;
                largest = magnitude > largest ? magnitude : largest;
            }
            largest = device::reduce_max(largest);
            if (device::lane() == i) amax = largest;
        });
        const Scale scale = scale_of(device::bits_to_float(amax), power_of_two);
        scale_ = scale.stored;
        for_each([&](uint32_t i, uint32_t) {
            const float multiplier = device::broadcast(scale.multiplier, i);
            float values[kMine];
            values_of(i, values);
            UCCL_EP_UNROLL
            for (uint32_t j = 0; j < kMine; ++j) values[j] *= multiplier;
            Pack<uint8_t, kMine> pack;
            floats_to_float8<kMine>(pack.value, values);
            device::copy_bits(cast_[i], pack);
        });
    }

    // Messages have rows of whole groups at multiples of 64 bytes.
    UCCL_EP_DEVICE void store(uint8_t *row, float *scales) const {
        for_each([&](uint32_t i, uint32_t begin) {
            Pack<uint8_t, kMine> pack;
            device::copy_bits(pack, cast_[i]);
            if constexpr (kWhole) {
                *reinterpret_cast<Pack<uint8_t, kMine> *>(row + begin) = pack;
            } else {
                UCCL_EP_UNROLL
                for (uint32_t j = 0; j < kMine; ++j) {
                    if (begin + j < hidden_) row[begin + j] = pack.value[j];
                }
            }
        });
        const uint32_t group = first_ + device::lane() * step_;
        if (device::lane() < kGroups && group < groups_) scales[group] = scale_;
    }

  private:
    // Calls `visit(i, begin)` for each group that the row has: `begin` is the first element of this lane.
    template <class Visit>
    UCCL_EP_DEVICE void for_each(Visit visit) const {
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kGroups; ++i) {
            const uint32_t group = first_ + i * step_;
            if (group < groups_) visit(i, group * kScaleGroup + device::lane() * kMine);
        }
    }

    uint32_t hidden_, groups_, first_, step_;
    Words<kMine * sizeof(Storage)> loaded_[kGroups];
    Words<kMine> cast_[kGroups];
    float scale_;
};

}  // namespace uccl_ep
