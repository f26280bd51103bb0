"""The Blackwell backward's plan as data, and its compiled facts: counts in the PTX are those of the plan's formulas."""

import functools
import importlib.util
import itertools
import re
from dataclasses import replace

import pytest
from ptx_lint import early
from verifier.mutate import drop, edit

from jax_fa4.kernels import select
from jax_fa4.kernels.common.parts import REGISTER_FILE, SMEM_LIMIT, label
from jax_fa4.kernels.sm100.bwd.plan import NATIVE_DEPTHS, Plan, bind, choose
from jax_fa4.kernels.sm100.regions import check_regions
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def problem(d=64, v=None, dtype="bfloat16", **spec):
    return Problem(AttentionSpec(**spec), 2, 300, 333, 4, 2, d, d if v is None else v, dtype, "bwd")


@pytest.mark.parametrize(
    ("d", "v"), [*itertools.product((8, 64, 72, 128), (8, 64, 96, 128)), (192, 128), (136, 8), (128, 192), (8, 136)]
)
def test_resources_fit(d, v):
    for more in ({}, {"segments": True}, {"soft_cap": True, "deterministic": True, "band": True, "segments": True}):
        plan = choose(problem(d, v, **more))
        assert plan.inner >= d and plan.inner_value >= v and {plan.inner, plan.inner_value} <= set(NATIVE_DEPTHS)
        assert plan.smem <= SMEM_LIMIT
        reduce, compute, rest = plan.registers
        assert 128 * (reduce + 2 * compute + rest) <= REGISTER_FILE
        assert max(r.end for r in plan.regions) <= 512
        assert plan.serial is (max(d, v) > 128)
        # a compute thread holds 64 weights, 32 slopes and 16 words of them; a reduce thread what it reads at once
        assert compute >= 64 + 32 + 16 + 8 and reduce >= (plan.inner if plan.at_once else 32) + 24


def test_five_accumulators_in_512_columns():
    plan = Plan("bfloat16", 128, 128)
    assert {r.name: (r.start, r.end) for r in plan.regions if not r.inside} == {
        "s": (0, 128), "dp": (128, 256), "dv": (256, 384), "dk": (384, 512),
    }  # fmt: skip
    assert plan.at("dq") == plan.at("dp") and not plan.dq_apart
    small = Plan("bfloat16", 64, 64)
    assert small.dq_apart and small.at("dq") == 384
    for p in (plan, small):
        for square, name in (("s", "p"), ("dp", "ds")):  # each over the half that its warpgroup has read
            assert [p.at(f"{name}{g}") for g in range(2)] == [p.at(square), p.at(square) + 64]
    assert Plan("bfloat16", 128, 64).dq_apart is False and Plan("bfloat16", 64, 128).dq_apart


def test_deeper_than_128_takes_turns():
    """What stands in the columns that dV and dK leave; each has ended where the next begins."""
    plan = choose(problem(192, 128))
    at = {r.name: (r.start, r.end) for r in plan.regions}
    assert at == {
        "dv": (0, 128), "dk": (128, 320), "turns": (320, 512), "s": (320, 448), "p0": (320, 352), "p1": (384, 416),
        "dp": (384, 512), "ds0": (384, 416), "ds1": (448, 480), "dq": (320, 512),
    }  # fmt: skip
    assert (plan.query_stages, plan.dout_stages, plan.at("dq")) == (1, 1, 320)
    late = [r._replace(life=(1, 4)) if r.name == "dp" else r for r in plan.regions]
    with pytest.raises(AssertionError, match=r"dp overlap|p1 and dp"):  # dP before dV has read P
        check_regions(tuple(late))
    with pytest.raises(AssertionError, match="overlap"):
        check_regions(tuple(r._replace(life=()) for r in plan.regions))


