"""The Blackwell forward runs in the emulator, from its PTX and what bind says. It has never run on silicon.

Inputs past every length are NaN, results start as poison, schedules are adversarial where a seed is given.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from compare import check
from emulated import forward
from problems import BY_NAME, Case
from verifier.mutate import drop, drop_wait, edit

from jax_fa4.kernels.sm100.fwd.plan import bind, choose
from jax_fa4.spec import Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16", **fields):
    problem = Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype)
    plan = choose(problem)
    few = {"workers": min(plan.workers, 3)}  # on a card as many as SMs: most would find nothing to do here
    return replace(plan, **{**few, **fields})


def passes(case, dtype="bfloat16", seed=0, **fields):
    inp, got, report = forward(plan_of(case, dtype, **fields), bind, case, seed)
    report.check()
    check(got, case, inp, dtype)


# Few plans (each is a compile), many problems.
SAME_PLAN = [
    "len_1x1", "len_127x129", "len_1x300", "len_200x1", "heads_7_1", "causal_129x127", "bottom_200x1", "causal_1000",
    "window_17_5", "window_0_0", "window_left", "window_right", "window_far",
    "lengths", "lengths_zero", "lengths_bottom", "lengths_window", "scale_large", "fill_both_causal", "spread_4",
]  # fmt: skip


@pytest.mark.parametrize("name", [*SAME_PLAN, "sinks", "sinks_dead_rows", "soft_cap", "soft_cap_hard",
                                  "segments", "segments_causal", "segments_disjoint"])  # fmt: skip
def test_forward_is_attention(name):
    passes(BY_NAME[name])


DEPTHS = [
    Case("d128", b=1, t=300, s=600, n=2, k=1, d=128, kv_lens=(521,)),
    Case("d128_causal", b=1, t=400, s=400, n=1, k=1, d=128, causal=True),
    Case("d192_128", b=1, t=130, s=500, d=192, v=128, kv_lens=(401,)),
    Case("d72_40", b=1, t=130, s=200, d=72, v=40, kv_lens=(150,)),
    Case("d64_128", b=1, t=130, s=200, d=64, v=128, kv_lens=(150,)),
]


@pytest.mark.parametrize("case", DEPTHS, ids=lambda case: case.name)
def test_forward_at_other_depths(case):
    passes(case)


MANY = Case("many", b=2, t=300, s=700, n=2, k=1, d=128, window=(400, 60), bottom_right=True, q_lens=(300, 140),
            kv_lens=(700, 391), sinks=True)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_everything_together_in_any_schedule(seed):
    passes(MANY, "float16", seed)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(200))
def test_everything_together_in_many_schedules(seed):
    passes(MANY, "float16", seed)


SEGMENTS = Case("all_kinds", b=2, t=300, s=420, n=2, k=1, d=128, window=(250, 20), bottom_right=True, q_lens=(300, 140),
                kv_lens=(420, 170), scale=0.2, soft_cap=4.0, sinks=True, segments=3)  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_segments_with_everything_else(seed):
    passes(SEGMENTS, "float16", seed)


OUT_BY_16 = {
    "a cap": Case("segments_cap", b=2, t=200, s=260, n=1, k=1, soft_cap=4.0, segments=3, kv_lens=(260, 130)),
    "sinks": Case("segments_sinks", b=2, t=140, s=260, n=1, k=1, d=192, v=104, sinks=True, segments=3, q_lens=(140, 0)),
}


@pytest.mark.parametrize("name", OUT_BY_16)
def test_outputs_that_leave_by_16_columns(name):
    plan = plan_of(OUT_BY_16[name])
    assert plan.last_columns == 16 and not plan.splits
    passes(OUT_BY_16[name], "float16" if name == "a cap" else "bfloat16", seed=1)


def test_a_warp_of_two_segments_meets_blocks_of_one():
    """Each key block is of one segment, the rows of a warp are not: still masked."""
    case = Case("mixed_rows", b=1, t=100, s=256, n=1, k=1, segments=2)

    def fill(inp):
        inp.q_segments[...], inp.kv_segments[...] = np.arange(100) // 20 % 2, np.arange(256) // 128

    inp, got, report = forward(plan_of(case), bind, case, fill=fill)
    report.check()
    check(got, case, inp, "bfloat16")


def test_segments_cost_only_their_own_blocks():
    """Packed sequences of 256: a pair of query tiles meets two of eight key blocks, not eight."""
    case = Case("packed", b=1, t=1024, s=1024, n=1, k=1, segments=4)

    def packed(inp):
        inp.q_segments[...] = inp.kv_segments[...] = np.arange(1024) // 256

    def together(inp):
        inp.q_segments[...] = inp.kv_segments[...] = 7

    plan = plan_of(case)
    cycles = [
        forward(plan, bind, case, fill=fill)[2].check().counters.total("tensor.cycles") for fill in (packed, together)
    ]
    assert cycles == [n * 512 for n in (4 * 2 * 2, 4 * 2 * 8)]  # pairs x tiles x blocks, at depth 64 512 clocks each


@pytest.mark.parametrize("blocks", range(1, 8))
def test_no_number_of_blocks_deadlocks(blocks):
    """Up to 2 stages + 1: every phase of every ring comes round."""
    passes(Case("blocks", b=1, t=130, s=128 * blocks, n=1, k=1), seed=blocks, stage_cap=3)


def test_integers_are_exact():
    """Every row has equal scores and integer values: O is a mean of integers, exact in float32, so layouts show."""
    case = Case("mean", b=1, t=256, s=256, n=1, k=1, fill="integers", scale=1e-30)
    inp, got, report = forward(plan_of(case, "float16"), bind, case)
    report.check()
    want = inp.value.mean(axis=1, keepdims=True).swapaxes(1, 2)[:, 0][:, None].repeat(256, 1)
    np.testing.assert_array_equal(got.out[:, :, 0], want.astype(np.float16)[:, :, 0])


def rescales(report):
    """Stores to tensor memory of the correction warps: 4 for each warp, tile and block whose O is rescaled."""
    return report.counters.instructions["correct"]["tcgen05.st"]


def run_lazy(case, lazy, **how):
    plan = plan_of(case, lazy=lazy)
    inp, got, report = forward(plan, bind, case, roles=plan.roles, **how)
    report.check()
    check(got, case, inp, "bfloat16")
    return rescales(report)


def test_lazy_rescaling_changes_nothing_but_work():
    """tau 8 against 0.5 on random inputs: the same result within the rule, fewer rescales."""
    case = Case("tau", b=1, t=256, s=1024, n=1, k=1, d=64, spread=1.5)
    assert run_lazy(case, 8.0) < run_lazy(case, 0.5) / 2


@pytest.mark.parametrize("step", (-7.9, 3.9, 7.9, 8.5, 30.0))
def test_a_maximum_that_creeps(step):
    """Block after block the maximum grows by `step` log2 units, below tau and above: weights up to 2^8 are summed."""
    case = Case("creep", b=1, t=256, s=128 * 6, n=1, k=1, d=64, scale=1.0)

    def fill(inp):
        inp.query[...], inp.query[..., 0] = 0, 1.0
        visited = 5 - np.arange(case.s) // 128
        level = step * np.log(2) * (visited if step > 0 else visited - 5)
        inp.key[..., 0] = (level[None, :, None] + 0.1 * inp.key[..., 1]).astype(np.float32)
        from problems import rounded

        inp.key[...] = rounded(inp.key, "bfloat16")

    count = run_lazy(case, 8.0, fill=fill)
    per_block = 8 * case.d // 16  # warps x tiles x stores
    expected = {-7.9: 0, 3.9: 1, 7.9: 2, 8.5: 5, 30.0: 5}[step]
    assert expected * per_block <= count <= (expected + 1) * per_block, (count, per_block)


# Faults that only execution shows; each must fail the run, by an error finding, a deadlock or a wrong number.
BROKEN = {
    "no proxy fence before O is stored": drop(r"fence\.proxy\.async[^\n]*", -1),
    "no proxy fence behind the zeroed edge": drop(r"fence\.proxy\.async[^\n]*", 0),
    "S used without wait::ld": lambda ptx: _drop_before(ptx, r"tcgen05\.wait::ld[^\n]*", "ex2"),
    "P handed over without wait::st": drop(r"tcgen05\.wait::st[^\n]*", -1),
    "first product adds": edit(r"setp\.ne\.b32 add, %r\d+, 0", "setp.ne.b32 add, 1, 0", 0),
    "edge rows not zeroed": drop(r"st\.shared\.v4\.b32[^\n]*", 0),
    "no CTA barrier": drop(r"bar\.sync \s*0;"),
    "wrong LN2": edit(r"0f3F317218", "0f3F317318"),
    "a mask bit off": edit(r"(shl\.b32 %r\d+, )-1", r"\g<1>-2"),
    "polynomial's power of two": edit(r"(shl\.b32 \s*%r\d+, %r\d+, )23", r"\g<1>22"),
    "the wait for Q and K dropped": drop_wait(0),
    "a wait between roles dropped": drop_wait(5),
}


def _drop_before(ptx, pattern, mark):
    """The last match in front of the first `mark`."""
    import re

    head, tail = ptx[: ptx.index(mark)], ptx[ptx.index(mark) :]
    at = list(re.finditer(pattern, head))[-1]
    return head[: at.start()] + head[at.end() :] + tail


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_fails(name):
    case = Case("broken", b=1, t=200, s=300, n=1, k=1, d=64, kv_lens=(270,))
    plan = plan_of(case)
    with pytest.raises(AssertionError):
        for seed in range(3):
            inp, got, report = forward(plan, bind, case, seed, edit=BROKEN[name])
            report.check()
            check(got, case, inp, "bfloat16")


# Few CTAs, so that each takes several pairs: rings go on where the pair before left them.
AGAIN = {
    "ragged": (
        Case("again_ragged", b=2, t=300, s=300, n=2, k=1, kv_lens=(300, 130), q_lens=(300, 140)),
        {"workers": 3},
    ),
    "one block": (Case("again_one", b=1, t=600, s=100, n=3, k=3), {"workers": 2}),
    "edges in any stage": (Case("again_edge", b=1, t=600, s=520, kv_lens=(450,)), {"workers": 2, "stage_cap": 3}),
    "depth 128": (Case("again_128", b=1, t=300, s=300, d=128, sinks=True), {"workers": 2}),
    "more CTAs than pairs": (Case("again_few", b=1, t=257, s=130, n=1, k=1), {"workers": 5}),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_cta_takes_several_pairs(name):
    case, fields = AGAIN[name]
    passes(case, seed=3, **fields)


def test_every_order_of_pairs_takes_each_once():
    """Sections of one key head, and of several, against head by head: the same bits in other CTAs."""
    case = Case("order", b=2, t=600, s=300, n=4, k=2, causal=True, kv_lens=(300, 200))
    given = []
    for fields in ({"sections": True}, {"sections": False}, {"workers": 3, "sections": True}, {"skips": False}):
        inp, got, report = forward(plan_of(case, **fields), bind, case)
        report.check()
        check(got, case, inp, "bfloat16")
        given.append(got)
    for other in given[1:]:
        np.testing.assert_array_equal(other.out, given[0].out)
        np.testing.assert_array_equal(other.lse, given[0].lse)


@pytest.mark.parametrize(
    ("case", "halves", "whole"),
    [
        (Case("skip_causal", b=1, t=512, s=512, n=1, k=1, causal=True), (2 * 2 - 1) + (2 * 4 - 1), 2 * 2 + 2 * 4),
        (Case("skip_window", b=1, t=512, s=512, n=1, k=1, window=(128, 0)), (2 * 2 - 1) + (2 * 3 - 2), 2 * 2 + 2 * 3),
        (
            Case("skip_dead", b=1, t=512, s=512, n=1, k=1, q_lens=(100,)),
            (4 + 1) + 2,
            8 + 2,
        ),  # one block where nobody is
        (Case("skip_none", b=1, t=256, s=512, n=1, k=1), 2 * 4, 2 * 4),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_halves_of_pairs_that_see_nothing_are_not_computed(case, halves, whole):
    """Tensor cycles say how many 128 x 128 tiles were: 512 each at depth 64."""
    for skips, tiles in ((True, halves), (False, whole)):
        plan = plan_of(case, skips=skips, workers=0)
        inp, got, report = forward(plan, bind, case)
        report.check()
        check(got, case, inp, "bfloat16")
        assert report.counters.total("tensor.cycles") / 512 == tiles


# Few queries against many keys: heads of a group as rows, keys shared by P CTAs, and the kernel that combines them.
FEW = {
    "one query": Case("decode", b=2, t=1, s=900, n=8, k=2, d=128, kv_lens=(900, 0)),
    "some, sinks": Case("decode_3", b=2, t=3, s=700, n=6, k=2, causal=True, bottom_right=True, sinks=True,
                        kv_lens=(690, 300)),
    "sinks and a cap": Case("decode_cap", b=1, t=2, s=520, n=4, k=2, kv_lens=(500,), soft_cap=4.0, sinks=True),
    "a group of seven": Case("decode_60", b=1, t=60, s=520, n=7, k=1, d=72, v=40, window=(200, 3), bottom_right=True),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_few_queries_against_many_keys(name):
    plan = plan_of(FEW[name])
    assert plan.splits and plan.packed
    passes(FEW[name], seed=1)


def test_split_keys_of_long_queries():
    """Parts without a key of some rows, or of all; the sink counts once."""
    case = Case("split", b=1, t=300, s=900, n=1, k=1, d=128, causal=True, kv_lens=(800,), sinks=True)
    passes(case, seed=1, splits=True, sections=False)


def test_parts_are_a_run_time_number():
    """One object serves every batch and length: P alone differs."""
    plan = choose(Problem(Case("x").spec, 1, 1, 4096, 8, 1, 64, 64))
    ends = [{"B": b, "T": 1, "S": s, "N": 8, "K": 1} for b, s in ((1, 512), (1, 16384), (200, 16384))]
    parts = [plan.extents(shapes)["P"] for shapes in ends]
    assert parts == [2, 64, 5]
    grids = [bind(plan, plan.extents(shapes))[0].grid[0] for shapes in ends]
    assert grids == [p * shapes["B"] for p, shapes in zip(parts, ends, strict=True)]
