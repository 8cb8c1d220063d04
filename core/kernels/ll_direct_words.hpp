// Words of a direct low-latency operation: the picks of a dispatch, the weights of a combine. A word is 8 bytes, which
// arrive whole, and says of which operation it is, so that no fence and no flag stand between the one who writes it and
// the one who looks at it.
//
// What tells a word from the one that lay there before has few bits, so no word may grow old: each operation also
// renews one that it has no use for. Words of a rank are renewed within 2 * direct_words() operations.
#pragma once

#include "ll_direct.hpp"

namespace uccl_ep {

template <class Operation>
UCCL_EP_DEVICE uint64_t *direct_word(const Group &group, uint32_t owner, uint64_t number, uint32_t source,
                                     uint32_t index) {
    return reinterpret_cast<uint64_t *>(
        group.peer_data[owner] +
        group.layout.direct_word_offset(Operation::kWords, static_cast<uint32_t>(number & 1), source, index));
}

// Up to three picks of a token, of 16 bits each as int16, above 16 bits of the operation's number.
struct PicksWord {
    static constexpr uint32_t kPicks = 3;
    static_assert(kDirectPicks < 1u << 16, "two ranks renew a word within kDirectPicks operations");

    UCCL_EP_DEVICE static uint32_t of_token(uint32_t topk) { return (topk + kPicks - 1) / kPicks; }
    UCCL_EP_DEVICE static uint64_t empty(uint64_t number) { return ~uint64_t{0} << 16 | (number & 0xffff); }
    // `pick(k)`, of picks [first, topk).
    template <class Pick>
    UCCL_EP_DEVICE static uint64_t of(uint64_t number, uint32_t first, uint32_t topk, Pick pick) {
        uint64_t bits[kPicks];
        UCCL_EP_UNROLL  // the loads together, so none of them behind a condition
            for (uint32_t i = 0; i < kPicks; ++i) bits[i] =
                static_cast<uint16_t>(pick(first + i < topk ? first + i : topk - 1));
        uint64_t word = number & 0xffff;
        UCCL_EP_UNROLL
        for (uint32_t i = 0; i < kPicks; ++i) word |= (first + i < topk ? bits[i] : 0xffff) << (16 * (i + 1));
        return word;
    }
    UCCL_EP_DEVICE static bool is_of(uint64_t word, uint64_t number) { return ((word ^ number) & 0xffff) == 0; }
    UCCL_EP_DEVICE static int16_t pick(uint64_t word, uint32_t i) {
        return static_cast<int16_t>(static_cast<uint16_t>(word >> (16 * (i + 1))));
    }
};

// A weight, below 32 bits of the operation's number.
struct WeightWord {
    UCCL_EP_DEVICE static uint64_t empty(uint64_t number) { return number << 32; }
    UCCL_EP_DEVICE static uint64_t of(uint64_t number, float weight) {
        return number << 32 | device::float_to_bits(weight);
    }
    UCCL_EP_DEVICE static bool is_of(uint64_t word, uint64_t number) { return (word ^ number << 32) >> 32 == 0; }
    UCCL_EP_DEVICE static float weight(uint64_t word) { return device::bits_to_float(static_cast<uint32_t>(word)); }
};

// Send the words of this block's tokens to every other rank, once there is room: `of_token` words each of tokens b,
// b + blocks, ... below `tokens`, `load(token, i)` being word i. False on failure. The whole warp; one warp of a block.
template <class Operation, class Word, class Load>
UCCL_EP_DEVICE bool direct_send_words(const Group &group, const DirectCounts<Operation> &counts, uint32_t tokens,
                                      uint32_t of_token, Load load) {
    const Span span(group, Activity::kSendsWords);
    const uint64_t number = counts.sent + 1;
    const uint32_t ranks = group.num_ranks(), blocks = device::num_blocks(), block = device::block_index();
    const uint32_t mine = block < tokens ? (tokens - block + blocks - 1) / blocks * of_token : 0;
    const auto token = [&](uint32_t item) { return block + item / of_token * blocks; };
    uint32_t item = device::lane();
    uint64_t word = item < mine ? load(token(item), item % of_token) : 0;  // on its way while there is no room
    if (!direct_wait_room(group, counts)) return false;
    while (item < mine) {
        for (uint32_t i = 1; i < ranks; ++i) {
            device::store_relaxed_system(direct_word<Operation>(group, (group.rank + i) % ranks, number, group.rank,
                                                                token(item) * of_token + item % of_token),
                                         word);
        }
        item += device::kWarpSize;
        if (item < mine) word = load(token(item), item % of_token);
    }
    const auto renewed = static_cast<uint32_t>(number / 2 % group.layout.direct_words());
    if (block == 0 && renewed >= tokens * of_token) {
        for (uint32_t i = device::lane() + 1; i < ranks; i += device::kWarpSize) {
            device::store_relaxed_system(
                direct_word<Operation>(group, (group.rank + i) % ranks, number, group.rank, renewed),
                Word::empty(number));
        }
    }
    return true;
}

// Wait until a word is of operation `number`, and return it; another one on failure. `look()` is called now and then, so
// that it may take longer than a look at the word. One thread.
template <class Operation, class Word, class Look>
UCCL_EP_DEVICE uint64_t direct_wait_word(const Group &group, Phase phase, uint32_t source, uint64_t number,
                                         const uint64_t *address, Look look) {
    uint64_t word = 0;
    uint32_t polls = 0;
    wait_at_least(group, {phase, source, group.layout.signal_index(Operation::kRowsSignal, source, 0), number}, [&] {
        word = device::load_relaxed_system(address);
        if (Word::is_of(word, number)) return number;
        if (++polls % 64 == 0) look();
        return number - 1;
    });
    return word;
}

}  // namespace uccl_ep