def test_ring_table_is_derived():
    plan = Plan("bfloat16", 128, 128)
    rings = {r.name: tuple(r)[3:] for r in plan.rings}
    tile = 128 * 128 * 2
    assert rings == {
        "k": (1, 1, 0, tile), "v": (1, 1, 0, tile), "q": (2, 1, 1, tile), "dout": (1, 1, 1, tile),
        "stats": (2, 1, 8, 1024), "scores": (1, 1, 0, 0), "probs": (1, 8, 0, 0), "slopes": (1, 1, 0, 0),
        "ds": (1, 8, 0, 0), "dq": (1, 1, 4, 0), "final": (1, 1, 0, 0),
    }  # fmt: skip
    assert Plan("float16", 64, 64).stages_of("dout") == 2
    assert plan.smem == 7 * tile + 2 * 1024 + 8 * (1 + 1 + 4 + 2 + 4 + 1 + 1 + 1 + 1 + 2 + 1) + 16
    assert sorted(w for warps in plan.roles.values() for w in warps) == list(range(14))


def test_launch_follows_the_shapes():
    plan = Plan("bfloat16", 72, 40, ordered=True)
    e = plan.extents({"B": 3, "T": 300, "S": 333, "N": 4, "K": 2})
    pre, main, post = bind(plan, e)
    assert [k.name for k in (pre, main, post)] == ["bwd_pre", "backward", "bwd_post"]
    assert (pre.grid, main.grid, post.grid) == ((3 * 4 * 3, 1, 1), (3 * 2 * 3, 1, 1), (6 * 4 * 3, 1, 1))
    k, v, dk, dv, q, dout = main.descriptors
    assert k[:5] == ("k", (333, 72, 2, 3), (2 * 72, 1, 72, 333 * 2 * 72), (128, 128), False)
    assert dv[:5] == ("dv", (333, 40, 2, 3), (2 * 40, 1, 40, 333 * 2 * 40), (128, 64), True)
    assert (v.tensor, dk.tensor, q.dims, dout.box) == ("v", "dk", (300, 72, 4, 3), (128, 64))
    assert main.pointers == ("stats", "work", "turns", "tickets", "ints", "floats")
    assert [k.dependent for k in (pre, main, post)] == [False, True, True] and plan.pre.releases
    _, segmented, _ = bind(replace(plan, segments=True), e)
    ids = ("q_segments", "kv_segments")
    assert segmented.pointers == (*main.pointers[:4], "ranges", *main.pointers[4:], *ids)
    pre, loose, _ = bind(replace(plan, segments=True, ordered=False), e | {"C": 1})
    assert loose.pointers == ("stats", "work", "ints", "floats", *ids) and "ranges" not in pre.pointers
    sized = {b.name: b.sized(e) for b in plan.outputs}
    assert sized == {
        "dq": (3, 300, 4, 72), "dk": (3, 333, 2, 72), "dv": (3, 333, 2, 40), "stats": (3, 4, 3, 256),
        "work": (3, 4, 3, 2, 128 * 72), "turns": (3, 4, 3, 2), "tickets": (1,),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"registers": (160, 136, 88)}, ["66560", "65536"]),
        ({"registers": (150, 136, 88)}, ["steps of 8"]),
        ({"query_stages": 1}, []),
        ({"query_stages": 3}, ["264", "232448"]),
        ({"depth": 200}, ["200"]),
        ({"depth": 136, "value_depth": 192, "query_stages": 1}, ["no room", "136"]),
    ],
)
def test_impossible_plans_are_our_bugs(bad, words):
    with pytest.raises(AssertionError) as error:
        replace(Plan("bfloat16", 128, 128), **bad)
    assert all(w in str(error.value) for w in words), error.value


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem(264, 128), ["264", "query and key", "up to 256"]),
        (problem(64, 320), ["320", "value", "up to 256"]),
        (problem(60), ["60", "multiples of 8"]),
        (problem(64, dtype="float32"), ["float32", "bfloat16"]),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(problem, words):
    with pytest.raises(Unsupported) as error:
        select(problem, "sm_100a")
    assert all(w in str(error.value) for w in words), error.value


def test_plans_are_keys():
    one = select(problem(128, band=True), "sm_100a")
    assert one == select(problem(128, band=True, lengths=True, sinks=True), "sm_100a")
    others = [{}, {"band": True, "deterministic": True}, {"band": True, "soft_cap": True}]
    assert len({one, *(select(problem(128, **spec), "sm_100a") for spec in others)}) == 4
    assert select(problem(), "sm_103a") == replace(select(problem(), "sm_100a"), arch="sm_103a")


