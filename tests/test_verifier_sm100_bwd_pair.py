"""The main kernel of the Blackwell backward by pairs is race-free: a pair of key tiles against a tile of queries."""

import functools

import pytest
from launch import launches
from micro import build as micro_build
from verifier import run
from verifier.mutate import drop
from verifier.stores import additions_as_stores

from jax_fa4.kernels.sm100.bwd.pair.plan import PairPlan, bind
from jax_fa4.mask import UNBOUNDED

MISSING = run.missing() or micro_build.missing()
pytestmark = [pytest.mark.prove, pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")]


@functools.cache
def built(plan):
    from jax_fa4.ffi.compile import build

    return build(plan, keep_ptx=True).ptx.rstrip("\0")


def judge(plan, queries, lengths=None, edit=lambda ptx: ptx, timeout=900):
    """The verdict on the main kernel. The other two have no order to get wrong: no thread of theirs waits."""
    sizes = {"B": 1, "T": queries, "S": 256, "N": 1, "K": 1}
    values = {"ints": [UNBOUNDED, UNBOUNDED, *(lengths or (queries, 256)), 0]}
    _, main, _ = launches(plan, bind, sizes, edit(built(plan)), values)
    return run.judge(additions_as_stores(main, "work"), None, None, timeout)


@pytest.mark.parametrize("lengths", [None, (100, 256)])
def test_a_step_is_safe(lengths):
    """Three steps, in which every ring wraps, are tests/verifier/matrix.py's."""
    verdict = judge(PairPlan("bfloat16", 128, 128), 128, lengths)
    assert verdict.safe, verdict


_ACQUIRE = r"\{[^{}]*try_wait\.parity\.acquire\.cluster[^{}]*\}"
MUTANTS = {
    "dS is not waited for": drop(_ACQUIRE, -2),
    "the CTAs do not meet at the end": drop(r"barrier\.cluster\.wait[^\n]*", -1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_step_is_caught(name):
    verdict = judge(PairPlan("bfloat16", 128, 128), 128, edit=MUTANTS[name])
    assert not verdict.safe and verdict.result not in ("None", "timeout"), verdict
