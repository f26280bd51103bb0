"""Hopper objects run in the emulator, from their PTX and what bind says: the forward and the backward preprocess.

Inputs past every length are NaN, results start as poison, schedules are adversarial where a seed is given.
"""

import functools
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from compare import Result, check, oracle
from emulator import Uninitialised, run
from launch import launches, to_emulator
from problems import BY_NAME, DTYPES, Case, inputs

from jax_fa4.ffi.buffers import FLOATS, VALUES
from jax_fa4.ffi.compile import build
from jax_fa4.kernels import select
from jax_fa4.kernels.passes.plan import BwdPre
from jax_fa4.kernels.passes.plan import bind as bind_pre
from jax_fa4.kernels.sm90.fwd import kernel
from jax_fa4.kernels.sm90.fwd.plan import Plan, bind, tiles_for
from jax_fa4.spec import Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


@functools.cache
def ptx_of(plan):
    return build(plan, keep_ptx=True).ptx


def raw(x, dtype):
    """As the emulator takes it: bfloat16 as its bits."""
    x = x.astype(DTYPES[dtype])
    return x.view(np.uint16) if dtype == "bfloat16" else x


def value_operands(case):
    """ints and floats as ffi/buffers.VALUES lays them out."""
    ints = np.zeros(VALUES.example(case.b), np.int32)
    ints[VALUES.left], ints[VALUES.right] = case.sides
    q_len, kv_len = case.lengths
    for b in range(case.b):
        at = VALUES.example(b)
        ints[at + VALUES.q_len], ints[at + VALUES.kv_len] = q_len[b], kv_len[b]
        ints[at + VALUES.offset] = case.offset[b]
    floats = np.zeros(FLOATS, np.float32)
    floats[VALUES.scale], floats[VALUES.soft_cap] = case.scale_value, case.soft_cap or 0
    return ints, floats


def forward(case, dtype, seed=0, fill=lambda inp: None, by_shape=False, **fields):
    """(Result with out and lse, the emulator's report) of the selected plan, or of one with these fields.

    fill: changes the inputs in place. by_shape: the plan that this shape gets, not that of long sequences.
    """
    spec = case.spec
    if fields:
        kinds = {name: getattr(spec, name) for name in ("band", "segments", "soft_cap", "sinks")}
        plan = Plan(dtype, case.d, case.v, **{**kinds, **tiles_for(case.d, case.v), **fields})
    else:
        problem = Problem(spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype)
        plan = select(problem, "sm_90a", any_shape=not by_shape)
        if plan.workers:  # on a card as many as SMs: most would find nothing to do here
            plan = replace(plan, workers=3)
    inp = inputs(case, dtype)
    fill(inp)
    q_len, kv_len = case.lengths
    q, k, v = inp.query.copy(), inp.key.copy(), inp.value.copy()
    for b in range(case.b):
        q[b, q_len[b] :] = k[b, kv_len[b] :] = v[b, kv_len[b] :] = np.nan
    ints, floats = value_operands(case)
    given = {"q": raw(q, dtype), "k": raw(k, dtype), "v": raw(v, dtype), "ints": ints, "floats": floats}
    given |= {"q_segments": inp.q_segments, "kv_segments": inp.kv_segments}
    given["sinks"] = None if inp.sinks is None else inp.sinks.astype(np.float32)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    e = plan.extents(shapes)
    for b in plan.outputs:
        kind = raw(np.zeros(0), dtype).dtype if b.name == "out" else np.dtype(np.float32)
        memory[b.name] = Uninitialised(b.sized(e), kind)
    for launch in launches(plan, bind, shapes, ptx_of(plan)):
        report = run(launch.ptx, to_emulator(launch), memory, seed=seed)
        report.check()
        memory |= {name: report.outputs[name] for name in ("part", "part_lse") if name in memory}
    got = report.outputs["out"]
    got = got.view(DTYPES[dtype]) if dtype == "bfloat16" else got
    none = [None] * (len(Result._fields) - 2)
    return inp, Result(got.astype(np.float64), report.outputs["lse"].astype(np.float64), *none), report


