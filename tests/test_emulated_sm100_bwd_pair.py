"""The Blackwell backward of CTA pairs runs in the emulator, from its PTX and what bind says. Never run on silicon.

As tests/test_emulated_sm100_bwd.py: three kernels one after the other, NaN past every length, poison, any schedule.
"""

import importlib.util
import re
from dataclasses import replace

import numpy as np
import pytest
from compare import Result, check, visibility
from emulated import ptx_of
from emulator import run
from launch import launches, to_emulator
from problems import DTYPES, Case, inputs
from test_compile_bwd import operands
from test_emulated_sm100_bwd import empty_outputs
from verifier.mutate import drop, edit

from jax_fa4.kernels.sm100.bwd.pair.plan import PairPlan, bind, registers_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16", **fields):
    kinds = {"band": case.spec.band, "segments": case.spec.segments, "soft_cap": case.spec.soft_cap}
    kinds |= {"ordered": fields.pop("ordered", False)}
    return PairPlan(dtype, case.d, case.v, **kinds, **{"registers": registers_for(case.d, **kinds)} | fields)


def backward(plan, case, seed=0, edit=lambda ptx: ptx, inp=None, bind=bind, **how):
    """(inputs, Result with dq, dk, dv, buffers after the call); every launch must end without a finding."""
    inp = inp or inputs(case, plan.dtype)
    given = operands(plan, case, inp)
    memory = {b.name: given[b.name] for b in plan.inputs}
    shapes = {"B": case.b, "T": case.t, "S": case.s, "N": case.n, "K": case.k}
    memory |= empty_outputs(plan, shapes)
    for launch in launches(plan, bind, shapes, edit(ptx_of(plan))):
        report = run(launch.ptx, to_emulator(launch), memory, seed=seed, **how).check()
        memory |= {b.name: report.outputs[b.name] for b in plan.outputs}
    got = {name: memory[name].view(DTYPES[plan.dtype]).astype(np.float64) for name in ("dq", "dk", "dv")}
    return inp, Result(*[got.get(name) for name in Result._fields]), memory


def passes(case, dtype="bfloat16", seed=0, resident=4, **fields):
    return checked(plan_of(case, dtype, **fields), case, seed, resident)


def checked(plan, case, seed, resident, bind=bind, **how):
    """(plan, buffers after the call), which is within the error rule, and 0 past the lengths."""
    inp, got, memory = backward(plan, case, seed, bind=bind, resident=resident, **how)
    check(got, case, inp, plan.dtype, from_stored=case.fill == "offset")
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        assert (got.dq[b, q_len:] == 0).all() and (got.dk[b, kv_len:] == 0).all() and (got.dv[b, kv_len:] == 0).all()
    return plan, memory


# Few plans (each is a compile): full masks, and everything together. Every other combination under `prove`.
FULL = [
    Case("full", b=1, t=300, s=300, n=2, k=1, d=128, q_lens=(270,), kv_lens=(290,)),
    Case("short", b=2, t=130, s=100, n=2, k=1, d=128, q_lens=(130, 65), kv_lens=(64, 1)),
    Case("deep", b=1, t=300, s=300, n=2, k=1, d=192, v=128, q_lens=(270,), kv_lens=(290,)),
    Case("zero", b=2, t=129, s=127, n=1, k=1, d=128, q_lens=(0, 129), kv_lens=(127, 0), fill="both"),
]
ALL = Case("all_kinds", b=2, t=150, s=300, n=2, k=1, d=128, window=(150, 20), bottom_right=True, q_lens=(150, 90),
           kv_lens=(300, 170), scale=0.2, soft_cap=4.0, segments=3)  # fmt: skip
MANY = Case("many keys", b=1, t=140, s=900, n=2, k=1, d=128)


@pytest.mark.parametrize(
    ("case", "seed"), [(case, 1 + i) for i, case in enumerate(FULL)], ids=[case.name for case in FULL]
)
def test_backward_is_the_derivative(case, seed):
    passes(case, seed=seed)


def turns_of(case, plan):
    """Pairs that visit each query tile of the first head: what an ordered plan counts, for each CTA's half."""
    band = visibility(replace(case, segments=0), inputs(case, "float64"))
    n = plan.tile
    tiles = [[[x[i : i + n, j : j + 2 * n].any() for j in range(0, case.s, 2 * n)] for i in range(0, case.t, n)]
             for x in band[:, 0]]  # fmt: skip
    return np.sum(tiles, axis=2)


def bits(memory):
    return b"".join(memory[name].tobytes() for name in ("dq", "dk", "dv", "work"))


def test_everything_together_and_ordered_gives_the_same_bits():
    """Two pairs add to a dQ, however many CTAs are resident and in whatever order they run."""
    plan, memory = passes(ALL, "float16", seed=2, resident=6, ordered=True)
    assert bits(passes(ALL, "float16", seed=3, resident=2, ordered=True)[1]) == bits(memory)
    assert (memory["turns"].sum(-1) == 2 * turns_of(ALL, plan)[:, None]).all()
    assert memory["tickets"] == 2 * ALL.b


def test_pairs_that_start_at_other_queries():
    case = Case("shifted", b=1, t=140, s=300, n=1, k=1, d=128)
    _, memory = passes(case, seed=1, resident=4, ordered=True)
    assert bits(passes(case, seed=6, resident=2, ordered=True)[1]) == bits(memory)
    assert memory["turns"].shape[-1] == 2 and memory["turns"].any((0, 1, 2)).all(), "both copies are used"


