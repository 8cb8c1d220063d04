// What can be taken out of the ring, one mechanism at a time: the checker must notice each.
#pragma once

namespace ring_model {

enum class Mutation {
    kNone,
    kNoReleaseFence,       // publish
    kNoAcquireFence,       // poll
    kRelaxedConsumedStore,
    kRelaxedConsumedLoad,
    kRelaxedCachedCopy,    // the producers' shared copy of `consumed` without release
    kFenceWithoutAcquire,  // nor is it acquired
    kNoFullCheck,
    kOnePhaseBit,          // only word 0 says whether the command is new
    kConsumedTooEarly,     // published before the slot was read
    kCompletedTooEarly,    // published before the transport is done with the staged bytes
    kRelaxedCompletedStore,
    kRelaxedCompletedLoad,
    kNoCompletedWait,      // staging reused after the push
    kBatchAboveCapacity,   // one reservation of more slots than there are
    kTicketNotAtomic,      // head advanced by a load and a store
    kNoPhase,              // a slot that is not zero passes for new, whatever its lap
    kOneSlotTooMany,       // the full check lets capacity + 1 commands in
    kLaneWithoutFence,     // of a warp, only the lane that takes the tickets fences
    kNoWarpSync,           // the other lanes learn their tickets without being synchronised
};

inline constexpr const char *kNames[] = {"none",
                                         "no_release_fence",
                                         "no_acquire_fence",
                                         "relaxed_consumed_store",
                                         "relaxed_consumed_load",
                                         "relaxed_cached_copy",
                                         "fence_without_acquire",
                                         "no_full_check",
                                         "one_phase_bit",
                                         "consumed_too_early",
                                         "completed_too_early",
                                         "relaxed_completed_store",
                                         "relaxed_completed_load",
                                         "no_completed_wait",
                                         "batch_above_capacity",
                                         "ticket_not_atomic",
                                         "no_phase",
                                         "one_slot_too_many",
                                         "lane_without_fence",
                                         "no_warp_sync"};

inline Mutation mutation = Mutation::kNone;

}  // namespace ring_model
