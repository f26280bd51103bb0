"""The Blackwell forward at depths 136 to 256: plan, order of signals, compiled facts, values, counts. Never on silicon.

In the emulator: inputs past every length are NaN, results start as poison, seeds other than 0 are adversarial.
"""

import importlib.util
import re
from dataclasses import replace

import numpy as np
import protocol as checker
import pytest
from compare import check
from count import cycles, per_tile
from emulated import forward, ptx_of
from problems import Case, rounded
from test_sm100_pair import without
from test_sm100_plan import problem
from verifier.mutate import drop, edit

from jax_fa4.kernels.common.parts import SMEM_LIMIT
from jax_fa4.kernels.sm100.events import Arrive, Wait
from jax_fa4.kernels.sm100.fwd.plan import bind, choose, clocks
from jax_fa4.kernels.sm100.fwd.wide.plan import Wide
from jax_fa4.kernels.sm100.fwd.wide.protocol import protocol
from jax_fa4.spec import Problem, Unsupported

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16", **fields):
    plan = choose(Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype))
    assert isinstance(plan, Wide)
    return replace(plan, **fields)


# The plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "v"), [(256, 256), (136, 136), (200, 200), (192, 192), (64, 136), (256, 64), (248, 8)])
@pytest.mark.parametrize("kinds", [{}, {"band": True, "sinks": True}, {"soft_cap": True, "segments": True}])
def test_depths_up_to_256_have_a_plan(d, v, kinds):
    for dtype in ("bfloat16", "float16"):
        plan = choose(problem(d, v, dtype, **kinds))
        assert isinstance(plan, Wide) and plan.pair and plan.smem <= SMEM_LIMIT
        assert (plan.inner, plan.inner_value) == (256, 256)
        assert max(r.end for r in plan.regions) == 512
        # A CTA of 384 threads starts with 168 registers each, and can never have more together.
        assert sum(plan.registers) <= 3 * 168
    assert choose(problem(d, v, **kinds), "sm_103a").share is None


@pytest.mark.parametrize(("d", "v"), [(128, 128), (192, 128), (136, 64)])
def test_others_keep_theirs(d, v):
    assert not isinstance(choose(problem(d, v)), Wide)


@pytest.mark.parametrize(("d", "v"), [(264, 64), (64, 264)])
def test_deeper_ones_are_refused(d, v):
    with pytest.raises(Unsupported, match=rf"{d}.*{v}.*256"):
        choose(problem(d, v))


def test_impossible_plans_are_our_bugs():
    for bad in ({"registers": (208, 160, 144)}, {"early": 4}, {"pair": False}, {"stage_cap": 4}, {"depth": 264}):
        with pytest.raises(AssertionError):
            replace(Wide("bfloat16", 256, 256), **bad)


def test_launch():
    plan = Wide("bfloat16", 200, 136)
    (k,) = bind(plan, plan.extents({"B": 3, "T": 300, "S": 77, "N": 4, "K": 2}))
    assert k.cluster == 2 and k.grid == (2 * 2 * 4 * 3, 1, 1) and k.block == 384 and k.smem == plan.smem
    q, key, value, out = k.descriptors
    assert (q.box, key.box, value.box, out.box) == ((128, 256), (64, 256), (128, 128), (128, 256))
    assert q.dims == (300, 200, 4, 3) and value.dims == (77, 136, 2, 3) and out.dims == (300, 136, 4, 3)


# Order of signals -------------------------------------------------------------------------------------------------

PLAN = Wide("bfloat16", 256, 256)


@pytest.mark.parametrize("stages", (2, 3))
@pytest.mark.parametrize("blocks", (1, 2, 3, 4))
def test_no_deadlock_and_no_overwriting(stages, blocks):
    assert checker.check(protocol(replace(PLAN, stage_cap=stages), blocks)) == []


