/* The counted plan: one signal, one sender, one receiver, a network that keeps no order.
 *
 * Numbers that wrap in the code (the epoch) wrap here as well. A message is really known by its ghost,
 * its number modulo G >= 2 M, which the protocol never sees: it tells a right decision from one that
 * merely looks right. All counters are relative to each other, so a pass holds for runs of any length.
 *
 * Parameters (-D)          the code's value
 *   M    epochs             64
 *   W    receiver's window  32, in messages
 *   S    slots = credit     at most 32
 *   K    writes a message   up to 2 here
 *   CQ   depth of the receiver's arrival queue (0: arrivals are counted as they land)
 *   CQS  arrival queues (1 or 2)
 *   DUP  duplicates that the network may make (255: no limit)
 *   FAIL lane errors, each followed by a retry (255: no limit)
 *   LATE 1: an immediate (without its payload) may come once more until LIFE messages later
 *   CREDIT 0: credits come late but right; 1: credits are themselves messages of a counted signal
 * A mutant is one more -D MUTANT_...; docs/verification.md says what each takes away.
 */
#ifndef G
#define G (2 * M)
#endif
#ifndef CQS
#define CQS 1
#endif
#ifndef DUP
#define DUP 0
#endif
#ifndef FAIL
#define FAIL 0
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef LIFE
#define LIFE 0
#endif
#ifndef CREDIT
#define CREDIT 0
#endif
#include "ghosts.pml"

byte next;     /* sender: the next message to post */
byte credit;   /* sender: messages known to be consumed */
byte raised;   /* receiver: value of the signal, as the next message to raise */
byte consumed; /* receiver's kernel: the next message to read */

byte wire[NX]; /* copies in flight */
bit open[NX];  /* sender: posted, completion not polled */
byte size[G];  /* ghost: how many writes the message has */
byte memory[S * K]; /* ghost + 1 of the message whose payload landed last; 0: none that anybody may read */

byte seen[W];  /* receiver, per epoch of the window: bitset of write indexes */
byte total[W]; /* receiver: writes of the message, 0 while the last one is unknown */
#ifdef MUTANT_COUNT_ONLY
byte arrived[W];
#endif

byte duplicates = DUP;
byte failures = FAIL;
#if LATE
bit late[NX];
#endif
#if CREDIT
byte credit_wire[G];   /* credit messages in flight */
byte credit_seen[W];
byte credits_sent;
#endif
#ifdef MUTANT_IMM_BEFORE_PAYLOAD
bit unplaced[NX];
#endif
#ifdef MUTANT_SAME_GENERATION
bit old[NX]; /* copies posted before the lane error */
#endif

#if CQ
chan cq0 = [CQ] of { byte };
#if CQS > 1
chan cq1 = [CQ] of { byte };
#endif
#endif

/* Scratch, no part of the state. The search cannot take back a statement that reads a hidden variable,
 * so every such statement stands in a d_step, which is taken back as a whole. */
hidden byte x, g, i, d, slot, n;
hidden byte complete, final;

/* ---- receiver ---- */

inline check_data(message) {
    i = 0;
    do
    :: i < size[message] -> assert(memory[((message) % S) * K + i] == (message) + 1); i++
    :: else -> break
    od
}

inline raise_complete() { /* in order: a signal's value promises all messages up to it */
    complete = 1;
    do
    :: complete ->
        slot = raised % W;
#ifdef MUTANT_LAST_IGNORED
        complete = (seen[slot] != 0);
#elif defined(MUTANT_COUNT_ONLY)
        complete = (total[slot] > 0 && arrived[slot] >= total[slot]);
#else
        complete = (total[slot] > 0 && seen[slot] == (1 << total[slot]) - 1);
#endif
        if
        :: complete ->
            /* Signal implies data: every announced write of the message is in its place. */
            check_data(raised);
            assert(size[raised] > 0 && AHEAD(next, raised) > 0);
            seen[slot] = 0;
            total[slot] = 0;
#ifdef MUTANT_COUNT_ONLY
            arrived[slot] = 0;
#endif
#if LATE
            n = 0; /* the life of a late copy ends LIFE messages later */
            do
            :: n < NX ->
                if
                :: late[n] && AHEAD((raised + 1) % G, n / K) > LIFE -> late[n] = 0
                :: else
                fi;
                n++
            :: else -> break
            od;
#endif
            raised = (raised + 1) % G
        :: else
        fi
    :: else -> break
    od
}

