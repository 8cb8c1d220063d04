// Every field of a command at its limits, alone and together, and the phase of every lap.
#include "check.hpp"
#include "uccl_ep/command.hpp"
#include "uccl_ep/ring.hpp"

using namespace uccl_ep;

namespace {

void round_trip(const Command &command, uint64_t phase) {
    const PackedCommand packed = pack(command, phase);
    for (const uint64_t word : packed.word) {
        CHECK_EQ(word >> kPhaseBit, phase >> kPhaseBit);
    }
    const Command back = unpack(packed);
    CHECK_EQ(static_cast<uint32_t>(back.operation), static_cast<uint32_t>(command.operation));
    CHECK_EQ(back.peer, command.peer);
    CHECK_EQ(back.signal, command.signal);
    CHECK_EQ(back.bytes, command.bytes);
    CHECK_EQ(back.local_offset, command.local_offset);
    CHECK_EQ(back.remote_offset, command.remote_offset);
    CHECK_EQ(back.value, command.value);
}

const Command kZero{Operation::kWrite, 0, 0, 0, 0, 0, 0};
const Command kFull{Operation::kWriteSignal, kMaxRanks - 1,       kMaxSignals - 1, kMaxWriteBytes,
                    kMaxWindowBytes - 1,     kMaxWindowBytes - 1, ~uint64_t{0}};

}  // namespace

TEST(zero_and_full_commands_survive) {
    for (const uint64_t phase : {uint64_t{0}, uint64_t{1} << kPhaseBit}) {
        round_trip(kZero, phase);
        round_trip(kFull, phase);
    }
}

TEST(each_field_alone_touches_no_other) {
    for (const uint64_t phase : {uint64_t{0}, uint64_t{1} << kPhaseBit}) {
        for (int field = 0; field < 7; ++field) {
            Command rises = kZero;
            Command falls = kFull;
            switch (field) {
                case 0:
                    rises.operation = kFull.operation, falls.operation = kZero.operation;
                    break;
                case 1:
                    rises.peer = kFull.peer, falls.peer = 0;
                    break;
                case 2:
                    rises.signal = kFull.signal, falls.signal = 0;
                    break;
                case 3:
                    rises.bytes = kFull.bytes, falls.bytes = 0;
                    break;
                case 4:
                    rises.local_offset = kFull.local_offset, falls.local_offset = 0;
                    break;
                case 5:
                    rises.remote_offset = kFull.remote_offset, falls.remote_offset = 0;
                    break;
                default:
                    rises.value = kFull.value, falls.value = 0;
                    break;
            }
            round_trip(rises, phase);
            round_trip(falls, phase);
        }
    }
}

TEST(the_sixty_fourth_bit_of_a_value_is_kept) {
    Command command = kZero;
    command.value = uint64_t{1} << 63;
    round_trip(command, 0);
    command.value -= 1;
    round_trip(command, uint64_t{1} << kPhaseBit);
}

TEST(random_commands_survive) {
    check::Random random(1);
    for (int i = 0; i < 100000; ++i) {
        const Command command{random.below(2) != 0 ? Operation::kWrite : Operation::kWriteSignal,
                              static_cast<uint32_t>(random.below(kMaxRanks)),
                              static_cast<uint32_t>(random.below(kMaxSignals)),
                              random.below(kMaxWriteBytes + 1),
                              random.below(kMaxWindowBytes),
                              random.below(kMaxWindowBytes),
                              random.next()};
        round_trip(command, random.below(2) << kPhaseBit);
    }
}

TEST(the_phase_flips_with_every_lap_and_starts_at_one) {
    for (const uint64_t capacity : {2u, 4u, 1024u}) {
        for (uint64_t ticket = 0; ticket < 5 * capacity; ++ticket) {
            CHECK_EQ(phase_of_ticket(ticket, capacity), phase_of_lap(ticket / capacity));
        }
        CHECK_EQ(phase_of_ticket(0, capacity) >> kPhaseBit, 1u);
    }
}

CHECK_MAIN()
