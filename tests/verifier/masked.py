"""Equality of the Blackwell forward with attention: causal, windows, lengths, shared keys, sinks, parts combined.

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
from verifier.describe import by_comparison, normal
from verifier.told import told_values, without_lse

ROWS = run.Reference(Path(__file__).parent / "reference_rows.py", ("q", "k", "v"), ("out", "lse"))
PREFIX = replace(ROWS, path=ROWS.path.with_name("reference_prefix.py"))
# Their log-sum-exp is not asked: the prover knows it as the logarithm of one sum over keys, in one form only; here a
# term is added, or the form is another.
SINKS = run.Reference(ROWS.path.with_name("reference_sinks.py"), ("q", "k", "v", "sinks"), ("out",))
COMBINE = run.Reference(ROWS.path.with_name("reference_combine.py"), ("part", "part_lse"), ("out",))


@dataclass(frozen=True)
class Case(cases.Case):
    """Query i sees the keys from i + offset - left to i + offset + right that are below the length."""

    offset: int = 0
    kernel: str = "forward"
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
        if self.kernel == "combine":
            return {}
        return {"first": first, "last": last, "keys": min(keys, self.sizes["S"])}

    @property
    def reference(self) -> run.Reference:
        if self.kernel == "combine":
            return COMBINE
        if self.plan.sinks:
            return SINKS
        return PREFIX if self.left == UNBOUNDED and self.sizes["K"] == 1 else ROWS


ONE, TWO = {"T": 8, "S": 128}, {"T": 8, "S": 256}
CAUSAL = {"right": 0}  # offsets: the boundary lies inside the last block, or for few rows between two


def banded(**kinds: Any):
    return forward(band=True, **{**TWIN, **kinds})


EQUAL = {
    "equal, causal, one block": Case(banded(), RESCALE, ONE, offset=64, **CAUSAL),
    "equal, causal, two blocks": Case(banded(), RESCALE, TWO, offset=200, **CAUSAL),
    "equal, causal, two blocks, not rescaled": Case(banded(), SKIP, {"T": 2, "S": 256}, offset=200, **CAUSAL),
    "equal, D 128, causal, one block": Case(banded(d=128), RESCALE, {"T": 2, "S": 128}, offset=64, **CAUSAL),
    "equal, two heads share keys": Case(forward(**TWIN), RESCALE, {"T": 4, "S": 128, "N": 2}),
    "equal, 100 keys count, causal, float16": Case(
        banded(dtype="float16"), RESCALE, {"T": 4, "S": 128}, offset=97, lengths=(UNBOUNDED, 100), **CAUSAL
    ),
    "equal, sinks, the output": Case(forward(sinks=True, **TWIN), RESCALE, {"T": 4, "S": 128}),
    "equal, two parts combined, the output": Case(
        forward(splits=True), None, {"T": 1, "S": 512, "N": 2}, kernel="combine"
    ),
    "equal, window": Case(banded(), RESCALE, {"T": 1, "S": 128}, 32, 0, offset=64),
}


MORE = {
    "equal, three blocks": Case(forward(**TWIN), RESCALE, {"T": 1, "S": 384}),
    "equal, a pair of CTAs": Case(forward(pair=True, registers=(184, 88, 56), **TWIN), RESCALE, ONE),
    "equal, a window over two blocks": Case(banded(), RESCALE, {"T": 1, "S": 256}, 136, 0, offset=200),
}
# Asked too, with no verdict that a test may rest on.
OPEN = MORE | {
    "equal, 112 keys count": Case(forward(**TWIN), RESCALE, ONE, lengths=(UNBOUNDED, 112)),
    "equal, 100 keys count": Case(forward(**TWIN), RESCALE, {"T": 2, "S": 128}, lengths=(UNBOUNDED, 100)),
}


def launched(case: Case, ptx: str | None = None) -> Launch:
    """What is judged: PTX with numbers told, exact exponentials, and hidden scores by comparisons."""
    ptx = cases.built(case.plan) if ptx is None else ptx
    names = [kernel.name for kernel in bind(case.plan, case.plan.extents(case.sizes))]
    one = launches(case.plan, bind, case.sizes, ptx)[names.index(case.kernel)]
    if "lse" not in case.reference.outputs:
        ptx = without_lse(ptx, one.entry)
    if case.kernel == "combine":
        return replace(one, ptx=ptx)
    (at,) = (p.index for p in one.parameters if p.name == "ints")
    ptx = told_values(ptx, one.entry, at, case.values["ints"])
    return replace(one, ptx=cases.ideal(case, ptx if case.plan.band else by_comparison(normal(ptx))))


def judge(
    case: Case, ptx: str | None = None, timeout: int = 900, constants: dict[str, int] | None = None
) -> run.Verdict:
    asked = replace(case.reference, constants=constants or case.seen)
    return run.judge(launched(case, ptx), case.arm, asked, timeout)
