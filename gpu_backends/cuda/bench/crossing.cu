// What a low-latency operation of two GPUs cannot go below on a machine: kernels that do nothing but what every such
// operation has to, one step more each, chained in a graph on both GPUs. Block b of each deals with token b, as the
// direct kernels do. With one GPU both sides share it, which checks the program and measures nothing.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "common.hpp"

namespace {

constexpr uint32_t kTokens = 128, kHidden = 7168, kThreads = 384, kWarps = kThreads / 32;
constexpr uint32_t kCopies = 4, kRows = 4;  // of a token at a rank, of two ranks and top-8
constexpr uint32_t kStamps = 6, kChained = 20;
constexpr uint32_t kLineData = 120, kLine = 128;  // a line carries its number in its last 8 bytes
constexpr uint64_t kScaleBytes = 1 << 16;
constexpr uint64_t kInboxBytes = uint64_t{kTokens} * (kHidden * 4 / kLineData + 1) * kLine + kScaleBytes;
constexpr uint64_t kLimitNs = 2'000'000'000;

enum class Kind {
    kEmpty,          // a node of a graph
    kFlag,           // a flag, nothing ordered before it
    kFlagReleased,   // behind a release
    kRows,           // a row of e4m3 size to the peer, then the flag
    kRowsWarpFlags,  // the same, each warp behind its own release
    kDispatch,       // and every row copied to its places
    kDispatchCast,   // and cast on the way
    kDispatchLines,  // copied to its places, no release: every 128 bytes carry the number
    kSums,           // rows of bf16 summed to float32, to the peer
    kCombine,        // and added to the own sum
    kCombineLines,   // the same by lines
    kCount
};
const char *const kNames[] = {
    "empty kernel",        "flag, relaxed",       "flag, released",       "row, flag",
    "row, a flag a warp",  "row, flag, 4 copies", "cast, flag, 4 copies", "row by lines, 4 copies",
    "sum of 4 rows, flag", "sum, flag, added",    "sum by lines, added"};

__host__ __device__ constexpr bool sums(Kind kind) {
    return kind == Kind::kSums || kind == Kind::kCombine || kind == Kind::kCombineLines;
}
__host__ __device__ constexpr bool by_lines(Kind kind) {
    return kind == Kind::kDispatchLines || kind == Kind::kCombineLines;
}
__host__ __device__ constexpr bool copies(Kind kind) {
    return kind == Kind::kDispatch || kind == Kind::kDispatchCast || kind == Kind::kDispatchLines;
}
__host__ __device__ constexpr bool sends_rows(Kind kind) {
    return kind == Kind::kRows || kind == Kind::kRowsWarpFlags || kind == Kind::kDispatch;
}
__host__ __device__ constexpr uint32_t row_bytes(Kind kind) { return sums(kind) ? kHidden * 4 : kHidden; }
__host__ __device__ constexpr uint32_t line_pieces(Kind kind) {
    return (row_bytes(kind) + kLineData - 1) / kLineData * (kLine / 16);
}

struct Side {
    uint8_t *inbox, *peer_inbox;   // two, by parity
    uint64_t *flags, *peer_flags;  // [warps][tokens]
    const uint8_t *x;              // [rows][tokens][hidden] bf16
    uint8_t *out;                  // [2 * copies][tokens][2 * hidden]
    uint64_t *counter;             // [tokens]
    uint64_t *stamps;              // [tokens][stamps] ns
    uint64_t *late;                // the last number that a block gave up to wait for
};

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ void store_relaxed(uint64_t *address, uint64_t value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ __forceinline__ void store_release(uint64_t *address, uint64_t value) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

struct Pair {
    uint64_t low, high;
};
__device__ __forceinline__ Pair load_pair(const void *address) {
    Pair value;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(value.low), "=l"(value.high)
                 : "l"(address)
                 : "memory");
    return value;
}
__device__ __forceinline__ void store_pair(void *address, Pair value) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(value.low), "l"(value.high)
                 : "memory");
}

__device__ __forceinline__ void wait_flag(const Side &side, const uint64_t *flag, uint64_t number) {
    const uint64_t limit = now_ns() + kLimitNs;
    while (load_acquire(flag) < number) {
        if (now_ns() > limit) {
            *side.late = number;
            return;
        }
    }
}

// Where the data of 16-byte piece `i` of a row in lines begins, in 8 bytes; the last piece of a line has 8 only.
__device__ __forceinline__ uint32_t line_word(uint32_t i) { return i / 8 * (kLineData / 8) + i % 8 * 2; }
__device__ __forceinline__ bool ends_line(uint32_t i) { return i % 8 == 7; }

