"""The Blackwell backward of sweeps as data: memory, rings, launches and whom `select` gives it; compiled facts."""

import importlib.util
import itertools
import re
from dataclasses import replace

import pytest
from ptx_lanes import lanes
from ptx_lint import early

from jax_fa4.kernels import select
from jax_fa4.kernels.common.parts import REGISTER_FILE, SMEM_LIMIT, label
from jax_fa4.kernels.sm100.bwd.wide.plan import NATIVE_DEPTHS, WidePlan, bind, wanted
from jax_fa4.kernels.sm100.regions import check_regions
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")
EVERY = range(8, 257, 8)


def problem(d=256, v=None, dtype="bfloat16", arch="sm_100a", **spec):
    return Problem(AttentionSpec(**spec), 2, 300, 700, 4, 2, d, v or d, dtype, "bwd")


def test_every_depth_has_a_plan_and_this_one_what_no_other_takes():
    for d, v in itertools.product(EVERY, EVERY):
        plan = select(problem(d, v), "sm_100a")
        assert isinstance(plan, WidePlan) is wanted(d, v) is (max(d, v) > 192 or min(d, v) > 128), (d, v)
        assert plan.inner >= d and plan.inner_value >= v


@pytest.mark.parametrize("kinds", [{}, {"segments": True, "soft_cap": True, "band": True}])
def test_resources_fit(kinds):
    for d, v in itertools.product((8, *NATIVE_DEPTHS), NATIVE_DEPTHS):
        plan = WidePlan("float16", d, v, **kinds)
        compute, rest = plan.registers
        assert 128 * (2 * compute + rest) <= REGISTER_FILE
        for sweep in plan.sweeps:
            assert sweep.smem <= SMEM_LIMIT and max(r.end for r in sweep.regions) <= 512
            assert sweep.own_bytes >= 2 * 128 * sweep.width
    assert max(sweep.smem for sweep in WidePlan("bfloat16", 256, 256).sweeps) == 7 * 32768 + 2048 + 8 * 15 + 16


def test_tensor_memory_of_each_sweep():
    dv, dk, dq = WidePlan("bfloat16", 256, 192).sweeps
    assert {r.name: (r.start, r.end) for r in dv.regions} == {
        "s": (0, 128), "s_next": (128, 256), "p0": (0, 32), "p1": (64, 96), "p_next0": (128, 160),
        "p_next1": (192, 224), "dv": (256, 448),
    }  # fmt: skip
    for sweep, name in ((dk, "dk"), (dq, "dq")):
        assert {r.name: (r.start, r.end) for r in sweep.regions} == {
            "s": (0, 128), "dp": (128, 256), "ds0": (128, 160), "ds1": (192, 224), name: (256, 512),
        }  # fmt: skip
    with pytest.raises(AssertionError, match="overlap"):
        check_regions(tuple(r._replace(start=192) if r.name == "dk" else r for r in dk.regions))


def test_tiles_of_each_sweep():
    """Own rows whole, the other side's in halves: by rows, and by depth where they are summed."""
    dv, dk, dq = WidePlan("bfloat16", 192, 256).sweeps
    assert dv.boxes == {"score_a": (128, 192), "score_b": (64, 192), "turned": (128, 128), "out": (128, 256)}
    assert dv.own_bytes == dv.tile_bytes("out") > dv.tile_bytes("score_a")
    assert dk.boxes | {"slope_a": (128, 256), "slope_b": (64, 256)} == dk.boxes
    assert dk.boxes == dq.boxes and dk.boxes["turned"] == (128, 96) and dk.boxes["out"] == (128, 192)
    assert [dk.swizzle(dk.boxes[part]) for part in ("score_a", "score_b", "turned")] == [128, 128, 64]
    assert (dv.places, dk.places, dq.by_query, dk.by_query) == (2, 1, True, False)


