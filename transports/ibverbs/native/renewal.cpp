#include "renewal.hpp"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "lane.hpp"

namespace uccl_ep::ibverbs {
namespace {

constexpr uint32_t kReceivesPerCall = 64;
constexpr int kPollBatch = 32;

}  // namespace

int post_receives(ibv_qp *queue_pair, uint64_t id, uint32_t count) {
    while (count > 0) {
        ibv_recv_wr requests[kReceivesPerCall] = {};
        const uint32_t batch = std::min(count, kReceivesPerCall);
        for (uint32_t i = 0; i < batch; ++i) {
            requests[i].wr_id = id;
            requests[i].next = i + 1 < batch ? &requests[i + 1] : nullptr;
        }
        ibv_recv_wr *refused = nullptr;
        if (const int error = ibv_post_recv(queue_pair, requests, &refused)) return error;
        count -= batch;
    }
    return 0;
}

Handover &Lane::handover(uint32_t peer) {
    Pair *pair = pair_of(peer);
    if (pair == nullptr) throw std::invalid_argument("no queue pair towards rank " + std::to_string(peer));
    return *pair->handover;
}

// --- the thread that makes queue pairs

void Lane::ask(uint32_t peer, uint32_t generation) {
    handover(peer).wanted.store(generation, std::memory_order_release);
    attention_.store(true, std::memory_order_release);
}

void Lane::prepare(uint32_t peer, ibv_qp *queue_pair) {
    Pair *pair = pair_of(peer);
    if (pair == nullptr || stage(peer) != Stage::kDrained) {
        throw std::invalid_argument("the queue pair towards rank " + std::to_string(peer) + " is still in use");
    }
    Handover &handover = *pair->handover;
    const uint64_t id = request_id(pair->place, ++handover.next_tag, 0);
    if (const int error = post_receives(queue_pair, id, pair->settings.receive_depth)) {
        throw std::runtime_error(describe_post(error, {settings_.device, peer, index_, queue_pair->qp_num}));
    }
    handover.next = queue_pair;
}

void Lane::connected(uint32_t peer, uint32_t generation) {
    Handover &handover = this->handover(peer);
    handover.next_generation = generation;
    handover.stage.store(Stage::kConnected, std::memory_order_release);
    attention_.store(true, std::memory_order_release);
}

void Lane::ready(uint32_t peer) {
    handover(peer).stage.store(Stage::kReady, std::memory_order_release);
    attention_.store(true, std::memory_order_release);
}

void Lane::give_up(uint32_t peer, std::string words) {
    Handover &handover = this->handover(peer);
    const Stage stage = handover.stage.load(std::memory_order_acquire);
    if (stage == Stage::kUp || stage == Stage::kReady || stage == Stage::kFinal) return;
    handover.last_words = std::move(words);
    handover.stage.store(Stage::kFinal, std::memory_order_release);
    dead_[peer].store(1, std::memory_order_release);
    attention_.store(true, std::memory_order_release);
}

void Lane::end_renewals(const std::string &words) {
    ended_.store(true);
    for (const Pair &pair : pairs_) give_up(pair.peer, words);
}

// --- the proxy thread

void Lane::wake() {
    // A full pipe has woken the thread already.
    [[maybe_unused]] const ssize_t written = ::write(settings_.wake_fd, "b", 1);
}

void Lane::look_after_pairs() {
    attention_.exchange(false, std::memory_order_acq_rel);
    // Also what belongs to no queue pair in use: a new one that failed before it was connected returns its receives,
    // and completion queues must never overflow.
    if (under_way_ != 0) drain_receives();
    for (Pair &pair : pairs_) look_after(pair);
    under_way_ = static_cast<uint64_t>(
        std::count_if(pairs_.begin(), pairs_.end(), [](const Pair &it) { return it.broken && !it.final; }));
}

void Lane::look_after(Pair &pair) {
    Handover &handover = *pair.handover;
    const bool asked = handover.wanted.load(std::memory_order_acquire) > pair.generation;
    switch (handover.stage.load(std::memory_order_acquire)) {
        case Stage::kUp:
            if (!asked) return;
            while (!pair.broken && fetch_completions() > 0) {  // what was acknowledged need not be sent again
            }
            if (!pair.broken) {
                break_pair(pair, pair.settled, -ECONNRESET,
                           describe_completion(IBV_WC_WR_FLUSH_ERR, 0, place_of(pair)) +
                               " The peer saw the error and asked for a new queue pair.");
            }
            return;
        case Stage::kBroken:
            if (pair.final || pair.receives != 0 || pair.returned < pair.taken) return;
            if (pass_on(pair, Stage::kBroken, Stage::kDrained)) wake();
            return;
        case Stage::kDrained:
            return;
        case Stage::kConnected:
            adopt(pair);
            return;
        case Stage::kReady:
            adopt(pair);
            if (pair.again || handover.wanted.load(std::memory_order_acquire) > pair.generation) {
                if (!pass_on(pair, Stage::kReady, Stage::kBroken)) return;
                pair.again = pair.open = false;
                drain(pair);
            } else if (!pair.owes) {
                bring_up(pair);
            }
            return;
        case Stage::kFinal:
            if (pair.final) return;
            pair.final = true;
            pair.words += " The queue pair was not replaced: " + handover.last_words + ".";
            say(pair);
            return;
    }
}

// What a pair in stage kBroken holds comes back and it is replaced, or that is the end of it. In the order of stage
// and ended_, whoever ends renewals sees this pair or is seen here.
void Lane::drain(Pair &pair) {
    if (renewable() && !ended_.load()) {
        ++under_way_;
        wake();
    } else {
        pair.final = true;
        dead_[pair.peer].store(1, std::memory_order_release);
    }
}

// The next stage, unless the pair was given up meanwhile.
bool Lane::pass_on(Pair &pair, Stage from, Stage to) {
    return pair.handover->stage.compare_exchange_strong(from, to, std::memory_order_seq_cst);
}

// The new queue pair in place of the old one; it receives from now on, and sends once it is brought up.
void Lane::adopt(Pair &pair) {
    if (pair.handover->next == nullptr) return;
    pair.queue_pair = std::exchange(pair.handover->next, nullptr);
    pair.generation = pair.handover->next_generation;
    pair.tag = pair.handover->next_tag;
    pair.open = true;
    pair.consumed = 0;
    pair.receives = pair.settings.receive_depth;
    if (pair.early != 0 && pair.early_tag == (pair.tag & 0xFF)) {  // it failed before anybody was told that it is there
        pair.receives -= pair.early;
        pair.open = false;
        pair.again = true;
    }
    pair.early = 0;
    pair.taken = pair.returned = pair.posted;
    ++statistics_.renewals;
}

void Lane::bring_up(Pair &pair) {
    if (pass_on(pair, Stage::kReady, Stage::kUp)) pair.broken = pair.owes = false;
}

int64_t Lane::renew() {
    look_after_pairs();
    // Also for pairs of which no operation failed: the next one would.
    for (Pair &pair : pairs_) {
        if (!pair.broken || pair.final) continue;
        if (pair.handover->stage.load(std::memory_order_acquire) != Stage::kReady) return 0;
    }
    for (Pair &pair : pairs_) {
        if (pair.broken && !pair.final) bring_up(pair);
    }
    return 1;
}

// Arrivals are kept for poll_arrivals, which a plan without immediates never calls.
void Lane::drain_receives() {
    ibv_wc completions[kPollBatch];
    int got = kPollBatch;
    while (got == kPollBatch) {
        got = ibv_poll_cq(receive_queue_, kPollBatch, completions);
        for (int i = 0; i < got; ++i) {
            uccl_ep_arrival arrival;
            if (take_receive(completions[i], &arrival)) arrived_.push_back(arrival);
        }
    }
}

// Whether the completion of a receive is an arrival; one of a queue pair that was replaced since is, too.
bool Lane::take_receive(const ibv_wc &completion, uccl_ep_arrival *arrival) {
    Pair &pair = pairs_[place_of_id(completion.wr_id)];
    if (!has_tag(completion.wr_id, pair.tag)) look_after(pair);  // the first of a new queue pair
    const bool current = has_tag(completion.wr_id, pair.tag);
    if (current) {
        --pair.receives;
    } else if (completion.status != IBV_WC_SUCCESS) {
        if (!has_tag(completion.wr_id, pair.early_tag)) pair.early = 0;
        pair.early_tag = tag_of_id(completion.wr_id);
        ++pair.early;
    }
    if (completion.status != IBV_WC_SUCCESS) {
        if (current) on_flushed_receive(pair, completion);
        return false;
    }
    if (current) {
        ++pair.consumed;
        refill(pair);
    }
    *arrival = {ntohl(completion.imm_data), pair.peer, 0};
    return true;
}

}  // namespace uccl_ep::ibverbs
