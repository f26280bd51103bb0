"""The main kernel of the Blackwell backward is race-free, one key tile against one to three query tiles.

Of a plan with turns the verifier is told two values that it has no channel for: a ticket is the CTA's number, and the
turn of the only key tile has come. The additions that give turns up are left out: sentryward 0.1.1 has no words for
them. That turns are taken in order, and end, is tests/test_sm100_bwd_plan.py's and the emulator's. Segment ids it
cannot judge: which of a warp's branches are taken depends on memory that it does not know.
"""

import functools
import re

import pytest
from launch import launches
from micro import build as micro_build
from verifier import run
from verifier.mutate import drop, drop_wait

from jax_fa4.kernels.sm100.bwd.plan import Plan, bind, choose
from jax_fa4.mask import UNBOUNDED
from jax_fa4.spec import AttentionSpec, Problem

MISSING = run.missing() or micro_build.missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")


@functools.cache
def built(plan):
    from jax_fa4.ffi.compile import build

    return build(plan, keep_ptx=True).ptx.rstrip("\0")


def told(ptx):
    """The values that the docstring above names. Lines keep their numbers."""
    at = ptx.index("bar.sync", re.search(r"atom\S+\s+(%r\d+), .*?st\.shared\.b32\s+\S+ \1;", ptx, re.S).end())
    # read beside the address of tensor memory, which lies in front of it
    drawn = re.compile(r"ld\.shared\.v2\.b32\s+\{(%r\d+), (%r\d+)\}, (\[[^\]]+\]);")
    ptx = ptx[:at] + drawn.sub(r"ld.shared.b32 \1, \3; mov.u32 \2, %ctaid.x;", ptx[at:], count=1)
    assert "%ctaid.x;" in ptx[at : at + 400], ptx[at : at + 400]
    ptx = re.sub(r"atom\S+\s+(%r\d+), [^;]+;", r"mov.u32 \1, %ctaid.x;", ptx)
    ptx, given = re.subn(r"red\.release\.gpu\.global\.add\.s32[^;]+;", "", ptx)
    assert given, "no turn is given up in the text"
    return re.sub(r"ld\.acquire\.gpu\.global\.b32\s+(%r\d+), \[[^\]]+\];", r"mov.b32 \1, 0;", ptx)


def judge(plan, queries, lengths=None, edit=lambda ptx: ptx, timeout=900):
    """The verdict on the main kernel. The other two have no order to get wrong: no thread of theirs waits."""
    sizes = {"B": 1, "T": queries, "S": 128, "N": 1, "K": 1}
    values = {"ints": [UNBOUNDED, UNBOUNDED, *(lengths or (queries, 128)), 0]}
    ptx = edit(built(plan))
    _, main, _ = launches(plan, bind, sizes, told(ptx) if plan.ordered else ptx, values)
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


def chosen(d, v, **kinds):
    return choose(Problem(AttentionSpec(**kinds), 1, 256, 128, 1, 1, d, v, "bfloat16", "bwd"))


# What choose() returns, by depths and kinds; a pair's plans are another file's
EVERY = {
    f"{d}, {v} {' '.join(kinds)}": chosen(d, v, **dict.fromkeys(kinds, True))
    for d, v in ((64, 64), (128, 128), (192, 128))
    for kinds in ((), ("band",), ("deterministic",), ("band", "deterministic"), ("soft_cap",))
}


@pytest.mark.prove
@pytest.mark.parametrize("name", EVERY)
def test_every_plan_is_safe(name):
    verdict = judge(EVERY[name], 128, timeout=1800)
    assert verdict.safe, verdict


@pytest.mark.prove
@pytest.mark.parametrize("lengths", [None, (300, 100)])
def test_steps_that_wrap_every_ring_are_safe(lengths):
    verdict = judge(Plan("bfloat16", 64, 64), 384, lengths)
    assert verdict.safe, verdict
