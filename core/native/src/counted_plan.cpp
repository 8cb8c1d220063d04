// Counted: every write names its signal, message and index in its immediate data; the receiving proxy
// counts, and raises the signal when all is there.
//
// Where the receiver's queue of arrivals is finite, it gives credits: how many immediates of a sender it
// has polled on this lane, an absolute number in the sender's control window. One such write is under
// way at a time, since an older one that lands last would take credit back.
#include <algorithm>
#include <array>
#include <cstddef>

#include "plan.hpp"
#include "uccl_ep/counted_receiver.hpp"
#include "uccl_ep/std_atomics.hpp"

namespace uccl_ep {
namespace {

constexpr uint64_t kArrivalsPerPoll = 256;
constexpr uint32_t kNoSignal = UINT32_MAX;
constexpr uint32_t kRepeats = 3;  // of the last credit, where a completion proves no placement

class CountedPlan final : public Plan {
  public:
    CountedPlan(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats)
        : shared_(shared),
          lane_(lane),
          outbound_(outbound),
          stats_(stats),
          codec_(shared.limits.imm_bits, shared.layout.num_signals()),
          receiver_(codec_, shared.layout.num_signals()),
          senders_(shared.sender_signals.data()),
          once_(shared.limits.exactly_once && !can_renew(*shared.ops)),
          arrivals_(kArrivalsPerPoll),
          peers_(shared.layout.num_ranks) {
        if (shared.limits.remote_queue_depth != 0) {
            // What is posted again after an error may have arrived before: then it lies in the queue twice.
            const uint64_t copies = can_renew(*shared.ops) ? 2 : 1;
            window_ = std::max<uint64_t>(
                1, shared.limits.remote_queue_depth / copies / std::max<uint64_t>(1, shared.remote_peers.size()));
        }
    }

    bool admit(uint32_t peer, uint32_t key, uint64_t value) override {
        if (window_ == 0) {
            return true;
        }
        const uint64_t sealed = senders_[key].sealed;
        const uint64_t needed = value > sealed + 1 ? value - sealed : 1;
        Peer &state = peers_[peer];
        if (state.sent - state.credited + needed > window_) {
            state.credited = std::max(
                state.credited,
                StdAtomics::load_acquire_system(shared_.word(shared_.layout.notice_offset(peer) + credit_field())));
        }
        // A peer that closed gives no more credit, and its queue matters no more.
        return state.sent - state.credited + needed <= window_ || state.sent == state.credited ||
               shared_.verdicts->peer_closed(peer);
    }

    bool windowed() const override { return window_ != 0; }
    void write(uccl_ep_write &write, const Op &op) override {
        SenderSignal &signal = senders_[op.key];
        if (op.value == signal.sealed + 1) {  // nearly all messages: nothing was skipped
            signal.sealed = op.value;
            signal.next_index = 0;
        }
        // Nothing was staged behind it where it is refused: a message begun anew has no writes yet.
        if ((op.value != signal.sealed && !fill_gap(op)) || !announce(write, op, signal)) {
            outbound_.unstage();
        }
    }
    void end(const Op &op) override {
        Op empty = op;
        empty.kind = OpKind::kEmpty;
        empty.last = true;
        if (op.value == senders_[op.key].sealed || fill_gap(empty)) {
            send(empty);
        }
    }

    void completed(const Op &op) override {
        if (op.kind == OpKind::kCredit) {
            peers_[op.peer].credit_in_flight = false;
        }
    }

    uint64_t poll() override {
        if (announced_ != 0) {
            stats_.emulated_immediates.add(announced_);
            announced_ = 0;
        }
        const int64_t count =
            shared_.ops->poll_arrivals(shared_.ops->context, lane_, arrivals_.data(), arrivals_.size());
        if (count < 0) {
            const char *words =
                shared_.ops->last_error != nullptr ? shared_.ops->last_error(shared_.ops->context, lane_) : nullptr;
            fail(Fault{shared_.rank, Reason::kTransport, 0, 0, 0,
                       std::string("polling arrivals failed: ") + (words != nullptr ? words : "no reason given")});
            return 0;
        }
        if (count != 0) {
            counted_ = 0;
            for (int64_t i = 0; i < count; ++i) {
                take(arrivals_[static_cast<uint64_t>(i)]);
            }
            raise();
            stats_.emulated_counts.add(counted_);
            stats_.arrivals.add(static_cast<uint64_t>(count));
        }
        if (window_ != 0) {
            for (const uint32_t peer : shared_.remote_peers) {
                if (peers_[peer].polled - peers_[peer].told >= std::max<uint64_t>(1, window_ / 4)) {
                    tell(peer);
                }
            }
        }
        return static_cast<uint64_t>(count);
    }

