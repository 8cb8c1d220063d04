// The fenced plan's sender: a signal says no more than what is placed, one write of it at a time.
#include <vector>

#include "check.hpp"
#include "uccl_ep/fenced_sender.hpp"

using namespace uccl_ep;

TEST(the_signal_waits_for_every_write_and_all_messages_before) {
    FencedSender sender;
    sender.write(1);
    sender.write(1);
    sender.end(1);
    sender.write(2);
    sender.end(2);
    CHECK_EQ(sender.take_signal(), 0u);
    sender.placed(2);
    CHECK_EQ(sender.take_signal(), 0u);
    sender.placed(1);
    CHECK_EQ(sender.take_signal(), 0u);
    sender.placed(1);
    CHECK_EQ(sender.take_signal(), 2u);
    CHECK(!sender.quiet());
    sender.signal_placed();
    CHECK(sender.quiet());
}

TEST(one_signal_write_is_under_way_and_newer_values_coalesce) {
    FencedSender sender;
    for (uint64_t value = 1; value <= 5; ++value) {
        sender.end(value);
        CHECK_EQ(sender.take_signal(), value == 1 ? 1u : 0u);
    }
    sender.signal_placed();
    CHECK(sender.wants_signal());
    CHECK_EQ(sender.take_signal(), 5u);
    sender.signal_placed();
    CHECK_EQ(sender.take_signal(), 0u);
}

TEST(a_message_that_goes_on_is_not_signalled) {
    FencedSender sender;
    sender.write(1);
    sender.placed(1);
    CHECK_EQ(sender.take_signal(), 0u);
    sender.write(1);
    sender.end(1);
    CHECK_EQ(sender.take_signal(), 0u);
    sender.placed(1);
    CHECK_EQ(sender.take_signal(), 1u);
}

TEST(skipped_numbers_are_empty_messages) {
    FencedSender sender;
    sender.write(3);
    sender.end(3);
    CHECK_EQ(sender.take_signal(), 2u);
    sender.signal_placed();
    sender.placed(3);
    CHECK_EQ(sender.take_signal(), 3u);
}

TEST(the_window_holds_back_the_thirty_third_message) {
    FencedSender sender;
    for (uint64_t value = 1; value <= kEpochWindow; ++value) {
        CHECK(sender.admit(value));
        sender.write(value);
        sender.end(value);
    }
    CHECK(!sender.admit(kEpochWindow + 1));
    sender.placed(1);
    CHECK(sender.admit(kEpochWindow + 1));
    CHECK(!sender.admit(kEpochWindow + 2));
}

TEST(random_orders_of_placement_never_signal_early) {
    check::Random random(3);
    FencedSender sender;
    std::vector<uint64_t> flight;
    std::vector<uint64_t> outstanding(1, 0);
    uint64_t begun = 0;
    uint64_t signalled = 0;
    bool in_flight = false;
    for (int step = 0; step < 100000; ++step) {
        const uint64_t action = random.below(4);
        if (action == 0 && sender.admit(begun + 1)) {
            ++begun;
            outstanding.push_back(random.below(5));
            for (uint64_t i = 0; i < outstanding[begun]; ++i) {
                sender.write(begun);
                flight.push_back(begun);
            }
            sender.end(begun);
        } else if (action == 1 && !flight.empty()) {
            std::swap(flight.back(), flight[random.below(flight.size())]);
            --outstanding[flight.back()];
            sender.placed(flight.back());
            flight.pop_back();
        } else if (action == 2) {
            if (const uint64_t value = sender.take_signal()) {
                CHECK(!in_flight && value > signalled && value <= begun);
                for (uint64_t message = 1; message <= value; ++message) {
                    CHECK_EQ(outstanding[message], 0u);
                }
                signalled = value;
                in_flight = true;
            }
        } else if (in_flight) {
            sender.signal_placed();
            in_flight = false;
        }
    }
    CHECK(signalled > 5 * kEpochs);
}

CHECK_MAIN()
