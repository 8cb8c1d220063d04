// The counted plan's receiver under every order, duplicates, missing writes, and wrap over many epochs.
#include <algorithm>
#include <vector>

#include "check.hpp"
#include "uccl_ep/counted_receiver.hpp"

using namespace uccl_ep;

namespace {

struct Write {
    uint64_t message;
    uint64_t immediate;
};

std::vector<Write> message_writes(const ImmediateCodec &codec, uint32_t signal, uint64_t message, uint32_t writes) {
    std::vector<Write> list;
    for (uint32_t i = 0; i < writes; ++i) {
        list.push_back(Write{
            message, codec.encode(Immediate{signal, static_cast<uint32_t>(message % kEpochs), i, i + 1 == writes})});
    }
    return list;
}

template <class T>
void shuffle(std::vector<T> &list, check::Random &random) {
    for (size_t i = list.size(); i > 1; --i) {
        std::swap(list[i - 1], list[random.below(i)]);
    }
}

}  // namespace

TEST(the_codec_keeps_every_field_at_its_limits) {
    for (const uint32_t imm_bits : {32u, 64u}) {
        for (const uint32_t signals : {1u, 2u, 88u, 1408u, 1u << 20, (1u << 21)}) {
            const ImmediateCodec codec(imm_bits, signals);
            for (const uint32_t signal : {0u, signals - 1}) {
                for (const uint32_t index : {0u, static_cast<uint32_t>(codec.max_writes() - 1)}) {
                    for (const uint32_t epoch : {0u, kEpochs - 1}) {
                        for (const bool last : {false, true}) {
                            const uint64_t bits = codec.encode(Immediate{signal, epoch, index, last});
                            CHECK(imm_bits == 64 || bits >> 32 == 0);
                            const Immediate back = codec.decode(bits);
                            CHECK_EQ(back.signal, signal);
                            CHECK_EQ(back.epoch, epoch);
                            CHECK_EQ(back.index, index);
                            CHECK_EQ(back.last, last);
                        }
                    }
                }
            }
        }
    }
    CHECK_THROWS(ImmediateCodec(32, (1u << 21) + 1));
    CHECK_THROWS(ImmediateCodec(16, 1));
}

TEST(any_order_within_the_window_counts_right_over_many_epochs) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        check::Random random(seed);
        constexpr uint32_t kSignals = 3;
        const ImmediateCodec codec(32, kSignals);
        CountedReceiver receiver(codec, kSignals);
        uint64_t sent[kSignals] = {};
        std::vector<Write> net[kSignals];
        std::vector<uint64_t> missing[kSignals];  // writes of message i+1 that did not arrive
        for (int step = 0; step < 20000; ++step) {
            const uint32_t signal = static_cast<uint32_t>(random.below(kSignals));
            auto &flight = net[signal];
            if (random.below(3) == 0 && sent[signal] - receiver.complete(signal) < kEpochWindow) {
                const uint32_t writes = static_cast<uint32_t>(1 + random.below(random.below(8) == 0 ? 200 : 4));
                const auto list = message_writes(codec, signal, ++sent[signal], writes);
                flight.insert(flight.end(), list.begin(), list.end());
                missing[signal].push_back(writes);
            }
            if (flight.empty()) {
                continue;
            }
            std::swap(flight.back(), flight[random.below(flight.size())]);
            const Write write = flight.back();
            flight.pop_back();
            --missing[signal][write.message - 1];
            uint64_t expected = receiver.complete(signal);
            const uint64_t before = expected;
            while (expected < sent[signal] && missing[signal][expected] == 0) {
                ++expected;
            }
            uint32_t named = 99;
            const Arrival outcome = receiver.accept(write.immediate, &named);
            CHECK_EQ(named, signal);
            CHECK(outcome == (expected > before ? Arrival::kRaise : Arrival::kCounted));
            CHECK_EQ(receiver.complete(signal), expected);
        }
        CHECK(receiver.complete(0) > 3 * kEpochs);
    }
}

