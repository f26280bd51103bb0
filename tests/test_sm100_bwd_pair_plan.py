"""The Blackwell backward of CTA pairs as data: memory, rings, launches and whom `select` gives it; compiled facts."""

import importlib.util
import re
from dataclasses import replace

import pytest
from ptx_lanes import lanes
from ptx_lint import early

from jax_fa4.kernels import select
from jax_fa4.kernels.common.parts import REGISTER_FILE, SMEM_LIMIT, label
from jax_fa4.kernels.sm100.bwd.pair.plan import PairPlan, bind, choose, registers_for, worth
from jax_fa4.kernels.sm100.bwd.plan import Plan
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def problem(d=128, v=None, s=1024, dtype="bfloat16", **spec):
    return Problem(AttentionSpec(**spec), 2, 300, s, 4, 2, d, v or d, dtype, "bwd")


def test_five_accumulators_in_512_columns():
    plan = PairPlan("bfloat16", 128, 128)
    assert {r.name: (r.start, r.end) for r in plan.regions} == {
        "turns": (0, 128), "s": (0, 128), "p": (0, 64), "dq": (64, 128), "dp": (128, 256), "ds": (128, 192),
        "dv": (256, 384), "dk": (384, 512),
    }  # fmt: skip


def test_at_depth_192_dq_lies_beyond_a_part_of_s():
    plan = PairPlan("bfloat16", 192, 128)
    assert {r.name: (r.start, r.end) for r in plan.regions} == {
        "turns": (0, 128), "s": (0, 64), "p": (0, 32), "dq": (32, 128), "dp": (128, 192), "ds": (128, 160),
        "dv": (192, 320), "dk": (320, 512),
    }  # fmt: skip
    assert (plan.parts, plan.span, plan.unit) == (2, 64, 16)
    assert [plan.boxes[name] for name in ("q", "qt", "kt")] == [(32, 192), (64, 96), (256, 96)]
    assert [plan.swizzle(plan.boxes[name]) for name in ("k", "q", "qt", "kt", "doutt")] == [128, 128, 64, 64, 128]


def test_ring_table_is_derived():
    """Counts of the leader's barriers are in warps of both CTAs: twice 8 compute, twice 4 reduce, 4 that keep dS."""
    plan = PairPlan("bfloat16", 128, 128)
    half = 128 * 64 * 2
    assert {r.name: tuple(r)[3:] for r in plan.rings} == {
        "k": (1, 1, 0, 2 * half), "v": (1, 1, 0, 2 * half), "kt": (1, 1, 0, 2 * half), "q": (1, 1, 0, half),
        "dout": (1, 1, 0, half), "qt": (1, 1, 1, half), "doutt": (1, 1, 1, half), "stats": (2, 1, 8, 1024),
        "scores": (1, 1, 16, 0), "probs": (1, 16, 0, 0), "slopes": (1, 1, 0, 0), "ds": (1, 16, 0, 0),
        "square": (1, 8, 0, 0), "trade": (1, 1, 0, half), "dq": (1, 1, 8, 0),
    }  # fmt: skip
    for ring in plan.rings:
        assert plan.arrivals(ring, 1) == ring.full
        assert plan.arrivals(ring, 0) == ring.full + (ring.name in ("q", "dout", "qt", "doutt", "trade"))


@pytest.mark.parametrize("more", [{}, {"segments": True}, {"ordered": True, "soft_cap": True, "band": True}])
def test_resources_fit(more):
    plan = PairPlan("float16", 128, 96, **more)
    assert 224 * 1024 < plan.smem <= SMEM_LIMIT
    reduce, compute, rest = plan.registers
    assert 128 * (reduce + 2 * compute + rest) <= REGISTER_FILE
    assert compute >= 128 and reduce >= 64 + 24  # 64 weights, 32 slopes, 32 words; a reduce thread has 64 columns


def test_launch_follows_the_shapes():
    plan = PairPlan("bfloat16", 96, 128, ordered=True)
    e = plan.extents({"B": 3, "T": 300, "S": 513, "N": 4, "K": 2})
    pre, main, post = bind(plan, e)
    assert (pre.grid, main.grid, post.grid) == ((3 * 4 * 3, 1, 1), (2 * 3 * 2 * 3, 1, 1), (6 * 4 * 3, 1, 1))
    assert (main.cluster, main.block, main.dependent) == (2, 512, True)
    found = [(d.tensor, d.dims[1], d.box, d.store) for d in main.descriptors]
    assert found == [
        ("k", 96, (128, 128), False), ("v", 128, (128, 128), False), ("k", 96, (256, 64), False),
        ("q", 96, (64, 128), False), ("dout", 128, (64, 128), False), ("q", 96, (128, 64), False),
        ("dout", 128, (128, 64), False), ("dk", 96, (128, 128), True), ("dv", 128, (128, 128), True),
    ]  # fmt: skip
    sized = {b.name: b.sized(e) for b in plan.outputs}
    assert sized["work"] == (3, 4, 3, 2, 128 * 128) and sized["turns"] == (3, 4, 3, 2) and sized["tickets"] == (1,)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"registers": (96, 160, 104)}, ["66560", "65536"]),
        ({"slices": 3}, ["232448"]),
        ({"depth": 64}, ["64"]),
        ({"depth": 200}, ["200"]),
    ],
)
def test_impossible_plans_are_our_bugs(bad, words):
    with pytest.raises(AssertionError) as error:
        replace(PairPlan("bfloat16", 128, 128), **bad)
    assert all(w in str(error.value) for w in words), error.value


