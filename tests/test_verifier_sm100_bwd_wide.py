"""Each sweep of the Blackwell backward at depth 256 is race-free: a pair of CTAs, one to three steps."""

import functools

import pytest
from launch import launches
from micro import build as micro_build
from test_emulated_sm100_bwd_wide import _ACQUIRE, _MEET, inside
from verifier import run
from verifier.mutate import drop

from jax_fa4.kernels.sm100.bwd.wide.plan import WidePlan, bind
from jax_fa4.mask import UNBOUNDED

MISSING = run.missing() or micro_build.missing()
pytestmark = [pytest.mark.prove, pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")]
GRADIENTS = ("dv", "dk", "dq")


@functools.cache
def built(plan):
    from jax_fa4.ffi.compile import build

    return build(plan, keep_ptx=True).ptx.rstrip("\0")


def judge(gradient, steps=1, edit=lambda ptx: ptx, timeout=900, **kinds):
    """The verdict on one sweep's kernel. The preprocess has no order to get wrong: no thread of it waits."""
    plan = WidePlan("bfloat16", 256, 256, **kinds)
    queries, keys = (256, 128 * steps) if gradient == "dq" else (128 * steps, 256)
    sizes = {"B": 1, "T": queries, "S": keys, "N": 1, "K": 1}
    values = {"ints": [UNBOUNDED, UNBOUNDED, queries, keys, 0]}
    _, *sweeps = launches(plan, bind, sizes, edit(built(plan)), values)
    return run.judge(sweeps[GRADIENTS.index(gradient)], None, None, timeout)


@pytest.mark.parametrize(("gradient", "steps"), [("dv", 1), ("dk", 1), ("dq", 1), ("dk", 2), ("dv", 3)])
def test_steps_are_safe(gradient, steps):
    """One to five minutes each on two shared cores. In the longest of dK and dV places of operands are used again."""
    verdict = judge(gradient, steps)
    assert verdict.safe, verdict


MUTANTS = {
    "dQ before dS is there": ("dq", drop(_ACQUIRE, -1)),
    "the CTAs do not meet at the end": ("dv", drop(_MEET, -1)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_step_is_caught(name):
    gradient, change = MUTANTS[name]
    verdict = judge(gradient, edit=inside(gradient, change))
    assert not verdict.safe and verdict.result not in ("None", "timeout"), verdict