    void tick() override {
        if (window_ == 0) {
            return;
        }
        for (const uint32_t peer : shared_.remote_peers) {
            Peer &state = peers_[peer];
            if (state.polled != state.told) {
                state.repeats = shared_.limits.placement_proof ? 0 : kRepeats;
                tell(peer);
            } else if (state.repeats != 0) {
                --state.repeats;
                tell(peer);
            }
        }
    }

  private:
    struct Peer {
        uint64_t sent = 0;      // immediates to it on this lane
        uint64_t credited = 0;  // of these, polled there, as far as is known
        uint64_t polled = 0;    // immediates of it
        uint64_t told = 0;      // credit written last
        uint32_t repeats = 0;
        bool credit_in_flight = false;
    };

    uint64_t credit_field() const { return offsetof(PeerNotice, consumed) + uint64_t{lane_} * 8; }

    // A message begins. The receiver counts every message number, but a kernel may skip some (a credit that
    // went up by more than one): those are messages of nothing.
    [[gnu::noinline]] bool fill_gap(const Op &op) {
        SenderSignal &signal = senders_[op.key];
        if (op.value - signal.sealed > kEpochWindow) {
            fail(Fault{shared_.rank, Reason::kBadCommand, op.signal, signal.sealed + kEpochWindow, op.value,
                       "signal " + std::to_string(op.signal) + " went from " + std::to_string(signal.sealed) + " to " +
                           std::to_string(op.value) + ": at most " + std::to_string(kEpochWindow) +
                           " messages may be under way"});
            return false;
        }
        while (signal.sealed + 1 != op.value) {
            ++signal.sealed;
            signal.next_index = 0;
            Op empty = op;
            empty.kind = OpKind::kEmpty;
            empty.commands = 0;
            empty.bytes = 0;
            empty.value = signal.sealed;
            empty.last = true;
            stats_.emulated_gaps.add(1);
            send(empty);
        }
        signal.sealed = op.value;
        signal.next_index = 0;
        return true;
    }

    // Give a write its immediate. False: the message has too many.
    bool announce(uccl_ep_write &write, const Op &op, SenderSignal &signal) {
        if (signal.next_index >= codec_.max_writes()) {
            refuse(op, signal.next_index);
            return false;
        }
        write.flags = UCCL_EP_WRITE_IMMEDIATE;
        write.immediate = codec_.encode(
            Immediate{op.signal, static_cast<uint32_t>(op.value % kEpochs), signal.next_index++, op.last});
        if (window_ != 0) {
            peers_[op.peer].sent += 1;
        }
        ++announced_;
        return true;
    }
    [[gnu::cold, gnu::noinline]] void refuse(const Op &op, uint64_t index) {
        fail(Fault{shared_.rank, Reason::kBadCommand, op.signal, codec_.max_writes(), index,
                   "a message of more than " + std::to_string(codec_.max_writes()) + " writes"});
    }

    // A write of no bytes.
    void send(const Op &op) {
        const Outbound::Staged staged = outbound_.stage();
        staged.write->peer = op.peer;
        staged.write->local_region = UCCL_EP_REGION_DATA;
        staged.write->remote_region = UCCL_EP_REGION_DATA;
        *staged.op = op;
        staged.op->in_use = true;
        if (!announce(*staged.write, op, senders_[op.key])) {
            outbound_.unstage();
        }
    }