# Few plans (each is a compile), many problems.
SAME_PLAN = [
    "len_1x1", "len_127x129", "len_1x300", "heads_7_1", "causal_129x127", "bottom_200x1", "causal_1000",
    "window_17_5", "window_0_0", "window_left", "window_right", "window_far",
    "lengths", "lengths_zero", "lengths_bottom", "lengths_window", "scale_large", "fill_both_causal", "spread_4",
]  # fmt: skip
OTHER_PLANS = ["segments", "segments_disjoint", "soft_cap", "sinks_dead_rows"]
DEPTHS = [
    Case("depth_96", t=130, s=140, d=96, kv_lens=(140, 77)),
    Case("depth_128", t=200, s=300, n=2, k=1, d=128, kv_lens=(300, 77)),
    Case("depth_128_causal", t=200, s=300, n=2, k=1, d=128, causal=True, bottom_right=True, kv_lens=(300, 77)),
    Case("depth_96_causal", t=130, s=140, d=96, causal=True, kv_lens=(140, 77)),
    Case("depth_192_128", b=1, t=130, s=300, d=192, v=128, kv_lens=(201,)),
    Case("depth_256_causal", b=1, t=130, s=200, d=256, n=2, k=1, causal=True),
    Case("depth_72_40", b=1, t=130, s=200, d=72, v=40, kv_lens=(150,)),
    Case("depth_64_128", b=1, t=130, s=200, d=64, v=128, kv_lens=(150,)),
]
EVERYTHING = Case(
    "all_kinds", b=2, t=200, s=300, n=4, k=2, d=128, window=(150, 20), bottom_right=True, q_lens=(200, 140),
    kv_lens=(300, 170), scale=0.2, soft_cap=4.0, sinks=True, segments=3,
)  # fmt: skip


def passes(case, dtype="bfloat16", **how):
    inp, got, report = forward(case, dtype, **how)
    report.check()
    check(got, case, inp, dtype)


@pytest.mark.parametrize("name", SAME_PLAN + OTHER_PLANS)
def test_forward_is_attention(name):
    passes(BY_NAME[name])


@pytest.mark.parametrize("case", DEPTHS, ids=lambda case: case.name)
def test_forward_at_other_depths(case):
    passes(case)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_kind_together_in_any_schedule(seed):
    passes(EVERYTHING, "float16", seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("s", [100, 200, 300, 520])
def test_turns_leave_no_arrival_over(s, seed):
    passes(Case("turns", b=1, t=130, s=s, n=1, k=1), seed=seed, turns=True)


HUGE = 133120.0  # a bfloat16 that is no power of two
# Keys of the tile visited first (keys 128..) and of the other: with queries of HUGE, logits of 64 * HUGE * scale * key.
STEEP = {
    "one peak, met first": ([HUGE, 1.0], [1.0, -HUGE]),
    "one peak, met last": ([1.0, -1.0], [HUGE, 1.0]),
    "ties in both": ([HUGE, -1.0], [HUGE, HUGE]),
    "all far below 0": ([-HUGE, -HUGE], [-HUGE, -131072.0]),
    "from below to 0": ([-HUGE, -HUGE], [0.0, 0.0]),
    "from 0 upwards": ([0.0, 0.0], [HUGE, 0.0]),
    "just past the limit": ([16.0, 15.9375], [15.875, 16.0]),
}


def steep(case, few):
    """Inputs whose every score is exact: queries HUGE, one number a key; the rest of the keys repeat it."""

    def fill(inp):
        inp.query[:] = HUGE
        for first, values in ((128, few[0]), (0, few[1])):
            of_keys = inp.key[:, first : first + 128]
            of_keys[:] = values[1]
            of_keys[:, :1] = values[0]

    return fill


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_key_with_a_huge_logit(dtype):
    """The rounding of peak * scale is thousands of steps of the exponent here; O is V all the same."""
    top = HUGE if dtype == "bfloat16" else 65504.0

    def fill(inp):
        for x in (inp.query, inp.key, inp.value):
            x[:] = top

    case = Case("huge", b=1, t=1, s=1, n=1, k=1)
    _, got, report = forward(case, dtype, fill=fill)
    report.check()
    assert (got.out == top).all()
    np.testing.assert_allclose(got.lse, 64 * top**2 * 0.125, rtol=3e-7)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("scale", [0.125, 0.1])
@pytest.mark.parametrize("name", STEEP)
def test_huge_logits_give_the_mean_of_their_peaks(name, scale, sinks):
    """Logits apart by at least their own spacing: the keys at the peak share the weight, in whichever tile they are."""
    case = Case("steep", b=1, t=3, s=256, n=1, k=1, scale=scale, sinks=sinks)
    inp, got, report = forward(case, "bfloat16", fill=steep(case, STEEP[name]))
    report.check()
    logits = scale * np.einsum("td,sd->ts", inp.query[0, :, 0], inp.key[0, :, 0])
    more = np.broadcast_to(inp.sinks if sinks else np.array([-np.inf]), (3, 1))
    top = np.maximum(logits.max(axis=1, keepdims=True), more)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True) + np.exp(more - top)
    np.testing.assert_allclose(got.out[0, :, 0], weights @ inp.value[0, :, 0] / total, atol=2e-2)
    np.testing.assert_allclose(got.lse[0, 0], (top + np.log(total))[:, 0], rtol=3e-7)


