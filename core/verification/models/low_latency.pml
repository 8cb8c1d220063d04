/* Low-latency mode: two ranks, dispatch and combine messages both ways, two parities of inbox and
 * outbox. Message n lies in parity n mod 2; its sender must know that n - 2 was expanded (credit),
 * which says that the transport is done with the outbox as well. It knows by the head of the peer's last dispatch, which
 * says what the peer had expanded when it sent that (`noted`: the next message of a kind has room). A rank that does not
 * know it so tells what it has expanded itself, and waits for the peer's signal that says the same; others tell it when
 * they have sent. The ordering plan below is taken to be right (it has
 * models of its own): a signal comes after the data of its message and of all earlier ones.
 *
 * Both ranks run the same program: any interleaving of send and receive halves in which at most
 * HOOKS sends wait for their receive half; a rank inside a half does nothing else until it is through.
 *
 * Parameters (-D): G ghosts, KINDS 1 (dispatch only) or 2 (and combine), HOOKS.
 */
#ifndef LAG
#define LAG 4 /* steps by which one rank may be ahead of the other */
#endif
#ifndef HOOKS
#define HOOKS 2
#endif
#define AHEAD(a, b) (((a) + G - (b)) % G)
#ifdef MUTANT_ONE_PARITY
#define PARITY(m) 0
#else
#define PARITY(m) ((m) % 2)
#endif
#ifdef MUTANT_RUN_AHEAD_3
#define RUN_AHEAD 3
#else
#define RUN_AHEAD 2
#endif
#define AT(rank, kind) ((rank) * KINDS + (kind))
#define MESSAGE(rank, kind, m) (AT(rank, kind) * G + (m))
#define BUFFER(rank, kind, m) (AT(rank, kind) * 2 + PARITY(m))
#define NM (2 * KINDS * G)

byte sent[2 * KINDS];     /* messages this rank sent, by kind */
byte raised[2 * KINDS];   /* value of the signal for them at the peer */
byte received[2 * KINDS]; /* messages of the peer that this rank expanded */
byte credit[2 * KINDS];   /* messages this rank knows the peer expanded */
byte expanded[2 * KINDS]; /* messages of the peer for which this rank gave credit */
byte noted[2 * KINDS];    /* the message of mine that there is known to be room for, G: none */
byte head[4 * KINDS];     /* of a dispatch, by sender and parity: what the sender has expanded, of each kind */
byte outbox[4 * KINDS];
byte inbox[4 * KINDS];

bit wire[NM]; /* under way; the transport reads the outbox when it likes */

/* The ranks run one program: who comes first to its next step decides it for both. */
chan tape0 = [LAG] of { byte };
chan tape1 = [LAG] of { byte };

hidden byte x, r;

#define HEAD(rank, m, kind) (((rank) * 2 + PARITY(m)) * KINDS + (kind))
#define TELL(kind) expanded[AT(me, kind)] = received[AT(me, kind)]
/* Whether there is known to be room for the next message of a kind, the peer having read `theirs`: its head says so, and
 * the signal that says the same does not lag behind by more than ghosts can tell (in the counted plan, the window). */
#ifndef BEHIND
#define BEHIND (G - 2)
#endif
#ifdef MUTANT_HEAD_IGNORED
#define HAS_READ(kind, mine, theirs) true
#else
#define HAS_READ(kind, mine, theirs) (AHEAD(mine, theirs) <= 1 && AHEAD(mine, credit[AT(me, kind)]) <= BEHIND)
#endif
#define OUTSTANDING(k) AHEAD(sent[AT(me, k)], received[AT(me, k)])
#define MAY_SEND(k) (OUTSTANDING(k) < HOOKS && (k == 0 || sent[AT(me, k)] != received[AT(me, 0)]))

