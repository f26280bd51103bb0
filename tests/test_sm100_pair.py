"""The Blackwell forward on pairs of CTAs: plan, compiled facts, values, counts. It has never run on silicon.

In the emulator: inputs past every length are NaN, results start as poison, seeds other than 0 are adversarial.
"""

import importlib.util
import itertools
import re
from dataclasses import replace

import numpy as np
import protocol as checker
import pytest
from compare import check
from count import cycles, per_tile
from emulated import forward, ptx_of
from problems import Case
from test_sm100_plan import expected, problem
from verifier.mutate import drop, drop_wait, edit

from jax_fa4.kernels import of_every_shape, select
from jax_fa4.kernels.common.parts import SMEM_LIMIT
from jax_fa4.kernels.sm100.events import Arrive, Wait
from jax_fa4.kernels.sm100.fwd.plan import LONG, Plan, bind, choose, clocks, paired
from jax_fa4.kernels.sm100.fwd.protocol import protocol
from jax_fa4.spec import Problem

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def long(d=128, v=None, t=4096, s=4096, **spec):
    return replace(problem(d, v, **spec), t=t, s=s)


def plan_of(case, dtype="bfloat16", **fields):
    """Whatever the lengths of the case, on pairs."""
    plan = choose(Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype))
    return replace(plan if plan.pair else paired(plan), **fields)


# The plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "v"), [(64, 64), (128, 128), (192, 128), (72, 40), (136, 8)])
@pytest.mark.parametrize("band", (False, True))
def test_resources_fit(d, v, band):
    single = choose(problem(d, v, band=band, sinks=True))
    plan = paired(single)
    assert plan.smem <= SMEM_LIMIT and max(r.end for r in plan.regions) <= 512
    assert plan.key_bytes == single.key_bytes // 2 and plan.value_bytes == single.value_bytes // 2
    assert plan.q_bytes == single.q_bytes and plan.stages >= single.stages
    rings = {r.name: r for r in plan.rings}
    assert rings["kv"].bytes == 2 * plan.stage_bytes and rings["q"].bytes == 2 * plan.q_bytes
    # warps of softmax and correction of both CTAs; warps of softmax of both; edge warps of both
    assert (rings["probs"].full, rings["rest"].full, rings["edge"].full) == (16, 8, 2)


@pytest.mark.parametrize(("t", "ctas"), [(1, 2), (512, 2), (513, 4), (1100, 6)])
def test_launch(t, ctas):
    plan = paired(Plan("bfloat16", 128, 128))
    (k,) = bind(plan, plan.extents({"B": 3, "T": t, "S": 77, "N": 4, "K": 2}))
    assert k.cluster == 2 and k.grid == (ctas * 4 * 3, 1, 1)
    q, key, value, out = k.descriptors
    assert (q.box, key.box, value.box, out.box) == ((128, 128), (64, 128), (128, 64), (128, 128))
    assert value.swizzle == 128
    narrow = paired(Plan("bfloat16", 64, 64))
    value = bind(narrow, narrow.extents({"B": 1, "T": t, "S": 77, "N": 4, "K": 2}))[0].descriptors[2]
    assert value.box == (128, 32) and value.swizzle == 64


CHOSEN = [
    (long(), True), (long(192, 128), True), (long(t=1024, s=1024), True), (long(96), True), (long(sinks=True), True),
    (long(64), False),  # exponentials take longest, on pairs too
    (long(t=LONG - 1), False), (long(s=LONG - 1), False),
    (long(t=4096 + 100), False), (long(t=4096 + 300), True),  # 256 queries for nothing cost more than they save
    (long(192, 128, t=8192 + 100), True),  # of 8192 they do not, at this depth
    (long(band=True), False), (long(segments=True), False), (long(soft_cap=True), False),
]  # fmt: skip


@pytest.mark.parametrize(("call", "pair"), CHOSEN)
def test_pairs_are_chosen_where_the_counts_say_so(call, pair):
    assert choose(call).pair == pair
    assert choose(call, "sm_103a").pair == (pair or (call.d == 64 and not call.spec.band and call.t >= LONG))


