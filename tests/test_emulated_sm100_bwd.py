"""The Blackwell backward runs in the emulator, from its PTX and what bind says. It has never run on silicon.

The three kernels of a call run one after the other. Inputs past every length are NaN, results and scratch start as
poison, schedules are adversarial where a seed is given.
"""

import importlib.util
import re
from dataclasses import replace

import numpy as np
import pytest
from compare import Result, check, of_stored_out, oracle, unfused, visibility
from emulated import ptx_of, raw
from emulator import Uninitialised, run
from launch import launches, to_emulator
from problems import BY_NAME, DTYPES, Case, inputs
from test_compile_bwd import operands
from verifier.mutate import drop, edit

from jax_fa4.kernels.sm100.bwd.plan import bind, choose
from jax_fa4.spec import Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16", **fields):
    spec = replace(case.spec, deterministic=fields.pop("deterministic", fields.pop("ordered", False)))
    problem = Problem(spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype, "bwd")
    return replace(choose(problem), **fields)


def empty_outputs(plan, shapes):
    """Results and scratch by name, nothing written yet."""
    kinds = {"float32": np.dtype(np.float32), "int32": np.dtype(np.int32)}
    kinds[plan.dtype] = raw(np.zeros(0), plan.dtype).dtype
    e = plan.extents(shapes)
    return {b.name: Uninitialised(b.sized(e), kinds[b.dtype]) for b in plan.outputs}


def backward(plan, case, seed=0, edit=lambda ptx: ptx, fill=lambda inp: inp, reports=None, **how):
    """(inputs, Result with dq, dk, dv, buffers after the call); every launch must end without a finding.

    fill: what to make of the inputs. reports: a list that gets those of the emulator.
    """
    inp = fill(inputs(case, plan.dtype))
    given = operands(plan, case, inp)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    memory |= empty_outputs(plan, shapes)
    for launch in launches(plan, bind, shapes, edit(ptx_of(plan))):
        report = run(launch.ptx, to_emulator(launch), memory, seed=seed, **how).check()
        memory |= {b.name: report.outputs[b.name] for b in plan.outputs}
        if reports is not None:
            reports.append(report)
    got = {name: memory[name].view(DTYPES[plan.dtype]).astype(np.float64) for name in ("dq", "dk", "dv")}
    return inp, Result(*[got.get(name) for name in Result._fields]), memory


def passes(case, dtype="bfloat16", seed=0, resident=2, **fields):
    plan = plan_of(case, dtype, **fields)
    inp, got, memory = backward(plan, case, seed, resident=resident)
    check(got, case, inp, dtype)
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        assert (got.dq[b, q_len:] == 0).all() and (got.dk[b, kv_len:] == 0).all() and (got.dv[b, kv_len:] == 0).all()
    return plan, memory


# Few plans (each is a compile), many problems: two at depth 64 here, and every other one of the table under `prove`.
QUICK = ["len_1x300", "causal_129x127", "bottom_200x1", "window_17_5", "lengths_zero", "lengths_window"]
LONG = [
    "len_1x1", "len_127x129", "heads_7_1", "window_0_0", "window_left", "window_right", "window_far", "lengths",
    "lengths_bottom", "scale_large", "causal_1000", "sinks", "sinks_dead_rows", "soft_cap", "soft_cap_hard",
]  # fmt: skip
D128 = Case("d128", b=1, t=200, s=256, n=2, k=1, d=128, q_lens=(170,), kv_lens=(250,))
# dQ in columns of its own, or in dP's; one stage of dO or two; slices of dQ that are not full
DEPTHS = [
    Case("d72_40", b=1, t=130, s=150, n=1, k=1, d=72, v=40, q_lens=(125,)),
    Case("d96_128", b=1, t=300, s=130, n=1, k=1, d=96, v=128),
    Case("d64_128", b=1, t=130, s=150, n=1, k=1, d=64, v=128),
    Case("d8_24", b=1, t=130, s=150, n=1, k=1, d=8, v=24),
    Case("d128_64", b=1, t=260, s=150, n=1, k=1, d=128, v=64, causal=True),
]
# Steps that take turns in tensor memory: queries and keys, or values, deeper than 128
DEEP = [
    Case("d192_128", b=1, t=300, s=200, n=1, k=1, d=192, v=128, q_lens=(290,), kv_lens=(150,), causal=True),
    Case("d128_192", b=2, t=140, s=130, n=2, k=1, d=128, v=192),
    Case("d136_24", b=1, t=260, s=150, n=1, k=1, d=136, v=24, q_lens=(230,)),
    Case("d192_128_all", b=1, t=260, s=300, n=2, k=1, d=192, v=128, window=(150, 60), soft_cap=3.0, segments=2),
]
MANY = Case("many", b=2, t=256, s=200, n=2, k=1, d=128, window=(150, 60), bottom_right=True, q_lens=(256, 140),
            kv_lens=(200, 131), scale=0.2)  # fmt: skip