THREE = {"rows": 192, "groups": 3, "registers": (32, 160), "overlap": False}
TWO_CTAS = {"rows": 64, "groups": 1, "registers": (24, 232), "blocks": 2}
THREE_CTAS = {"rows": 64, "groups": 1, "registers": (24, 136), "blocks": 3, "keys": 96, "halfway": True, "slack": 8.0}
THREE_CTAS |= {"told": True, "bits": True, "workers": 5}
# With 24 registers the producer of a band spills 12 to 24 bytes here.
AHEAD = {"turns": True, "workers": 2, "registers": (40, 232)}
VARIANTS = {
    "workers": {"workers": 3},
    "workers sections turns": {"workers": 5, "sections": True, "turns": True},
    "sections chains": {"sections": True, "chains": 4},
    "three": THREE,
    "three turns workers": THREE | {"turns": True, "workers": 2, "sections": True, "chains": 2},
    "three narrow": {"rows": 192, "groups": 3, "registers": (32, 160), "keys": 80, "turns": True},
    "two CTAs": TWO_CTAS,
    "two CTAs workers": TWO_CTAS | {"workers": 4, "chains": 4},
    "slack": {"slack": 8.0},
    "slack 0 three": THREE | {"slack": 0.0},
    "fma": {"on_fma": 3, "slack": 8.0},
    "fma three": THREE | {"on_fma": 16, "chains": 4},
    "not beside": {"overlap": False, "turns": True, "workers": 2},
    "held": AHEAD | {"held": True},
    "own three": THREE | {"own": True},
    "own three held turns": THREE | {"own": True, "overlap": True, "held": True, "turns": True, "workers": 3},
    "halfway": AHEAD | {"halfway": True},
    "halfway slack chains": {"halfway": True, "turns": True, "slack": 8.0, "chains": 4},
    "halfway fma": {"halfway": True, "on_fma": 5},
    "own three halfway": THREE | {"own": True, "overlap": True, "halfway": True, "turns": True, "workers": 3},
    "own three halfway slack 0": THREE
    | {"own": True, "overlap": True, "halfway": True, "turns": True, "workers": 3, "slack": 0.0, "chains": 2},
    "told": AHEAD | {"told": True, "quick": True},
    "bits narrow": {"keys": 80, "bits": True},
    "bits of two words": {"keys": 192, "bits": True},
    "three CTAs told bits": THREE_CTAS,
    "two CTAs told bits halfway": TWO_CTAS
    | {"told": True, "bits": True, "halfway": True, "slack": 8.0, "workers": 4, "quick": True},
    "own three halfway told bits": THREE
    | {"own": True, "overlap": True, "halfway": True, "turns": True, "workers": 3, "slack": 8.0}
    | {"told": True, "bits": True},
    "own narrow": {"own": True, "turns": True, "workers": 2, "keys": 64},
}
MANY = Case("many", b=2, t=330, s=300, n=2, k=1, causal=True, q_lens=(330, 140), kv_lens=(300, 170), bottom_right=True)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", VARIANTS)
def test_plan_variants_are_attention(name, seed):
    passes(MANY, seed=seed, **VARIANTS[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("row", [3, 11])
def test_one_row_alone_whose_peak_rises_beyond_the_slack(row, dtype):
    """Of a thread's two rows, 8 apart, either: the whole warp shrinks what it has, by 1 where nothing rose. In float16
    a weight of 2^16 is none."""

    def fill(inp):
        inp.query[:, :row] = inp.query[:, row + 1 :] = 0.0
        inp.query[:, row] = 4.0
        inp.key[:, 5] = 3.0  # met last; a logit of 96

    one = {"rows": 64, "groups": 1, "registers": (24, 240), "overlap": True, "halfway": True, "slack": 8.0}
    passes(Case("rises", b=1, t=64, s=256, n=1, k=1), dtype, fill=fill, **one)


STEPS = (0.0, 2.6, 4.01, 7.9, 8.0, 8.1, 16.0, -1.0, -8.5)  # of a row's peak from a tile to the next, in powers of two


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 3])
def test_peaks_that_climb_by_less_than_the_slack_and_by_more(groups, dtype):
    """Five tiles of keys. A peak is compared with the one that is kept, not the tile's before: a weight is at most
    2^8, which float16 holds, also of large values."""

    def fill(inp):
        inp.query[:] = inp.key[:] = 0.0
        climb = (np.resize(STEPS, 150) * 8 / np.log2(np.e)).astype(DTYPES[dtype])  # the scale is 1/8
        inp.query[:, :, :, 0] = climb[:, None]
        tile = 4 - np.arange(160) // 32  # keys are visited from the last to the first
        inp.key[:, :, 0, 0] = np.where(np.arange(160) % 32 == 11, tile, -3 * (np.arange(160) % 2) + tile - 1)
        if dtype == "float16":
            inp.value[:, :, :, ::2] = np.where(np.arange(160) % 3, 512.0, -512.0)[:, None, None]

    how = {"rows": 64 * groups, "groups": groups, "registers": (24, 240) if groups == 1 else (32, 160), "keys": 32}
    case = Case("climbs", b=1, t=150, s=160, n=1, k=1)
    inp, got, report = forward(case, dtype, fill=fill, halfway=True, own=groups > 1, slack=8.0, **how)
    report.check()
    check(got, case, inp, dtype)
    np.testing.assert_allclose(got.lse, oracle(case, inp)[0].lse, rtol=5e-7, atol=5e-7)


