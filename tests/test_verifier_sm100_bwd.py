"""The main kernel of the Blackwell backward is race-free, one key tile against one to three query tiles.

A quick case, broken ones, and the one of every ring; all kinds of plans are tests/verifier/matrix.py's. Of a plan with
turns the verifier is told what it cannot know, see tests/verifier/told.py; that turns are taken in order, and end, is
tests/test_sm100_bwd_plan.py's and the emulator's.
"""

import functools

import pytest
from launch import launches
from micro import build as micro_build
from verifier import run
from verifier.mutate import drop, drop_wait
from verifier.stores import additions_as_stores
from verifier.told import told_turns

from jax_fa4.kernels.sm100.bwd.plan import Plan, bind
from jax_fa4.mask import UNBOUNDED

MISSING = run.missing() or micro_build.missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")


@functools.cache
def built(plan):
    from jax_fa4.ffi.compile import build

    return build(plan, keep_ptx=True).ptx.rstrip("\0")


def judge(plan, queries, lengths=None, edit=lambda ptx: ptx, timeout=900):
    """The verdict on the main kernel. The other two have no order to get wrong: no thread of theirs waits."""
    sizes = {"B": 1, "T": queries, "S": 128, "N": 1, "K": 1}
    values = {"ints": [UNBOUNDED, UNBOUNDED, *(lengths or (queries, 128)), 0]}
    ptx = edit(built(plan))
    _, main, _ = launches(plan, bind, sizes, told_turns(ptx) if plan.ordered else ptx, values)
    return run.judge(additions_as_stores(main, "work"), None, None, timeout)


def test_a_step_is_safe():
    verdict = judge(Plan("bfloat16", 64, 64), 128)
    assert verdict.safe, verdict


MUTANTS = {
    "P handed over before it is stored": drop(r"tcgen05\.wait::st[^\n]*", 0),
    "an mbarrier wait dropped": drop_wait(1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_step_is_caught(name):
    verdict = judge(Plan("bfloat16", 64, 64), 128, edit=MUTANTS[name])
    assert not verdict.safe and verdict.result not in ("None", "timeout"), verdict


@pytest.mark.prove
@pytest.mark.parametrize("lengths", [None, (300, 100)])
def test_steps_that_wrap_every_ring_are_safe(lengths):
    verdict = judge(Plan("bfloat16", 64, 64), 384, lengths)
    assert verdict.safe, verdict