def exact(plan, case, seed=0, bind=bind):
    """Every sum is one of integers over a power of two: equality, whatever the order. Scores are 0 to float32, so P is
    1 / S; values cancel over keys, so delta is 0 and dS = V dO^T / S; dQ, dK and dV are rounded once, at the end."""
    rng = np.random.default_rng(seed)
    inp = inputs(case, plan.dtype)
    for x, low, high in ((inp.query, -2, 3), (inp.key, -2, 3), (inp.dout, 0, 2)):
        x[:] = rng.integers(low, high, x.shape)
    half = case.s // 2
    inp.value[:, :half] = rng.integers(0, 2, inp.value[:, :half].shape)
    inp.value[:, half:] = -inp.value[:, :half][:, ::-1]
    inp.dlse[:] = 0
    _, got, _ = backward(plan, case, seed, inp=inp, bind=bind)
    ds = np.einsum("bskv,btkv->bkst", inp.value, inp.dout) / case.s
    want = {
        "dq": case.scale * np.einsum("bkst,bskd->btkd", ds, inp.key),
        "dk": case.scale * np.einsum("bkst,btkd->bskd", ds, inp.query),
        "dv": inp.dout.sum(1, keepdims=True).repeat(case.s, 1) / case.s,
    }
    for name, x in want.items():
        assert abs(x).max() > 0
        np.testing.assert_array_equal(getattr(got, name), x.astype(DTYPES[plan.dtype]).astype(np.float64), name)


@pytest.mark.parametrize("depth", (128, 192))
def test_integers_are_exact(depth):
    case = Case("exact", b=1, t=256, s=256, n=1, k=1, d=depth, v=128, scale=2.0**-60)
    exact(plan_of(case), case, seed=1)


# Faults that only execution shows; each must fail the run, by an error finding, a deadlock or a wrong number.
BROKEN = {
    "the last dQ over the one before": drop(r"\{[^{}]*try_wait\.parity\.acquire\.cluster[^{}]*\}", -1),
    "a CTA does not say that its tile is there": drop(
        r"mbarrier\.arrive\.release\.cluster\.shared::cluster\S* [^;]+;", 0
    ),
    "dS sent without a proxy fence": drop(r"fence\.proxy\.async[^\n]*", -3),
    "too few bytes announced from the other CTA": edit(
        r"(mov\.b32\s+%r\d+, )16384(;\s*mbarrier\.arrive\.exp)", r"\g<1>8192\g<2>"
    ),
    "half of what is sent": edit(r"(shared::cta\.mbarrier\S+ \[\S+\], \[\S+\], )(\S+), ", r"\g<1>2048, "),
    "commits to the leader alone": edit(r"(tcgen05\.commit\S+\s+\[\S+\], )\S+;", r"\g<1>1;"),
    "a pair's rows taken for one CTA's": lambda ptx: _other_rows(ptx),
}


def _other_rows(ptx):
    """dQ as a product of 256 rows."""
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 15 | 1 << 16 | 128 >> 3 << 17 | 128 >> 4 << 24
    made = re.sub(rf"\b{idesc}\b", str(idesc + (128 >> 4 << 24)), ptx)
    if made == ptx:
        raise ValueError(f"no instruction descriptor {idesc} in the text")
    return made


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_fails(name):
    case = Case("broken", b=1, t=300, s=200, n=1, k=1, d=128, kv_lens=(190,), q_lens=(290,))
    plan = plan_of(case)
    with pytest.raises(AssertionError):
        for seed in range(3):
            inp, got, _ = backward(plan, case, seed, edit=BROKEN[name])
            check(got, case, inp, "bfloat16")


# Under `prove` ------------------------------------------------------------------------------------------------------

BANDS = [
    Case("causal", b=1, t=300, s=400, n=1, k=1, d=128, causal=True),
    Case("window", b=2, t=256, s=300, n=2, k=1, d=128, window=(150, 60), bottom_right=True, q_lens=(256, 140),
         kv_lens=(300, 131), fill="both"),
]  # fmt: skip
OTHERS = [
    Case("d72_96", b=1, t=130, s=150, n=1, k=1, d=72, v=96, q_lens=(125,)),
    Case("d128_80_cap", b=1, t=130, s=300, n=1, k=1, d=128, v=80, soft_cap=2.0, fill="outlier"),
    Case("segments", b=2, t=200, s=400, n=2, k=1, d=128, segments=4, fill="offset"),
    Case("d192_cap", b=1, t=200, s=300, n=2, k=1, d=192, v=128, soft_cap=2.0, q_lens=(180,), kv_lens=(290,)),
    Case("d160_72", b=2, t=130, s=200, n=1, k=1, d=160, v=72, causal=True, bottom_right=True, kv_lens=(200, 140)),
    Case("one", b=1, t=1, s=1, n=1, k=1, d=128),
    Case("constant", b=1, t=150, s=270, n=1, k=1, d=128, fill="constant"),
]


@pytest.mark.prove
@pytest.mark.parametrize("ordered", (False, True))
@pytest.mark.parametrize("case", [*BANDS, *OTHERS], ids=lambda case: case.name)
def test_backward_is_the_derivative_in_every_form(case, ordered):
    for seed in range(2):
        passes(case, "float16" if case.segments else "bfloat16", seed, ordered=ordered)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(60))
def test_in_many_schedules(seed):
    case = (*FULL, BANDS[1], Case("long", b=1, t=640, s=256, n=1, k=1, d=128))[seed % 6]
    passes(case, seed=seed, resident=2 + 2 * (seed % 3))


@pytest.mark.prove
def test_only_ordered_gives_the_same_bits_in_many_schedules():
    def made(seeds, **fields):
        return {bits(passes(MANY, seed=seed, resident=2 + 2 * (seed % 4), **fields)[1]) for seed in seeds}

    assert len(made(range(50), ordered=True)) == 1
    assert len(made(range(12))) > 1
