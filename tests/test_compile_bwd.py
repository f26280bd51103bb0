"""Hopper backward objects: facts of their builds, and their numbers and protocol in the emulator, without a GPU.

The three kernels of a call run one after the other from their PTX and what bind says. Inputs past every length are NaN,
results and scratch start as poison, schedules are adversarial where a seed is given.
"""

import functools
import importlib.util
import re
from dataclasses import replace

import numpy as np
import pytest
from compare import Result, check, oracle
from emulated import raw, value_operands
from emulator import Uninitialised, run
from launch import launches, to_emulator
from problems import BY_NAME, DTYPES, Case, inputs

from jax_fa4.kernels import select
from jax_fa4.kernels.common.tiles import key_tiles
from jax_fa4.kernels.sm90.bwd.order import alternating
from jax_fa4.kernels.sm90.bwd.plan import bind, section_of
from jax_fa4.mask import UNBOUNDED, Band
from jax_fa4.spec import Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


@functools.cache
def built(plan):
    from jax_fa4.ffi.compile import build

    return build(plan, keep_ptx=True)


def plan_of(case, dtype="bfloat16", **fields):
    spec = replace(case.spec, deterministic=fields.pop("deterministic", False))
    problem = Problem(spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype, "bwd")
    return replace(select(problem, "sm_90a"), **fields)


def operands(plan, case, inp):
    """By buffer name. out and lse are the exact ones, rounded; NaN wherever a length says that nothing is there."""
    q_len, kv_len = case.lengths
    exact, _ = oracle(case, inp)
    made = {"q": inp.query, "k": inp.key, "v": inp.value, "out": exact.out, "dout": inp.dout}
    made = {name: x.copy() for name, x in made.items()}
    lse, dlse = exact.lse.copy(), inp.dlse.copy()
    for b in range(case.b):
        for name, x in made.items():
            x[b, (kv_len if name in ("k", "v") else q_len)[b] :] = np.nan
        lse[b, :, q_len[b] :] = dlse[b, :, q_len[b] :] = np.nan
    made = {name: raw(x, plan.dtype) for name, x in made.items()}
    ints, floats = value_operands(case)
    made |= {"lse": lse.astype(np.float32), "dlse": dlse.astype(np.float32), "ints": ints, "floats": floats}
    return made | {"q_segments": inp.q_segments, "kv_segments": inp.kv_segments}


def backward(plan, case, seed=0, edit=lambda ptx: ptx, fill=lambda inp: inp, reports=None, **how):
    """(inputs, Result with dq, dk, dv, buffers after the call); every launch must end without a finding.

    fill: what to make of the inputs. reports: a list that gets those of the emulator.
    """
    inp = fill(inputs(case, plan.dtype))
    given = operands(plan, case, inp)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    e = plan.extents(shapes)
    half = raw(np.zeros(0), plan.dtype).dtype
    kinds = {plan.dtype: half, "float32": np.dtype(np.float32), "int32": np.dtype(np.int32)}
    memory |= {b.name: Uninitialised(b.sized(e), kinds[b.dtype]) for b in plan.outputs}
    for launch in launches(plan, bind, shapes, edit(built(plan).ptx)):
        report = run(launch.ptx, to_emulator(launch), memory, seed=seed, **how).check()
        memory |= {b.name: report.outputs[b.name] for b in plan.outputs}
        if reports is not None:
            reports.append(report)
    got = {}
    for name in ("dq", "dk", "dv"):
        got[name] = (memory[name].view(DTYPES[plan.dtype]) if half == np.uint16 else memory[name]).astype(np.float64)
    return inp, Result(*[got.get(name) for name in Result._fields]), memory


def passes(case, dtype="bfloat16", seed=0, resident=2, **fields):
    plan = plan_of(case, dtype, **fields)
    inp, got, memory = backward(plan, case, seed, resident=resident)
    check(got, case, inp, dtype)
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        assert (got.dq[b, q_len:] == 0).all() and (got.dk[b, kv_len:] == 0).all() and (got.dv[b, kv_len:] == 0).all()
    return plan, memory


