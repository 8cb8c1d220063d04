/* Shared by the models of the ordering plans.
 *
 * A message is known by its ghost, its number modulo G. Counters are compared as distances, so a run
 * never ends. K writes a message at most (1 or 2), S slots at the receiver: message g fills slot g mod S.
 */
#define NX (G * K) /* a write is x = ghost * K + write index */
#define AHEAD(a, b) (((a) + G - (b)) % G)
#define LIVE(m) (AHEAD(m, consumed) < AHEAD(next, consumed)) /* posted and not consumed */

#if K == 1
#define STILL_OPEN(m) (open[m])
#else
#define STILL_OPEN(m) (open[(m) * K] || open[(m) * K + 1])
#endif

/* x becomes any index of which c holds; blocks while there is none. */
#define O1(c, n) :: c(n) -> x = n
#define O2(c, n) O1(c, n) O1(c, (n) + 1)
#define O4(c, n) O2(c, n) O2(c, (n) + 2)
#define O8(c, n) O4(c, n) O4(c, (n) + 4)
#define O16(c, n) O8(c, n) O8(c, (n) + 8)
#define O32(c, n) O16(c, n) O16(c, (n) + 16)
#if NX == 8
#define PICK(c) if O8(c, 0) fi
#elif NX == 16
#define PICK(c) if O16(c, 0) fi
#elif NX == 32
#define PICK(c) if O32(c, 0) fi
#else
#error "G * K must be 8, 16 or 32"
#endif
#if G == 4
#define PICK_MESSAGE(c) if O4(c, 0) fi
#elif G == 8
#define PICK_MESSAGE(c) if O8(c, 0) fi
#elif G == 16
#define PICK_MESSAGE(c) if O16(c, 0) fi
#else
#error "G must be 4, 8 or 16"
#endif