def test_ring_table_is_derived():
    """Counts of the leader's barriers are in warps of both CTAs: twice 8 compute."""
    dv, dk, dq = WidePlan("bfloat16", 256, 256).sweeps
    half = 128 * 128 * 2
    rings = {r.name: tuple(r)[3:] for r in dk.rings}
    assert rings == {
        "score_a": (1, 1, 0, 2 * half), "score_b": (1, 1, 0, half), "turned": (1, 1, 1, half),
        "scores": (1, 1, 16, 0), "slope_a": (1, 1, 0, 2 * half), "slope_b": (1, 1, 0, half), "slopes": (1, 1, 0, 0),
        "stats": (2, 1, 8, 1024), "weights": (1, 16, 0, 0), "final": (1, 1, 0, 0),
    }  # fmt: skip
    assert {r.name: tuple(r)[3:] for r in dq.rings} == {name: x for name, x in rings.items() if name != "stats"}
    assert {r.name: tuple(r)[3:] for r in dv.rings} == {
        "score_a": (1, 1, 0, 2 * half), "score_b": (2, 1, 0, half), "turned": (2, 1, 1, half), "scores": (2, 1, 0, 0),
        "stats": (2, 1, 8, 1024), "weights": (2, 16, 0, 0), "final": (1, 1, 0, 0),
    }  # fmt: skip
    for one in (dv, dk, dq):
        for ring in one.rings:
            assert one.arrivals(ring, 1) == ring.full
            assert one.arrivals(ring, 0) == ring.full + (ring.name in ("score_b", "slope_b", "turned"))


def test_launch_follows_the_shapes():
    plan = WidePlan("bfloat16", 200, 128, segments=True)
    e = plan.extents({"B": 3, "T": 300, "S": 513, "N": 4, "K": 2})
    pre, dv, dk, dq = bind(plan, e)
    assert [k.grid[0] for k in (pre, dv, dk, dq)] == [3 * 4 * 3, 2 * 3 * 2 * 3, 2 * 3 * 2 * 3, 2 * 2 * 4 * 3]
    for kernel in (dv, dk, dq):
        assert (kernel.cluster, kernel.block, kernel.dependent) == (2, 384, True)
        assert kernel.pointers == ("stats", "ints", "floats", "q_segments", "kv_segments")
    assert [(d.tensor, d.dims[1], d.box, d.store) for d in dv.descriptors] == [
        ("k", 200, (128, 256), False), ("q", 200, (64, 256), False), ("dout", 128, (128, 64), False),
        ("dv", 128, (128, 128), True),
    ]  # fmt: skip
    assert [(d.tensor, d.box, d.store) for d in dk.descriptors] == [
        ("k", (128, 256), False), ("q", (64, 256), False), ("v", (128, 128), False), ("dout", (64, 128), False),
        ("q", (128, 128), False), ("dk", (128, 256), True),
    ]  # fmt: skip
    assert [d.tensor for d in dq.descriptors] == ["q", "k", "dout", "v", "k", "dq"]
    sized = {b.name: b.sized(e) for b in plan.outputs}
    assert sized == {
        "dq": (3, 300, 4, 200), "dk": (3, 513, 2, 200), "dv": (3, 513, 2, 128), "stats": (3, 4, 3, 256),
    }, "no workspace, no turns"  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"registers": (216, 96)}, ["67584", "65536"]),
        ({"registers": (204, 96)}, ["steps of 8"]),
        ({"depth": 264}, ["264"]),
    ],
)
def test_impossible_plans_are_our_bugs(bad, words):
    with pytest.raises(AssertionError) as error:
        replace(WidePlan("bfloat16", 256, 256), **bad)
    assert all(w in str(error.value) for w in words), error.value