__device__ __forceinline__ void store_line(uint8_t *lines, uint32_t i, Pair data, uint64_t number) {
    if (ends_line(i)) data.high = number;
    store_pair(lines + i * 16, data);
}

// The whole warp. The 8 lanes of a line look until its number is there: the line is written by one instruction of a
// warp, and arrives whole.
__device__ __forceinline__ Pair load_line(const Side &side, const uint8_t *lines, uint32_t i, uint64_t number,
                                          bool there) {
    const uint64_t limit = now_ns() + kLimitNs;
    for (;;) {
        Pair data{0, number};
        if (there) data = load_pair(lines + i * 16);
        if (__all_sync(0xffffffffu, !ends_line(i) || data.high == number)) return data;
        if (now_ns() > limit) {
            *side.late = number;
            return data;
        }
    }
}

// Two bfloat16 of a word.
__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// Elements [8 i, 8 i + 8) of the weighted sum of a token's rows.
__device__ __forceinline__ void sum_group(const uint8_t *x, uint32_t token, uint32_t i, float *sum) {
    uint4 loaded[kRows];
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r)
        loaded[r] = reinterpret_cast<const uint4 *>(x + (uint64_t{r} * kTokens + token) * kHidden * 2)[i];
#pragma unroll
    for (uint32_t e = 0; e < 8; ++e) sum[e] = 0;
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t words[4] = {loaded[r].x, loaded[r].y, loaded[r].z, loaded[r].w};
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) {
            sum[2 * w] += low_half(words[w]) * (0.5f + r);
            sum[2 * w + 1] += high_half(words[w]) * (0.5f + r);
        }
    }
}