def test_a_tile_s_weights_are_added_up_before_they_meet_the_total():
    """2048 keys of one weight, exp(-1/2): added to the total one by one, half of the rows' log-sum-exp was off by
    5e-6, and by 4e-3 at a million keys."""

    def fill(inp):
        inp.query[:], inp.key[:] = 0.0, 0.0
        inp.query[..., 0], inp.key[..., 0] = 1.0, -4.0
        inp.key[:, -1, :, 0] = 0.0  # the peak, in the first tile

    case = Case("one weight", b=1, t=64, s=2048, n=1, k=1)
    one = {"rows": 64, "groups": 1, "registers": (24, 240), "halfway": True, "slack": 8.0}
    inp, got, report = forward(case, "bfloat16", fill=fill, **one)
    report.check()
    np.testing.assert_allclose(got.lse, oracle(case, inp)[0].lse, rtol=0, atol=1.5e-6)


HIDDEN_FIRST = [
    Case("causal", b=3, t=70, s=70, n=1, k=1, causal=True, q_lens=(70, 70, 0), kv_lens=(0, 1, 70), spread=3.0),
    Case("both", b=2, t=100, s=140, n=1, k=1, window=(20, 5), q_lens=(100, 60), kv_lens=(140, 70), spread=3.0),
    Case("bottom", b=2, t=140, s=100, n=1, k=1, window=(33, 0), bottom_right=True, kv_lens=(1, 100), spread=3.0),
]


