"""Which plan a Hopper forward problem gets: depths, kinds and shapes against small tables of what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.sm90.fwd.plan import DEPTHS, NATIVE_DEPTHS, SMS, Plan, native, tiles_for
from jax_fa4.spec import Problem, Unsupported

_THREE = {"rows": 192, "groups": 3, "registers": (32, 160), "overlap": False}
_THREE_HALFWAY = {**_THREE, "overlap": True, "halfway": True, "own": True, "slack": 8.0}
_TWO_CTAS = {"rows": 64, "groups": 1, "registers": (24, 232), "blocks": 2}
_LIGHT = {"chains": 4, "slack": 8.0}
_AHEAD = {"workers": SMS, "turns": True}
_TOLD = {"told": True}
_TOLD_BITS = {"told": True, "bits": True}
# (depth of Q and K, of V and O in shared memory, band) -> (longest sequence, fields in place of tiles_for's), the
# longest ascending; the last serves any length. TFLOP/s on an H200, 2026-11-30, 16k tokens in all, at 1k, 4k and 16k,
# and of cuDNN 9.19 and FlashAttention-4's own kernels in the same run: 2026-11-30_h200_forward_halfway.txt in
# docs/measured; with a slack at 4k and 16k: 2026-11-30_h200_forward_slack.txt. What fields do:
# docs/decisions/hopper_forward_forms.md.
MEASURED: dict[tuple[int, int, bool], tuple[tuple[int, dict[str, Any]], ...]] = {
    # 506, 529; 438, 453; 483, 528. Before the slack, with two chains up to 8k: 500, 530. Bases that stay: 1.06 at 16k;
    # told: 1.02, 1.02, 1.01
    (64, 64, False): ((0, {**_THREE_HALFWAY, **_AHEAD, **_TOLD}),),
    # 296, 437, 508; 289, 390, 430; 248, 420, 500. Before the slack: 428, 505 at 4k and 16k. At 1k the second: 270.
    # Told, with bits: at 1k and 2k with the rest 1.22, 1.10; at 4k and 16k 1.04, 1.01. At 1k the second then: 1.08;
    # three CTAs of 64 x 96 tiles 1.22, 1.08
    (64, 64, True): (
        (2048, {**_TWO_CTAS, "workers": 2 * SMS, "halfway": True, "slack": 8.0, **_TOLD_BITS, "quick": True}),
        (0, {**_THREE_HALFWAY, **_AHEAD, **_TOLD_BITS}),
    ),
    # 609, 448, 4k only. Before the slack: 578; no overlap, 96 keys: 579
    (96, 96, False): ((0, {**_THREE_HALFWAY, **_AHEAD, "keys": 112}),),
    # 517, 383, 4k only. Likewise 503; 490
    (96, 96, True): ((0, {**_THREE_HALFWAY, **_AHEAD, "keys": 112}),),
    # 589, 620, 664; 497, 574, 604; 506, 618, 640. Before the slack: 606, 659. Told: 1.02, 1.02, 1.00
    (128, 128, False): (
        (2048, {**_AHEAD, **_TOLD, "halfway": True}),
        (0, {"workers": SMS, "sections": True, "halfway": True, "slack": 8.0, **_TOLD}),
    ),
    # 445, 580, 647; 366, 481, 545; 382, 561, 626. Before the slack: 561, 643; the first at 4k 536, the second at 1k 425
    # The first now: 1.10 of what 445 was; told and with bits the second is 0.99 at 4k and 16k.
    # Without a slack, 32:4 heads at 4k: 627, cuDNN 504; window of 1024 at 16k: 479, 368
    (128, 128, True): (
        (2048, {**_AHEAD, "registers": (40, 232), "halfway": True, "slack": 8.0, **_TOLD_BITS, "quick": True}),
        (0, {**_AHEAD, "registers": (40, 232), "halfway": True, "slack": 8.0}),
    ),
    # 664, 550, 4k only; not halfway 661, light too 672
    (192, 192, False): ((0, {"halfway": True}),),
    # 585, 492, 4k only; not halfway 570
    (192, 192, True): ((0, {"halfway": True}),),
    # 684, 583, 4k only; not halfway 645
    (256, 256, False): ((0, {"halfway": True}),),
    # 591 at 4k, 731 at 16k; 508, 523; not halfway 591, 716
    (256, 256, True): ((0, {**_LIGHT, "turns": True, "halfway": True}),),
}
FEW_QUERIES = 64  # a tile of theirs alone would be half empty
FEW_TILES = 4 * SMS  # query tiles of 128 rows: few enough for the order of their lengths to decide the time of the call
# Where tiles are few: the form without workers, by depths; tiles_for's alone elsewhere.
FEW_FORMS: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): _TWO_CTAS,
    (96, 96): {**_THREE, "keys": 96, "turns": True},
}
LONG = 4096  # keys from which on sharing those of a tile pays for putting the parts together


class Shape(NamedTuple):
    """What of a problem's shape decides, where it is known; symbols are not."""

    few_queries: bool = False
    tiles: int | None = None  # of 128 queries, all heads and examples
    keys: int | None = None