proctype Rank(byte me; chan mine; chan peers) {
    byte step; /* 2 * kind + 0 to send, + 1 to receive */
    byte m;
    do
    :: atomic {
        if
        :: nempty(mine) -> mine?step
        :: empty(mine) && nfull(peers) ->
            if
            :: MAY_SEND(0) -> step = 0
            :: OUTSTANDING(0) > 0 -> step = 1
#if KINDS > 1
            :: MAY_SEND(1) -> step = 2
            :: OUTSTANDING(1) > 0 -> step = 3
#endif
            fi;
            peers!step
        fi
    };
    if
    :: step % 2 == 0 ->
        m = sent[AT(me, step / 2)];
#ifndef MUTANT_TELL_BEHIND_THE_WAIT
        d_step {
            if
            :: noted[AT(me, step / 2)] != m -> TELL(step / 2)
            :: else
            fi
        };
#endif
        d_step {
#ifdef MUTANT_NO_CREDIT
            true ->
#else
            noted[AT(me, step / 2)] == m || AHEAD(m, credit[AT(me, step / 2)]) < RUN_AHEAD ->
#endif
            noted[AT(me, step / 2)] = G;
            outbox[BUFFER(me, step / 2, m)] = m + 1;
            if
            :: step / 2 == 0 ->
                head[HEAD(me, m, 0)] = received[AT(me, 0)];
#if KINDS > 1
                head[HEAD(me, m, 1)] = received[AT(me, 1)];
#endif
            :: else
            fi;
            wire[MESSAGE(me, step / 2, m)] = 1;
            sent[AT(me, step / 2)] = (m + 1) % G;
            TELL(step / 2);
            m = 0;
            step = 0
        }
    :: else ->
        m = received[AT(me, step / 2)];
        d_step { /* the wait ends; expanding begins */
            raised[AT(1 - me, step / 2)] != m ->
            assert(inbox[BUFFER(me, step / 2, m)] == m + 1);
#ifdef MUTANT_CREDIT_BEFORE_EXPAND
            expanded[AT(me, step / 2)] = (m + 1) % G;
#endif
            if
            :: step / 2 == 0 ->
                if
                :: HAS_READ(0, (m + 1) % G, head[HEAD(1 - me, m, 0)]) -> noted[AT(me, 0)] = (m + 1) % G
                :: else
                fi;
#if KINDS > 1
                if
                :: HAS_READ(1, sent[AT(me, 1)], head[HEAD(1 - me, m, 1)]) -> noted[AT(me, 1)] = sent[AT(me, 1)]
                :: else
                fi
#endif
            :: else
            fi
        };
        d_step {
            assert(inbox[BUFFER(me, step / 2, m)] == m + 1); /* nothing landed on it meanwhile */
            inbox[BUFFER(me, step / 2, m)] = 0;
            received[AT(me, step / 2)] = (m + 1) % G;
            m = 0;
            step = 0
        }
    fi
    od
}

#define O1(c, n) :: c(n) -> x = n
#define O2(c, n) O1(c, n) O1(c, (n) + 1)
#define O4(c, n) O2(c, n) O2(c, (n) + 2)
#define O8(c, n) O4(c, n) O4(c, (n) + 4)
#define O16(c, n) O8(c, n) O8(c, (n) + 8)
#if KINDS == 1 && G == 4
#define PICK(c) if O8(c, 0) fi
#elif (KINDS == 1 && G == 8) || (KINDS == 2 && G == 4)
#define PICK(c) if O16(c, 0) fi
#else
#define PICK(c) if O16(c, 0) O16(c, 16) fi
#endif

#define UNDER_WAY(n) wire[n]
active proctype Network() {
    do
    :: atomic {
        PICK(UNDER_WAY);
        d_step {
            r = x / G; /* rank and kind of the sender */
            inbox[BUFFER(1 - r / KINDS, r % KINDS, x % G)] = outbox[BUFFER(r / KINDS, r % KINDS, x % G)];
            wire[x] = 0
        }
    }
    od
}

#define CAN_RAISE(a) (raised[a] != sent[a] && !wire[(a) * G + raised[a]])
#define CAN_CREDIT(r, k) (credit[AT(r, k)] != expanded[AT(1 - (r), k)])
active proctype Signals() {
    do
    :: d_step { CAN_RAISE(0) -> raised[0] = (raised[0] + 1) % G }
    :: d_step { CAN_RAISE(1) -> raised[1] = (raised[1] + 1) % G }
#if KINDS > 1
    :: d_step { CAN_RAISE(2) -> raised[2] = (raised[2] + 1) % G }
    :: d_step { CAN_RAISE(3) -> raised[3] = (raised[3] + 1) % G }
#endif
    od
}
active proctype Credits() {
    do
    :: d_step { CAN_CREDIT(0, 0) -> credit[AT(0, 0)] = (credit[AT(0, 0)] + 1) % G }
    :: d_step { CAN_CREDIT(1, 0) -> credit[AT(1, 0)] = (credit[AT(1, 0)] + 1) % G }
#if KINDS > 1
    :: d_step { CAN_CREDIT(0, 1) -> credit[AT(0, 1)] = (credit[AT(0, 1)] + 1) % G }
    :: d_step { CAN_CREDIT(1, 1) -> credit[AT(1, 1)] = (credit[AT(1, 1)] + 1) % G }
#endif
    od
}

init { atomic {
    noted[0] = G; noted[1] = G;
#if KINDS > 1
    noted[2] = G; noted[3] = G;
#endif
    run Rank(0, tape0, tape1); run Rank(1, tape1, tape0)
} }

/* The program may choose for ever to do only one kind of step, but no step may block for ever. */
ltl live {
    ([]<> (received[0] < G / 2)) && ([]<> (received[0] >= G / 2)) &&
    ([]<> (received[KINDS] < G / 2)) && ([]<> (received[KINDS] >= G / 2))
}