inline count() { /* the arrival of immediate {epoch, index, last} of write x */
    g = x / K;
    i = x % K;
    final = (i + 1 == size[g]);
#ifdef MUTANT_EPOCH_IGNORED
    d = 0;
#else
    d = ((g % M) + M - (raised % M)) % M;
#endif
    if
#ifndef MUTANT_CLOSED_ACCEPTED
    :: d >= W ->
        assert(AHEAD(g, raised) >= W) /* refused as a closed epoch: it must really be one */
    :: else ->
#else
    :: else ->
#endif
        slot = (raised + d) % W;
        assert(g == (raised + d) % G); /* the window holds the message it takes this write for */
#ifdef MUTANT_COUNT_ONLY
        arrived[slot]++;
#endif
        seen[slot] = seen[slot] | (1 << i);
        if
        :: final -> total[slot] = i + 1
        :: else
        fi;
#if LATE
        late[x] = 1;
#endif
#ifdef MUTANT_RAISE_OUT_OF_ORDER
        /* Raises to this message without asking for the earlier ones, whose data the value promises. */
        if
        :: total[slot] > 0 && seen[slot] == (1 << total[slot]) - 1 ->
            n = 0;
            do
            :: n < d -> check_data((raised + n) % G); n++
            :: else -> break
            od
        :: else
        fi;
#endif
        raise_complete()
    fi
}

inline place(write) {
    memory[((write / K) % S) * K + write % K] = (LIVE(write / K) -> write / K + 1 : 0)
}

inline land() {
    wire[x]--;
#ifdef MUTANT_IMM_BEFORE_PAYLOAD
    unplaced[x] = 1;
#else
    place(x);
#endif
}

/* ---- the parties ---- */

#ifdef MUTANT_NO_CREDIT
#define MAY_POST (AHEAD(next, consumed) < G - 1)
#else
#define MAY_POST (AHEAD(next, credit) < S)
#endif
#ifdef MUTANT_REUSE_BEFORE_COMPLETION
#define SLOT_FREE 1
#else
#define SLOT_FREE (!STILL_OPEN((next + G - S) % G))
#endif

active proctype Sender() {
    do
    :: atomic {
        MAY_POST && SLOT_FREE ->
        if
        :: n = 1
#if K > 1
        :: n = 2
#endif
        fi;
        d_step {
            size[next] = n;
            i = 0;
            do
            :: i < n -> wire[next * K + i] = 1; open[next * K + i] = 1; i++
            :: else -> break
            od;
            next = (next + 1) % G;
        }
    }
    od
}

#define IN_FLIGHT(n) wire[n] > 0
#define INTO_CQ0(n) (wire[n] > 0 && nfull(cq0))
#define INTO_CQ1(n) (wire[n] > 0 && nfull(cq1))
#define DONE(n) (open[n] && wire[n] == 0)

#ifdef MUTANT_IMM_BEFORE_PAYLOAD
#define NOT_PLACED(n) unplaced[n]
active proctype Placement() {
    do
    :: atomic {
        PICK(NOT_PLACED);
        d_step { unplaced[x] = 0; place(x) }
    }
    od
}
#endif

active proctype Network() {
    do
#if CQ == 0
    :: atomic { PICK(IN_FLIGHT); d_step { land(); count() } }
#else
    :: atomic { PICK(INTO_CQ0); d_step { land() }; cq0!x }
#if CQS > 1
    :: atomic { PICK(INTO_CQ1); d_step { land() }; cq1!x }
#endif
#endif
    od
}

#if CQ
active proctype Receiver() {
    byte write;
    do
    :: atomic { cq0?write -> d_step { x = write; write = 0; count() } }
    od
}
#if CQS > 1
active proctype OtherReceiver() {
    byte write;
    do
    :: atomic { cq1?write -> d_step { x = write; write = 0; count() } }
    od
}
#endif
#endif

