// Sums of the rows of tokens, as high-throughput combine makes them: checks the shortcut for two rows of bfloat16 and
// the form for all, bit for bit against each other and against the CPU, then measures them on one GPU.
#include "primitives.hpp"
//
#include "common.hpp"
#include "sums.hpp"

using namespace uccl_ep;

struct SumsParameters {
    uint8_t *out;         // [tokens][row_bytes]
    const uint8_t *rows;  // [terms][tokens][row_bytes]
    uint32_t tokens, elements, row_bytes, num_terms, payload_type;
};

// The tokens of a block, in rounds of one a warp with the block meeting in between.
template <class Sum>
UCCL_EP_DEVICE void each_token(const SumsParameters &p, Sum sum) {
    const auto first = [&](uint32_t block) {
        return static_cast<uint32_t>(uint64_t{p.tokens} * block / device::num_blocks());
    };
    const uint32_t end = first(device::block_index() + 1), warps = device::warps_per_block();
    for (uint32_t round = first(device::block_index()); round < end; round += warps) {
        const uint32_t token = round + device::warp_in_block();
        const auto row = [&](uint32_t j) { return p.rows + (uint64_t{j} * p.tokens + token) * p.row_bytes; };
        if (token < end) sum(p.out + uint64_t{token} * p.row_bytes, row);
        device::sync_block();
    }
}

UCCL_EP_KERNEL(sums_of_any, SumsParameters) {
    const SumsParameters &p = parameters;
    each_token(p, [&](uint8_t *out, auto row) {
        sum_payload<false>(p.payload_type, out, 0, p.elements, p.num_terms, row, [](uint32_t) { return 1.0f; });
    });
}

UCCL_EP_KERNEL(sums_of_tokens, SumsParameters) {
    const SumsParameters &p = parameters;
    each_token(p, [&](uint8_t *out, auto row) { sum_token(p.payload_type, out, p.elements, p.num_terms, row); });
}

struct Form {
    const char *name;
    void (*kernel)(SumsParameters);
};
static const Form kForms[] = {{"any rows", sums_of_any}, {"as combine does", sums_of_tokens}};

__global__ void fill(uint32_t *words, uint64_t count, uint32_t seed) {
    for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
         i += gridDim.x * uint64_t{blockDim.x}) {
        uint32_t word = static_cast<uint32_t>(i) * 2654435761u + seed;
        word = (word ^ (word >> 15)) * 2246822519u;
        words[i] = word ^ (word >> 13);
    }
}

#ifdef __CUDA_ARCH__
#define PAIR_OF_DEVICE UCCL_EP_DEVICE_BFLOAT16_PAIR
#else
#define PAIR_OF_DEVICE(low, high) 0  // nvcc parses it for the CPU side too
#endif
// Each float in either half of a pair: the conversion of the device against the one that defines the bits.
__global__ void compare_conversions(unsigned long long *wrong) {
    for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i >> 32 == 0;
         i += gridDim.x * uint64_t{blockDim.x}) {
        const auto bits = static_cast<uint32_t>(i), other = bits * 2654435761u;
        const float low = device::bits_to_float(bits), high = device::bits_to_float(other);
        const uint32_t want = float_to_bfloat16(low) | uint32_t{float_to_bfloat16(high)} << 16;
        if (PAIR_OF_DEVICE(low, high) != want) atomicAdd(wrong, 1ull);
    }
}

