#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "simulator.hpp"

namespace uccl_ep::sim {
namespace {

// What a caller may have in the simulated network beyond its send queue: writes that completed early
// are no longer in the queue but still need memory here.
constexpr uint64_t kNetworkDepth = 4;  // times the send queue
constexpr uint64_t kBatch = 64;        // entries polled from the inner transport at a time
constexpr uint64_t kMaxLosses = 8;
constexpr uint64_t kCutAlignment = 64; // a cut never tears what a CPU or a NIC moves as one

}  // namespace

Lane::Lane(Simulator &owner, uint32_t index, Bounce bounce)
    : owner_(owner),
      faults_(owner.faults_),
      index_(index),
      bounce_(std::move(bounce)),
      last_due_(owner.num_ranks_, 0),
      inflight_bytes_(owner.num_ranks_, 0),
      last_placed_(owner.num_ranks_, 0),
      lost_from_(owner.num_ranks_, 0) {}

uint64_t Lane::now() const {
    if (!faults_.microseconds) return ticks_;
    using namespace std::chrono;
    return static_cast<uint64_t>(duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count());
}

int64_t Lane::refuse_write(const uccl_ep_write &write) {
    const uint64_t user_regions = owner_.regions_.size() - 1;
    const auto refuse = [this](int64_t code, std::string why) {
        error_ = std::move(why);
        return code;
    };
    if (write.peer >= owner_.num_ranks_ || write.peer == owner_.rank_) {
        return refuse(-EINVAL, "sim: no lane to rank " + std::to_string(write.peer));
    }
    if (write.bytes > faults_.max_message) {
        return refuse(-EMSGSIZE, "sim: a write of " + std::to_string(write.bytes) + " bytes, at most " +
                                     std::to_string(faults_.max_message));
    }
    if ((write.bytes | write.local_offset | write.remote_offset) & (faults_.alignment - 1)) {
        return refuse(-EINVAL, "sim: offsets and sizes must be multiples of " + std::to_string(faults_.alignment));
    }
    const bool has_immediate = (write.flags & UCCL_EP_WRITE_IMMEDIATE) != 0;
    if (has_immediate && owner_.ops_.poll_arrivals == nullptr) return refuse(-EOPNOTSUPP, "sim: no immediate data");
    if (write.bytes == 0 && !has_immediate) return refuse(-EINVAL, "sim: a write of nothing, without immediate");
    if (write.local_region >= user_regions || write.remote_region >= user_regions) {
        return refuse(-EINVAL, "sim: there are " + std::to_string(user_regions) + " regions");
    }
    // Cut into pieces, such a write would come out at the other end of the region.
    if (write.remote_offset + write.bytes < write.remote_offset) {
        return refuse(-EINVAL, "sim: the target's offset and size exceed 64 bits");
    }
    const Region &source = owner_.regions_[write.local_region];
    if (write.bytes > source.bytes || write.local_offset > source.bytes - write.bytes) {
        return refuse(-EINVAL,
                      "sim: the source reaches beyond its region of " + std::to_string(source.bytes) + " bytes");
    }
    return 0;
}

// Whether the queue takes one more operation now.
bool Lane::accepts(const Draw &draw) {
    if (outstanding_ >= faults_.send_queue_depth) return false;
    if (flights_.size() - free_flights_.size() >= kNetworkDepth * faults_.send_queue_depth) return false;
    if (!refusal_drawn_) {
        refusal_drawn_ = true;
        refusals_left_ = draw.chance(kRefuse, faults_.refuse) ? 1 + static_cast<uint32_t>(draw.bits(kRefuse) % 4) : 0;
    }
    if (refusals_left_ > 0) {
        --refusals_left_;
        count(owner_.statistics_.refusals);
        return false;
    }
    refusal_drawn_ = false;
    return true;
}

void Lane::note(uint64_t decision) {
    digest_ = mix(digest_ ^ decision);
    owner_.statistics_.decisions.fetch_add(mix(digest_ ^ index_), std::memory_order_relaxed);
}

uint32_t Lane::begin_flight(const Draw &draw, uint32_t peer, uint64_t bytes) {
    uint32_t index;
    if (free_flights_.empty()) {
        index = static_cast<uint32_t>(flights_.size());
        flights_.emplace_back();
    } else {
        index = free_flights_.back();
        free_flights_.pop_back();
        flights_[index] = Flight{};
    }
    flights_[index].live = true;
    flights_[index].number = number_++;
    flights_[index].completion_delay = draw.time(kCompletionOf, faults_.distribution, faults_.completion_delay);
    inflight_bytes_[peer] += bytes;
    ++outstanding_;
    owner_.count_towards(peer);
    if (draw.chance(kStall, faults_.stall)) {
        stalled_until_ = now() + static_cast<uint64_t>(faults_.stall_time);
        count(owner_.statistics_.stalls);
    }
    return index;
}

int64_t Lane::post_writes(const uccl_ep_write *writes, uint64_t num_writes) {
    for (uint64_t i = 0; i < num_writes; ++i) {
        const uccl_ep_write &write = writes[i];
        if (const int64_t refused = refuse_write(write)) return i > 0 ? static_cast<int64_t>(i) : refused;
        const Draw draw(faults_.seed, owner_.rank_, index_, number_);
        if (!accepts(draw)) return static_cast<int64_t>(i);
        const uint32_t index = begin_flight(draw, write.peer, write.bytes);
        Flight &flight = flights_[index];
        flight.write = write;
        if (faults_.imm_bits < 64) flight.write.immediate &= (uint64_t{1} << faults_.imm_bits) - 1;
        const bool fenced = (write.flags & UCCL_EP_WRITE_FENCED) != 0;
        if (!fenced && !down_ && draw.chance(kEarly, faults_.early_completion)) {
            if (write.bytes == 0) {
                flight.early = true;
            } else if (const auto offset = bounce_.allocate(write.bytes)) {
                flight.early = true;
                flight.bounce_offset = *offset;
                std::memcpy(owner_.regions_.back().pointer + *offset,
                            owner_.regions_[write.local_region].pointer + write.local_offset, write.bytes);
            }
        }
        if (!flight.early && faults_.check_source) flight.source_hash = hash_source(flight);
        count(owner_.statistics_.writes);
        schedule(index, draw);
        maybe_break();
    }
    return static_cast<int64_t>(num_writes);
}

int64_t Lane::post_signals(const uccl_ep_signal *signals, uint64_t num_signals) {
    for (uint64_t i = 0; i < num_signals; ++i) {
        const uccl_ep_signal &signal = signals[i];
        if (signal.peer >= owner_.num_ranks_ || signal.peer == owner_.rank_ || signal.remote_offset % 8 != 0 ||
            signal.remote_region >= owner_.regions_.size() - 1) {
            error_ = "sim: a signal needs a connected rank, a registered region and an offset that is a multiple of 8";
            return i > 0 ? static_cast<int64_t>(i) : -EINVAL;
        }
        const Draw draw(faults_.seed, owner_.rank_, index_, number_);
        if (!accepts(draw)) return static_cast<int64_t>(i);
        const uint32_t index = begin_flight(draw, signal.peer, 8);
        flights_[index].is_signal = true;
        flights_[index].signal = signal;
        count(owner_.statistics_.signals);
        schedule(index, draw);
        maybe_break();
    }
    return static_cast<int64_t>(num_signals);
}

// Draws when, how often and in how many pieces an accepted operation lands.
void Lane::schedule(uint32_t index, const Draw &draw) {
    Flight &flight = flights_[index];
    if (down_) {  // flushed with an error, as by a queue pair in its error state
        flight.status = -EIO;
        events_.push({now(), flight.number, Event::kComplete, index, 0, 0, true});
        return;
    }
    const uint32_t peer = flight.peer();
    uint64_t delay = draw.time(kDelayOf, faults_.distribution, faults_.delay);
    uint64_t losses = 0;
    while (losses < kMaxLosses && draw.chance(kLosses + static_cast<uint32_t>(losses) * 256, faults_.drop)) ++losses;
    const bool twice = !flight.early && draw.chance(kDuplicate, faults_.duplicate);
    note(mix(delay) ^ mix(losses << 2 | uint64_t{twice} << 1 | uint64_t{flight.early}) ^ mix(flight.completion_delay));

    if (losses > 0 && faults_.report_drops) {
        count(owner_.statistics_.reported_losses);
        flight.status = -EIO;
        error_ = "sim: operation " + std::to_string(flight.number) + " of this lane was lost, as the option asks";
        events_.push({now() + delay, draw.bits(kTie), Event::kComplete, index, 0, 0, true});
        return;
    }
    owner_.statistics_.losses.fetch_add(losses, std::memory_order_relaxed);
    delay += losses * static_cast<uint64_t>(faults_.retry_delay);
    if (faults_.inflight_limit != 0 && inflight_bytes_[peer] > faults_.inflight_limit) {
        delay = static_cast<uint64_t>(static_cast<double>(delay + 1) * faults_.collapse);
        count(owner_.statistics_.collapsed);
    }
    const uint64_t from = faults_.ordered ? std::max(now(), last_due_[peer]) : now();
    uint64_t due = now() + delay;
    if (faults_.ordered) due = last_due_[peer] = std::max(from, due);
    if (flight.early) {
        count(owner_.statistics_.early_completions);
        events_.push({now() + flight.completion_delay, draw.bits(kTie), Event::kComplete, index, 0, 0, true});
    }
    schedule_pieces(index, draw, from, due);
    if (!twice) return;
    // Directly behind the original where order is kept; anywhere later where it is not. The caller's
    // completion waits for both, so a copy never lands on bytes that somebody may use again.
    count(owner_.statistics_.duplicates);
    schedule_pieces(index, draw, due, faults_.ordered ? due : due + 1 + delay);
}

void Lane::schedule_pieces(uint32_t index, const Draw &draw, uint64_t from, uint64_t due) {
    Flight &flight = flights_[index];
    const uint64_t bytes = flight.is_signal ? 0 : flight.write.bytes;
    // Where order is kept, ties are broken by the number of the operation and then of the piece.
    const auto tie = [&](uint32_t piece, bool last) {
        if (faults_.ordered) return flight.number << 8 | (last ? 255u : piece);
        return (draw.bits(kSegmentTie + piece) >> 1) | (last ? uint64_t{1} << 63 : 0);
    };
    if (faults_.early_immediate && bytes > 0 && (flight.write.flags & UCCL_EP_WRITE_IMMEDIATE)) {
        flight.unplaced += 2;
        events_.push({from, tie(0, false), Event::kPlace, index, 0, 0, true});
        events_.push({due + 1, tie(1, true), Event::kPlace, index, 0, bytes, false});
        return;
    }
    uint32_t pieces = 1;
    if (faults_.max_segments > 1 && bytes >= 2 * kCutAlignment) {
        pieces += static_cast<uint32_t>(draw.bits(kSegments) % std::min(faults_.max_segments, kMaxSegments));
    }
    std::vector<uint64_t> cuts;  // where pieces end, in bytes of the payload
    for (uint32_t piece = 0; piece + 1 < pieces; ++piece) {
        const uint64_t cut = draw.bits(kSegmentCut + piece) % bytes / kCutAlignment * kCutAlignment;
        if (cut > 0) cuts.push_back(cut);
    }
    cuts.push_back(bytes);
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    const uint32_t num_pieces = static_cast<uint32_t>(cuts.size());
    const uint32_t final_piece = static_cast<uint32_t>(draw.bits(kSegments) >> 32) % num_pieces;
    flight.unplaced += num_pieces;
    for (uint32_t piece = 0; piece < num_pieces; ++piece) {
        const bool last = piece == final_piece;
        const uint64_t at = last ? due : from + draw.bits(kSegmentDelay + piece) % (due - from + 1);
        events_.push({at, tie(piece, last), Event::kPlace, index, piece > 0 ? cuts[piece - 1] : 0, cuts[piece], last});
    }
    if (num_pieces > 1) owner_.statistics_.segments.fetch_add(num_pieces, std::memory_order_relaxed);
}

int64_t Lane::post_piece(const Event &event, Flight &flight) {
    const uccl_ep_transport_ops *inner = owner_.inner_;
    if (flight.is_signal) {
        uccl_ep_signal signal = flight.signal;
        signal.token = event.flight;
        return inner->post_signals(inner->context, index_, &signal, 1);
    }
    uccl_ep_write write = flight.write;
    write.token = event.flight;
    write.bytes = event.end - event.begin;
    write.remote_offset += event.begin;
    write.local_offset += event.begin;
    if (flight.early && write.bytes > 0) {
        write.local_region = static_cast<uint32_t>(owner_.regions_.size() - 1);
        write.local_offset = flight.bounce_offset + event.begin;
    }
    if (!event.last) write.flags &= ~static_cast<uint32_t>(UCCL_EP_WRITE_IMMEDIATE);
    return inner->post_writes(inner->context, index_, &write, 1);
}

// Hands a piece to the inner transport; false where that one is full.
bool Lane::place(const Event &event) {
    Flight &flight = flights_[event.flight];
    const uint32_t peer = flight.peer();
    if (owner_.is_dead(peer)) {
        count(owner_.statistics_.killed);
        error_ = "sim: rank " + std::to_string(peer) + " is dead, as the option kill_peer asks";
        piece_placed(event.flight, -ENOTCONN);
        return true;
    }
    if (event.last && !flight.is_signal && !flight.early && faults_.check_source &&
        hash_source(flight) != flight.source_hash) {
        count(owner_.statistics_.source_changed);
    }
    const int64_t accepted = post_piece(event, flight);
    if (accepted == 0) return false;
    if (accepted < 0) {
        const char *why =
            owner_.inner_->last_error != nullptr ? owner_.inner_->last_error(owner_.inner_->context, index_) : nullptr;
        error_ = why != nullptr ? why : "the inner transport refused a write";
        piece_placed(event.flight, static_cast<int32_t>(accepted));
        return true;
    }
    if (flight.failed && flight.completed) count(owner_.statistics_.late_copies);
    if (!event.last) return true;
    if (flight.number < last_placed_[peer]) count(owner_.statistics_.overtakes);
    last_placed_[peer] = std::max(last_placed_[peer], flight.number);
    return true;
}

void Lane::piece_placed(uint32_t index, int32_t status) {
    Flight &flight = flights_[index];
    if (status != 0 && flight.status == 0) flight.status = status;
    if (status != 0 && flight.completed && !flight.failed && status != -ENOTCONN) {
        // Too late for a completion: as on a real device, the lane itself breaks.
        broken_ = status;
        error_ = "sim: operation " + std::to_string(flight.number) +
                 " of this lane failed after it had completed: " + error_;
    }
    if (--flight.unplaced > 0) return;
    if (flight.completed) {
        retire(index);
    } else if (!flight.early && !flight.failed) {
        const uint64_t delay = flight.completion_delay;
        if (delay == 0) {
            complete(index);
        } else {
            events_.push({now() + delay, flight.number, Event::kComplete, index, 0, 0, true});
        }
    }
}

void Lane::complete(uint32_t index) {
    Flight &flight = flights_[index];
    const uint32_t peer = flight.peer();
    done_.push_back({flight.is_signal ? flight.signal.token : flight.write.token, peer,
                     owner_.is_dead(peer) && flight.status == 0 ? -ENOTCONN : flight.status});
    flight.completed = true;
    if (flight.unplaced == 0) retire(index);
}

void Lane::retire(uint32_t index) {
    Flight &flight = flights_[index];
    inflight_bytes_[flight.peer()] -= flight.is_signal ? 8 : flight.write.bytes;
    flight.live = false;
    if (flight.early && flight.write.bytes > 0) bounce_.release(flight.bounce_offset, flight.write.bytes);
    free_flights_.push_back(index);
}

void Lane::progress() {
    if (now() < stalled_until_) return;
    while (!events_.empty() && events_.top().due <= now()) {
        const Event event = events_.top();
        events_.pop();
        if (event.kind == Event::kComplete) {
            complete(event.flight);
            continue;
        }
        if (!place(event)) {
            events_.push(event);
            return;
        }
    }
}

int64_t Lane::poll_completions(uccl_ep_completion *out, uint64_t capacity) {
    ++ticks_;
    uccl_ep_completion polled[kBatch];
    int64_t got;
    do {
        got = owner_.inner_->poll_completions(owner_.inner_->context, index_, polled, kBatch);
        for (int64_t i = 0; i < got; ++i) {
            const uint64_t token = polled[i].token;
            if (token < flights_.size() && flights_[token].unplaced > 0) {
                piece_placed(static_cast<uint32_t>(token), polled[i].status);
            }
        }
    } while (got == static_cast<int64_t>(kBatch));
    progress();
    uint64_t given = 0;
    while (given < capacity && !done_.empty()) {
        out[given++] = done_.front();
        done_.pop_front();
    }
    outstanding_ -= given;
    if (given > 0) return static_cast<int64_t>(given);
    return broken_ != 0 ? broken_ : std::min<int64_t>(got, 0);
}

int64_t Lane::poll_arrivals(uccl_ep_arrival *out, uint64_t capacity) {
    ++ticks_;
    uccl_ep_arrival polled[kBatch];
    const int64_t got = owner_.inner_->poll_arrivals(owner_.inner_->context, index_, polled, kBatch);
    for (int64_t i = 0; i < got; ++i) {
        uccl_ep_arrival arrival = polled[i];
        if (arrival.peer < owner_.num_ranks_ && owner_.is_dead(arrival.peer)) continue;
        if (!faults_.name_peers) arrival.peer = UCCL_EP_PEER_UNKNOWN;
        // Another stream of numbers than the posts': the complement of the arrival's number.
        const Draw draw(faults_.seed, owner_.rank_, index_, ~arrivals_);
        const uint64_t delay = draw.time(kArrivalOf, faults_.distribution, faults_.arrival_delay);
        uint64_t due = now() + delay;
        if (faults_.ordered) due = last_arrival_due_ = std::max(last_arrival_due_, due);
        waiting_.push({due, faults_.ordered ? arrivals_ : draw.bits(kTie), arrival});
        ++arrivals_;
        if (delay > 0) count(owner_.statistics_.held_arrivals);
    }
    uint64_t given = 0;
    if (now() >= stalled_until_) {
        while (given < capacity && !waiting_.empty() && waiting_.top().due <= now()) {
            out[given++] = waiting_.top().arrival;
            waiting_.pop();
        }
    }
    return given == 0 && got < 0 ? got : static_cast<int64_t>(given);
}

const char *Lane::last_error() {
    if (error_.empty() && owner_.inner_->last_error != nullptr) {
        return owner_.inner_->last_error(owner_.inner_->context, index_);
    }
    return error_.c_str();
}

uint64_t Lane::hash_source(const Flight &flight) const {
    const uint8_t *bytes = owner_.regions_[flight.write.local_region].pointer + flight.write.local_offset;
    uint64_t hash = flight.write.bytes;
    for (uint64_t at = 0; at < flight.write.bytes; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + at, std::min<uint64_t>(8, flight.write.bytes - at));
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
    return hash;
}

}  // namespace uccl_ep::sim