def test_plans_are_keys():
    """Nothing is added in global memory, so a deterministic call has the same object."""
    one = select(problem(band=True), "sm_100a")
    same = {"lengths": True, "sinks": True, "deterministic": True}
    assert one == select(problem(band=True, **same), "sm_100a") and label(one) == "fa4_bwd_sm_100a_d256_band_pair"
    assert (
        len({one, *(select(problem(**spec), "sm_100a") for spec in ({}, {"segments": True}, {"soft_cap": True}))}) == 4
    )
    assert select(problem(), "sm_103a") == replace(select(problem(), "sm_100a"), arch="sm_103a")
    for wrong, word in ((problem(dtype="float32"), "float32"), (problem(264), "264"), (problem(256, 60), "60")):
        with pytest.raises(Unsupported, match=word):
            select(wrong, "sm_100a")


# Compiled facts ---------------------------------------------------------------------------------------------------

PLANS = {
    "full": WidePlan("bfloat16", 256, 256),
    "all kinds": WidePlan("float16", 256, 256, band=True, segments=True, soft_cap=True),
    "192": WidePlan("bfloat16", 192, 192, band=True, arch="sm_103a"),
    "200 72": WidePlan("float16", 200, 72, segments=True),
}


def expected(plan):
    """Counts in the text: of each product a copy before or behind the loop, and one in it."""
    depth, value = -(-plan.depth // 16), -(-plan.value_depth // 16)
    of_turned = {64: 1, 96: 3, 128: 2}  # copies by columns of a half: pieces of 64 columns, or of 32
    turned = [of_turned[s.boxes["turned"][1]] for s in plan.sweeps]
    inner, inner_value = plan.inner // 64, plan.inner_value // 64
    scores, slopes, store = 2 * inner, 2 * inner_value, inner_value + 2 * inner
    return {
        "mma": (r"tcgen05\.mma\.cta_group::2", 2 * (3 * (depth + 8) + 2 * value)),
        "commit": (r"tcgen05\.commit\S+multicast::cluster", 2 * (2 + 3 + 3)),
        "ex2": (r"ex2\.approx", 3 * 64 * (1 + plan.soft_cap)),
        "rows": (r"tcgen05\.ld\S+x32\.", 3 * 2 + 2 * 2 + (plan.inner_value + 2 * plan.inner) // 64),
        "stores": (r"tcgen05\.st\S+x16\.", 3 * 2),
        "TMA loads": (r"cp\.async\.bulk\.tensor\S+shared\S+global", 3 * scores + 2 * slopes + sum(turned)),
        "TMA stores": (r"cp\.async\.bulk\.tensor\S+global\.shared", store),
        "reductions": (r"cp\.reduce", 0),
        "local memory": (r"\.local\b", 0),
        "one CTA alone": (r"cta_group::1", 0),
    }


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.prove) for name in PLANS])
def test_compiled_counts_are_the_plans(name):
    from jax_fa4.ffi.compile import build

    plan = PLANS[name]
    made = build(plan, keep_ptx=True)
    assert made.facts.spills == 0 and len(made.facts.kernels) == 4 and all(k.stack == 0 for k in made.facts.kernels)
    for gradient in ("dv", "dk", "dq"):
        named = [k.name for k in made.facts.kernels if k.name.startswith(f"{label(plan)}_{gradient}_kernel_")]
        assert len(named) == 1, "what a profiler shows"
    found = {key: len(re.findall(pattern, made.ptx)) for key, (pattern, _) in expected(plan).items()}
    assert found == {key: count for key, (_, count) in expected(plan).items()}
    assert lanes(made.ptx) == [], "lanes of a warp may run apart at a barrier"
    assert all(early(made.ptx, n) == [] for n in (1, 2, 3)), "read before the launch before it has ended"


@needs_compiler
@pytest.mark.prove
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("kinds", list(itertools.product((False, True), repeat=3)), ids=str)
def test_no_form_spills(dtype, kinds):
    from jax_fa4.ffi.compile import build

    for d, v in ((256, 256), (192, 192), (256, 128)) if all(kinds) or not any(kinds) else ((256, 256),):
        plan = WidePlan(dtype, d, v, **dict(zip(("band", "segments", "soft_cap"), kinds, strict=True)))
        assert build(plan).facts.spills == 0 == plan.spill_allowance