BREAKS = {
    "scores not waited for": ("softmax", Wait, "scores", "overwrite"),
    "K not waited for": ("mma", Wait, "k", "overwrite"),
    "V overwritten": ("load", Wait, "v", "overwrite"),
    "O rescaled under a product": ("correct", Wait, "v", "overwrite"),
    "P V before P": ("mma", Wait, "probs", "overwrite"),
    "P V before the rest of P": ("mma", Wait, "rest", "overwrite"),
    "no statistics": ("softmax", Arrive, "hand", "deadlock"),
    "statistics not waited for": ("correct", Wait, "hand", "overwrite"),
    "tensor memory freed early": ("mma", Wait, "free", "overwrite"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_dropped_signal_is_found(name):
    role, kind, ring, fault = BREAKS[name]
    good = protocol(PLAN, 4)
    broken = without(good, role, kind, ring)
    assert broken != good
    assert fault in {f.kind for f in checker.check(broken)}


def test_statistics_come_before_the_join():
    """Joined first, softmax may arrive twice at a named barrier: 60 schedules in the emulator did not show it."""
    good = protocol(PLAN, 3)
    early = {}
    for agent, events in good.agents.items():
        join = next((e for e in events if isinstance(e, Arrive) and e.barrier[:2] == ("probs", "full")), None)
        early[agent] = [join, *(e for e in events if e is not join)] if agent[0] == "correct" else events
    assert "wrong phase" in {f.kind for f in checker.check(good._replace(agents=early))}


# Compiled facts ---------------------------------------------------------------------------------------------------

PLANS = {
    "full": choose(problem(256)),
    "band sinks fp16": choose(problem(256, dtype="float16", band=True, sinks=True)),
    "everything": choose(problem(256, band=True, sinks=True, segments=True, soft_cap=True)),
    "soft cap": choose(problem(256, soft_cap=True)),
}
COMPILED = ["full", "band sinks fp16"]


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in COMPILED else pytest.mark.prove) for n in PLANS])
def test_compiled_counts_are_the_plans(name):
    """And nothing spills: SlowKernel is an error in tests."""
    plan = PLANS[name]
    ptx, poly = ptx_of(plan), plan.emulated_columns
    counts = {
        "products": (r"tcgen05\.mma\.cta_group::2", 2 * (256 // 16) + 2 * (128 // 16)),
        "commits": (r"tcgen05\.commit\S+multicast", 2 + 2 + 1),  # scores twice, K and V, the last V
        "of one CTA": (r"tcgen05\.\S+cta_group::1", 0),
        "S and O loads": (r"tcgen05\.ld\S+x32\.", 4 + 256 // 32),
        "O loads to rescale": (r"tcgen05\.ld\S+x16\.", 256 // 16),
        "stores": (r"tcgen05\.st\S+x16\.", 4 + 256 // 16),
        "ex2": (r"ex2\.approx", 128 - poly + 1 + 2 * plan.sinks + 128 * plan.soft_cap),
        "add toward -inf": (r"add\.rm\.f32x2", poly // 2),
        "TMA loads": (r"cp\.async\.bulk\.tensor\S+shared::cluster\.global\S+cta_group::2", 4 + 4 + 2),
        "TMA stores": (r"cp\.async\.bulk\.tensor\S+global\.shared", 4),
        "votes": (r"vote\.sync", 1),
        "local memory": (r"\.local\b", 0),
    }
    wrong = {what: (len(re.findall(p, ptx)), n) for what, (p, n) in counts.items() if len(re.findall(p, ptx)) != n}
    assert not wrong, wrong


# Values -----------------------------------------------------------------------------------------------------------

CASES = [
    Case("even", b=1, t=256, s=384, n=1, k=1, d=256),
    Case("ragged", b=2, t=200, s=600, n=1, k=1, d=256, q_lens=(200, 77), kv_lens=(570, 300)),
    Case("one key", b=1, t=1, s=1, n=1, k=1, d=256),
    Case("no keys", b=2, t=130, s=200, n=1, k=1, d=256, kv_lens=(0, 5)),
    Case("padded", b=1, t=130, s=200, n=1, k=1, d=136, v=200, kv_lens=(150,)),
    Case("causal", b=1, t=300, s=300, n=1, k=1, d=256, causal=True, sinks=True),
    Case("window", b=1, t=300, s=700, n=1, k=1, d=256, window=(150, 60), bottom_right=True, kv_lens=(650,), sinks=True),
    Case("soft cap", b=1, t=130, s=300, n=1, k=1, d=256, soft_cap=20.0, spread=2.0),
    Case("segments", b=1, t=300, s=300, n=1, k=1, d=256, segments=3, causal=True),
]
CHECKED = {"even": ("bfloat16", (1,)), "ragged": ("bfloat16", (2,)), "one key": ("bfloat16", (1,)),
           "no keys": ("bfloat16", (3,)), "causal": ("float16", (2,)), "window": ("float16", (1,))}  # fmt: skip


def passes(case, dtype="bfloat16", seed=0, **how):
    fields = how.pop("fields", {})
    plan = plan_of(case, dtype, **fields)
    inp, got, report = forward(plan, bind, case, seed, roles=plan.roles, **how)
    report.check()
    assert not report.findings, report.findings
    check(got, case, inp, dtype)
    return report


@needs_compiler
@pytest.mark.parametrize(
    ("case", "dtype", "seed"),
    [
        pytest.param(c, CHECKED[c.name][0], seed, id=f"{c.name}-{seed}")
        for c in CASES
        if c.name in CHECKED
        for seed in CHECKED[c.name][1]
    ],
)
def test_forward_is_attention(case, dtype, seed):
    passes(case, dtype, seed)


@needs_compiler
@pytest.mark.prove
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_is_attention_in_many_schedules(case, seed):
    passes(case, seed=seed)


@needs_compiler
@pytest.mark.prove
@pytest.mark.parametrize("blocks", range(1, 8))
def test_no_number_of_blocks_deadlocks(blocks):
    passes(Case("blocks", b=1, t=200, s=128 * blocks, n=1, k=1, d=256), seed=blocks)


@needs_compiler
def test_rows_and_columns_are_their_own():
    """Each query sees one key; its value names key and column: a row, key or half in the wrong place shows."""
    case = Case("rows", b=1, t=256, s=256, n=1, k=1, d=256, window=(0, 0), sinks=False)

    def fill(inp):
        inp.value[...] = (np.arange(case.s)[:, None] + np.arange(case.d)[None, :])[None, :, None, :] % 251

    _, got, report = forward(plan_of(case), bind, case, fill=fill)
    report.check()
    want = (np.arange(case.t)[:, None] + np.arange(case.d)[None, :]) % 251
    np.testing.assert_array_equal(got.out[0, :, 0], want)


@needs_compiler
@pytest.mark.parametrize("step", [*(pytest.param(x, marks=pytest.mark.prove) for x in (-7.9, 8.5)), 7.9])
def test_a_maximum_that_creeps(step):
    """O is rescaled only where the maximum has grown by more than 2^8 since it was last moved."""
    case = Case("creep", b=1, t=256, s=128 * 5, n=1, k=1, d=256, scale=1.0)

    def fill(inp):
        inp.query[...], inp.query[..., 0] = 0, 1.0
        visited = 4 - np.arange(case.s) // 128
        level = step * np.log(2) * (visited if step > 0 else visited - 4)
        inp.key[..., 0] = rounded(np.broadcast_to(level[None, :, None], inp.key.shape[:3]), "bfloat16")

    report = passes(case, fill=fill)
    stores = report.counters.instructions["correct"].get("tcgen05.st", 0)
    blocks = {-7.9: 0, 7.9: 2, 8.5: 4}[step]
    assert stores == blocks * 2 * 4 * (256 // 16), stores  # CTAs, warps, chunks


# Counts -----------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_tile_takes_the_clocks_of_the_rules():
    plan = PLANS["full"]
    found = cycles(per_tile(plan, bind, ptx_of(plan), queries=256))
    assert found["tensor"] == 2048 and found["exp"] == 736 + 8
    assert (found["mma.read"], found["tma.write"]) == (1024, 512)
    shared = sum(found[k] for k in ("mma.read", "tma.write", "load.shared", "store.shared"))
    assert shared == clocks(plan)["shared memory"] == 1544, found


# Planted faults ---------------------------------------------------------------------------------------------------

BROKEN = {
    "P handed over before it is stored": drop(r"tcgen05\.wait::st[^\n]*", -1),
    "V freed in the leader alone": edit(r"(mov\.b16 \s*%rs\d+, )3", r"\g<1>1", 3),
    "first product adds": edit(r"setp\.ne\.b32 add, %r\d+, 0", "setp.ne.b32 add, 1, 0", 0),
    "no proxy fence before O is stored": drop(r"fence\.proxy\.async[^\n]*", -1),
    "both are the leader": edit(r"mov\.u32 \s*(%r\d+), %cluster_ctarank", r"mov.b32 \1, 0"),
    "no meeting at the end": drop(r"barrier\.cluster\.wait(\.aligned)?;", 1),
    "edge rows not zeroed": drop(r"st\.shared\.v4\.b32[^\n]*", 0),
}
QUICK = ("P handed over before it is stored", "V freed in the leader alone", "edge rows not zeroed")


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.prove) for n in BROKEN])
def test_a_broken_kernel_fails(name):
    case = Case("broken", b=1, t=200, s=400, n=1, k=1, d=256, kv_lens=(370,))
    with pytest.raises(AssertionError):
        for seed in range(3):
            inp, got, report = forward(plan_of(case), bind, case, seed, edit=BROKEN[name])
            report.check()
            check(got, case, inp, "bfloat16")