@pytest.mark.parametrize("kinds", [{}, {"band": True}, {"soft_cap": True}, {"sinks": True, "segments": True}])
def test_stand_ins_have_both_plans(kinds):
    """What `precompile` builds for a kind; where lengths are symbols, or must not matter, CTAs stay alone."""
    for arch in ("sm_100a", "sm_103a"):
        for d, v in ((64, 64), (128, 128), (192, 128), (256, 256)):
            kind = problem(d, v, **kinds)
            made = {select(one, arch) for one in of_every_shape(kind, arch)}
            for t, s in itertools.product((1, 512, 1024, 1100, 4096, 1 << 16), (1, 1024, 1 << 16)):
                assert select(replace(kind, t=t, s=s), arch) in made, (d, v, kinds, t, s)
            general = select(long(d, v, **kinds), arch, any_shape=True)
            assert general in made and general == select(long(d, v, t="t", s="s", **kinds), arch)
            assert general.pair == (d == 256)


def test_what_a_pair_saves():
    """Clocks by the rules, of which the emulator's counts below are the proof."""
    for d, v, one, two in ((64, 64, 520, 328), (128, 128, 1032, 648), (192, 128, 1352, 872)):
        plan = Plan("bfloat16", d, v)
        assert clocks(plan)["shared memory"] == one and clocks(paired(plan))["shared memory"] == two


# Order of signals -------------------------------------------------------------------------------------------------

PAIR = paired(Plan("bfloat16", 128, 128))


@pytest.mark.parametrize("plan", [PAIR, replace(PAIR, stage_cap=2), paired(Plan("bfloat16", 192, 128, early=4))])
@pytest.mark.parametrize("blocks", (1, 2, 3))
def test_no_deadlock_and_no_overwriting(plan, blocks):
    assert checker.check(protocol(plan, blocks)) == []


def without(p, role, kind, *barrier):
    """The protocol in which the agents of a role miss these events."""

    def kept(agent, events):
        hit = lambda e: isinstance(e, kind) and e.barrier[: len(barrier)] == barrier  # noqa: E731
        return [e for e in events if agent[0] != role or not hit(e)]

    return p._replace(agents={agent: kept(agent, events) for agent, events in p.agents.items()})


BREAKS = {
    "a half of V not waited for": ("edge", Wait, "landed", "overwrite"),
    "one edge warp does not answer": ("edge", Arrive, "landed", "deadlock"),
    "a CTA frees its tensor memory before the other has finished": ("mma", Wait, "free", "overwrite"),
    "load does not wait for the leader's products": ("load", Wait, "kv", "overwrite"),
    "weights not waited for": ("mma", Wait, "probs", "overwrite"),
    "the rest of the weights never arrives": ("softmax", Arrive, "rest", "deadlock"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_dropped_signal_is_found(name):
    role, kind, ring, expected_fault = BREAKS[name]
    good = protocol(replace(PAIR, stage_cap=3), 2)
    broken = without(good, role, kind, ring)
    assert broken != good
    assert expected_fault in {fault.kind for fault in checker.check(broken)}


def test_bytes_of_one_half_are_not_enough():
    """A barrier that expects the bytes of one CTA lets the product start on half of its operands."""
    good = protocol(replace(PAIR, stage_cap=3), 2)
    counts = {b: n - (b[:2] == ("kv", "full")) for b, n in good.counts.items()}
    assert checker.check(good._replace(counts=counts))


# Compiled facts ---------------------------------------------------------------------------------------------------

PLANS = {
    "d128": choose(long()),
    "d128 sinks fp16": choose(long(dtype="float16", sinks=True)),
    "d192 128": choose(long(192, 128)),
    "d128 band": paired(choose(problem(128, band=True))),
    "d64": paired(choose(problem(64))),
}
COMPILED = ["d128", "d128 band"]


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in COMPILED else pytest.mark.prove) for n in PLANS])
def test_compiled_counts_are_the_plans(name):
    """And nothing spills: SlowKernel is an error in tests."""
    plan = PLANS[name]
    ptx, q, v = ptx_of(plan), plan.inner // 64, plan.inner_value // 2 // plan.value_piece
    counts = expected(plan) | {
        "ids": (r"shfl\.sync", 4),  # one more than alone: the load warp slices the product by its rank
        "commit": (r"tcgen05\.commit\S+multicast", 8),  # one less: K is freed by the commit of the next product
        "TMA loads": (r"cp\.async\.bulk\.tensor\S+shared::cluster\.global\S+cta_group::2", 3 * q + v),
        "of one CTA": (r"tcgen05\.\S+cta_group::1", 0),
        "cluster barriers": (r"barrier\.cluster\.wait", 1 + 6),  # at the start; at the end of each role
        "arrivals at the leader": (r"mapa\.shared::cluster\S+ \w+, %r\d+, 0;", 2 + 1 + 4),  # softmax, edge, correction
    }
    wrong = {what: (len(re.findall(p, ptx)), n) for what, (p, n) in counts.items() if len(re.findall(p, ptx)) != n}
    assert not wrong, wrong
    assert choose(long()).pair and plan.pair


