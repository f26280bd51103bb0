"""The runs of the verifier on each kind of Blackwell plan: which launch, which values, which way branches go."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from launch import Launch, launches

from jax_fa4.mask import UNBOUNDED
from verifier import run
from verifier.describe import chosen_lines
from verifier.kinds import kinds
from verifier.stores import additions_as_stores, has_additions
from verifier.told import told_ranges, told_tiles, told_turns

# What branches on data do. In the forward True keeps O and False rescales it; with segments True is a tile of one
# segment, False one that is masked.
KEPT, DONE, MIXED = True, False, 7


@dataclass(frozen=True)
class Scene:
    """Sizes and run-time values of one call. Values default to what an unmasked call passes."""

    name: str
    sizes: dict[str, int]
    arm: bool | int = DONE
    sides: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    lengths: tuple[int, int] | None = None  # queries, keys
    rows: tuple[int, int] | None = None  # of the other side, first and last that segments leave; None = all
    offset: int | None = None  # of the diagonal; None = 0
    plan: dict[str, Any] = field(default_factory=dict)  # fields that differ


@dataclass(frozen=True)
class Run:
    """One thing to be judged."""

    kind: str
    scene: Scene
    plan: Any

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.scene.name}"

    @property
    def rank(self) -> int:
        """The lowest first: a kind's first scene, and kinds with little switched on."""
        scenes, arithmetic = _SCENES[self.plan.direction], ("soft_cap", "sinks")
        place = [s.name for s in scenes(self.plan)].index(self.scene.name)
        extra = sum(bool(getattr(self.plan, name, False)) for name in arithmetic)
        return 2 * place + 3 * extra + bool(self.plan.segments) + 2 * (extra > 1)


def sizes(t: int, s: int, n: int = 1, k: int = 1, b: int = 1) -> dict[str, int]:
    return {"B": b, "T": t, "S": s, "N": n, "K": k}