__device__ __forceinline__ uint32_t four_to_e4m3(const float *value, float factor) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2({value[0] * factor, value[1] * factor}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2({value[2] * factor, value[3] * factor}, __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

// A row of bf16 as e4m3 with a scale for each 128, 8 elements a lane. Whole warps.
__device__ __forceinline__ void cast_row(const uint8_t *row, uint8_t *to, float *scales) {
    constexpr uint32_t kGroups = kHidden / 8, kWhole = (kGroups + 31) / 32 * 32;
    for (uint32_t i = threadIdx.x; i < kWhole; i += kThreads) {
        uint4 loaded{};
        if (i < kGroups) loaded = reinterpret_cast<const uint4 *>(row)[i];
        const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        float value[8], most = 1e-4f;
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) {
            value[2 * w] = low_half(words[w]);
            value[2 * w + 1] = high_half(words[w]);
            most = fmaxf(most, fmaxf(fabsf(value[2 * w]), fabsf(value[2 * w + 1])));
        }
#pragma unroll
        for (uint32_t d = 8; d != 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
        const float factor = 448.0f / most;
        if (i >= kGroups) continue;
        reinterpret_cast<uint2 *>(to)[i] = {four_to_e4m3(value, factor), four_to_e4m3(value + 4, factor)};
        if (i % 16 == 0) scales[i / 16] = most;
    }
}

template <Kind kKind>
__device__ __forceinline__ void write_to_peer(const Side &side, uint8_t *to, float *scales, uint64_t number,
                                              float *own) {
    const uint32_t token = blockIdx.x, thread = threadIdx.x;
    const uint8_t *row = side.x + uint64_t{token} * kHidden * 2;
    if constexpr (kKind == Kind::kDispatchCast) cast_row(row, to, scales);
    if constexpr (sends_rows(kKind)) {
        for (uint32_t i = thread; i < row_bytes(kKind) / 16; i += kThreads)
            reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(row)[i];
    }
    if constexpr (kKind == Kind::kDispatchLines) {
        const auto *words = reinterpret_cast<const uint64_t *>(row);  // which has more bytes than these
        for (uint32_t i = thread; i < line_pieces(kKind); i += kThreads)
            store_line(to, i, {words[line_word(i)], words[line_word(i) + 1]}, number);
    }
    if constexpr (kKind == Kind::kSums || kKind == Kind::kCombine) {
        for (uint32_t i = thread; i < kHidden / 8; i += kThreads) {
            float sum[8];
            sum_group(side.x, token, i, sum);
            reinterpret_cast<float4 *>(to)[2 * i] = {sum[0], sum[1], sum[2], sum[3]};
            reinterpret_cast<float4 *>(to)[2 * i + 1] = {sum[4], sum[5], sum[6], sum[7]};
        }
    }
    if constexpr (kKind == Kind::kCombineLines) {
        for (uint32_t i = thread; i < kHidden / 8; i += kThreads) sum_group(side.x, token, i, own + 8 * i);
        __syncthreads();
        const auto *words = reinterpret_cast<const uint64_t *>(own);  // has room behind the row for a line
        for (uint32_t i = thread; i < line_pieces(kKind); i += kThreads)
            store_line(to, i, {words[line_word(i)], words[line_word(i) + 1]}, number);
        __syncthreads();  // the own sum comes into the same memory
    }
}

template <uint32_t kPieces>
__device__ __forceinline__ void copy_out(const Side &side, const uint8_t *source, uint32_t first) {
    for (uint32_t i = threadIdx.x; i < kPieces; i += kThreads) {
        const uint4 piece = reinterpret_cast<const uint4 *>(source)[i];
#pragma unroll
        for (uint32_t c = 0; c < kCopies; ++c) {
            uint8_t *out = side.out + (uint64_t{first + c} * kTokens + blockIdx.x) * kHidden * 2;
            reinterpret_cast<uint4 *>(out)[i] = piece;
        }
    }
}

template <Kind kKind>
__device__ __forceinline__ void take(const Side &side, const uint8_t *from, uint64_t number, const float *own) {
    const uint32_t token = blockIdx.x, thread = threadIdx.x;
    uint8_t *out = side.out + uint64_t{token} * kHidden * 2;
    if constexpr (copies(kKind) && !by_lines(kKind)) copy_out<row_bytes(kKind) / 16>(side, from, kCopies);
    if constexpr (kKind == Kind::kCombine) {
        for (uint32_t i = thread; i < kHidden / 4; i += kThreads) {
            const float4 a = reinterpret_cast<const float4 *>(from)[i], b = reinterpret_cast<const float4 *>(own)[i];
            reinterpret_cast<__nv_bfloat162 *>(out)[2 * i] = __floats2bfloat162_rn(a.x + b.x, a.y + b.y);
            reinterpret_cast<__nv_bfloat162 *>(out)[2 * i + 1] = __floats2bfloat162_rn(a.z + b.z, a.w + b.w);
        }
    }
    if constexpr (by_lines(kKind)) {
        constexpr uint32_t kWords = row_bytes(kKind) / 8;
        for (uint32_t base = thread / 32 * 32; base < line_pieces(kKind); base += kThreads) {
            const uint32_t i = base + thread % 32, at = line_word(i);
            const Pair piece = load_line(side, from, i, number, i < line_pieces(kKind));
            const auto put = [&](uint64_t word, uint32_t place) {
                if constexpr (sums(kKind)) {
                    const float low = __uint_as_float(static_cast<uint32_t>(word)),
                                high = __uint_as_float(static_cast<uint32_t>(word >> 32));
                    reinterpret_cast<__nv_bfloat162 *>(out)[place] =
                        __floats2bfloat162_rn(low + own[2 * place], high + own[2 * place + 1]);
                } else {
#pragma unroll
                    for (uint32_t c = kCopies; c < 2 * kCopies; ++c)
                        reinterpret_cast<uint64_t *>(out + uint64_t{c} * kTokens * kHidden * 2)[place] = word;
                }
            };
            if (at < kWords) put(piece.low, at);
            if (!ends_line(i) && at + 1 < kWords) put(piece.high, at + 1);
        }
    }
}

template <Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) step(const Side side) {
    if constexpr (kKind == Kind::kEmpty) return;
    extern __shared__ float own[];  // the own sum
    const uint32_t token = blockIdx.x, thread = threadIdx.x;
    uint64_t stamps[kStamps] = {now_ns()};
    const uint64_t number = side.counter[token] + 1;
    const uint64_t parity = (number & 1) * kInboxBytes;
    const uint64_t place = token * uint64_t{by_lines(kKind) ? line_pieces(kKind) * 16 : row_bytes(kKind)};
    auto *scales = reinterpret_cast<float *>(side.peer_inbox + parity + kInboxBytes - kScaleBytes) + token * 64;
    write_to_peer<kKind>(side, side.peer_inbox + parity + place, scales, number, own);
    stamps[1] = now_ns();
    uint64_t *flag = side.flags + token, *peer_flag = side.peer_flags + token;
    if constexpr (kKind == Kind::kRowsWarpFlags) {
        __syncwarp();
        if (thread % 32 == 0) store_release(peer_flag + thread / 32 * kTokens, number);
    } else if constexpr (!by_lines(kKind)) {
        __syncthreads();
        if (thread == 0 && kKind == Kind::kFlag) store_relaxed(peer_flag, number);
        if (thread == 0 && kKind != Kind::kFlag) store_release(peer_flag, number);
    }
    stamps[2] = now_ns();
    // The own part, while the rest is on its way.
    if constexpr (copies(kKind)) copy_out<kHidden / 16>(side, side.x + uint64_t{token} * kHidden * 2, 0);
    if constexpr (kKind == Kind::kCombine || kKind == Kind::kCombineLines) {
        for (uint32_t i = thread; i < kHidden / 8; i += kThreads)
            sum_group(side.x, (token + 1) % kTokens, i, own + 8 * i);
    }
    stamps[3] = now_ns();
    if constexpr (kKind == Kind::kRowsWarpFlags) {
        if (thread % 32 == 0) wait_flag(side, flag + thread / 32 * kTokens, number);
    } else if constexpr (!by_lines(kKind)) {
        if (thread == 0) wait_flag(side, flag, number);
    }
    __syncthreads();
    stamps[4] = now_ns();
    take<kKind>(side, side.inbox + parity + place, number, own);
    stamps[5] = now_ns();
    if (thread == 0) {
        side.counter[token] = number;
        for (uint32_t i = 0; i < kStamps; ++i) side.stamps[token * kStamps + i] = stamps[i];
    }
}

using Kernel = void (*)(Side);

template <size_t... kIndex>
std::vector<Kernel> kernels_of(std::index_sequence<kIndex...>) {
    return {step<static_cast<Kind>(kIndex)>...};
}

uint8_t *allocate(uint64_t bytes) {
    uint8_t *memory;
    CHECK(cudaMalloc(&memory, bytes));
    CHECK(cudaMemset(memory, 0, bytes));
    return memory;
}

uint64_t *allocate_words(uint64_t count) { return reinterpret_cast<uint64_t *>(allocate(count * 8)); }

float widened(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Whether the last operation delivered what it should, which both sides have from the same rows.
bool delivered(Kind kind, const Side &side, const std::vector<uint16_t> &x) {
    std::vector<uint16_t> out(uint64_t{2 * kCopies} * kTokens * kHidden);
    CHECK(cudaMemcpy(out.data(), side.out, out.size() * 2, cudaMemcpyDefault));
    if (kind == Kind::kDispatch || kind == Kind::kDispatchLines) {
        for (uint64_t row = 0; row < 2 * kCopies * kTokens; ++row) {
            const auto want = x.begin() + row % kTokens * kHidden;
            if (!std::equal(want, want + kHidden / 2, out.begin() + row * kHidden)) return false;
        }
    }
    if (kind == Kind::kCombine || kind == Kind::kCombineLines) {
        const auto sum = [&](uint32_t token, uint32_t i) {
            float total = 0;
            for (uint32_t r = 0; r < kRows; ++r)
                total += widened(x[(uint64_t{r} * kTokens + token) * kHidden + i]) * (0.5f + r);
            return total;
        };
        for (uint32_t token = 0; token < kTokens; ++token) {
            for (uint32_t i = 0; i < kHidden; ++i) {
                const float want = sum(token, i) + sum((token + 1) % kTokens, i);
                if (std::abs(widened(out[uint64_t{token} * kHidden + i]) - want) > want / 128) return false;
            }
        }
    }
    return true;
}

struct Machine {
    int devices;
    Side sides[2];
    cudaStream_t streams[2];
    std::vector<uint16_t> x;

    void use(int side) const { CHECK(cudaSetDevice(side % devices)); }
};

Machine open() {
    Machine machine;
    CHECK(cudaGetDeviceCount(&machine.devices));
    machine.devices = std::min(machine.devices, 2);
    machine.x.resize(uint64_t{kRows} * kTokens * kHidden);
    for (size_t i = 0; i < machine.x.size(); ++i) machine.x[i] = static_cast<uint16_t>(0x3f80 + i * 2654435761u % 251);
    for (int d = 0; d < 2; ++d) {
        machine.use(d);
        if (machine.devices == 2) CHECK(cudaDeviceEnablePeerAccess(1 - d, 0));
        uint8_t *rows = allocate(machine.x.size() * 2);
        CHECK(cudaMemcpy(rows, machine.x.data(), machine.x.size() * 2, cudaMemcpyDefault));
        machine.sides[d] = {allocate(2 * kInboxBytes),
                            nullptr,
                            allocate_words(kWarps * kTokens),
                            nullptr,
                            rows,
                            allocate(uint64_t{2 * kCopies} * kTokens * kHidden * 2),
                            allocate_words(kTokens),
                            allocate_words(kTokens * kStamps),
                            allocate_words(1)};
        CHECK(cudaStreamCreateWithFlags(&machine.streams[d], cudaStreamNonBlocking));
        CHECK(cudaDeviceSynchronize());
    }
    for (int d = 0; d < 2; ++d) {
        machine.sides[d].peer_inbox = machine.sides[1 - d].inbox;
        machine.sides[d].peer_flags = machine.sides[1 - d].flags;
    }
    return machine;
}

// Median microseconds of a kernel in a graph of kChained, the slower side.
double chained_us(const Machine &machine, Kernel kernel, uint32_t shared_bytes) {
    cudaGraphExec_t graphs[2];
    cudaEvent_t events[2][2];
    for (int d = 0; d < 2; ++d) {
        machine.use(d);
        for (cudaEvent_t &event : events[d]) CHECK(cudaEventCreate(&event));
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(machine.streams[d], cudaStreamCaptureModeThreadLocal));
        for (uint32_t i = 0; i < kChained; ++i)
            kernel<<<kTokens, kThreads, shared_bytes, machine.streams[d]>>>(machine.sides[d]);
        CHECK(cudaStreamEndCapture(machine.streams[d], &graph));
        CHECK(cudaGraphInstantiate(&graphs[d], graph, 0));
        CHECK(cudaGraphDestroy(graph));
    }
    std::vector<double> times;
    for (int round = 0; round < 18; ++round) {
        for (int d = 0; d < 2; ++d) {
            machine.use(d);
            CHECK(cudaEventRecord(events[d][0], machine.streams[d]));
            CHECK(cudaGraphLaunch(graphs[d], machine.streams[d]));
            CHECK(cudaEventRecord(events[d][1], machine.streams[d]));
        }
        double slower = 0;
        for (int d = 0; d < 2; ++d) {
            CHECK(cudaStreamSynchronize(machine.streams[d]));
            float milliseconds;
            CHECK(cudaEventElapsedTime(&milliseconds, events[d][0], events[d][1]));
            slower = std::max(slower, milliseconds * 1000.0 / kChained);
        }
        if (round >= 3) times.push_back(slower);  // the first rounds warm up
    }
    for (int d = 0; d < 2; ++d) {
        CHECK(cudaGraphExecDestroy(graphs[d]));
        for (cudaEvent_t &event : events[d]) CHECK(cudaEventDestroy(event));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

void print_stamps(const Side &side) {
    std::vector<uint64_t> stamps(kTokens * kStamps), column(kTokens);
    CHECK(cudaMemcpy(stamps.data(), side.stamps, stamps.size() * 8, cudaMemcpyDefault));
    uint64_t first = ~uint64_t{0};
    for (uint32_t token = 0; token < kTokens; ++token) first = std::min(first, stamps[token * kStamps]);
    for (uint32_t i = 1; i < kStamps; ++i) {
        for (uint32_t token = 0; token < kTokens; ++token) column[token] = stamps[token * kStamps + i] - first;
        std::sort(column.begin(), column.end());
        std::printf(" %9.2f", static_cast<double>(column[kTokens / 2]) / 1000);
    }
}

}  // namespace

int main() {
    const Machine machine = open();
    if (machine.devices == 1) std::printf("one GPU: both sides share it, and times mean nothing\n");
    std::printf(
        "%u tokens of %u, a block each of %u threads; us a kernel in a graph of %u, the slower side, and of the "
        "last one, us after its first block, median block\n%-24s %8s %10s %9s %9s %9s %9s\n",
        kTokens, kHidden, kThreads, kChained, "", "us", "written", "raised", "own part", "flag seen", "end");
    const std::vector<Kernel> kernels = kernels_of(std::make_index_sequence<static_cast<size_t>(Kind::kCount)>());
    int failures = 0;
    for (size_t k = 0; k < kernels.size(); ++k) {
        std::printf("%-24s %8.2f ", kNames[k], chained_us(machine, kernels[k], kHidden * 4 + kLine));
        if (k != 0) print_stamps(machine.sides[0]);
        bool ok = true;
        for (const Side &side : machine.sides) {
            uint64_t late;
            CHECK(cudaMemcpy(&late, side.late, 8, cudaMemcpyDefault));
            ok = ok && late == 0 && delivered(static_cast<Kind>(k), side, machine.x);
        }
        failures += !ok;
        std::printf("%s\n", ok ? "" : "  WRONG");
    }
    return failures != 0;
}