static uint16_t sum_on_cpu(const uint8_t *rows, uint64_t apart, uint32_t num_terms) {
    float sum = 0;
    for (uint32_t j = 0; j < num_terms; ++j) {
        uint16_t half;
        memcpy(&half, rows + j * apart, 2);
        const uint32_t bits = uint32_t{half} << 16;
        float value;
        memcpy(&value, &bits, 4);
        sum += value;
    }
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    if (sum != sum) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void launch(const Form &form, const SumsParameters &p, int blocks, int warps, cudaStream_t stream = nullptr) {
    form.kernel<<<blocks, 32 * warps, kStagingOfLaunch, stream>>>(p);
    CHECK(cudaGetLastError());
}

// The same bytes; of float64, a NaN may have come from either of two, whose bits the sum keeps.
static bool same(const std::vector<uint8_t> &a, const std::vector<uint8_t> &b, uint32_t payload) {
    if (payload != static_cast<uint32_t>(PayloadType::kFloat64)) return a == b;
    for (size_t at = 0; at < a.size(); at += sizeof(double)) {
        double one, other;
        memcpy(&one, a.data() + at, sizeof(one));
        memcpy(&other, b.data() + at, sizeof(other));
        if (memcmp(&one, &other, sizeof(one)) != 0 && !(one != one && other != other)) return false;
    }
    return true;
}

static int check() {
    int failures = 0, cases = 0;
    unsigned long long *wrong;
    CHECK(cudaHostAlloc(&wrong, sizeof(*wrong), cudaHostAllocMapped));
    *wrong = 0;
    compare_conversions<<<1024, 256>>>(wrong);
    CHECK(cudaDeviceSynchronize());
    std::printf("conversions to bfloat16 that differ: %llu of 2^32\n", *wrong);
    failures += *wrong != 0;

    constexpr uint32_t kTokens = 40;
    constexpr uint64_t kOut = kTokens * 32768ull, kRows = 20 * kOut;
    uint8_t *rows, *out[2];
    CHECK(cudaMalloc(&rows, kRows));
    for (uint8_t *&one : out) CHECK(cudaMalloc(&one, kOut));
    fill<<<256, 256>>>(reinterpret_cast<uint32_t *>(rows), kRows / 4, 7);
    std::vector<uint8_t> in(kRows), got[2];
    CHECK(cudaMemcpy(in.data(), rows, kRows, cudaMemcpyDefault));
    for (uint32_t payload = 1; payload <= 4; ++payload) {
        const uint32_t size = payload == static_cast<uint32_t>(PayloadType::kFloat64)   ? 8
                              : payload == static_cast<uint32_t>(PayloadType::kFloat32) ? 4
                                                                                        : 2;
        for (uint32_t row_bytes : {16u, 2040u, 2048u, 2064u, 4096u, 14328u, 14336u, 14352u, 32752u}) {
            for (uint32_t terms : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 20u}) {
                for (int warps : {1, 2, 3, 8, 12}) {
                    const uint32_t seed = static_cast<uint32_t>(++cases);
                    const SumsParameters like{
                        nullptr, rows + 16 * (seed % 5), kTokens, row_bytes / size, row_bytes, terms, payload};
                    for (int form = 0; form < 2; ++form) {
                        SumsParameters p = like;
                        p.out = out[form];
                        CHECK(cudaMemset(p.out, 0xee, kOut));
                        launch(kForms[form], p, 1 + static_cast<int>(seed % 3), warps);
                        got[form].resize(kOut);
                        CHECK(cudaMemcpy(got[form].data(), p.out, kOut, cudaMemcpyDefault));
                    }
                    bool ok = same(got[0], got[1], payload);
                    if (payload == static_cast<uint32_t>(PayloadType::kBfloat16)) {
                        const uint64_t apart = uint64_t{kTokens} * row_bytes;
                        for (uint64_t at = 0; at < apart && ok; at += 2) {
                            uint16_t half;
                            memcpy(&half, got[1].data() + at, 2);
                            ok = half == sum_on_cpu(in.data() + 16 * (seed % 5) + at, apart, terms);
                        }
                        for (uint64_t at = apart; at < kOut && ok; ++at) ok = got[1][at] == 0xee;
                    }
                    failures += !ok;
                    if (!ok)
                        std::printf("WRONG: payload %u, %u terms of %u bytes, %d warps\n", payload, terms, row_bytes,
                                    warps);
                }
            }
        }
    }
    std::printf("sums checked: %d, wrong: %d\n", cases, failures);
    CHECK(cudaFree(rows));
    for (uint8_t *one : out) CHECK(cudaFree(one));
    return failures;
}

static void measure() {
    constexpr uint32_t kTokens = 4096, kRowBytes = 14336, kMost = 8;
    uint8_t *rows, *out;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&rows, uint64_t{kMost} * kTokens * kRowBytes));
    CHECK(cudaMalloc(&out, uint64_t{kTokens} * kRowBytes));
    fill<<<1024, 256>>>(reinterpret_cast<uint32_t *>(rows), uint64_t{kMost} * kTokens * kRowBytes / 4, 3);
    CHECK(cudaDeviceSynchronize());
    std::printf("%u tokens of %u bytes of bf16, 12 warps a block; us (GB/s read by a block)\n  rows blocks", kTokens,
                kRowBytes);
    for (const Form &form : kForms) std::printf(" %22s", form.name);
    std::printf("\n");
    for (uint32_t terms : {1u, 2u, 8u}) {
        for (int blocks : {12, 44, 66, 132}) {
            std::printf("  %4u %6d", terms, blocks);
            for (const Form &form : kForms) {
                const SumsParameters p{
                    out, rows, kTokens, kRowBytes / 2, kRowBytes, terms, static_cast<uint32_t>(PayloadType::kBfloat16)};
                const double us = median_us(stream, 20, [&] { launch(form, p, blocks, 12, stream); });
                std::printf("     %8.1f (%6.1f)", us, double(terms) * kTokens * kRowBytes / blocks / us / 1000);
            }
            std::printf("\n");
        }
    }
}

int main(int argc, char **) {
    for (const Form &form : kForms)
        CHECK(cudaFuncSetAttribute(reinterpret_cast<const void *>(form.kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, kStagingOfLaunch));
    const int failures = check();
    if (argc == 1 && failures == 0) measure();  // any argument: the checks alone
    return failures == 0 ? 0 : 1;
}
