// The shipped packing of commands (command.hpp) and of immediates (immediate.hpp) at every limit of
// every field, in all combinations. Exit code 0 and a count, or 1 and the first combination that fails.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "uccl_ep/command.hpp"
#include "uccl_ep/immediate.hpp"

using namespace uccl_ep;

static uint64_t checked = 0;

static void require(bool holds, const char *what, uint64_t a, uint64_t b, uint64_t c) {
    ++checked;
    if (!holds) {
        std::printf("%s: %llu %llu %llu\n", what, static_cast<unsigned long long>(a),
                    static_cast<unsigned long long>(b), static_cast<unsigned long long>(c));
        std::exit(1);
    }
}

static void check_commands() {
    const uint64_t offsets[] = {0, 1, 63, 64, uint64_t{1} << 32, kMaxWindowBytes / 2, kMaxWindowBytes - 1};
    const uint64_t sizes[] = {0, 1, 7168, (uint64_t{1} << 24) - 1, kMaxWriteBytes};
    const uint64_t values[] = {
        0, 1, uint64_t{1} << 32, uint64_t{1} << 62, (uint64_t{1} << 63) - 1, uint64_t{1} << 63, ~uint64_t{0}};
    for (const Operation operation : {Operation::kWrite, Operation::kWriteSignal}) {
        for (const uint32_t peer : {0u, 1u, kMaxRanks / 2, kMaxRanks - 1}) {
            for (const uint32_t signal : {0u, 1u, kMaxSignals / 2, kMaxSignals - 1}) {
                for (const uint64_t bytes : sizes) {
                    for (const uint64_t local : offsets) {
                        for (const uint64_t remote : offsets) {
                            for (const uint64_t value : values) {
                                for (const uint64_t lap : {uint64_t{0}, uint64_t{1}}) {
                                    const Command in{operation, peer, signal, bytes, local, remote, value};
                                    const PackedCommand packed = pack(in, phase_of_lap(lap));
                                    const Command out = unpack(packed);
                                    require(out.operation == operation && out.peer == peer && out.signal == signal &&
                                                out.bytes == bytes && out.local_offset == local &&
                                                out.remote_offset == remote && out.value == value,
                                            "command", bytes, local, value);
                                    for (const uint64_t word : packed.word) {
                                        require(word >> kPhaseBit == 1 - lap, "phase of word", word, lap, 0);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

static void check_immediates() {
    for (const uint32_t imm_bits : {32u, 64u}) {
        for (const uint32_t num_signals : {1u, 2u, 3u, 64u, 1000u, 1u << 16, 1u << 20, 1u << 21}) {
            const ImmediateCodec codec(imm_bits, num_signals);
            const uint32_t top = static_cast<uint32_t>(codec.max_writes() - 1);
            require(codec.max_writes() >= 1u << kMinIndexBits, "writes of a message", imm_bits, num_signals, top);
            for (const uint32_t signal : {0u, num_signals / 2, num_signals - 1}) {
                for (uint32_t epoch = 0; epoch < kEpochs; ++epoch) {
                    for (const uint32_t index : {0u, 1u, top / 2, top}) {
                        for (const bool last : {false, true}) {
                            const uint64_t bits = codec.encode(Immediate{signal, epoch, index, last});
                            require(imm_bits == 64 || bits >> 32 == 0, "bits above the immediate", bits, signal, index);
                            const Immediate out = codec.decode(bits);
                            require(
                                out.signal == signal && out.epoch == epoch && out.index == index && out.last == last,
                                "immediate", signal, epoch, index);
                        }
                    }
                }
            }
        }
        bool refused = false;
        try {
            ImmediateCodec(32, 1u << 26);
        } catch (const std::invalid_argument &) {
            refused = true;
        }
        require(refused, "more signals than fit must be refused", imm_bits, 0, 0);
    }
}

int main() {
    static_assert(kMaxSignals <= 1u << kSignalBits && kMaxRanks <= 1u << kPeerBits);
    check_commands();
    check_immediates();
    std::printf("checked=%llu\n", static_cast<unsigned long long>(checked));
    return 0;
}