# Compiled facts ---------------------------------------------------------------------------------------------------

PLANS = {
    "d128 band": choose(problem(128, band=True)),
    "d64 cap ordered fp16": choose(problem(64, dtype="float16", soft_cap=True, deterministic=True)),
    "d72 40 sm_103a": choose(problem(72, 40), "sm_103a"),
    "d192 128": choose(problem(192, 128)),
    "d128 segments": choose(problem(128, segments=True, soft_cap=True)),
}


def expected(plan):
    """Counts in the text: two copies of every product (S, dP, dV before and in the loop; dK, dQ in and behind it), one
    where steps are serial."""
    depth, value = -(-plan.depth // 16), -(-plan.value_depth // 16)
    slices = -(-plan.depth // 32)
    copies = 2 - plan.serial
    return {
        "mma": (r"tcgen05\.mma\.", copies * (depth + value + 3 * 8)),
        "commit": (r"tcgen05\.commit", copies * 5 + 1),
        "ex2": (r"ex2\.approx", 64 * (1 + plan.soft_cap)),
        "rows loaded": (r"tcgen05\.ld\S+32x32b\.x32\.", slices + (plan.inner + plan.inner_value) // 64),
        # of S and dP, of P and dS: 16 lanes by 32 columns, a warp has 32 by 64; dS also for shared memory
        "fragments loaded": (r"tcgen05\.ld\S+16x256b\.x4\.", 2 * 2 * 2),
        "fragments stored": (r"tcgen05\.st\S+16x128b\.x4\.", 2 * 2 * 2),
        "dS": (r"stmatrix\S+x4\.", 32 * 64 // 256),
        # In order, a step's first addition is there twice: with a turn of the step before to give up, and without.
        # Each of them is also there as a store, for who is first.
        "reductions": (r"cp\.reduce\.async\.bulk", slices + plan.ordered),
        "first": (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group ", plan.ordered * (slices + 1)),
        "TMA loads": (r"cp\.async\.bulk\.tensor\S+global", 2 * (plan.inner + plan.inner_value) // 64),
        "local memory": (r"\.local\b", 0),
    }


@functools.cache
def built(name):
    from jax_fa4.ffi.compile import build

    return build(PLANS[name], keep_ptx=True)


@needs_compiler
@pytest.mark.parametrize("name", PLANS)
def test_every_path_waits_for_the_launch_before_it(name):
    """Main and post start early: no thread of theirs may touch global memory before the kernel ahead is done with it.
    Nobody starts early in front of pre, which starts the chain."""
    ptx = built(name).ptx
    pre, main, post = range(3)
    assert early(ptx, main) == early(ptx, post) == []
    texts = [ptx[at.start() :].split("\n}", 1)[0] for at in re.finditer(r"\.entry", ptx)]
    assert ["griddepcontrol.launch_dependents" in text for text in texts] == [True, True, False]
    assert "griddepcontrol.wait" not in texts[pre]
    for which, kernel in ((0, main), (1, post)):
        assert early(drop(r"griddepcontrol\.wait;", which)(ptx), kernel)
        one_path = edit(r"griddepcontrol\.wait;", r"@%p1 bra $SKIP; griddepcontrol.wait; $SKIP:", which)
        assert early(one_path(ptx), kernel)


@needs_compiler
@pytest.mark.parametrize("name", PLANS)
def test_compiled_counts_are_the_plans(name):
    plan, made = PLANS[name], built(name)
    assert made.facts.spills == 0 and len(made.facts.kernels) == 3
    assert all(k.stack == 0 for k in made.facts.kernels)
    named = sum(k.name.startswith(label(PLANS[name]) + "_kernel_") for k in made.facts.kernels)
    assert named == 2 and sum(k.name.startswith("fa4_bwd_pre_") for k in made.facts.kernels) == 1, (
        "what a profiler shows"
    )
    found = {key: len(re.findall(pattern, made.ptx)) for key, (pattern, _) in expected(plan).items()}
    stores = len(re.findall(r"cp\.async\.bulk\.tensor\S+global\.shared", made.ptx))
    found["TMA loads"] -= stores
    assert stores == (plan.inner + plan.inner_value) // 64
    assert found == {key: count for key, (_, count) in expected(plan).items()}
