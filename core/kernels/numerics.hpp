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
