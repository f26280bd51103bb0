"""Equality of the Blackwell forward with attention under masks: causal, windows, lengths, heads that share keys.

Sides, lengths and offset are told (`told.told_values`): the kernel compares and branches as ever, but with constants,
so that which keys a row sees is known to the prover. The reference sums those keys alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch import Launch, launches

from jax_fa4.kernels.sm100.fwd.plan import bind
from jax_fa4.mask import UNBOUNDED
from verifier import cases, run
from verifier.cases import RESCALE, SKIP, TWIN, forward
from verifier.told import told_values

ROWS = run.Reference(Path(__file__).parent / "reference_rows.py", ("q", "k", "v"), ("out", "lse"))
PREFIX = replace(ROWS, path=ROWS.path.with_name("reference_prefix.py"))


@dataclass(frozen=True)
class Case(cases.Case):
    """Query i sees the keys from i + offset - left to i + offset + right that are below the length."""

    offset: int = 0
    equal: bool = True

    @property
    def values(self) -> dict[str, list]:
        queries, keys = self.lengths or (UNBOUNDED, UNBOUNDED)
        return {"ints": [self.left, self.right, *(queries, keys, self.offset) * self.sizes["B"]]}

    @property
    def seen(self) -> dict[str, int]:
        """The reference's numbers: first and last key of query 0 were there no ends, and how many keys there are."""
        keys = self.sizes["S"] if self.lengths is None else self.lengths[1]
        first, last = -keys if self.left == UNBOUNDED else self.offset - self.left, keys
        if self.right != UNBOUNDED:
            last = self.offset + self.right
        return {"first": first, "last": last, "keys": min(keys, self.sizes["S"])}

    @property
    def reference(self) -> run.Reference:
        return PREFIX if self.left == UNBOUNDED and self.sizes["N"] == 1 else ROWS


ONE, TWO = {"T": 8, "S": 128}, {"T": 8, "S": 256}
CAUSAL = {"right": 0}  # offsets: the boundary lies inside the last block, or for few rows between two


def banded(**kinds: Any):
    return forward(band=True, **{**TWIN, **kinds})


EQUAL = {
    "equal, causal, one block": Case(banded(), RESCALE, ONE, offset=64, **CAUSAL),
    "equal, causal, two blocks": Case(banded(), RESCALE, TWO, offset=200, **CAUSAL),
    "equal, window": Case(banded(), RESCALE, {"T": 1, "S": 128}, 32, 0, offset=64),
}


# Asked too, with no verdict that a test may rest on.
OPEN = {
    "equal, causal, two blocks, not rescaled": Case(banded(), SKIP, TWO, offset=200, **CAUSAL),
}


def launched(case: Case, ptx: str | None = None) -> Launch:
    """What is judged: PTX with numbers told, exact exponentials, and hidden scores by comparisons."""
    ptx = cases.built(case.plan) if ptx is None else ptx
    (one,) = launches(case.plan, bind, case.sizes, ptx)
    (at,) = (p.index for p in one.parameters if p.name == "ints")
    return replace(one, ptx=cases.ideal(case, told_values(ptx, one.entry, at, case.values["ints"])))


def judge(
    case: Case, ptx: str | None = None, timeout: int = 900, constants: dict[str, int] | None = None
) -> run.Verdict:
    asked = replace(case.reference, constants=constants or case.seen)
    return run.judge(launched(case, ptx), case.arm, asked, timeout)
