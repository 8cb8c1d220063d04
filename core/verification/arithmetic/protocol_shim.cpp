// The shipped receiver, sender and codec behind C functions, so that property tests drive the very code.
#include <cstdint>

#include "uccl_ep/counted_receiver.hpp"
#include "uccl_ep/fenced_sender.hpp"
#include "uccl_ep/immediate.hpp"

using namespace uccl_ep;

namespace {
struct Receiver {
    ImmediateCodec codec;
    CountedReceiver receiver;
};
}  // namespace

extern "C" {

// NULL where the codec refuses the widths.
void *receiver_new(uint32_t imm_bits, uint32_t num_signals) {
    try {
        const ImmediateCodec codec(imm_bits, num_signals);
        return new Receiver{codec, CountedReceiver(codec, num_signals)};
    } catch (const std::invalid_argument &) {
        return nullptr;
    }
}
void receiver_free(void *receiver) { delete static_cast<Receiver *>(receiver); }
uint64_t receiver_max_writes(void *receiver) { return static_cast<Receiver *>(receiver)->codec.max_writes(); }
uint64_t receiver_encode(void *receiver, uint32_t signal, uint64_t message, uint32_t index, uint32_t last) {
    return static_cast<Receiver *>(receiver)->codec.encode(
        Immediate{signal, static_cast<uint32_t>(message % kEpochs), index, last != 0});
}
void receiver_decode(void *receiver, uint64_t bits, uint32_t *fields) {
    const Immediate imm = static_cast<Receiver *>(receiver)->codec.decode(bits);
    fields[0] = imm.signal;
    fields[1] = imm.epoch;
    fields[2] = imm.index;
    fields[3] = imm.last;
}
uint32_t receiver_accept(void *receiver, uint64_t bits, uint32_t *signal) {
    return static_cast<uint32_t>(static_cast<Receiver *>(receiver)->receiver.accept(bits, signal));
}
uint64_t receiver_complete(void *receiver, uint32_t signal) {
    return static_cast<Receiver *>(receiver)->receiver.complete(signal);
}

void *sender_new() { return new FencedSender; }
void sender_free(void *sender) { delete static_cast<FencedSender *>(sender); }
uint32_t sender_admit(void *sender, uint64_t value) { return static_cast<FencedSender *>(sender)->admit(value); }
void sender_write(void *sender, uint64_t value) { static_cast<FencedSender *>(sender)->write(value); }
void sender_end(void *sender, uint64_t value) { static_cast<FencedSender *>(sender)->end(value); }
void sender_placed(void *sender, uint64_t value) { static_cast<FencedSender *>(sender)->placed(value); }
uint64_t sender_take_signal(void *sender) { return static_cast<FencedSender *>(sender)->take_signal(); }
void sender_signal_placed(void *sender) { static_cast<FencedSender *>(sender)->signal_placed(); }
uint32_t sender_quiet(void *sender) { return static_cast<FencedSender *>(sender)->quiet(); }
}
