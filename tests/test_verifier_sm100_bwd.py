"""The main kernel of the Blackwell backward is race-free, one key tile against one and three query tiles."""

import functools

import pytest
from launch import launches
from micro import build as micro_build
from verifier import run
from verifier.mutate import drop, drop_wait

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
    _, main, _ = launches(plan, bind, sizes, edit(built(plan)), values)
    return run.judge(main, None, None, timeout)


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
