/* The native plan: an ordered lane; data, then the signal, on the same lane. Software adds only
 * credits and, after an error, the generation of the lane.
 *
 * Parameters (-D): G ghosts, S slots = credit, K writes a message, DEPTH of a lane,
 *   FAIL lane errors with a retry (255: no limit).
 */
#ifndef FAIL
#define FAIL 0
#endif
#include "ghosts.pml"
#define SIGNAL (NX) /* an entry of the lane: a write x, or SIGNAL + message */

byte next;
byte posted;  /* writes of message `next` posted so far */
byte raised;
byte consumed;
byte credit;
byte newest;  /* one past the newest message ever posted: ahead of `next` while a retry catches up */
byte size[G];
byte memory[S * K];
byte failures = FAIL;

chan lane = [DEPTH] of { byte };
#ifdef MUTANT_SIGNAL_ON_OTHER_LANE
chan signal_lane = [DEPTH] of { byte };
#else
#define signal_lane lane
#endif
#ifdef MUTANT_SAME_GENERATION
chan old_lane = [DEPTH] of { byte };
#endif

hidden byte i, n, entry;

#ifdef MUTANT_NO_CREDIT
#define MAY_POST (AHEAD(next, consumed) < G - 1)
#else
#define MAY_POST (AHEAD(next, credit) < S)
#endif

active proctype Sender() {
    do
    :: atomic {
        MAY_POST && size[next] == 0 ->
        if
        :: size[next] = 1
#if K > 1
        :: size[next] = 2
#endif
        fi
    }
    :: atomic { size[next] > 0 && posted < size[next] && nfull(lane) -> lane!(next * K + posted); posted++ }
    :: atomic {
        size[next] > 0 && posted == size[next] && nfull(signal_lane) ->
        d_step {
            posted = 0;
            newest = (newest == next -> (next + 1) % G : newest);
            next = (next + 1) % G
        };
        /* A retry raises the signal once, to its newest value: one that was placed already must not
         * be followed by an older one. */
        if
#ifndef MUTANT_RETRY_EVERY_SIGNAL
        :: newest != next -> skip
        :: else -> signal_lane!(SIGNAL + (next + G - 1) % G)
#else
        :: true -> signal_lane!(SIGNAL + (next + G - 1) % G)
#endif
        fi
    }
    od
}

inline arrive() {
    if
    :: entry < SIGNAL -> /* 0: nobody may read a message that was consumed already */
        n = AHEAD(consumed, entry / K);
        memory[((entry / K) % S) * K + entry % K] = (n > 0 && n <= S -> 0 : entry / K + 1)
    :: else ->
        n = (entry - SIGNAL + 1) % G;
        assert(AHEAD(n, raised) <= S); /* never decreases */
        do
        :: raised != n ->
            assert(size[raised] > 0);
            i = 0;
            do
            :: i < size[raised] -> assert(memory[(raised % S) * K + i] == raised + 1); i++
            :: else -> break
            od;
            raised = (raised + 1) % G
        :: else -> break
        od
    fi;
    entry = 0
}

active proctype Lane() {
    byte first, second;
    do
    :: atomic { lane?first -> d_step { entry = first; first = 0; arrive() } }
#ifdef MUTANT_WRITE_OVERTAKEN
    /* what an unordered transport does: the next entry lands before the first */
    :: atomic {
        len(lane) > 1 -> lane?first; lane?second;
        d_step { entry = second; second = 0; arrive(); entry = first; first = 0; arrive() }
    }
#endif
#ifdef MUTANT_DUPLICATE_BEHIND_OTHERS
    /* the entry lands, and lands again behind what was posted since */
    :: atomic { lane?first -> d_step { entry = first; arrive() }; lane!first; first = 0 }
#endif
    od
}

#ifdef MUTANT_SIGNAL_ON_OTHER_LANE
active proctype OtherLane() {
    byte first;
    do
    :: atomic { signal_lane?first -> d_step { entry = first; first = 0; arrive() } }
    od
}
#endif

active proctype Kernel() {
    do
    :: d_step {
        consumed != raised ->
        i = 0;
        do
        :: i < size[consumed] ->
            assert(memory[(consumed % S) * K + i] == consumed + 1);
            memory[(consumed % S) * K + i] = 0;
            i++
        :: else -> break
        od;
        consumed = (consumed + 1) % G
    }
    od
}

active proctype Credits() {
    do
    :: d_step {
        credit != consumed ->
        size[credit] = 0;
        if
        :: next == credit && newest != next -> next = (next + 1) % G; posted = 0 /* no need to retry it */
        :: else
        fi;
        credit = (credit + 1) % G
    }
    od
}

#if FAIL
/* A lane error loses a tail of the lane, and the sender cannot know which: it posts everything since
 * the last credit again, on a lane of a new generation. */
active proctype LaneError() {
    byte lost;
    do
    :: atomic {
        failures > 0 && newest != credit ->
        failures = (failures == 255 -> 255 : failures - 1);
        do
        :: len(lane) > 0 ->
            lane?lost;
#ifdef MUTANT_SAME_GENERATION
            if
            :: nfull(old_lane) -> old_lane!lost
            :: full(old_lane)
            fi
#endif
        :: len(lane) == 0 -> break
        od;
        lost = 0;
        posted = 0;
        next = credit
    }
    od
}
#ifdef MUTANT_SAME_GENERATION
active proctype OldLane() {
    byte first;
    do
    :: atomic { old_lane?first -> d_step { entry = first; first = 0; arrive() } }
    od
}
#endif
#endif

ltl live { []<> (consumed < G / 2) && []<> (consumed >= G / 2) }
