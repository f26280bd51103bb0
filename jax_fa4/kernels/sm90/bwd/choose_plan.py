"""Which plan a Hopper backward problem gets: depths, kinds and length against a small table of what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_fa4.kernels.sm90.bwd.plan import DEPTHS, NATIVE_DEPTHS, SMS, Plan, form_for, native
from jax_fa4.spec import Problem, Unsupported

_WORKERS = {"workers": SMS}
_STEP = _WORKERS | {"turns": False, "late": True}  # in step, dQ told of late
_ALTERNATES = {"alternates": True}
# (128 queries a step, band, ordered) -> (longest sequence, fields beside form_for's and `turns`), the longest
# ascending; the last serves any length. TFLOP/s at 1k, 4k and 16k, 16k tokens in all, and of cuDNN 9.19 and
# FlashAttention-4's own kernels in the same run (H200, 2026-11-30, docs/measured/2026-11-30_h200_backward_kept.txt;
# ordered: 2026-11-30_h200_backward_rounds.txt).
MEASURED: dict[tuple[bool, bool, bool], tuple[tuple[int, dict[str, Any]], ...]] = {
    # 442, 530; cuDNN 297, 399, its own 417, 515. In turns 424 at 1k; in step 516 at 4k
    (True, False, False): ((2048, _STEP), (0, {})),
    # 313, 478; cuDNN 207, 337, its own 312, 461. In turns 307 at 1k; in step 464 at 4k; not late 305, 471
    (True, True, False): ((2048, _STEP), (8192, _WORKERS | {"late": True}), (0, _WORKERS)),
    # 476, 595, 612; cuDNN 354, 482, 525, its own 464, 577, 615. Nothing kept 459, 566, 591; in turns 467, 562, 596
    # With an early LSE, timed since at 4k and 16k beside the form before and its own: 572, 600; 551, 587; 551, 602
    # (2026-11-30_h200_settled_variants.txt)
    (False, False, False): ((2048, _STEP | {"kept": 2}), (0, _STEP | {"kept": 2, "early": True})),
    # 342, 508, 608; cuDNN 252, 399, 505, its own 335, 505, 585. In step 345, 493, 567; values last, LSE late 578 at 16k
    # In step with two kept, timed since: 347, 517, 583, in turns 338, 510, at 16k as below 579, its own 339, 493, 571
    (False, True, False): ((8192, _STEP | {"kept": 2}), (0, {"values_first": True, "early": True})),
    # 386, 500, 533 in the order of sections; head by head 328, 424, 543
    (True, False, True): ((0, {"section": 32}),),
    # 296, 450, 517; without workers 268, 423, 509. Of the plain form (docs/measured/2026-11-30_h200_ordered.txt): 1.01
    # at 1k, 0.99 at 16k; no head in reverse: 1.00, 0.97; 32 of them: 1.01, 0.92
    (True, True, True): ((0, _WORKERS | {"mirrored": 8}),),
    # 422, 539, 583; head by head 387, 489, 589
    (False, False, True): ((0, {"section": 32}),),
    # 330, 470, 537; without workers 312, 477, 523. Of the plain form: 1.02, 1.06 (8k 1.03), 0.93; with no head in
    # reverse 0.97, 0.98 (0.97), 0.93; 32: 1.02, 0.91 (0.92), 0.91
    (False, True, True): ((1024, _WORKERS | {"mirrored": 32}), (0, _WORKERS | {"mirrored": 8})),
}
# The same where heads share keys and the choice is another: all heads at a query tile before the next one. 32:4 heads,
# causal D128 at 1k, 4k and 16k: 369, 512, 567, before 316, 463, 564 (2026-11-30_h200_backward_shared_keys.txt).
SHARED_KEYS: dict[tuple[bool, bool, bool], tuple[tuple[int, dict[str, Any]], ...]] = {
    (True, True, False): (
        (2048, _STEP | _ALTERNATES),
        (8192, _WORKERS | {"late": True} | _ALTERNATES),
        (0, _WORKERS | _ALTERNATES),
    ),
    (False, True, False): ((0, _WORKERS | _ALTERNATES),),
    # Of the plain form, with 32:4 heads at 1k, 4k, 8k and 16k: 0.96, 0.93, 0.95, 0.95, head by head 0.76, 0.81, 0.86,
    # 0.90; 32:8 at 8k 0.90, 0.84. Not 16:8: at 2k 0.76, 1.00; nor D64: 32:4 at 4k 0.89, 0.90, at 16k 0.90, 0.94
    # (2026-12-01_h200_ordered_shared_keys.json).
    (False, True, True): tuple((longest, form | _ALTERNATES) for longest, form in MEASURED[False, True, True]),
}
ORDERED_GROUP = 4  # heads that share keys, from which on that holds with an order
# The same of deeper ones, by (band, ordered). Of the plain form at D256 4k, D192 4k: 0.81, 0.80; without sections 0.64,
# 0.59 (0.70, 0.66 if no turn is deferred). Causal, with heads in reverse: 0.57 to 0.74 at D256.
DEEP: dict[tuple[bool, bool], dict[str, Any]] = {(False, True): {"section": 64, "defers": True}}

# The same among segments, by the greater depth: only one sequence of a head is at work, so more heads fit in L2. Of the
# plain form with twelve sequences in 16k, and with two (2026-11-30_h200_ordered_segments.txt): D64 1.01, 1.01 (32 MiB
# 0.87, 0.89; 512 1.10, 0.96); D128 1.08, 1.04 (32: 0.91, 0.96); D256 0.89, 0.83 (64: 0.64, 0.72; 256: 0.81, 0.85).
AMONG_SEGMENTS = {64: 128, 128: 512, 192: 512, 256: 512}


def measured(problem: Problem, any_shape: bool = False) -> dict[str, Any]:
    """What timing decided.

    Other kinds of problem than those timed take warpgroups in turn, which registers allow wherever each has keys of its
    own, and how work is shared out, if they can.
    """
    spec, inner, inner_value = problem.spec, native(problem.d), native(problem.v)
    among = {}
    if spec.segments and spec.deterministic and not spec.band:
        among = {"section": AMONG_SEGMENTS[max(inner, inner_value)]}
    if inner + inner_value > 256:
        return DEEP.get((spec.band, spec.deterministic), {}) | among
    small = inner == inner_value == 64
    fields: dict[str, Any] = {"turns": True, "rows": 128 if small else 64}
    length = 0 if any_shape or not isinstance(problem.s, int) else problem.s
    # Tiles that segments share are found by the whole CTA; dK and dV leave through places of one depth.
    alone = spec.segments or inner != inner_value
    # With a soft cap 84 to 284 bytes spill, and at depths padded to 64 24 (DSL 4.8.1).
    crowded = alone or spec.soft_cap or (small and min(problem.d, problem.v) < 64)
    kind = (small, spec.band, spec.deterministic)
    share = problem.n // problem.k >= (ORDERED_GROUP if spec.deterministic else 2)
    for longest, more in SHARED_KEYS.get(kind, MEASURED[kind]) if share else MEASURED[kind]:
        if longest == 0 or 0 < length <= longest:
            left_out = ("workers", "alternates") * alone + ("turns", "kept", "late", "values_first", "early") * crowded
            return fields | {name: value for name, value in more.items() if name not in left_out} | among
    raise AssertionError("the last of a list serves any length")


def stand_ins(problem: Problem) -> list[Problem]:
    """Problems of this kind that have among them every plan that its shapes, or heads that share keys, can choose."""
    lengths = {longest or 1 << 16 for forms in [*MEASURED.values(), *SHARED_KEYS.values()] for longest, _ in forms}
    heads = ((8, 8), (8, 1))  # of queries, of keys
    return [replace(problem, t=x, s=x, n=n, k=k) for x in sorted(lengths) for n, k in heads]


def choose(problem: Problem, any_shape: bool = False) -> Plan:
    """The plan for a backward problem, or Unsupported with what would work.

    The length decides between plans, each of which is right for any shape; any_shape: the one for long sequences.
    """
    spec = problem.spec
    for name, depth in (("query and key", problem.d), ("value", problem.v)):
        if depth % 8 or not 8 <= depth <= NATIVE_DEPTHS[-1]:
            raise Unsupported(f"depth {depth} of {name}: the Hopper backward takes {DEPTHS}")
    return Plan(
        problem.dtype,
        problem.d,
        problem.v,
        band=spec.band,
        segments=spec.segments,
        soft_cap=spec.soft_cap,
        ordered=spec.deterministic,
        # 16 to 20 bytes there, with `workers` and without (DSL 4.8.1); no one is fast at depths padded to 64.
        spill_allowance=32 if spec.soft_cap and min(problem.d, problem.v) < 64 else 0,
        **form_for(problem.d, problem.v) | measured(problem, any_shape),
    )