    void take(const uccl_ep_arrival &arrival) {
        uint32_t signal = 0;
        const Arrival outcome = receiver_.accept(arrival.immediate, &signal);
        if (outcome != Arrival::kUnknownSignal) {
            const uint32_t writer = shared_.signal_writer(signal);
            if (arrival.peer != UCCL_EP_PEER_UNKNOWN && arrival.peer != writer) {
                protocol(arrival.peer, signal, "an immediate names a signal that another rank writes");
                return;
            }
            // A copy takes no credit: its sender counts each write once.
            peers_[writer].polled += outcome == Arrival::kCounted || outcome == Arrival::kRaise ? 1 : 0;
        }
        // A raise waits for no more than the look at the next arrival: messages of one signal that complete
        // one after another are raised, and made visible to the device, once.
        if (outcome != Arrival::kRaise || to_raise_ != signal) {
            raise();
        }
        switch (outcome) {
            case Arrival::kCounted:
                ++counted_;
                return;
            case Arrival::kRaise:
                ++counted_;
                to_raise_ = signal;
                return;
            case Arrival::kDuplicate:
                stats_.emulated_duplicates.add(1);
                if (once_) {
                    protocol(shared_.signal_writer(signal), signal, "a write arrived twice");
                }
                return;
            case Arrival::kClosedEpoch:
                stats_.emulated_closed.add(1);
                if (once_) {
                    protocol(shared_.signal_writer(signal), signal, "a write of a message that was complete arrived");
                }
                return;
            case Arrival::kContradiction:
                protocol(shared_.signal_writer(signal), signal, "the writes of a message contradict its last one");
                return;
            case Arrival::kUnknownSignal:
                protocol(arrival.peer < shared_.layout.num_ranks ? arrival.peer : shared_.rank, signal,
                         "an immediate names no signal");
                return;
        }
    }

    void raise() {
        if (to_raise_ == kNoSignal) {
            return;
        }
        const uint32_t signal = to_raise_;
        to_raise_ = kNoSignal;
        if (shared_.options.flush_function != 0) {
            reinterpret_cast<void (*)(void *)>(shared_.options.flush_function)(
                reinterpret_cast<void *>(shared_.options.flush_context));
        }
        StdAtomics::store_release_system(shared_.word(shared_.layout.signal_offset(signal)),
                                         receiver_.complete(signal));
        stats_.signals_raised.add(1);
        if (trace_ != nullptr) {
            trace_->add(TraceKind::kRaised, signal, receiver_.complete(signal), shared_.signal_writer(signal), 0, 0);
        }
    }

    void protocol(uint32_t culprit, uint32_t signal, const char *words) {
        uint64_t seen = 0;
        uint64_t announced = 0;
        uint64_t complete = 0;
        if (signal < shared_.layout.num_signals()) {
            receiver_.progress(signal, &seen, &announced);
            complete = receiver_.complete(signal);
        }
        fail(Fault{culprit, Reason::kProtocol, signal, announced, seen,
                   std::string(words) + " (rank " + std::to_string(culprit) + ", signal " + std::to_string(signal) +
                       ", message " + std::to_string(complete + 1) + ": " + std::to_string(seen) + " of " +
                       std::to_string(announced) + " writes)"});
    }

    void tell(uint32_t peer) {
        Peer &state = peers_[peer];
        if (state.credit_in_flight || !outbound_.room(kOperationsPerCommand)) {
            return;
        }
        state.told = state.polled;
        const uint64_t local = shared_.layout.notice_outbox_offset(peer) + credit_field();
        StdAtomics::store_release_system(shared_.word(local), state.told);
        outbound_.stage_control(OpKind::kCredit, peer, local,
                                shared_.layout.notice_offset(shared_.rank) + credit_field(), 8,
                                shared_.limits.placement_proof);
        state.credit_in_flight = true;
        stats_.emulated_credits.add(1);
    }

    EngineShared &shared_;
    uint32_t lane_;
    Outbound &outbound_;
    ProxyStats &stats_;
    ImmediateCodec codec_;
    CountedReceiver receiver_;
    SenderSignal *senders_;
    const bool once_;  // no write arrives twice: neither the transport nor a retry repeats one
    std::vector<uccl_ep_arrival> arrivals_;
    std::vector<Peer> peers_;
    uint64_t window_ = 0;             // immediates under way to one peer, 0: no limit
    uint64_t announced_ = 0;          // immediates sent, not in stats_ yet
    uint64_t counted_ = 0;            // arrivals of this poll
    uint32_t to_raise_ = kNoSignal;   // complete, not raised yet
};

}  // namespace

std::unique_ptr<Plan> make_counted_plan(EngineShared &shared, uint32_t lane, Outbound &outbound, ProxyStats &stats) {
    return std::make_unique<CountedPlan>(shared, lane, outbound, stats);
}

}  // namespace uccl_ep