# Values -----------------------------------------------------------------------------------------------------------


def passes(case, dtype="bfloat16", seed=0, **fields):
    inp, got, report = forward(plan_of(case, dtype, **fields), bind, case, seed)
    report.check()
    assert not {f.kind for f in report.findings} & {"empty_commit", "duplicate_issue", "missing_tcgen05_fence"}
    check(got, case, inp, dtype)
    return got


FULL = [
    Case("even", b=1, t=512, s=256, n=1, k=1, d=128),
    Case("ragged", b=2, t=600, s=300, n=2, k=1, d=128, q_lens=(600, 77), kv_lens=(270, 300)),
    Case("one CTA idle", b=1, t=100, s=200, n=1, k=1, d=128),
    Case("one key", b=1, t=1, s=1, n=1, k=1, d=128),
    Case("no keys", b=2, t=130, s=200, n=1, k=1, d=128, kv_lens=(0, 5)),
    Case("padded", b=1, t=130, s=200, n=1, k=1, d=72, v=40, kv_lens=(150,)),  # the other half of V lies outside
]
BANDS = [
    Case("causal", b=1, t=600, s=600, n=1, k=1, d=128, causal=True),
    Case("window", b=1, t=600, s=700, n=1, k=1, d=128, window=(150, 60), bottom_right=True, kv_lens=(650,)),
    Case("more queries than keys", b=1, t=520, s=130, n=1, k=1, d=128, causal=True, bottom_right=True),
]
DEPTHS = [
    Case("d192", b=1, t=300, s=500, n=1, k=1, d=192, v=128, kv_lens=(270,)),  # O over Q
    Case("d64", b=1, t=300, s=300, n=1, k=1, d=64, kv_lens=(270,)),  # V in rows of 64 bytes
]


CHECKED = {"ragged": (1, 2), "one key": (1,), "no keys": (2,), "causal": (1,), "window": (2,)}


@needs_compiler
@pytest.mark.parametrize(
    ("case", "seed"),
    [pytest.param(c, s, id=f"{c.name}-{s}") for c in (*FULL, *BANDS, *DEPTHS) for s in CHECKED.get(c.name, ())],
)
def test_forward_is_attention(case, seed):
    passes(case, seed=seed)


@needs_compiler
@pytest.mark.prove
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", [*FULL, *BANDS, *DEPTHS], ids=lambda case: case.name)
def test_forward_is_attention_in_many_schedules(case, seed):
    passes(case, seed=seed)


@needs_compiler
@pytest.mark.parametrize("case", [pytest.param(BANDS[1], marks=pytest.mark.prove), FULL[1]], ids=lambda case: case.name)
def test_a_pair_computes_the_bits_of_one_cta(case):
    """Row by row the same sums in the same order, so which plan serves a call does not show in its result."""
    one = choose(Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v))
    assert not one.pair
    _, want, _ = forward(one, bind, case)
    got = passes(case)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


