"""Which plan a Hopper backward problem gets: depths, kinds and length against a small table of what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_fa4.kernels.sm90.bwd.plan import DEPTHS, NATIVE_DEPTHS, Plan, form_for, native
from jax_fa4.spec import Problem, Unsupported

SMS = 132  # of an H100 or H200; another number only changes how long the last tiles of a call take
_WORKERS = {"workers": SMS}
# (128 queries a step, band, ordered) -> (longest sequence, fields beside form_for's and `turns`), the longest
# ascending; the last serves any length. TFLOP/s at 1k, 4k and 16k, 16k tokens in all, and of cuDNN 9.19 in the same
# run (H200, 2026-11-30, docs/measured/2026-11-30_h200_backward_rounds.txt).
MEASURED: dict[tuple[bool, bool, bool], tuple[tuple[int, dict[str, Any]], ...]] = {
    # 430, 525, 578; cuDNN 326, 402, 439. Without workers 417 at 1k, with them 536 at 16k
    (True, False, False): ((2048, _WORKERS), (0, {})),
    # 312, 468, 550; cuDNN 219, 340, 408. Without workers 285, 449, 533
    (True, True, False): ((0, _WORKERS),),
    # 446, 541, 594; cuDNN 386, 505, 533. With workers 446, 535, 564. Samples in an order that moves on
    # (2026-11-30_h200_aside.txt): 431, 537, 578; with workers 448, 535, 569
    (False, False, False): ((2048, _WORKERS), (0, {})),
    # 337, 484, 575; cuDNN 268, 419, 529. Without workers 327, 476; with them 550 at 16k
    (False, True, False): ((8192, _WORKERS), (0, {})),
    # 386, 500, 533 in the order of sections; head by head 328, 424, 543
    (True, False, True): ((0, {"section": 32}),),
    # 296, 450, 517; without workers 268, 423, 509
    (True, True, True): ((0, _WORKERS),),
    # 422, 539, 583; head by head 387, 489, 589
    (False, False, True): ((0, {"section": 32}),),
    # 330, 470, 537; without workers 312, 477, 523
    (False, True, True): ((0, _WORKERS),),
}


def measured(problem: Problem, any_shape: bool = False) -> dict[str, Any]:
    """What timing decided.

    Warpgroups in turn give 1.05 to 1.17 of warpgroups in step wherever registers let them, which is where each has
    keys of its own; at depth 64 with 128 queries a step.
    """
    spec, inner, inner_value = problem.spec, native(problem.d), native(problem.v)
    if inner + inner_value > 256:
        return {}
    small = inner == inner_value == 64
    fields: dict[str, Any] = {"turns": True, "rows": 128 if small else 64}
    length = 0 if any_shape or not isinstance(problem.s, int) else problem.s
    for longest, more in MEASURED[small, spec.band, spec.deterministic]:
        if longest == 0 or 0 < length <= longest:
            # Tiles that segments share are found by the whole CTA; dK and dV leave through places of one depth.
            alone = spec.segments or inner != inner_value
            return fields | {name: value for name, value in more.items() if name != "workers" or not alone}
    raise AssertionError("the last of a list serves any length")


def stand_ins(problem: Problem) -> list[Problem]:
    """Problems of this kind, whatever its shapes, that have among them every plan that shapes can choose."""
    lengths = {longest or 1 << 16 for forms in MEASURED.values() for longest, _ in forms}
    return [replace(problem, t=length, s=length) for length in sorted(lengths)]


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