def shape_of(problem: Problem) -> Shape:
    b, t, s, n = problem.b, problem.t, problem.s, problem.n
    if not all(isinstance(x, int) for x in (b, t, s, n)):
        return Shape()
    return Shape(t <= FEW_QUERIES and s >= 512, up(t, 128) * n * b, s)


def decode_for(depth: int, value_depth: int) -> dict[str, Any]:
    """Fields of calls with at most FEW_QUERIES queries: decoding, one token or some at a time.

    K and V are read once for all heads that share them, by as many CTAs as the card has places for. Memory is the
    limit, so the forms differ little: 8 of depth 128, on an H200, 2026-11-30, are within 3 % of each other with the
    parts that `parts_for` makes (docs/measured/2026-11-30_h200_short_variants.json). One query against 16k keys: batch
    16, 32:4 heads 137 us (3.9 TB/s; cuDNN 149), batch 1, 32:32 heads 78 us (86), batch 16 with 4 queries 136 us (781).
    """
    inner, inner_value = native(depth), native(value_depth)
    fields: dict[str, Any] = {"rows": 64, "groups": 1, "registers": (24, 240), "splits": True, "packed": True, **_LIGHT}
    if inner + inner_value <= 256:
        narrow = inner + inner_value <= 128
        fields |= {**_TWO_CTAS, "keys": 128 if narrow else 80, "stages": 3 if narrow else 2}
    return fields


def few_tiles_for(shape: Shape, band: bool, value_depth: int) -> dict[str, Any] | None:
    """Fields where query tiles are few, or None where they are many.

    Causal tiles longest first over all heads, depth 128: with 256 tiles 70 us against 97 head by head (one sequence of
    4k, 8 heads), 50 against 58 (two of 2k). Long keys and no more tiles than SMs: their keys shared by two CTAs or more
    54 against 59 (4k, 4 heads), 73 against 106 (8k, 2 heads); at 2k it costs more than it saves. Same measurement.
    """
    assert shape.tiles is not None and shape.keys is not None
    # Deeper values leave no registers for it: 16 bytes spill at 256 (keys of 128, sinks, a band), 24 at 136 and 160.
    if native(value_depth) <= 128 and shape.keys >= LONG and shape.tiles <= (SMS if band else SMS // 2):
        return {"sections": True, "splits": True}
    if band and shape.tiles <= FEW_TILES:
        return {"sections": True}
    return None


def fields_for(problem: Problem, any_shape: bool) -> dict[str, Any]:
    """All that the shape and the measurements decide."""
    spec = problem.spec
    crowded = spec.segments or spec.soft_cap
    # Of sinks beside a band, 16 bytes spill at value depths beyond 192 with the longer tile (DSL 4.8.1).
    base = tiles_for(problem.d, problem.v, crowded or (spec.sinks and spec.band and native(problem.v) > 192))
    shape = Shape() if any_shape else shape_of(problem)
    if shape.few_queries and not spec.segments:
        return base | decode_for(problem.d, problem.v)
    if crowded:
        return base
    if shape.tiles is not None and (few := few_tiles_for(shape, spec.band, problem.v)) is not None:
        return base | FEW_FORMS.get((native(problem.d), native(problem.v)), {}) | few
    depths = (native(problem.d), native(problem.v))
    measured = MEASURED.get((*depths, spec.band), ((0, {}),))
    for longest, fields in measured:
        if longest == 0 or (shape.keys is not None and shape.keys <= longest):
            return base | fields
    raise AssertionError("the last of a list serves any length")


def stand_ins(problem: Problem) -> list[Problem]:
    """Problems of this kind, whatever its shapes, that have among them every plan that shapes can choose."""
    shapes = [(1, 1, LONG, 8), (1, 1024, 1024, 8), (1, 2 * LONG, 2 * LONG, 1)]  # few queries, few tiles, and long keys
    lengths = {longest or 1 << 16 for forms in MEASURED.values() for longest, _ in forms}
    shapes += [(64, length, length, 16) for length in sorted(lengths)]
    return [replace(problem, b=b, t=t, s=s, n=n, k=n) for b, t, s, n in shapes]


def choose(problem: Problem, any_shape: bool = False) -> Plan:
    """The plan for a forward problem, or Unsupported with what would work.

    Shapes decide between few plans, each of which is right for any shape; any_shape: the one for long sequences.
    """
    spec = problem.spec
    for name, depth in (("query and key", problem.d), ("value", problem.v)):
        if depth % 8 or not 8 <= depth <= NATIVE_DEPTHS[-1]:
            raise Unsupported(f"depth {depth} of {name}: the Hopper forward takes {DEPTHS}")
    return Plan(
        problem.dtype,
        problem.d,
        problem.v,
        band=spec.band,
        segments=spec.segments,
        soft_cap=spec.soft_cap,
        sinks=spec.sinks,
        **fields_for(problem, any_shape),
    )