TEST(a_duplicate_never_stands_in_for_a_missing_write) {
    const ImmediateCodec codec(32, 4);
    CountedReceiver receiver(codec, 4);
    uint32_t signal = 0;
    const auto writes = message_writes(codec, 2, 1, 3);
    CHECK(receiver.accept(writes[2].immediate, &signal) == Arrival::kCounted);
    CHECK(receiver.accept(writes[0].immediate, &signal) == Arrival::kCounted);
    CHECK(receiver.accept(writes[0].immediate, &signal) == Arrival::kDuplicate);
    CHECK(receiver.accept(writes[2].immediate, &signal) == Arrival::kDuplicate);
    CHECK_EQ(receiver.complete(2), 0u);
    uint64_t seen = 0;
    uint64_t announced = 0;
    receiver.progress(2, &seen, &announced);
    CHECK_EQ(seen, 2u);
    CHECK_EQ(announced, 3u);
    CHECK(receiver.accept(writes[1].immediate, &signal) == Arrival::kRaise);
    CHECK_EQ(receiver.complete(2), 1u);
    CHECK(receiver.accept(writes[1].immediate, &signal) == Arrival::kClosedEpoch);
}

TEST(a_later_message_waits_for_the_earlier) {
    const ImmediateCodec codec(32, 1);
    CountedReceiver receiver(codec, 1);
    uint32_t signal = 0;
    for (uint64_t message = kEpochWindow; message >= 2; --message) {
        CHECK(receiver.accept(message_writes(codec, 0, message, 1)[0].immediate, &signal) == Arrival::kCounted);
    }
    CHECK_EQ(receiver.complete(0), 0u);
    CHECK(receiver.accept(message_writes(codec, 0, 1, 1)[0].immediate, &signal) == Arrival::kRaise);
    CHECK_EQ(receiver.complete(0), uint64_t{kEpochWindow});
}

TEST(a_message_beyond_the_window_is_refused) {
    const ImmediateCodec codec(32, 1);
    CountedReceiver receiver(codec, 1);
    uint32_t signal = 0;
    CHECK(receiver.accept(message_writes(codec, 0, kEpochWindow + 1, 1)[0].immediate, &signal) ==
          Arrival::kClosedEpoch);
    CHECK(receiver.accept(message_writes(codec, 0, kEpochWindow, 1)[0].immediate, &signal) == Arrival::kCounted);
}

TEST(contradictions_and_strangers_are_told) {
    const ImmediateCodec codec(32, 5);
    CountedReceiver receiver(codec, 5);
    uint32_t signal = 0;
    CHECK(receiver.accept(codec.encode(Immediate{1, 1, 4, false}), &signal) == Arrival::kCounted);
    CHECK(receiver.accept(codec.encode(Immediate{1, 1, 2, true}), &signal) == Arrival::kContradiction);
    CHECK(receiver.accept(codec.encode(Immediate{2, 1, 3, true}), &signal) == Arrival::kCounted);
    CHECK(receiver.accept(codec.encode(Immediate{2, 1, 5, true}), &signal) == Arrival::kContradiction);
    CHECK(receiver.accept(codec.encode(Immediate{7, 1, 0, true}), &signal) == Arrival::kUnknownSignal);
    CHECK_EQ(signal, 7u);
}

TEST(messages_of_many_writes_count_in_any_order) {
    const ImmediateCodec codec(32, 64);
    CountedReceiver receiver(codec, 64);
    check::Random random(5);
    uint32_t signal = 0;
    for (uint64_t message = 1; message <= 3; ++message) {
        auto writes = message_writes(codec, 63, message, 5000);
        shuffle(writes, random);
        for (size_t i = 0; i < writes.size(); ++i) {
            const Arrival outcome = receiver.accept(writes[i].immediate, &signal);
            CHECK(outcome == (i + 1 == writes.size() ? Arrival::kRaise : Arrival::kCounted));
        }
        CHECK_EQ(receiver.complete(63), message);
    }
}

CHECK_MAIN()
