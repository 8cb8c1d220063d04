// Sums of pieces that lie in a block's memory, lane by lane on the CPU, against a sum of one element after the other:
// the same bits for every type, count of rows and length, and no byte beside them. Prints what went wrong; 0: nothing.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#define UCCL_EP_DEVICE inline
#define UCCL_EP_UNROLL

namespace uccl_ep::device {
inline constexpr uint32_t kWarpSize = 32;
inline uint32_t this_lane = 0;
inline uint32_t lane() { return this_lane; }
template <class To, class From>
void copy_bits(To &to, const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&to, &from, sizeof(to));
}
inline float bits_to_float(uint32_t bits) {
    float value;
    copy_bits(value, bits);
    return value;
}
inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    copy_bits(bits, value);
    return bits;
}
inline float half_to_float(uint16_t bits) {
    _Float16 value;
    copy_bits(value, bits);
    return static_cast<float>(value);
}
inline uint16_t float_to_half(float value) {
    const auto half = static_cast<_Float16>(value);
    uint16_t bits;
    copy_bits(bits, half);
    return bits;
}
}  // namespace uccl_ep::device

#include "numerics.hpp"
#include "vector_run.hpp"

using namespace uccl_ep;

namespace {

std::mt19937 generator(1);
int wrong = 0;

template <class Element>
void check(const char *name) {
    using Storage = typename Element::Storage;
    constexpr uint32_t kEach = 16 / sizeof(Storage);
    for (const uint32_t pieces : {1u, 24u, 31u, 32u, 33u, 64u, 65u, 96u, 97u, 124u, 127u, 128u, 129u, 248u, 300u}) {
        for (uint32_t terms = 1; terms <= 7; ++terms) {
            std::vector<Storage> rows(terms * pieces * kEach), out((pieces + 40) * kEach), want;
            for (Storage &one : rows) {
                const auto any = static_cast<uint16_t>(generator());
                if constexpr (Element::kIsBfloat16) {
                    one =
                        any;  // all there are; other types keep the payload of a NaN, which the order of a sum leaves open
                } else {
                    one = Element::store(static_cast<typename Element::Accumulator>(static_cast<int16_t>(any)) / 7);
                }
            }
            // Where the sums would differ if the first row were not added: minus zero in all rows.
            for (uint32_t j = 0; j < terms; ++j) rows[j * pieces * kEach] = Element::store(-0.0f);
            std::memset(out.data(), 0xee, out.size() * sizeof(Storage));
            want = out;
            for (uint32_t i = 0; i < pieces * kEach; ++i) {
                typename Element::Accumulator sum = 0;
                for (uint32_t j = 0; j < terms; ++j) sum += Element::load(rows[j * pieces * kEach + i]);
                want[i] = Element::store(sum);
            }
            // As the pieces of other places than a vector's are aligned.
            std::vector<device::RunPiece> staged(terms * pieces), summed(pieces + 40);
            std::memcpy(staged.data(), rows.data(), staged.size() * 16);
            std::memcpy(summed.data(), out.data(), summed.size() * 16);
            for (device::this_lane = 0; device::this_lane < device::kWarpSize; ++device::this_lane)
                device::sum_pieces<Element>(summed.data(), staged.data(), pieces, terms);
            std::memcpy(out.data(), summed.data(), summed.size() * 16);
            if (std::memcmp(out.data(), want.data(), out.size() * sizeof(Storage)) != 0) {
                ++wrong;
                std::printf("%s: %u pieces of %u rows differ\n", name, pieces, terms);
            }
        }
    }
}

}  // namespace

int main() {
    check<Bfloat16>("bfloat16");
    check<Float16>("float16");
    check<Float32>("float32");
    check<Float64>("float64");
    return wrong == 0 ? 0 : 1;
}