# Few plans (each is a compile), many problems.
SAME_PLANS = [
    "len_1x1", "len_127x129", "len_1x300", "heads_7_1", "causal_129x127", "bottom_200x1", "window_17_5", "window_0_0",
    "window_left", "window_right", "window_far", "lengths", "lengths_zero", "lengths_bottom", "lengths_window",
    "scale_large",
]  # fmt: skip
OTHERS = [
    Case("d128_causal", b=1, t=130, s=200, n=2, k=1, d=128, causal=True, kv_lens=(170,), q_lens=(100,)),
    Case("d192_128", b=1, t=100, s=150, n=1, k=1, d=192, v=128, kv_lens=(130,)),
    Case("d256_causal", b=1, t=100, s=140, n=2, k=1, d=256, causal=True),
    Case("d72_40", b=1, t=130, s=150, n=1, k=1, d=72, v=40, q_lens=(125,)),
    Case("d136_200", b=1, t=100, s=80, n=1, k=1, d=136, v=200),
    Case("d128_causal_alone", b=1, t=130, s=200, n=1, k=1, d=128, causal=True, kv_lens=(170,), q_lens=(100,)),
]
EVERYTHING = Case(
    "all_kinds", b=2, t=150, s=300, n=4, k=2, d=64, window=(150, 20), bottom_right=True, q_lens=(150, 90),
    kv_lens=(300, 170), scale=0.2, soft_cap=4.0, segments=3,
)  # fmt: skip


@pytest.mark.parametrize("name", SAME_PLANS)
def test_backward_is_the_derivative(name):
    passes(BY_NAME[name])


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_backward_at_other_depths(case):
    passes(case)


@pytest.mark.parametrize(
    "case", [OTHERS[0], OTHERS[2], replace(EVERYTHING, name="d64", soft_cap=None, segments=0)], ids=lambda c: c.name
)
def test_warps_of_a_warpgroup_wait_for_one_anothers_slopes(case):
    """Nothing in PTX says that a wgmma waits for all four warps: dQ reads dS that they have laid down."""
    plan = plan_of(case)
    plan = plan if plan.apart else replace(plan, turns=True)
    assert plan.turns != plan.apart, "the two forms that have such a wait"
    backward(plan, case)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_kind_together_in_any_schedule(seed):
    passes(EVERYTHING, "float16", seed=seed)


