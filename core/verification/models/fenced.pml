/* The fenced plan: a transport without immediates. The sender holds the signal, an absolute 64-bit
 * number, back until completions prove that the data are placed, and writes it with an ordinary
 * 8-byte write, of which one is in flight.
 *
 * Parameters (-D): G ghosts, S slots = credit, K writes a message,
 *   FAIL lane errors with a retry (255: no limit), DUP duplicates (255: no limit).
 */
#ifndef FAIL
#define FAIL 0
#endif
#ifndef DUP
#define DUP 0
#endif
#include "ghosts.pml"

byte next;     /* the next message to post */
byte proven;   /* messages before it are known to be placed */
byte sent;     /* value of the last signal write */
byte raised;   /* receiver: the signal's value, as the next message to come */
byte consumed;
byte credit;

byte wire[NX]; /* copies in flight */
bit open[NX];  /* posted, completion not polled */
byte size[G];
byte memory[S * K];
byte signal_wire[G]; /* signal writes in flight, by value */
byte signals_open;   /* their completions not polled */
bit credit_wire[G];
byte credits_open;
byte credit_sent;
byte failures = FAIL;
byte duplicates = DUP;
#ifdef MUTANT_SAME_GENERATION
bit old[NX];
bit old_signal[G];
#endif

hidden byte x, i, n;

#ifdef MUTANT_TWO_SIGNALS
#define MAX_SIGNALS 2
#else
#define MAX_SIGNALS 1
#endif
#ifdef MUTANT_TWO_CREDITS
#define MAX_CREDITS 2
#else
#define MAX_CREDITS 1
#endif
#ifdef MUTANT_NO_CREDIT
#define MAY_POST (AHEAD(next, consumed) < G - 1)
#else
#define MAY_POST (AHEAD(next, credit) < S)
#endif

active proctype Sender() {
    do
    :: atomic {
        MAY_POST -> /* credited implies raised, hence completed: nothing can land on the slot any more */
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
            next = (next + 1) % G
        }
    }
    od
}

inline place(write) {
    memory[((write / K) % S) * K + write % K] = (LIVE(write / K) -> write / K + 1 : 0)
}

#define IN_FLIGHT(n) wire[n] > 0
active proctype Network() {
    do
    :: atomic { PICK(IN_FLIGHT); d_step { wire[x]--; place(x) } }
    od
}

/* A fenced completion says that no copy is under way any more: all are placed. */
#ifdef MUTANT_COMPLETION_BEFORE_PLACEMENT
#define DONE(n) open[n]
#else
#define DONE(n) (open[n] && wire[n] == 0)
#endif
active proctype Completions() {
    do
    :: atomic { PICK(DONE); d_step { open[x] = 0 } }
    od
}

active proctype Proxy() {
    do
#ifdef MUTANT_SIGNAL_BEFORE_PLACEMENT
    :: d_step { proven != next -> proven = (proven + 1) % G }
#elif defined(MUTANT_SIGNAL_OUT_OF_ORDER)
    /* raises to the newest complete message, whatever is missing before it */
    :: d_step { proven != next && !STILL_OPEN(proven) -> proven = (proven + 1) % G }
    :: d_step {
        AHEAD(next, proven) > 1 && !STILL_OPEN((proven + 1) % G) -> proven = (proven + 2) % G
    }
#else
    :: d_step { proven != next && !STILL_OPEN(proven) -> proven = (proven + 1) % G }
#endif
    :: d_step { /* coalesces: the newest value stands for all before it */
        sent != proven && signals_open < MAX_SIGNALS ->
        sent = proven;
        signal_wire[sent]++;
        signals_open++
    }
    od
}

inline raise(value) {
    assert(AHEAD(value, raised) <= S); /* a signal never decreases */
    do
    :: raised != value ->
        assert(size[raised] > 0);
        i = 0;
        do
        :: i < size[raised] -> assert(memory[(raised % S) * K + i] == raised + 1); i++
        :: else -> break
        od;
        raised = (raised + 1) % G
    :: else -> break
    od
}

#define SIGNAL_IN_FLIGHT(n) signal_wire[n] > 0
active proctype SignalNetwork() {
    do
    :: atomic {
        PICK_MESSAGE(SIGNAL_IN_FLIGHT);
        d_step { signal_wire[x]--; n = x; raise(n); signals_open-- }
    }
    od
}

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
        size[consumed] = 0;
        consumed = (consumed + 1) % G
    }
    od
}

/* Credits: the same kind of signal in the other direction, without data. */
active proctype CreditSender() {
    do
    :: d_step {
        credit_sent != consumed && credits_open < MAX_CREDITS ->
        credit_sent = consumed;
        credit_wire[credit_sent] = 1;
        credits_open++
    }
    od
}

#define CREDIT_IN_FLIGHT(n) credit_wire[n]
active proctype CreditNetwork() {
    do
    :: atomic {
        PICK_MESSAGE(CREDIT_IN_FLIGHT);
        d_step {
            credit_wire[x] = 0;
            credits_open--;
            assert(AHEAD(x, credit) <= S); /* never decreases */
            credit = x
        }
    }
    od
}

#if DUP
#define SINGLE(n) (duplicates > 0 && wire[n] == 1)
active proctype Duplicator() {
    do
    :: atomic { PICK(SINGLE); d_step { wire[x] = 2; duplicates = (duplicates == 255 -> 255 : duplicates - 1) } }
    od
}
#endif

#if FAIL
/* A lane error. Under a new generation: what the old lane carried can no longer land. Data without a
 * completion are posted again; so is the signal, with the newest value. */
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
                wire[x] = open[x];
                x++
            :: else -> break
            od;
            x = 0;
            do
            :: x < G ->
#ifdef MUTANT_SAME_GENERATION
                old_signal[x] = (signal_wire[x] > 0 || old_signal[x]);
#endif
                signal_wire[x] = 0;
                x++
            :: else -> break
            od;
            if
            :: signals_open > 0 -> sent = proven; signal_wire[sent] = 1; signals_open = 1
            :: else
            fi
        }
    }
    od
}
#ifdef MUTANT_SAME_GENERATION
#define OLD(n) old[n]
#define OLD_SIGNAL(n) old_signal[n]
active proctype OldLane() {
    do
    :: atomic { PICK(OLD); d_step { old[x] = 0; place(x) } }
    :: atomic { PICK_MESSAGE(OLD_SIGNAL); d_step { n = x; raise(n); old_signal[x] = 0 } }
    od
}
#endif
#endif

ltl live { []<> (consumed < G / 2) && []<> (consumed >= G / 2) }