PACKED = Case("packed", b=2, t=300, s=300, n=2, k=1, d=128, causal=True, segments=4, q_lens=(300, 190),
              kv_lens=(290, 300))  # fmt: skip
CAPPED = Case("capped", b=1, t=200, s=300, n=2, k=1, d=128, window=(150, 20), soft_cap=2.0, q_lens=(190,),
              kv_lens=(270,))  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_backward_is_the_derivative(name):
    passes(BY_NAME[name])


@pytest.mark.parametrize("case", [D128, DEPTHS[0]], ids=lambda case: case.name)
def test_backward_at_other_depths(case):
    passes(case)


@pytest.mark.parametrize("name", ["segments_causal", "segments_disjoint"])
def test_segments_see_only_themselves(name):
    passes(BY_NAME[name], seed=3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_segments_of_several_tiles(deterministic):
    """Query tiles that share no segment with the keys are left out, with turns too."""
    plan, memory = passes(PACKED, "float16", seed=1, deterministic=deterministic)
    assert plan.segments and (plan.narrows, plan.chained) == (not deterministic, deterministic)
    if deterministic:
        assert memory["tickets"] == 2 * 3


@pytest.mark.parametrize(("case", "seed"), [(DEEP[0], 0), (DEEP[0], 2)], ids=lambda x: getattr(x, "name", str(x)))
def test_backward_deeper_than_128(case, seed):
    plan, _ = passes(case, seed=seed)
    assert plan.serial


@pytest.mark.prove
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", DEEP, ids=lambda case: case.name)
def test_backward_deeper_than_128_in_many_schedules(case, deterministic):
    for seed in range(8):
        passes(case, "float16", seed, resident=1 + seed % 3, deterministic=deterministic)


@pytest.mark.prove
@pytest.mark.parametrize("case", [*(BY_NAME[name] for name in LONG), *DEPTHS[1:]], ids=lambda case: case.name)
def test_backward_is_the_derivative_at_length(case):
    passes(case)


@pytest.mark.parametrize("seed", range(2))
def test_everything_together_in_any_schedule(seed):
    passes(MANY, "float16", seed)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(200))
def test_everything_together_in_many_schedules(seed):
    passes(MANY if seed % 2 else D128, "float16", seed, resident=1 + seed % 4)


def bits(memory):
    return b"".join(memory[name].tobytes() for name in ("dq", "dk", "dv", "work"))


def same_bits(case, seeds, **fields):
    """Whether dQ, also in float32, dK and dV are the same whatever the schedule; each run is also right."""
    made = {bits(passes(case, seed=seed, resident=1 + seed % 4, **fields)[1]) for seed in seeds}
    return len(made) == 1


