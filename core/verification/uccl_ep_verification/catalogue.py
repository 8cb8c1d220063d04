"""All cases. docs/verification.md explains each mutant; a mechanism without one is not verified."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .case import Case, Limits, Outcome
from .native import PACKING_MUTANTS, packing_case, ring_case
from .spin import spin_case

COUNTED = "M=4 W=2 S=2 K=2"
FENCED = "G=8 S=2 K=2"
NATIVE = "G=8 S=2 K=2 DEPTH=4"
LOW_LATENCY = "G=8 KINDS=1"


def ring_cases() -> list[Case]:
    cases = [
        ring_case("spsc", "1 producer, 4 commands, 2 slots, random", "pass", "random", 60_000),
        ring_case("mpsc", "2 producers, 3 commands, 2 slots, random", "pass", "random", 60_000),
        ring_case("spsc", "1 producer, 4 commands, at most 2 preemptions", "pass", "bound:2", 0),
        ring_case("spsc_small", "1 producer, 1 slot, at most 4 preemptions", "pass", "bound:4", 0),
        ring_case("mpsc_small", "2 producers, 1 slot, at most 3 preemptions", "pass", "bound:3", 0),
        ring_case("mpsc_medium", "2 producers, 2 slots, at most 1 preemption", "pass", "bound:1", 0),
        ring_case("spsc_staging", "1 producer, 1 staging buffer, random", "pass", "random", 60_000),
        ring_case("warp", "a warp of 2 lanes, 3 rounds, 2 slots, random", "pass", "random", 60_000),
        ring_case("warp_small", "a warp of 2 lanes, 2 rounds, at most 1 preemption", "pass", "bound:1", 0),
        ring_case("spsc", "1 producer, random, long", "pass", "random", 2_000_000, full=True),
        ring_case("mpsc", "2 producers, random, long", "pass", "random", 2_000_000, full=True),
    ]
    for mutation in (
        "no_release_fence",
        "no_acquire_fence",
        "one_phase_bit",
        "no_phase",
        "no_full_check",
        "one_slot_too_many",
        "consumed_too_early",
        "relaxed_consumed_store",
        "relaxed_consumed_load",
        "relaxed_cached_copy",
        "fence_without_acquire",
        "ticket_not_atomic",
    ):
        cases.append(ring_case("mpsc", mutation, "fail", "random", 60_000))
    for mutation in (
        "completed_too_early",
        "relaxed_completed_store",
        "relaxed_completed_load",
        "no_completed_wait",
        "batch_above_capacity",
    ):
        cases.append(ring_case("spsc", mutation, "fail", "random", 60_000))
    for mutation in ("lane_without_fence", "no_warp_sync"):
        cases.append(ring_case("warp", mutation, "fail", "random", 60_000))
    return cases


def counted_cases() -> list[Case]:
    def passes(variant: str, defines: str, **more: bool) -> Case:
        return spin_case("counted", variant, "pass", defines, **more)

    def mutant(variant: str, defines: str) -> Case:
        return spin_case("counted", variant, "fail", defines)

    return [
        passes("2 arrival queues, reordering", f"{COUNTED} CQ=2 CQS=2"),
        passes("duplicates, lane errors, retries", f"{COUNTED} CQ=2 DUP=255 FAIL=255"),
        passes("4 messages under way, reordering", "M=8 W=4 S=4 K=2 CQ=0"),
        passes("4 messages under way, duplicates", "M=8 W=4 S=4 K=1 CQ=0 DUP=255"),
        passes("window above the slots, duplicates", "M=8 W=4 S=2 K=2 CQ=1 DUP=255"),
        passes("late immediates, life M - W", f"{COUNTED} CQ=0 LATE=1 LIFE=2"),
        passes("credits are counted signals", f"{COUNTED} CQ=0 CREDIT=1"),
        passes("credits are counted signals, M=8", "M=8 W=4 S=4 K=1 CQ=0 CREDIT=1"),
        passes("progress: duplicate, lane error", f"{COUNTED} CQ=1 DUP=1 FAIL=1", live=True),
        passes("progress: counted credits", f"{COUNTED} CQ=0 CREDIT=1", live=True),
        passes("4 under way, arrival queue", "M=8 W=4 S=4 K=1 CQ=2 DUP=255 FAIL=255", full=True),
        passes("progress: 2 duplicates, 2 errors", f"{COUNTED} CQ=0 DUP=2 FAIL=2", live=True, full=True),
        mutant("signal before payload (imm_after_payload broken)", f"{COUNTED} CQ=0 MUTANT_IMM_BEFORE_PAYLOAD"),
        mutant("count without index bitset", f"{COUNTED} CQ=0 DUP=2 MUTANT_COUNT_ONLY"),
        mutant("last flag ignored", f"{COUNTED} CQ=0 MUTANT_LAST_IGNORED"),
        mutant("epoch not checked", f"{COUNTED} CQ=0 MUTANT_EPOCH_IGNORED"),
        mutant("closed epoch accepted", f"{COUNTED} CQ=0 DUP=255 MUTANT_CLOSED_ACCEPTED"),
        mutant("raise out of order", f"{COUNTED} CQ=0 MUTANT_RAISE_OUT_OF_ORDER"),
        mutant("window above M / 2", "M=4 W=4 S=4 K=1 CQ=0 G=16 DUP=255"),
        mutant("late immediates, life M - W + 1", f"{COUNTED} CQ=0 LATE=1 LIFE=3"),
        mutant("no credit", f"{COUNTED} CQ=0 MUTANT_NO_CREDIT"),
        mutant("slot reused before completion", f"{COUNTED} CQ=0 DUP=255 MUTANT_REUSE_BEFORE_COMPLETION"),
        mutant("retry without new generation", f"{COUNTED} CQ=0 FAIL=255 MUTANT_SAME_GENERATION"),
        mutant("no retry", f"{COUNTED} CQ=0 FAIL=1 MUTANT_NO_RETRY"),
        mutant("one signal over 2 arrival queues, a duplicate", f"{COUNTED} CQ=1 CQS=2 DUP=1"),
        mutant("credit truncated, several in flight", f"{COUNTED} CQ=0 CREDIT=1 MUTANT_CREDIT_TRUNCATED"),
        mutant("credit skips message numbers", f"{COUNTED} CQ=0 CREDIT=1 MUTANT_CREDIT_SKIPS"),
    ]


def fenced_cases() -> list[Case]:
    def mutant(variant: str, defines: str) -> Case:
        return spin_case("fenced", variant, "fail", defines)

    return [
        spin_case("fenced", "reordering, coalescing", "pass", FENCED),
        spin_case("fenced", "duplicates, lane errors, retries", "pass", f"{FENCED} DUP=255 FAIL=255"),
        spin_case("fenced", "4 messages under way", "pass", "G=16 S=4 K=1 FAIL=255"),
        spin_case("fenced", "progress: duplicate, lane error", "pass", f"{FENCED} DUP=1 FAIL=1", live=True),
        mutant("completion before placement", f"{FENCED} MUTANT_COMPLETION_BEFORE_PLACEMENT"),
        mutant("signal before placement", f"{FENCED} MUTANT_SIGNAL_BEFORE_PLACEMENT"),
        mutant("signal skips an incomplete message", f"{FENCED} MUTANT_SIGNAL_OUT_OF_ORDER"),
        mutant("two signal writes in flight", f"{FENCED} MUTANT_TWO_SIGNALS"),
        mutant("two credit writes in flight", f"{FENCED} MUTANT_TWO_CREDITS"),
        mutant("no credit", f"{FENCED} MUTANT_NO_CREDIT"),
        mutant("retry without new generation", f"{FENCED} FAIL=255 MUTANT_SAME_GENERATION"),
    ]


def native_cases() -> list[Case]:
    def mutant(variant: str, defines: str) -> Case:
        return spin_case("native", variant, "fail", defines)

    return [
        spin_case("native", "ordered lane", "pass", NATIVE),
        spin_case("native", "lane errors, retries", "pass", f"{NATIVE} FAIL=255"),
        spin_case("native", "progress: 2 lane errors", "pass", f"{NATIVE} FAIL=2", live=True),
        spin_case("native", "4 messages under way", "pass", "G=16 S=4 K=2 DEPTH=8 FAIL=255", full=True),
        mutant("write overtaken (write_order broken)", f"{NATIVE} MUTANT_WRITE_OVERTAKEN"),
        mutant("duplicate lands behind later entries", f"{NATIVE} MUTANT_DUPLICATE_BEHIND_OTHERS"),
        mutant("signal on another lane than its data", f"{NATIVE} MUTANT_SIGNAL_ON_OTHER_LANE"),
        mutant("no credit", f"{NATIVE} MUTANT_NO_CREDIT"),
        mutant("retry without new generation", f"{NATIVE} FAIL=255 MUTANT_SAME_GENERATION"),
        mutant("retry raises every signal again", f"{NATIVE} FAIL=255 MUTANT_RETRY_EVERY_SIGNAL"),
    ]


def low_latency_cases() -> list[Case]:
    def mutant(variant: str, defines: str) -> Case:
        return spin_case("low_latency", variant, "fail", f"{LOW_LATENCY} {defines}")

    return [
        spin_case("low_latency", "2 ranks, send and receive halves", "pass", LOW_LATENCY),
        spin_case("low_latency", "progress", "pass", "G=4 KINDS=1 LAG=2", live=True),
        mutant("one parity", "MUTANT_ONE_PARITY"),
        mutant("run ahead by 3", "MUTANT_RUN_AHEAD_3"),
        mutant("no credit", "MUTANT_NO_CREDIT"),
        mutant("credit before the message is expanded", "MUTANT_CREDIT_BEFORE_EXPAND"),
        mutant("three sends before a receive", "HOOKS=3"),
        mutant("told behind the wait", "MUTANT_TELL_BEHIND_THE_WAIT"),
        mutant("room noted whatever the head says", "MUTANT_HEAD_IGNORED"),
        mutant("signals may lag without limit", "BEHIND=255"),
    ]


def lemma_cases() -> list[Case]:
    if importlib.util.find_spec("z3") is None:

        def missing(scratch: Path, shared: Path, limits: Limits) -> Outcome:
            return Outcome("unknown", 0, "z3 is missing")

        return [Case("lemma", "all", "pass", ("z3",), missing)]

    from . import lemmas

    def lemma_case(lemma: lemmas.Lemma, mutation: str) -> Case:
        def check(scratch: Path, shared: Path, limits: Limits) -> Outcome:
            verdict, reason = lemmas.check(lemma, mutation, limits.time_s)
            if verdict == "pass":
                return Outcome("pass", 0, "")
            return Outcome("fail", 0, reason) if verdict == "fail" else Outcome("unknown", 0, reason)

        return Case(f"lemma {lemma.name}", mutation or "real widths", "fail" if mutation else "pass", ("z3",), check)

    return [lemma_case(lemma, mutation) for lemma in lemmas.LEMMAS for mutation in ("", *lemma.mutations)]


def all_cases() -> list[Case]:
    return [
        *ring_cases(),
        packing_case(),
        *(packing_case(mutation) for mutation in PACKING_MUTANTS),
        *lemma_cases(),
        *counted_cases(),
        *fenced_cases(),
        *native_cases(),
        *low_latency_cases(),
    ]