def _forward(plan: Any) -> list[Scene]:
    """Two blocks of keys, so that a ring of two stages wraps; three where K has a ring of its own."""
    if plan.packed:
        return _few(plan)
    causal = (UNBOUNDED, 0) if plan.band else (UNBOUNDED, UNBOUNDED)
    window = (100, 20) if plan.band else causal
    span, wide = plan.span, 128 * (plan.queries == 1 and not (plan.segments or plan.soft_cap or plan.sinks))
    even = sizes(span, 256 + wide)
    made = [
        Scene("even, rescaled", even, DONE, causal),
        Scene("ragged, kept", sizes(span - 56, 200), KEPT, window, (span - 66, 190), (130, 189)),
        Scene("even, a mixture", even, MIXED, causal),
        Scene("two heads share keys", sizes(span // 2 if plan.pair else span, 128, n=2), DONE, causal),
        Scene("one block", sizes(span, 128), DONE, causal),
        Scene("three blocks, kept", sizes(span, 384), KEPT, causal),
        Scene("no keys", sizes(span, 128), KEPT, causal, (span, 0)),
    ]
    if plan.workers:
        made.insert(1, Scene("two pairs in a CTA", sizes(span + 1, 200), KEPT))
    if plan.band and not plan.pair:
        made.append(Scene("each half leaves a block out", sizes(span, 512), DONE, (128, 0), offset=512 - span))
    return made


def _few(plan: Any) -> list[Scene]:
    """Parts of two blocks each; heads of a group are rows."""
    band = (UNBOUNDED, 0) if plan.band else (UNBOUNDED, UNBOUNDED)
    return [
        Scene("one query, two parts, rescaled", sizes(1, 512, n=2), DONE, band, (1, 512)),
        Scene("three queries, ragged, kept", sizes(3, 520, n=3), KEPT, band, (3, 390)),
        Scene("one query, two parts, a mixture", sizes(1, 512, n=2), MIXED, band),
    ]


def _backward(plan: Any) -> list[Scene]:
    """One tile of keys, or a pair of them: of several the order in memory is by atomic additions, or by turns."""
    keys = 256 if _is_pair(plan) else 128
    causal = (UNBOUNDED, 0) if plan.band else (UNBOUNDED, UNBOUNDED)
    window = (100, 20) if plan.band else causal
    return [
        Scene("one step", sizes(128, keys), DONE, causal),
        Scene("ragged", sizes(100, keys - 27), KEPT, window, (90, keys - 40), (0, 89)),
        Scene("two heads share keys", sizes(128, keys, n=2), MIXED, causal),
        Scene("two steps", sizes(256, keys), DONE, window),
        Scene("three steps, every ring wraps", sizes(384, keys), DONE, (UNBOUNDED, UNBOUNDED)),
    ]


_SCENES = {"fwd": _forward, "bwd": _backward}


def _is_pair(plan: Any) -> bool:
    return bool(getattr(plan, "pair", False))


def _small(plan: Any) -> Any:
    """The plan with rings that wrap in a small call, and one CTA where it would take as many as a card has.

    What ptxas then spills (8 bytes at depth 128) is not in the PTX, of which the verdict is.
    """
    if plan.direction == "bwd":
        return plan
    return replace(plan, stage_cap=2, workers=min(plan.workers, 1), spill_allowance=64)


def runs() -> Iterator[Run]:
    """The most important first."""
    made = [
        Run(kind, scene, replace(_small(plan), **scene.plan))
        for kind, plan in kinds().items()
        for scene in _SCENES[plan.direction](plan)
    ]
    return iter(sorted(made, key=lambda r: r.rank))


@functools.lru_cache(4)  # scenes of a kind share it; the texts are large
def built(plan: Any) -> str:
    from jax_fa4.ffi.compile import build

    return (build(plan, keep_ptx=True).ptx or "").rstrip("\0")


def values(r: Run) -> dict[str, list]:
    e, scene = r.scene.sizes, r.scene
    return {"ints": [*scene.sides, *(*(scene.lengths or (e["T"], e["S"])), scene.offset or 0) * e["B"]]}


def launched(r: Run, ptx: str | None = None) -> dict[str, Launch]:
    """All kernels of the call by their names in the plan, with what the verifier is told."""
    ptx = built(r.plan) if ptx is None else ptx
    bind = importlib.import_module(r.plan.launcher.rsplit(".", 1)[0] + ".plan").bind
    if getattr(r.plan, "ordered", False):
        ptx = told_turns(ptx)
    chained = getattr(r.plan, "chained", False)
    if r.plan.segments and (getattr(r.plan, "narrows", True) or chained):
        others = ["S"] if r.plan.direction == "fwd" else ["T"]
        if hasattr(r.plan, "sweeps"):
            others = ["S" if sweep.by_query else "T" for sweep in r.plan.sweeps]
        ptx = told_tiles(ptx, *(r.scene.rows or (0, r.scene.sizes[other] - 1) for other in others))
    names = [kernel.name for kernel in bind(r.plan, r.plan.extents(r.scene.sizes))]
    made = dict(zip(names, launches(r.plan, bind, r.scene.sizes, ptx, values(r)), strict=True))
    if chained:  # what the preprocess has written, of the one key tile
        first, last = r.scene.rows or (0, r.scene.sizes["T"] - 1)
        ranges = (first // r.plan.tile, last // r.plan.tile + 1)
        main = made["backward"]
        which = next(p.index for p in main.parameters if p.name == "ranges")
        made["backward"] = replace(main, ptx=told_ranges(main.ptx, main.entry, which, ranges))
    if getattr(r.plan, "ordered", False):
        made |= _collected(r, bind, ptx, made["bwd_post"])
    # One CTA or pair adds to dQ, to other rows at each step: what is asked of stores holds, and is answered sooner.
    return {name: additions_as_stores(one, "work") if has_additions(one) else one for name, one in made.items()}


def _collected(r: Run, bind: Any, ptx: str, post: Launch) -> dict[str, Launch]:
    """The postprocess of a plan with turns, by what it may find: it reads where somebody has added, and only there.

    The counts are told as what memory holds. Three times: all have been added to; none, as where queries see no keys;
    and of several tiles, and copies where there are any, some by none, some by one and some by two.
    """
    wide = {**r.scene.sizes, **{side: r.scene.sizes[side] + 256 for side in "TS"}}
    (more,) = [one for one in launches(r.plan, bind, wide, ptx) if one.entry == post.entry]
    found = {"bwd_post": (post, (1,)), "bwd_post, nothing added": (post, (0,))}
    found["bwd_post, several tiles, some added to"] = (more, (2, 0, 1))
    return {
        name: replace(one, contents={"turns": [counts[i % len(counts)] for i in range(_numbers(one, "turns"))]})
        for name, (one, counts) in found.items()
    }


def _numbers(one: Launch, name: str) -> int:
    return math.prod(one.buffers[name][1])


def judge(r: Run, ptx: str | None = None, timeout: int = 900) -> dict[str, run.Verdict]:
    """The verdict on each kernel of the call."""
    found = {}
    for name, one in launched(r, ptx).items():
        found[name] = run.judge(one, r.scene.arm if chosen_lines(one) else None, None, timeout, every_order(r))
    return found


def every_order(r: Run) -> bool:
    """Which search of the verifier is the quick one."""
    return bool(r.plan.segments) and r.plan.direction == "bwd"