def test_ordered_gives_the_same_bits_and_takes_every_turn_once():
    """And soft cap. Three key tiles add to a dQ, however many CTAs are resident and in whatever order they run."""
    plan, memory = passes(CAPPED, seed=2, resident=3, deterministic=True)
    assert bits(passes(CAPPED, seed=3, resident=1, deterministic=True)[1]) == bits(memory)
    band = visibility(CAPPED, inputs(CAPPED, "float64"))[0, 0]
    n = plan.tile
    tiles = [[band[i : i + n, j : j + n].any() for j in range(0, CAPPED.s, n)] for i in range(0, CAPPED.t, n)]
    assert (memory["turns"].sum(-1) == np.sum(tiles, axis=1)).all()
    assert memory["tickets"] == -(-CAPPED.s // n)


# Four key tiles that start at other query tiles and add to four copies of dQ; two lines of causal tiles, one of which
# goes the other way round.
TURNED = [
    Case("shifted", b=1, t=130, s=390, n=1, k=1, d=64),
    Case("both_ways", b=1, t=260, s=260, n=2, k=2, d=64, causal=True),
]


@pytest.mark.parametrize("case", TURNED, ids=lambda case: case.name)
def test_orders_that_are_not_ascending(case):
    _, memory = passes(case, seed=1, resident=4, deterministic=True)
    assert bits(passes(case, seed=6, resident=1, deterministic=True)[1]) == bits(memory)
    copies = memory["turns"].shape[-1]
    assert copies == {"shifted": 4, "both_ways": 2}[case.name] and memory["turns"].any((0, 1, 2)).all(), "all are used"


def test_what_nobody_adds_to_is_zero():
    """Whoever is first in turn stores, so the workspace holds anything where nobody was: queries that see no key."""
    case = Case("unseen", b=2, t=140, s=70, n=1, k=1, window=(2, 2), q_lens=(140, 120))
    plan, memory = passes(case, seed=1, deterministic=True)
    taken = memory["turns"][:, 0, :].sum(-1) > 0
    assert taken.tolist() == [[True, False], [True, False]]
    assert (memory["dq"][:, plan.tile :] == 0).all() and not (memory["dq"][:, :64] == 0).all()


@pytest.mark.prove
def test_only_ordered_gives_the_same_bits_in_many_schedules():
    case = Case("many keys", b=1, t=140, s=700, n=2, k=1, d=64)
    assert same_bits(case, range(50), deterministic=True)
    assert not same_bits(case, range(12))


def test_integers_are_exact():
    """Equal weights and integer dO: dV is a mean of integers over queries, exact in float32, so layouts show."""
    case = Case("mean", b=1, t=128, s=128, n=1, k=1, fill="integers", scale=1e-30)
    inp, got, _ = backward(plan_of(case, "float16"), case)
    want = inp.dout.mean(axis=1, keepdims=True).repeat(case.s, 1)
    np.testing.assert_array_equal(got.dv, want.astype(np.float16).astype(np.float64))


def test_keys_with_a_mean_lose_what_the_rounding_of_out_takes():
    """delta is a sum over `out`, given in 16 bits. Its error times the keys' mean is left in dQ, for a row's dS
    no longer sums to 0: dQ is off by more than an unfused computation's, and just by what its operands determine."""
    case = Case("offset", b=1, t=70, s=140, n=1, k=1, fill="offset")
    inp, got, _ = backward(plan_of(case), case)
    exact, _ = oracle(case, inp)
    given = of_stored_out(case, inp, "bfloat16").dq
    off = lambda x, y: np.abs(x - y).max()  # noqa: E731
    wanted = off(given, exact.dq)
    assert wanted > 2 * off(unfused(case, inp, "bfloat16").dq, exact.dq)
    assert off(got.dq, given) < wanted / 4 and off(got.dq, exact.dq) < 1.25 * wanted


# Faults that only execution shows; each must fail the run, by an error finding, a deadlock or a wrong number.
BROKEN = {
    "dS used without wait::ld": drop(r"tcgen05\.wait::ld[^\n]*", 1),
    "P handed over without wait::st": drop(r"tcgen05\.wait::st[^\n]*", 0),
    "dS handed over without wait::st": drop(r"tcgen05\.wait::st[^\n]*", 1),
    "no proxy fence behind a cleared row": drop(r"fence\.proxy\.async[^\n]*", 0),
    "no proxy fence before dK, dV are stored": drop(r"fence\.proxy\.async[^\n]*", -2),
    "no CTA barrier": drop(r"bar\.sync \s*0;"),
    "a mask bit off": edit(r"(shl\.b32 %r\d+, )-1", r"\g<1>-2"),
    "first product adds": edit(r"setp\.ne\.b32 add, %r\d+, 0", "setp.ne.b32 add, 1, 0", 0),
    "A of dQ not turned": lambda ptx: _not_turned(ptx),
    "too few bytes reduced": edit(r"(cp\.reduce\.async\.bulk\S+ \[\S+\], \[\S+\], )(\S+);", r"\g<1>16;", 0),
}


def _not_turned(ptx):
    """Clears the bit of the instruction descriptor that says that A is MN-major."""
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 15 | 1 << 16 | 64 >> 3 << 17 | 128 >> 4 << 24
    made = re.sub(rf"\b{idesc}\b", str(idesc - (1 << 15)), ptx)
    if made == ptx:
        raise ValueError(f"no instruction descriptor {idesc} in the text")
    return made


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_fails(name):
    case = Case("broken", b=1, t=200, s=200, n=1, k=1, d=64, kv_lens=(190,), q_lens=(150,))
    plan = plan_of(case)
    with pytest.raises(AssertionError):
        for seed in range(3):
            inp, got, _ = backward(plan, case, seed, edit=BROKEN[name])
            check(got, case, inp, "bfloat16")
