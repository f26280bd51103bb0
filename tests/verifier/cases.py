"""The Blackwell forward's verifier cases: plan, shapes, run-time values, arm; and how each is judged."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import Launch, launches

from jax_fa4.kernels.sm100.fwd.plan import Plan, Share, bind
from jax_fa4.mask import UNBOUNDED
from verifier import run
from verifier.describe import by_comparison, ideal_exponentials, never_moved, normal

SKIP, RESCALE = True, False  # the branch around the rescale is taken, or not
HERE = Path(__file__).parent
REFERENCE = run.Reference(HERE / "reference_attention.py", ("q", "k", "v", "ints"), ("out", "lse"))


@dataclass(frozen=True)
class Case:
    """One launch to be judged. Values default to what an unmasked call passes."""

    plan: Plan
    arm: bool | int | None = RESCALE
    shapes: dict[str, int] = field(default_factory=dict)
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    lengths: tuple[int, int] | None = None  # queries, keys
    equal: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": 1, "T": 256, "S": 256, "N": 1, "K": 1, **self.shapes}

    @property
    def values(self) -> dict[str, list]:
        e = self.sizes
        if self.equal:  # one value for all: see `describe.binding`
            return {"ints": [UNBOUNDED] * (2 + 3 * e["B"])}
        q_len, kv_len = self.lengths or (e["T"], e["S"])
        return {"ints": [self.left, self.right, *(q_len, kv_len, 0) * e["B"]]}


def forward(d: int = 64, v: int | None = None, **kinds: Any) -> Plan:
    """Two stages unless told otherwise, so that the ring wraps within two blocks."""
    dtype = kinds.pop("dtype", "bfloat16")
    return Plan(dtype, d, d if v is None else v, **{"stage_cap": 2, **kinds})


# In CI: depth 64 and at most two blocks, a quarter of a minute each on a free core.
QUICK = {
    "full, rescaled": Case(forward()),
    "full, not rescaled": Case(forward(), SKIP),
    "full, a mixture": Case(forward(stage_cap=10), 7),
    "causal": Case(forward(band=True), right=0),  # a half-tile is left out
    "ragged tail": Case(forward(), shapes={"T": 200, "S": 200}),
    "length inside the last block": Case(forward(), SKIP, lengths=(256, 130)),
    "two pairs in a CTA": Case(forward(workers=1), SKIP, {"T": 257, "S": 200}),
    "no keys": Case(forward(), SKIP, {"S": 128}, lengths=(256, 0)),
    "two heads share keys": Case(forward(), SKIP, {"N": 2, "S": 128}),
    "float16, padded depths, sinks": Case(forward(40, 24, dtype="float16", sinks=True), SKIP, {"S": 130}),
}
# One command, `make prove`: values and fields that no kind of plan has; the kinds are matrix.py's.
LONG = {
    "causal, a mixture": Case(forward(band=True), 3, right=0),
    "window and length": Case(forward(band=True), RESCALE, {"T": 192, "S": 200}, 64, 20, (192, 130)),
    "two pairs in a CTA, rescaled": Case(forward(workers=1), RESCALE, {"N": 2}),
    "two examples": Case(forward(), RESCALE, {"B": 2}),
    "always rescaled": Case(forward(lazy=0.0), None),
    "P at once": Case(forward(early=4)),
}
# The plans of calls but for the scale, which is a constant: the prover has no channel for a float operand. Each row of
# queries is proved by itself, at a second or less; the first eight take the same code as the other rows of a tile.
TWIN = {"baked_scale": 0.125, "stage_cap": 10}
FEW = {"T": 8, "S": 256}
EQUAL = {
    "equal, one block, few rows": Case(forward(**TWIN), RESCALE, {**FEW, "S": 128}, equal=True),
    "equal, two blocks": Case(forward(**TWIN), RESCALE, FEW, equal=True),
    "equal, two blocks, not rescaled": Case(forward(**TWIN), SKIP, FEW, equal=True),
    "equal, D 128, two blocks": Case(forward(128, **TWIN), RESCALE, FEW, equal=True),
    # the form and the share of a call without a mask, on one CTA
    "equal, float16, persistent, one block": Case(
        forward(dtype="float16", workers=1, share=Share(8, 4, 1), **TWIN), RESCALE, {**FEW, "S": 128}, equal=True
    ),
}
# Asked too, with no verdict that a test may rest on.
OPEN = {
    "equal, one block, all rows": Case(forward(**TWIN), RESCALE, {"S": 128}, equal=True),
    "equal, always rescaled, all MUFU, P at once": Case(
        forward(early=4, share=None, spill_allowance=16, **{**TWIN, "lazy": 0.0}), None, FEW, equal=True
    ),
}


@functools.cache
def built(plan: Plan) -> str:
    from jax_fa4.ffi.compile import build

    return (build(plan, keep_ptx=True).ptx or "").rstrip("\0")


def launched(case: Case, ptx: str | None = None) -> Launch:
    """The forward itself; what combines the parts of keys comes behind it."""
    one, *_ = launches(case.plan, bind, case.sizes, ptx or built(case.plan), case.values)
    return one


def ideal(case: Case, ptx: str) -> str:
    """What equality is asked of: exact exponentials; and where an arm skips all rescales, the values leading to it.
    With a mask, comparisons in place of the bits of words."""
    if case.plan.share is not None:
        ptx = ideal_exponentials(ptx, case.plan.share.degree)
    if case.plan.band:
        ptx = by_comparison(normal(ptx))
    return never_moved(ptx, case.plan.lazy) if case.arm is SKIP else ptx


def judge(case: Case, ptx: str | None = None, timeout: int = 900) -> run.Verdict:
    if not case.equal:
        return run.judge(launched(case, ptx), case.arm, None, timeout)
    return run.judge(launched(case, ideal(case, ptx or built(case.plan))), case.arm, REFERENCE, timeout)