def test_a_pair_is_chosen_where_the_counts_say_so():
    """Full masks of any length; a band or segments would have a pair visit what half of it does not see."""
    assert isinstance(select(problem(), "sm_100a"), PairPlan)
    assert isinstance(select(problem(96, 72, deterministic=True), "sm_103a"), PairPlan)
    assert select(problem(), "sm_103a") == replace(select(problem(), "sm_100a"), arch="sm_103a")
    assert select(problem(192, 128), "sm_100a").parts == 2
    others = [problem(64), problem(128, 64), problem(band=True), problem(segments=True)]
    for p in others:
        assert isinstance(select(p, "sm_100a"), Plan) and not worth(p)
    assert select(problem(s=1), "sm_100a") == select(problem(), "sm_100a"), "one object serves every length"
    assert select(problem(soft_cap=True, lengths=True), "sm_100a").soft_cap
    with pytest.raises(Unsupported, match="float32"):
        choose(problem(dtype="float32"))


# Compiled facts ---------------------------------------------------------------------------------------------------

PLANS = {"full": choose(problem()), "192": choose(problem(192, 128)), "ordered": choose(problem(deterministic=True))}


def expected(plan):
    """Counts in the text. Of each product a copy a part in the loop, and as many before it (S, dP, dV), behind it (dK)
    and both; but one of dQ in the loop and one behind it."""
    depth, value, parts, half = plan.depth // 16, plan.value_depth // 16, plan.parts, plan.inner // 2
    turned = {64: 1, 96: 3}[half]  # copies of Qt: pieces of 64 columns, or of 32
    return {
        "mma": (r"tcgen05\.mma\.cta_group::2", 2 * parts * (depth + value + 2 * plan.span // 16) + 2 * 16),
        "commit": (r"tcgen05\.commit\S+multicast::cluster", 2 * (4 * parts + 1)),
        "ex2": (r"ex2\.approx", 64 * (1 + plan.soft_cap)),
        "rows of 32": (r"tcgen05\.ld\S+x32\.", (4 if parts == 1 else 0) + half // 32 + (half + 64) // 32),
        "rows of 16": (r"tcgen05\.ld\S+x16\.", 0 if parts == 1 else 8),
        "stores": (r"tcgen05\.st\S+x(16|8)\.", 4 * parts),
        "reductions": (r"cp\.reduce\.async\.bulk", half // plan.slice + plan.ordered),
        "exchanges": (r"cp\.async\.bulk\.shared::cluster\.shared::cta", 1),
        "TMA loads": (
            r"cp\.async\.bulk\.tensor\S+shared\S+global",
            plan.inner // 64 + 2 + turned + parts * (plan.inner // 64 + turned + 2 + 1),
        ),
        "TMA stores": (r"cp\.async\.bulk\.tensor\S+global\.shared", plan.inner // 64 + 2),
        "local memory": (r"\.local\b", 0),
        "one CTA alone": (r"cta_group::1", 0),
    }


@needs_compiler
@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(name, marks=pytest.mark.prove) for name in ("192", "ordered"))]
)
def test_compiled_counts_are_the_plans(name):
    from jax_fa4.ffi.compile import build

    plan = PLANS[name]
    made = build(plan, keep_ptx=True)
    assert made.facts.spills == 0 and len(made.facts.kernels) == 3
    assert all(k.stack == 0 for k in made.facts.kernels)
    named = sum(k.name.startswith(label(PLANS[name]) + "_kernel_") for k in made.facts.kernels)
    assert named == 2 and sum(k.name.startswith("fa4_bwd_pre_") for k in made.facts.kernels) == 1, (
        "what a profiler shows"
    )
    found = {key: len(re.findall(pattern, made.ptx)) for key, (pattern, _) in expected(plan).items()}
    assert found == {key: count for key, (_, count) in expected(plan).items()}
    assert lanes(made.ptx) == [], "lanes of a warp may run apart at a barrier"
    assert early(made.ptx, 1) == early(made.ptx, 2) == [], "read before the launch before it has ended"


@needs_compiler
@pytest.mark.prove
@pytest.mark.parametrize("ordered", (False, True))
@pytest.mark.parametrize("cap", (False, True))
@pytest.mark.parametrize(
    ("depth", "more"),
    [
        (128, {}),
        (128, {"band": True}),
        (128, {"segments": True}),
        (128, {"band": True, "segments": True}),
        (192, {}),
        (192, {"band": True}),
    ],
)
def test_no_form_spills(depth, ordered, more, cap):
    from jax_fa4.ffi.compile import build

    kinds = {"band": False, "segments": False, "ordered": ordered, "soft_cap": cap} | more
    plan = PairPlan("bfloat16", depth, 128, registers=registers_for(depth, **kinds), **kinds)
    assert build(plan).facts.spills == 0 <= plan.spill_allowance <= 64