@needs_compiler
@pytest.mark.parametrize("blocks", (1, 4))
def test_no_number_of_blocks_deadlocks(blocks):
    """Up to 2 stages + 1 uses and more: every phase of every ring comes round."""
    passes(Case("blocks", b=1, t=300, s=128 * blocks, n=1, k=1, d=128), seed=blocks)


@needs_compiler
def test_values_lie_where_they_belong():
    """Scores are equal and each value names its key and column: a mean of integers, exact, shows every wrong row."""
    case = Case("mean", b=1, t=512, s=128, n=1, k=1, d=128, fill="integers", scale=1e-30)

    def fill(inp):
        inp.value[...] = 128 * (np.arange(case.s)[None, :, None, None] % 2) + np.arange(case.d)

    _, got, report = forward(plan_of(case), bind, case, fill=fill)
    report.check()
    want = 64 + np.arange(case.d)
    assert (got.out == np.broadcast_to(want, got.out.shape)).all()


@needs_compiler
def test_rows_are_their_own():
    """Each query sees one key only, whose value names it: a row or key in the wrong CTA shows."""
    case = Case("rows", b=1, t=512, s=512, n=1, k=1, d=128, window=(0, 0))

    def fill(inp):
        inp.value[...] = (np.arange(case.s) % 256)[None, :, None, None]

    inp, got, report = forward(plan_of(case), bind, case, fill=fill)
    report.check()
    assert (got.out == inp.value[:, :, :1]).all()


# Counts -----------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("name", "exp", "reads", "fills"),
    [("d128", 832, 512, 128), pytest.param("d128 band", 896, 512, 128, marks=pytest.mark.prove)],
)
def test_a_tile_takes_the_clocks_of_the_rules(name, exp, reads, fills):
    """Of a 128 x 128 tile, of either CTA: the target is 512 of operands, 640 with fills."""
    plan = PLANS[name]
    found = cycles(per_tile(plan, bind, ptx_of(plan), queries=512))
    assert found["tensor"] == 1024 and found["exp"] == exp + 8
    assert (found["mma.read"], found["tma.write"]) == (reads, fills)
    shared = sum(found[k] for k in ("mma.read", "tma.write", "load.shared", "store.shared"))
    assert shared == clocks(plan)["shared memory"], found


# Planted faults ---------------------------------------------------------------------------------------------------

BROKEN = {
    "bytes of one half expected": edit(
        r"(mov\.b32 \s*%r\d+, )32768(;\s*mbarrier\.arrive\.expect_tx)", r"\g<1>16384\2", 0
    ),
    "scores announced to the leader alone": edit(r"(mov\.b16 \s*%rs\d+, )3", r"\g<1>1", 0),
    "a stage of K freed in the leader alone": edit(r"(mov\.b16 \s*%rs\d+, )3", r"\g<1>1", 2),
    "weights announced in their own CTA": edit(
        r"mapa\.shared::cluster\.u32 there, (%r\d+), 0", r"mov.b32 there, \1", -1
    ),
    "no meeting at the end": drop(r"barrier\.cluster\.wait(\.aligned)?;", 1),
    "no meeting at the start": drop(r"barrier\.cluster\.wait(\.aligned)?;", 0),
    "both are the leader": edit(r"mov\.u32 \s*(%r\d+), %cluster_ctarank", r"mov.b32 \1, 0"),
    "the second half of V not waited for": edit(r"(done, \[%r\d+\]), 0(;\s*@!done)", r"\1, 1\2", -1),
    "the wait for a freed stage dropped": drop_wait(14),
}
QUICK = ("bytes of one half expected", "a stage of K freed in the leader alone", "the second half of V not waited for")


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.prove) for n in BROKEN])
def test_a_broken_pair_fails(name):
    case = Case("broken", b=1, t=400, s=700, n=1, k=1, d=128, kv_lens=(670,))
    with pytest.raises(AssertionError):
        for seed in range(3):
            inp, got, report = forward(plan_of(case), bind, case, seed, edit=BROKEN[name])
            report.check()
            check(got, case, inp, "bfloat16")