APART = Case(
    "apart", b=2, t=150, s=150, n=2, k=1, d=256, window=(100, 20), bottom_right=True, q_lens=(150, 90),
    kv_lens=(150, 70), scale=0.2, soft_cap=4.0, segments=3,
)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_warpgroups_with_duties_apart_in_any_schedule(seed):
    """Every kind together, rows of Q, dO, K and V past a length NaN; by its last step each warpgroup has seen all."""
    passes(APART, "float16", seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("d, v", [(256, 256), (136, 128)])
def test_apart_ordered_takes_both_halves_in_turn(d, v, seed):
    """Two reduce warps count for each tile of keys, each its half of dQ in a count of its own."""
    case = Case("apart_ordered", b=1, t=130, s=200, n=1, k=1, d=d, v=v, causal=True)
    plan, memory = passes(case, deterministic=True, seed=seed, resident=2 + seed)
    assert plan.apart and plan.halves == 2
    seen = memory["turns"].reshape(-1, 2).tolist()
    assert seen == [[1, 1], [2, 2], [3, 3]]  # of query tiles that see one, two, three tiles of keys


def test_apart_ordered_sums_are_bitwise_equal_in_any_schedule():
    case = Case("apart_bitwise", b=1, t=70, s=200, n=1, k=1, d=192, v=128, causal=False)
    plan = plan_of(case, deterministic=True)
    assert different_sums(plan, case, resident=4) == 1


def different_sums(plan, case, **how):
    """How many dQ there are in four schedules."""
    return len({backward(plan, case, seed, **how)[2]["work"].tobytes() for seed in (0, 1, 2, 3)})


@pytest.mark.prove
def test_a_turn_given_up_before_the_addition_is_complete_shows_in_the_sums():
    case = Case("apart_early", b=1, t=70, s=200, n=1, k=1, d=192, v=128, causal=False)

    def hasty(ptx):
        return re.sub(r"cp\.async\.bulk\.wait_group\s+\d+;", "", ptx)

    assert different_sums(plan_of(case, deterministic=True), case, resident=4, edit=hasty) > 1


MIRRORED = [
    Case("mirrored_apart", b=1, t=130, s=200, n=2, k=2, d=192, v=128, causal=True),
    Case("mirrored", b=3, t=300, s=300, n=1, k=1, d=64, causal=True),
]


@pytest.mark.parametrize("case", MIRRORED, ids=lambda case: case.name)
def test_heads_in_reverse_take_every_turn_once_and_sum_alike(case):
    """The last half of the key heads has its first keys first and goes through queries from the last to the first."""
    sums = set()
    for seed in (0, 2):
        workers = {} if case.d > 128 else {"workers": 2}
        plan, memory = passes(case, deterministic=True, mirrored=1, seed=seed, resident=1 + seed, **workers)
        assert plan.mirrored == 1 and case.b * case.k >= 2, "a head in reverse"
        tiles = -(-case.t // plan.rows)
        counts = memory["turns"].reshape(case.b * case.n, tiles, -1)
        for m in range(tiles):
            assert (counts[:, m] == min(-(-(m + 1) * plan.rows // plan.keys), -(-case.s // plan.keys))).all()
        sums.add(memory["work"].tobytes())
    assert len(sums) == 1


ALTERNATES = [
    Case("alternates", b=1, t=150, s=260, n=3, k=1, d=128, causal=True),
    Case("alternates_window", b=1, t=300, s=280, n=2, k=1, d=64, window=(100, 0)),
    Case("alternates_d64", b=2, t=300, s=200, n=2, k=1, d=64, window=(200, 30), q_lens=(300, 250), kv_lens=(150, 200)),
]


@pytest.mark.parametrize(
    "case, turns",
    [(case, True) for case in ALTERNATES] + [(ALTERNATES[-1], False)],
    ids=["d128", "window", "d64", "step"],
)
def test_heads_that_share_keys_visit_each_query_tile_one_after_the_other(case, turns):
    """Two CTAs: some tiles of keys go through the queries descending, others ascending; with a window all ascend."""
    plan, _ = passes(case, seed=turns, workers=2, turns=turns)
    tiles, group = -(-case.s // plan.keys), case.n // case.k
    section = section_of(plan, -(-case.t // plan.rows), tiles, group)
    ways = [alternating(i, tiles, section, plan.workers) for i in range(tiles * case.k * case.b)]
    assert plan.alternates and group > 1 and set(ways) == {0, 1}


ORDERED_SHARED = [
    Case("d128", b=2, t=150, s=260, n=3, k=1, d=128, causal=True),
    Case("d64", b=2, t=300, s=300, n=2, k=1, d=64, causal=True, q_lens=(300, 250), kv_lens=(250, 300)),
    Case("window", b=1, t=300, s=280, n=4, k=2, d=64, window=(100, 0)),  # a head in reverse, nothing alternates
]


@pytest.mark.parametrize("case", ORDERED_SHARED, ids=lambda case: case.name)
def test_turns_of_heads_that_share_keys_are_taken_once_and_sum_alike(case):
    """Key tiles go down from the last queries or up from their diagonal, and the first keys have the first turns."""
    sums = set()
    for seed in (0, 1, 2):
        alternate = {"alternates": True, "mirrored": 1, "workers": 2}
        plan, memory = passes(case, deterministic=True, seed=seed, resident=2, **alternate)
        counts = memory["turns"].reshape(case.b, case.n, -1)
        for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
            left, right = case.window or (UNBOUNDED, 0)
            for m in range(counts.shape[2]):
                seen = key_tiles(m, (plan.rows, plan.keys), Band(left, right, 0, q_len, kv_len), True)
                assert (counts[b, :, m] == seen[1] - seen[0]).all()
        sums.add(memory["work"].tobytes())
    assert len(sums) == 1


SHARED = [
    Case("shared_7", b=3, t=70, s=70, n=7, k=1, causal=True, bottom_right=True, q_lens=(70, 0, 9), kv_lens=(3, 70, 70)),
    Case("shared_5", b=1, t=70, s=90, n=5, k=1, d=128, causal=True, bottom_right=True),
    Case("more_queries", b=1, t=150, s=70, n=6, k=2, d=128, causal=True, bottom_right=True),
    Case("window_of_all", b=1, t=70, s=140, n=2, k=1, window=(140, 3), kv_lens=(130,)),
    Case("window_of_all_but_one", b=1, t=150, s=140, n=2, k=1, d=128, window=(139, None)),
    Case("not_shared", b=1, t=150, s=140, n=2, k=2, causal=True),  # a store may hold the form for those that do alone
]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_any_number_of_heads_shares_keys_with_more_ctas_than_tiles(case):
    passes(case, seed=1, workers=5, alternates=True)


IN_STEP = {"turns": False, "held": True, "workers": 0, "late": False, "kept": 0}
# 12 bytes spill since warps wait for one another: no plan that `choose` takes is of this form.
FINISHES = {"spill_allowance": 16, "workers": 2, "finishes": True, "parts": 1}
VARIANTS = [
    {"rows": 64, **IN_STEP, "lagged": True, "dependent": True},
    {"rows": 128, **IN_STEP, "section": 1},
    {"rows": 64, **IN_STEP, "lagged": True, "direct": True, "parts": 0},
    {"rows": 64, "parts": 1, "workers": 0, "dependent": True},
    {"workers": 3, "deterministic": True, "section": 1},
    {"rows": 128, "turns": False, "workers": 3, "late": True, "kept": 4},
    {"rows": 64, "turns": True, "values_first": True, "early": True, "late": True, "workers": 0},
    FINISHES | {"section": 1},
    FINISHES | {"clears": True},
    {"each_lane": True},
]


@pytest.mark.parametrize("workers", [2, 0])
def test_long_calls_without_a_band_read_the_lse_early(workers):
    """The form that `choose` takes beyond 2048 keys at depth 128, here of short ones."""
    long = Case("long", b=1, t=4096, s=4096, n=2, k=1, d=128)
    case = Case("early", b=2, t=150, s=200, n=2, k=1, d=128, q_lens=(90, 150), kv_lens=(170, 200))
    plan, _ = passes(case, seed=workers, workers=workers, early=True)
    assert plan.by_fours and replace(plan, workers=132) == plan_of(long)


def test_apart_frees_queries_by_each_lane():
    """The form of depth 256 that runs under compute-sanitizer."""
    passes(OTHERS[2], each_lane=True)


def test_apart_adds_directly():
    case = Case("apart_direct", b=1, t=200, s=100, n=1, k=1, d=200, v=256, kv_lens=(90,))
    passes(case, seed=1, direct=True, parts=0)


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: " ".join(fields))
def test_variants_of_the_plan_give_the_same(fields):
    """Forms that only differ in speed. Heads share keys here: what `choose` takes then has tests above."""
    case = Case("variant", b=2, t=150, s=300, n=4, k=2, d=64, window=(150, 20), q_lens=(90, 150), kv_lens=(170, 300))
    passes(case, seed=1, alternates=False, **fields)


# A key tile that no query sees, last in a partial query tile, once waited there for a turn of -1.
WINDOWED = Case("windowed", b=1, t=200, s=500, n=2, k=1, d=64, window=(100, 20))


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("case", [WINDOWED, replace(WINDOWED, name="full", t=130, s=300, window=(None, None))])
def test_ordered_takes_every_turn_once(case, seed):
    """However many CTAs are resident, and in whatever order they run."""
    if case.name == "full":
        case = replace(case, window=(10**6, 10**6))  # as a value, so that the plan is the windowed one's
    plan, memory = passes(case, deterministic=True, seed=seed, resident=1 + seed)
    assert plan.ordered
    visits = np.zeros(memory["turns"].shape[-1], int)
    see = oracle_visible(case)
    for m in range(visits.size):
        rows = see[m * plan.rows : (m + 1) * plan.rows]
        visits[m] = sum(rows[:, n : n + plan.keys].any() for n in range(0, case.s, plan.keys))
    assert (memory["turns"] == visits).all()
    # With workers each CTA takes one more, and learns that there is no work left.
    assert memory["tickets"] == -(-case.s // plan.keys) * case.k * case.b + plan.workers


def test_ordered_sums_are_bitwise_equal_in_any_schedule():
    """Three key tiles add to each query tile: in another order the sums would differ in their last bits."""
    case = replace(WINDOWED, name="full", t=70, s=300, n=1, window=(10**6, 10**6))
    plan = plan_of(case, deterministic=True)
    sums = [backward(plan, case, seed, resident=3)[2]["work"].tobytes() for seed in (0, 1, 2, 3)]
    assert len(set(sums)) == 1


def oracle_visible(case):
    """bool [T, S] of the first head of the first example."""
    from compare import visibility

    return visibility(case, inputs(case, "float64"))[0, 0]


def widths_added(plan):
    """Columns of dQ that a bulk addition may have."""
    from jax_fa4.kernels.sm90.bwd.pieces import columns_of

    pieces = [(group, piece) for group in range(plan.groups) for piece in range(plan.pieces)]
    return {columns_of(plan, *which)[1] for which in pieces} if plan.apart else {plan.depth}


def test_builds_without_spills_and_bulk_copies_are_elected():
    """Of every plan that the tests above have built; ptxas' word that wgmma runs unserialised is the builder's rule."""
    plans = [plan_of(BY_NAME["len_1x1"]), plan_of(BY_NAME["causal_1000"]), *map(plan_of, OTHERS)]
    plans += [plan_of(EVERYTHING, "float16"), plan_of(WINDOWED, deterministic=True)]
    for plan in plans:
        made = built(plan)
        assert made.facts.spills == 0 and made.facts.serialised == () and len(made.facts.kernels) == 3
        assert all(k.stack == 0 for k in made.facts.kernels)
        lines = [line.strip() for line in made.ptx.splitlines()]
        copies = [i for i, line in enumerate(lines) if re.match(r"cp\.async\.bulk\.(tensor|shared)", line)]
        if plan.workers:  # dK and dV are stored by the one thread that is the reduce role
            copies = [i for i in copies if ".global.shared" not in lines[i]]
        assert copies
        for i in copies:
            back = next(line for line in reversed(lines[:i]) if line.startswith(("elect.sync", "$L__", "bar.", "ret")))
            assert back.startswith("elect.sync"), lines[i - 12 : i + 1]
        counted = {int(x) for x in re.findall(r"cp\.reduce\.async\.bulk\S+ \S+, \S+, (\w+);", made.ptx) if x.isdigit()}
        assert counted <= {4 * plan.rows * width for width in widths_added(plan)}