/* A completion says: no copy of this write is under way any more. */
active proctype Completions() {
    do
    :: atomic { PICK(DONE); d_step {
        open[x] = 0;
        size[x / K] = (STILL_OPEN(x / K) || LIVE(x / K) -> size[x / K] : 0) } }
    od
}

active proctype Kernel() { /* reads the message, then gives its slot back */
    do
    :: d_step {
        consumed != raised ->
        i = 0;
        do
        :: i < size[consumed] ->
            assert(memory[(consumed % S) * K + i] == consumed + 1); /* nothing landed on it since */
            memory[(consumed % S) * K + i] = 0;
            i++
        :: else -> break
        od;
        size[consumed] = (STILL_OPEN(consumed) -> size[consumed] : 0);
        consumed = (consumed + 1) % G;
    }
    od
}

#if CREDIT == 0
active proctype Credits() {
    do
    :: d_step { credit != consumed -> credit = (credit + 1) % G }
    od
}
#else
/* Credits as messages 1, 2, 3 ... of a signal in the other direction, each one write. They need no
 * credits of their own: credit n + S cannot be sent before message n + S came, and that not before
 * credit n did. */
active proctype CreditSender() {
    do
#ifdef MUTANT_CREDIT_SKIPS
    :: d_step { /* coalesces: the counted plan would wait for the numbers left out */
        credits_sent != consumed ->
        credits_sent = consumed;
        credit_wire[(credits_sent + G - 1) % G] = 1
    }
#else
    :: d_step {
        credits_sent != consumed ->
        credit_wire[credits_sent] = 1;
        credits_sent = (credits_sent + 1) % G
    }
#endif
    od
}
#define CREDIT_IN_FLIGHT(n) credit_wire[n]
active proctype CreditNetwork() {
    do
    :: atomic {
        PICK_MESSAGE(CREDIT_IN_FLIGHT);
        d_step {
            credit_wire[x] = 0;
            d = ((x % M) + M - (credit % M)) % M;
#ifdef MUTANT_CREDIT_TRUNCATED
            /* an absolute number cut to the epoch's width, several in flight: takes the newest for true */
            credit = (credit + (d + 1) % M) % G;
#else
            if
            :: d < W ->
                assert(x == (credit + d) % G);
                credit_seen[(credit + d) % W] = 1;
                do
                :: credit_seen[credit % W] -> credit_seen[credit % W] = 0; credit = (credit + 1) % G
                :: else -> break
                od
            :: else -> assert(false)
            fi;
#endif
            assert(AHEAD(consumed, credit) <= S)
        }
    }
    od
}
#endif

#if DUP
#define SINGLE(n) (duplicates > 0 && wire[n] == 1)
active proctype Duplicator() {
    do
    :: atomic { PICK(SINGLE); d_step { wire[x] = 2; duplicates = (duplicates == 255 -> 255 : duplicates - 1) } }
    od
}
#endif

#if LATE
#define STALE(n) late[n]
active proctype LateCopies() {
    do
    :: atomic { PICK(STALE); d_step { late[x] = 0; count(); late[x] = 0 } }
    od
}
#endif

#if FAIL
/* A lane error: the sender cannot know which of the writes without a completion arrived, so it posts
 * all of them again. Under a new generation: what the old lane still carried can no longer land. */
active proctype LaneError() {
    do
    :: atomic {
        failures > 0 && next != credit ->
        d_step {
            failures = (failures == 255 -> 255 : failures - 1);
            x = 0;
            do
            :: x < NX ->
#ifdef MUTANT_SAME_GENERATION
                old[x] = (wire[x] > 0 || old[x]);
#endif
#ifdef MUTANT_NO_RETRY
                wire[x] = 0;
#else
                wire[x] = open[x];
#endif
                x++
            :: else -> break
            od;
            x = 0
        }
    }
    od
}
#endif

#ifdef MUTANT_SAME_GENERATION
#define OLD(n) old[n]
active proctype OldLane() {
    do
    :: atomic { PICK(OLD); d_step { old[x] = 0; place(x); count() } }
    od
}
#endif

ltl live { []<> (consumed < M) && []<> (consumed >= M) }
