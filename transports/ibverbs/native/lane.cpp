#include "lane.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <stdexcept>
#include <utility>

namespace uccl_ep::ibverbs {
namespace {

constexpr size_t kRound = 64;         // work requests of one round, fencing reads not counted
constexpr size_t kPieces = 4;         // of one write at most: chunks are larger than the largest write
constexpr int kPollBatch = 32;        // completions fetched at once
constexpr uint32_t kMaxPairs = 1u << (64 - kPlaceShift);

}  // namespace

Lane::Lane(uint32_t index, uint32_t num_ranks, std::atomic<uint8_t> *dead, LaneSettings settings, ibv_cq *send_queue,
           ibv_cq *receive_queue)
    : index_(index),
      dead_(dead),
      settings_(std::move(settings)),
      send_queue_(send_queue),
      receive_queue_(receive_queue),
      place_by_rank_(num_ranks, -1),
      requests_(2 * kRound),
      elements_(2 * kRound) {
    for (const Region &region : settings_.local) check(region);
    pairs_.reserve(num_ranks);  // pointers to pairs are kept while a round is built
    touched_.reserve(kRound);
}

void Lane::add_pair(uint32_t peer, ibv_qp *queue_pair, PairSettings settings) {
    if (peer >= place_by_rank_.size() || place_by_rank_[peer] >= 0 || pairs_.size() >= kMaxPairs) {
        throw std::invalid_argument("rank " + std::to_string(peer) + " cannot be added to lane " +
                                    std::to_string(index_));
    }
    if (settings.send_depth < kPieces + kMaxRegions) throw std::invalid_argument("send_depth must be at least 8");
    if (settings.remote.size() > kMaxRegions) throw std::invalid_argument("at most 4 regions can be registered");
    for (const Region &region : settings.remote) check(region);
    Pair pair;
    pair.queue_pair = queue_pair;
    pair.peer = peer;
    pair.place = static_cast<uint32_t>(pairs_.size());
    pair.handover = std::make_unique<Handover>();
    pair.entries.resize(std::bit_ceil(settings.send_depth));
    pair.consumed = settings.receive_depth;
    pair.settings = std::move(settings);
    pairs_.push_back(std::move(pair));
    place_by_rank_[peer] = static_cast<int32_t>(pairs_.size() - 1);
    refill(pairs_.back());
    if (pairs_.back().settings.receive_depth == 0) post_watch(pairs_.back());
    if (pairs_.back().broken) throw std::runtime_error(error_);
}

Lane::Pair *Lane::pair_of(uint32_t peer) {
    if (peer >= place_by_rank_.size() || place_by_rank_[peer] < 0) return nullptr;
    return &pairs_[static_cast<size_t>(place_by_rank_[peer])];
}

Place Lane::place_of(const Pair &pair) const { return {settings_.device, pair.peer, index_, pair.queue_pair->qp_num}; }

ibv_send_wr *Lane::add_request(Pair &pair, uint64_t token, bool has_token, bool fenced) {
    if (pair.head == nullptr) touched_.push_back(&pair);
    pair.entries[pair.posted & (pair.entries.size() - 1)] = {token, has_token, fenced};
    ibv_send_wr *request = &requests_[used_];
    *request = {};
    request->wr_id = request_id(pair.place, pair.tag, pair.posted);
    request->sg_list = &elements_[used_];
    request->num_sge = 1;
    if (pair.tail != nullptr) pair.tail->next = request;
    if (pair.head == nullptr) pair.head = request;
    pair.tail = request;
    ++pair.posted;
    ++used_;
    return request;
}

Lane::Verdict Lane::add_write(const uccl_ep_write &write) {
    Pair *pair = pair_of(write.peer);
    if (pair == nullptr || write.local_region >= settings_.local.size() ||
        write.remote_region >= pair->settings.remote.size()) {
        error_ = "a write names rank " + std::to_string(write.peer) + ", local region " +
                 std::to_string(write.local_region) + " and remote region " + std::to_string(write.remote_region) +
                 ", which are not connected";
        return Verdict::kInvalid;
    }
    const Region &local = settings_.local[write.local_region];
    const Region &remote = pair->settings.remote[write.remote_region];
    if (write.bytes > settings_.max_message) {
        error_ = "a write of " + std::to_string(write.bytes) + " bytes to rank " + std::to_string(write.peer) +
                 " is longer than max_message, " + std::to_string(settings_.max_message) + " bytes";
        return Verdict::kInvalid;
    }
    const bool immediate = (write.flags & UCCL_EP_WRITE_IMMEDIATE) != 0;
    const bool fenced = (write.flags & UCCL_EP_WRITE_FENCED) != 0;
    if (!local.contains(write.local_offset, write.bytes) || !remote.contains(write.remote_offset, write.bytes)) {
        error_ = "a write of " + std::to_string(write.bytes) + " bytes to rank " + std::to_string(write.peer) +
                 " leaves its windows";
        return Verdict::kInvalid;
    }
    if (immediate && pair->settings.receive_depth == 0) {
        error_ = settings_.device + " carries no immediate data (capability imm_bits is 0)";
        return Verdict::kInvalid;
    }
    if (pair->broken) {
        refuse(*pair, write.token);
        return Verdict::kAccepted;
    }
    if (pair->room() < kPieces + kMaxRegions) return Verdict::kFull;

    uint64_t done = 0;
    do {
        const uint64_t from = write.local_offset + done;
        const uint64_t to = write.remote_offset + done;
        const uint64_t piece = std::min({write.bytes - done, local.room(from), remote.room(to)});
        const bool last = done + piece == write.bytes;
        ibv_sge &element = elements_[used_];
        ibv_send_wr *request = add_request(*pair, write.token, last, fenced);
        element = {local.base + from, static_cast<uint32_t>(piece), local.key(from)};
        if (piece == 0) request->num_sge = 0;
        request->opcode = IBV_WR_RDMA_WRITE;
        if (immediate && last) {
            request->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            request->imm_data = htonl(static_cast<uint32_t>(write.immediate));
        }
        if (piece > 0 && piece <= pair->settings.inline_bytes && local.readable) request->send_flags = IBV_SEND_INLINE;
        request->wr.rdma.remote_addr = remote.base + to;
        request->wr.rdma.rkey = remote.key(to);
        done += piece;
    } while (done < write.bytes);
    if (fenced) {
        pair->fences |= 1u << write.remote_region;
        pair->fence_offset[write.remote_region] =
            std::min(write.remote_offset + (done ? done - 1 : 0), remote.bytes - 1);
    }
    return Verdict::kAccepted;
}

Lane::Verdict Lane::add_signal(const uccl_ep_signal &signal) {
    Pair *pair = pair_of(signal.peer);
    if (pair == nullptr || signal.remote_region >= pair->settings.remote.size() || signal.remote_offset % 8 != 0 ||
        !pair->settings.remote[signal.remote_region].contains(signal.remote_offset, 8)) {
        error_ = "a signal at offset " + std::to_string(signal.remote_offset) + " of region " +
                 std::to_string(signal.remote_region) + " of rank " + std::to_string(signal.peer) +
                 " is outside its window or not a multiple of 8";
        return Verdict::kInvalid;
    }
    if (pair->settings.inline_bytes < sizeof(signal.value)) {
        error_ = settings_.device + " posts nothing inline (capability native_signal is none)";
        return Verdict::kInvalid;
    }
    if (pair->broken) {
        refuse(*pair, signal.token);
        return Verdict::kAccepted;
    }
    if (pair->room() < 1) return Verdict::kFull;
    const Region &remote = pair->settings.remote[signal.remote_region];
    elements_[used_] = {reinterpret_cast<uintptr_t>(&signal.value), sizeof(signal.value), 0};
    ibv_send_wr *request = add_request(*pair, signal.token, true, false);
    request->opcode = IBV_WR_RDMA_WRITE;
    request->send_flags = IBV_SEND_INLINE;  // copied by the post, so the caller's array may go
    request->wr.rdma.remote_addr = remote.base + signal.remote_offset;
    request->wr.rdma.rkey = remote.key(signal.remote_offset);
    return Verdict::kAccepted;
}

void Lane::add_fences(Pair &pair) {
    for (; pair.fences != 0; pair.fences &= pair.fences - 1) {
        const auto region = static_cast<uint32_t>(std::countr_zero(pair.fences));
        const Region &remote = pair.settings.remote[region];
        const uint64_t offset = pair.fence_offset[region];
        elements_[used_] = {settings_.flush_address, 1, settings_.flush_key};
        ibv_send_wr *request = add_request(pair, 0, false, false);
        request->opcode = IBV_WR_RDMA_READ;
        request->wr.rdma.remote_addr = remote.base + offset;
        request->wr.rdma.rkey = remote.key(offset);
        ++statistics_.flushes;
    }
}

void Lane::ring_doorbells() {
    for (Pair *pair : touched_) {
        add_fences(*pair);
        pair->tail->send_flags |= IBV_SEND_SIGNALED;
        ibv_send_wr *refused = nullptr;
        const uint64_t first = pair->settled + ((pair->head->wr_id - pair->settled) & kNumberMask);
        const int error = ibv_post_send(pair->queue_pair, pair->head, &refused);
        pair->head = pair->tail = nullptr;
        // Of a chain that was refused in the middle the last one, which alone is signalled, is missing: what the device
        // took of it and carried out before the queue pair was in error comes back never.
        pair->taken = error == 0 ? pair->posted : first;
        ++statistics_.doorbells;
        if (error != 0) break_pair(*pair, pair->settled, -EIO, describe_post(error, place_of(*pair)));
    }
    statistics_.requests += used_;
    touched_.clear();
    used_ = 0;
}

int64_t Lane::post_writes(const uccl_ep_write *writes, uint64_t count) {
    uint64_t accepted = 0;
    Verdict verdict = Verdict::kAccepted;
    while (accepted < count && verdict == Verdict::kAccepted) {
        while (accepted < count && used_ + kPieces <= kRound) {
            verdict = add_write(writes[accepted]);
            if (verdict != Verdict::kAccepted) break;
            ++accepted;
        }
        ring_doorbells();
    }
    return verdict == Verdict::kInvalid && accepted == 0 ? -EINVAL : static_cast<int64_t>(accepted);
}

int64_t Lane::post_signals(const uccl_ep_signal *signals, uint64_t count) {
    uint64_t accepted = 0;
    Verdict verdict = Verdict::kAccepted;
    while (accepted < count && verdict == Verdict::kAccepted) {
        while (accepted < count && used_ < kRound) {
            verdict = add_signal(signals[accepted]);
            if (verdict != Verdict::kAccepted) break;
            ++accepted;
        }
        ring_doorbells();
    }
    return verdict == Verdict::kInvalid && accepted == 0 ? -EINVAL : static_cast<int64_t>(accepted);
}

void Lane::emit(uint64_t token, uint32_t peer, int32_t status) {
    if (out_count_ < out_capacity_) {
        out_[out_count_++] = {token, peer, status};
    } else {
        pending_.push_back({token, peer, status});
    }
}

void Lane::settle(Pair &pair, uint64_t up_to) {
    for (; pair.settled < up_to; ++pair.settled) {
        const Entry &entry = pair.entries[pair.settled & (pair.entries.size() - 1)];
        if (entry.has_token) emit(entry.token, pair.peer, 0);
    }
}

// `proven_up_to`: work requests before this number are known to be acknowledged. A fenced one among
// them is not proven by that: its read has not come back.
void Lane::break_pair(Pair &pair, uint64_t proven_up_to, int error, std::string words) {
    pair.broken = true;
    pair.open = false;
    pair.words = std::move(words);
    say(pair);
    for (; pair.settled < pair.posted; ++pair.settled) {
        const Entry &entry = pair.entries[pair.settled & (pair.entries.size() - 1)];
        const bool proven = pair.settled < proven_up_to && !entry.fenced;
        if (!entry.has_token) continue;
        emit(entry.token, pair.peer, proven ? 0 : error);
        pair.owes |= !proven;
    }
    if (renewable()) pair.handover->stage.store(Stage::kBroken);
    drain(pair);
}

// The words of the pair whose error is handed out first: it is the one that the caller asks about.
void Lane::say(const Pair &pair) {
    if (!said_) error_ = pair.words;
    said_ = true;
}

// A post on a queue pair that is broken.
void Lane::refuse(Pair &pair, uint64_t token) {
    pair.owes = true;
    if (pair.final) say(pair);
    emit(token, pair.peer, -ECONNRESET);
}

// One batch from the send queue; the number of completions, or -1 where the queue itself is broken.
int Lane::fetch_completions() {
    ibv_wc completions[kPollBatch];
    const int got = ibv_poll_cq(send_queue_, kPollBatch, completions);
    for (int i = 0; i < got; ++i) {
        const ibv_wc &completion = completions[i];
        Pair &pair = pairs_[place_of_id(completion.wr_id)];
        ++statistics_.completions;
        if (!has_tag(completion.wr_id, pair.tag)) continue;
        const uint64_t number = pair.returned + ((completion.wr_id - pair.returned) & kNumberMask);
        pair.returned = number + 1;
        if (pair.broken) continue;  // all that it owed was settled when it broke
        if (completion.status == IBV_WC_SUCCESS) {
            settle(pair, number + 1);
        } else {
            break_pair(pair, number, errno_of(completion.status),
                       describe_completion(completion.status, completion.vendor_err, place_of(pair)));
        }
    }
    return got;
}

int64_t Lane::poll_completions(uccl_ep_completion *out, uint64_t capacity) {
    out_ = out;
    out_capacity_ = capacity;
    out_count_ = 0;
    if (pending_.empty()) said_ = false;
    while (out_count_ < capacity && pending_head_ < pending_.size()) out[out_count_++] = pending_[pending_head_++];
    if (pending_head_ == pending_.size()) {
        pending_.clear();
        pending_head_ = 0;
    }
    int got = kPollBatch;
    while (out_count_ < capacity && got == kPollBatch) got = fetch_completions();
    if (watching_ && got == 0) look_at_watches();
    if (under_way_ != 0 || attention_.load(std::memory_order_relaxed)) look_after_pairs();
    out_capacity_ = 0;  // what other calls emit waits for the next call of this one
    if (got < 0) {
        error_ = settings_.device + ": the completion queue of lane " + std::to_string(index_) +
                 " cannot be polled any more; read the kernel log";
        return -EIO;
    }
    return static_cast<int64_t>(out_count_);
}

void Lane::refill(Pair &pair) {
    // A quarter of the queue at a time: few calls, and a receiver never runs dry while it refills.
    const uint32_t batch = std::max(1u, pair.settings.receive_depth / 4);
    if (pair.consumed < batch || !pair.open || pair.settings.receive_depth == 0) return;
    const int error = post_receives(pair.queue_pair, request_id(pair.place, pair.tag, 0), pair.consumed);
    ++statistics_.refills;
    if (error != 0) {
        break_receiver(pair, -EIO, describe_post(error, place_of(pair)));
        return;
    }
    pair.receives += pair.consumed;
    pair.consumed = 0;
}

// A receive is flushed when its queue pair fails. The cause is in the send queue, if this side was
// sending: look there first, for its words and for what was still acknowledged.
void Lane::on_flushed_receive(Pair &pair, const ibv_wc &completion) {
    while (!pair.broken && fetch_completions() > 0) {
    }
    break_receiver(pair, errno_of(completion.status),
                   describe_completion(completion.status, completion.vendor_err, place_of(pair)));
}

void Lane::break_receiver(Pair &pair, int error, std::string words) {
    if (!pair.open) return;
    if (pair.broken) {  // it has not been brought up since it was replaced
        pair.open = false;
        pair.again = true;
        pair.words = std::move(words);
    } else {
        break_pair(pair, pair.settled, error, std::move(words));
    }
}

void Lane::post_watch(Pair &pair) {
    ibv_sge element = {settings_.flush_address, 1, settings_.flush_key};  // siw takes no receive without one
    ibv_recv_wr request = {};
    request.sg_list = &element;
    request.num_sge = 1;
    request.wr_id = request_id(pair.place, pair.tag, 0);
    ibv_recv_wr *refused = nullptr;
    const int error = ibv_post_recv(pair.queue_pair, &request, &refused);
    if (error != 0) break_pair(pair, 0, -EIO, describe_post(error, place_of(pair)));
    watching_ = true;
}

void Lane::look_at_watches() {
    ibv_wc completion;
    while (ibv_poll_cq(receive_queue_, 1, &completion) > 0) {
        if (completion.status != IBV_WC_SUCCESS) on_flushed_receive(pairs_[place_of_id(completion.wr_id)], completion);
    }
}

int64_t Lane::poll_arrivals(uccl_ep_arrival *out, uint64_t capacity) {
    uint64_t count = std::min<uint64_t>(capacity, arrived_.size());
    if (count > 0) {
        std::copy_n(arrived_.begin(), count, out);
        arrived_.erase(arrived_.begin(), arrived_.begin() + static_cast<int64_t>(count));
    }
    while (count < capacity && arrived_.empty()) {
        ibv_wc completions[kPollBatch];
        const int wanted = static_cast<int>(std::min<uint64_t>(capacity - count, kPollBatch));
        const int got = ibv_poll_cq(receive_queue_, wanted, completions);
        if (got < 0) {
            error_ = settings_.device + ": the arrival queue of lane " + std::to_string(index_) +
                     " cannot be polled any more; read the kernel log";
            return -EIO;
        }
        for (int i = 0; i < got; ++i) count += take_receive(completions[i], &out[count]) ? 1 : 0;
        if (got < wanted) break;
    }
    return static_cast<int64_t>(count);
}

}  // namespace uccl_ep::ibverbs