@pytest.mark.parametrize("case", HIDDEN_FIRST, ids=lambda case: case.name)
def test_rows_of_which_a_slack_s_first_tiles_are_hidden(case):
    """Tiles of 32 keys: some rows of a warp see none of the first ones, others none of the last."""
    passes(case, "float16", seed=1, rows=64, groups=1, registers=(24, 240), keys=32, halfway=True, slack=8.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_no_number_leaves_those_beside_it_alone(bad):
    """It moves in each step, and its warp with it: all other rows by 1."""

    def fill(inp):
        inp.query[:, 13, :, 3] = inp.query[:, 40, :, 0] = bad

    how = {"rows": 64, "groups": 1, "registers": (24, 240), "keys": 32, "halfway": True, "slack": 8.0}
    case = Case("beside", b=1, t=64, s=130, n=1, k=1, causal=True, spread=3.0)
    (_, whole, _), (_, got, _) = (forward(case, "float16", **how, **more) for more in ({}, {"fill": fill}))
    others = np.delete(np.arange(64), (13, 40))
    assert np.isnan(got.out[0, [13, 40]]).all() and np.isnan(got.lse[0, 0, [13, 40]]).all()
    np.testing.assert_array_equal(got.out[0, others], whole.out[0, others])
    np.testing.assert_array_equal(got.lse[0, 0, others], whole.lse[0, 0, others])


TRIPS = [
    Case("trips_full", b=2, t=330, s=300, n=2, k=1, q_lens=(330, 140), kv_lens=(300, 170)),
    Case("trips_window", b=1, t=400, s=400, n=2, k=1, window=(100, 0)),
    Case("trips_dead", b=2, t=200, s=200, n=1, k=1, causal=True, q_lens=(200, 0), kv_lens=(70, 200)),
]


@pytest.mark.parametrize("case", TRIPS, ids=lambda case: case.name)
def test_warpgroups_pass_by_tiles_that_their_rows_do_not_see(case):
    """Rows of a tile past the last query, beyond the diagonal or out of the window: their warpgroup starts nothing."""
    passes(case, seed=1, **VARIANTS["own three held turns"])


def test_rows_that_do_not_exist_cost_one_tile_of_keys():
    """64 queries in a tile of 192, two tiles of keys: two of three warpgroups start one of two steps."""
    case = Case("few_rows", b=1, t=64, s=256, n=1, k=1)
    cycles = [forward(case, "bfloat16", **THREE, own=own)[2].counters.total("tensor.cycles") for own in (False, True)]
    assert cycles == [3 * 4 * 64 * 256 * 64 / 4096, 2 * 4 * 64 * 256 * 64 / 4096]


@pytest.mark.parametrize("causal", [False, True])
def test_a_front_and_a_tail_are_attention(causal, monkeypatch):
    """As where keys are many: of four heads the last alone is the tail."""
    monkeypatch.setattr(kernel, "TAIL_BYTES", 1)
    case = Case("dealt", b=2, t=450, s=200, n=2, k=2, causal=causal, bottom_right=True)
    plan = {"rows": 64, "groups": 1, "registers": (24, 240), "workers": 5}
    passes(case, **plan, chains=2)


@pytest.mark.parametrize("seed", [0, 1])
def test_query_tiles_are_told_once_their_place_is_free(seed):
    """Tiles of one step each: the load warp could tell of the third before the math warps have heard of the first."""
    plan = {"rows": 64, "groups": 1, "registers": (24, 232), "workers": 1, "told": True, "bits": True, "quick": True}
    passes(
        Case("told", b=2, t=330, s=100, n=1, k=1, causal=True, q_lens=(330, 140), kv_lens=(100, 70)), seed=seed, **plan
    )


SMALL = {"rows": 64, "groups": 1, "registers": (24, 240), "splits": True}
SPLIT = {
    "lengths": (Case("split_lengths", b=2, t=70, s=900, n=2, k=1, kv_lens=(900, 130), q_lens=(70, 3)), SMALL),
    "causal": (Case("split_causal", b=1, t=200, s=900, n=1, k=1, causal=True, bottom_right=True), SMALL),
    "sinks": (Case("split_sinks", b=1, t=2, s=700, n=3, k=3, sinks=True, kv_lens=(690,), d=72, v=40), SMALL),
    "sections": (
        Case("split_sections", b=2, t=130, s=900, n=2, k=1, causal=True, bottom_right=True, kv_lens=(900, 500)),
        SMALL | {"sections": True, "slack": 8.0, "chains": 4},
    ),
    "one query": (Case("decode", b=2, t=1, s=900, n=8, k=2, d=128, kv_lens=(900, 0)), SMALL | {"packed": True}),
    "one empty": (Case("decode_none", b=2, t=1, s=600, n=6, k=1, q_lens=(1, 0)), SMALL | {"packed": True}),
    "few, group of 7": (
        Case("few_7", b=2, t=5, s=600, n=14, k=2, causal=True, bottom_right=True, kv_lens=(600, 3), q_lens=(5, 4)),
        SMALL | {"packed": True},
    ),
    "few, two tiles, window": (
        Case("few_tiles", b=1, t=11, s=600, n=14, k=2, window=(200, 3), bottom_right=True, sinks=True, soft_cap=3.0),
        SMALL | {"packed": True, "keys": 64},
    ),
    "few, two warpgroups": (  # each multiplies rows that the other brought
        Case("few_groups", b=1, t=10, s=300, n=13, k=1),
        {"splits": True, "packed": True},
    ),
    "as chosen": (
        Case("decode_chosen", b=2, t=2, s=600, n=12, k=4, causal=True, bottom_right=True, kv_lens=(600, 555)),
        {"by_shape": True},
    ),
    "few, heads alone": (
        Case("few_alone", b=2, t=3, s=500, n=3, k=3, d=72, v=40, causal=True, bottom_right=True, sinks=True),
        SMALL | {"packed": True},
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_split_keys_are_combined(name):
    case, fields = SPLIT[name]
    passes(case, "float16" if "window" in name else "bfloat16", seed=1, **fields)


def test_segments_cost_only_their_own_tiles():
    """Packed sequences of 128: three of four key tiles are not loaded."""
    ids = np.repeat(np.arange(4, dtype=np.int32), 128)[None]
    case = Case("packed", b=1, t=512, s=512, n=1, k=1, segments=4)
    plan = select(Problem(case.spec, 1, 512, 512, 1, 1, 64, 64), "sm_90a")
    x = raw(np.random.default_rng(0).normal(size=(1, 512, 1, 64)), "bfloat16")
    ints, floats = value_operands(case)
    memory = {"q": x, "k": x, "v": x, "ints": ints, "floats": floats, "q_segments": ids}
    memory |= {"out": np.zeros_like(x), "lse": np.zeros((1, 1, 512), np.float32)}
    shapes = {"B": 1, "T": 512, "S": 512, "N": 1, "K": 1}
    cycles = []
    for kv_segments in (ids, np.zeros_like(ids)):
        (launch,) = launches(plan, bind, shapes, ptx_of(plan))
        report = run(launch.ptx, to_emulator(launch), {**memory, "kv_segments": kv_segments}).check()
        cycles.append(report.counters.total("tensor.cycles"))
    # One key tile for each of four query tiles, then four tiles for the one query tile whose id is 0: the same work.
    assert cycles == [4 * 2 * 2 * 128 * 128 * 64 / 4096] * 2  # FLOP of QK and PV, 4096 a cycle


@pytest.mark.parametrize(
    ("arch", "dtype", "v", "rows", "work"),
    [("sm_90a", "bfloat16", 128, 64, 128), ("sm_100a", "bfloat16", 96, 128, 96), ("sm_90a", "float16", 8, 64, 24)],
)
def test_backward_preprocess(arch, dtype, v, rows, work):
    """delta = rowsum(dO O) - dLSE and LSE log2(e); +inf and 0 in rows that see nothing; every padded row written."""
    plan = BwdPre(arch, dtype, v, rows, work)
    shapes, q_len = {"B": 2, "T": 130, "N": 3}, (130, 70)
    rng = np.random.default_rng(0)
    out, dout = (raw(rng.normal(size=(2, 130, 3, v)), dtype) for _ in range(2))
    lse, dlse = (rng.normal(size=(2, 3, 130)).astype(np.float32) for _ in range(2))
    lse[:, :, ::7] = -np.inf
    exact = [x.view(DTYPES[dtype]).astype(np.float64) for x in (out, dout)]
    want = np.einsum("btnv,btnv->bnt", *exact) - dlse
    alive = (np.arange(130) < np.array(q_len)[:, None])[:, None] & np.isfinite(lse)
    for x in (lse, dlse):
        x[1, :, 70:] = np.nan
    for x in (out, dout):
        x[1, 70:] = raw(np.array([np.nan]), dtype)[0]
    ints = np.array([0, 0, 130, 1, 0, 70, 1, 0], np.int32)
    memory = {"out": out, "dout": dout, "lse": lse, "dlse": dlse, "ints": ints}
    e = plan.extents(shapes)
    memory |= {b.name: Uninitialised(b.sized(e), np.dtype(np.float32)) for b in plan.outputs}
    (launch,) = launches(plan, lambda p, e: (bind_pre(p, e),), shapes, ptx_of(plan))
    report = run(launch.ptx, to_emulator(launch), memory, seed=1).check()
    assert (report.outputs["work"] == 0).all()
    two, delta = np.moveaxis(report.outputs["stats"].reshape(2, 3, -1, 2, rows), 3, 0).reshape(2, 2, 3, -1)
    assert two.shape[-1] == e["M"] * rows > 130
    assert np.isposinf(two[..., 130:]).all() and (delta[..., 130:] == 0).all()
    assert np.isposinf(two[..., :130][~alive]).all() and (delta[..., :130][~alive] == 0).all()
    np.testing.assert_allclose(two[..., :130][alive], lse[alive] * np.log2(np.e), rtol=1e-6)
    np.testing.assert_allclose(delta[..., :130][alive], want[alive], atol=1e-5 * v**0.5, rtol=1e-5)
