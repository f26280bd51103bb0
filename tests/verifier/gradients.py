"""The Blackwell backward's equality cases, kernel by kernel: what each must compute from what the one before left.

Plan and PTX of the first and last kernel are those of calls; the main kernel is a twin's, see rows.py. The additions of
dQ are left out: see `told.without_additions`. The scale is an operand of the proof, any number; no constant is told.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch import Launch, launches

from jax_fa4.kernels.sm100.bwd.pair.plan import PairPlan
from jax_fa4.kernels.sm100.bwd.plan import Plan
from jax_fa4.mask import UNBOUNDED
from verifier import cases, run
from verifier.describe import by_comparison, normal, one_by_one
from verifier.told import told_turns, told_values, without_additions

HERE = Path(__file__).parent
OPERANDS = ("q", "k", "v", "dout", "stats", "ints", "floats")
MAIN = run.Reference(HERE / "reference_gradients.py", OPERANDS, ("dk", "dv"))
PREFIX = run.Reference(
    HERE / "reference_gradients_prefix.py", OPERANDS[:5], MAIN.outputs
)  # numbers of the mask are told, and the scale: -inf times what is only known to be a number is no number
SCALE = 0.125
FIRST = ("out", "dout", "lse", "dlse", "ints")
PRE = run.Reference(HERE / "reference_statistics.py", FIRST, ("stats", "work"))
FRAGMENTS = replace(MAIN, path=HERE / "reference_gradients_fragments.py")
POST = run.Reference(HERE / "reference_dq.py", ("work", "floats"), ("dq",))
REFERENCES = {"bwd_pre": PRE, "backward": MAIN, "bwd_post": POST}


@dataclass(frozen=True)
class Case:
    """One kernel of a call. 128 queries and keys, no mask, unless told otherwise."""

    plan: Any
    kernel: str = "backward"
    shapes: dict[str, int] = field(default_factory=dict)
    rows: bool = False  # the twin of rows.py
    left: int = UNBOUNDED  # query i sees the keys from i - left on
    constant: bool = False  # numbers of the mask and the scale are told
    equal: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": 1, "T": 128, "S": 128, "N": 1, "K": 1, **self.shapes}

    @property
    def values(self) -> dict[str, list]:
        """Told where they are constant: see `launched`."""
        return {
            "ints": [
                self.left,
                UNBOUNDED,
                *(UNBOUNDED, UNBOUNDED, 0 if self.plan.band else UNBOUNDED) * self.sizes["B"],
            ]
        }


def backward(d: int = 64, dtype: str = "bfloat16", **kinds: Any) -> Plan:
    return Plan(dtype, d, d, **kinds)


EQUAL = {
    "gradients, D 64, one step": Case(backward(), rows=True),
    "gradients, D 64, a window": Case(backward(band=True), rows=True, left=32, constant=True),
    "gradients, D 64, a window, two steps": Case(
        backward(band=True), shapes={"T": 256}, left=32, rows=True, constant=True
    ),
    "gradients, D 64, two heads share keys": Case(backward(), shapes={"N": 2}, rows=True, constant=True),
    "gradients, D 64, two steps, constant scale": Case(backward(), shapes={"T": 256}, rows=True, constant=True),
    "gradients, D 128, one step": Case(backward(128), rows=True, constant=True),
    "gradients, D 64, in turns": Case(backward(ordered=True), rows=True),
    "gradients, D 64, statistics": Case(backward(), "bwd_pre"),
    "gradients, D 64, dQ of the workspace": Case(backward(), "bwd_post"),
}
# Asked too, with no verdict that a test may rest on; where each stops is said in docs/measured/emulator.md.
OPEN = {
    "gradients, D 64, one step, no twin": Case(backward()),
    "gradients, D 64, two steps": Case(backward(), rows=True, shapes={"T": 256}),
    "gradients, D 128, a pair": Case(PairPlan("bfloat16", 128, 128), shapes={"S": 256}),
}


@functools.cache
def _twin(plan: Plan) -> str:
    from verifier import rows  # wants the DSL

    return rows.built(plan)


def text(case: Case) -> str:
    """The PTX of a case, before anything is told."""
    return _twin(case.plan) if case.rows else cases.built(case.plan)


def launched(case: Case, ptx: str | None = None) -> Launch:
    ptx = text(case) if ptx is None else ptx
    ptx = one_by_one(without_additions(told_turns(ptx) if case.plan.ordered else ptx))
    bind = importlib.import_module(case.plan.launcher.rsplit(".", 1)[0] + ".plan").bind
    names = [kernel.name for kernel in bind(case.plan, case.plan.extents(case.sizes))]
    known = None if case.constant else case.values
    one = launches(case.plan, bind, case.sizes, ptx, known)[names.index(case.kernel)]
    if case.constant:
        at = {p.name: p.index for p in one.parameters}
        ptx = told_values(ptx, one.entry, at["ints"], case.values["ints"])
        one = replace(one, ptx=by_comparison(normal(told_values(ptx, one.entry, at["floats"], [SCALE, 0.0]))))
    if case.kernel != "bwd_pre":
        return one
    # Statistics by what, 16 queries, q, b and e, see their reference: the prover does not divide indices by 16.
    return replace(one, buffers=one.buffers | {"stats": ("float32", (2, case.sizes["T"] // 16, 4, 2, 2))})


def judge(
    case: Case, ptx: str | None = None, timeout: int = 900, reference: run.Reference | None = None
) -> run.Verdict:
    fragments = case.plan.pre.fragments and not case.rows
    known = FRAGMENTS if case.kernel == "backward" and fragments else REFERENCES[case.kernel]
    if case.constant:
        known = replace(PREFIX, constants={"last": case.left, "scale": SCALE})
    return run.judge(launched(case, ptx), None, reference or known, timeout)
