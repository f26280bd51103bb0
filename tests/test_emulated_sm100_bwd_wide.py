"""The Blackwell backward of sweeps, for depths up to 256, runs in the emulator, from its PTX and what bind says. Never
run on silicon.

As tests/test_emulated_sm100_bwd.py: kernels one after the other, NaN past every length, poison, any schedule.
"""

import importlib.util
import re

import pytest
from problems import Case
from test_emulated_sm100_bwd_pair import checked, exact
from verifier.mutate import drop, drop_wait, edit

from jax_fa4.kernels import select
from jax_fa4.kernels.sm100.bwd.wide.plan import WidePlan, bind
from jax_fa4.spec import Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def plan_of(case, dtype="bfloat16"):
    plan = select(Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, dtype, "bwd"), "sm_100a")
    assert isinstance(plan, WidePlan)
    return plan


def passes(case, dtype="bfloat16", seed=0, resident=4):
    return checked(plan_of(case, dtype), case, seed, resident, bind)[1]


# Few plans (each is a compile): full masks, and everything together. Every other combination under `prove`.
FULL = [
    Case("full", b=1, t=200, s=150, n=2, k=1, d=256, q_lens=(190,), kv_lens=(140,)),
    Case("zero", b=2, t=129, s=127, n=1, k=1, d=256, q_lens=(0, 129), kv_lens=(127, 0), fill="both"),
    Case("one", b=1, t=1, s=1, n=1, k=1, d=256),
]
ALL = Case("all_kinds", b=2, t=70, s=200, n=2, k=1, d=256, v=200, window=(150, 20), bottom_right=True,
           q_lens=(70, 40), kv_lens=(200, 130), scale=0.2, soft_cap=4.0, segments=3)  # fmt: skip
MANY = Case("many tiles", b=1, t=420, s=650, n=2, k=1, d=256, q_lens=(400,))


@pytest.mark.parametrize(
    ("case", "seed"), [(case, 1 + i) for i, case in enumerate(FULL[1:])], ids=[case.name for case in FULL[1:]]
)
def test_backward_is_the_derivative(case, seed):
    passes(case, seed=seed)


def bits(memory):
    return b"".join(memory[name].tobytes() for name in ("dq", "dk", "dv"))


def test_everything_together():
    passes(ALL, "float16", seed=2)


def test_the_same_bits_in_any_schedule():
    """However many CTAs are resident and in whatever order they run: nothing is added up outside a CTA."""
    assert len({bits(passes(FULL[0], seed=seed, resident=resident)) for seed, resident in ((2, 6), (3, 2))}) == 1


@pytest.mark.parametrize("depth", (256, pytest.param(192, marks=pytest.mark.prove)))
def test_integers_are_exact(depth):
    case = Case("exact", b=1, t=256, s=256, n=1, k=1, d=depth, scale=2.0**-60)
    exact(plan_of(case), case, 1, bind)


def inside(gradient, change):
    """The change made in one sweep's kernel."""

    def apply(ptx):
        start = re.search(rf"\.entry \S*_{gradient}_kernel_", ptx).start()
        end = ptx.find(".entry", start + 1)
        end = len(ptx) if end < 0 else end
        return ptx[:start] + change(ptx[start:end]) + ptx[end:]

    return apply


# Faults that only execution shows; each must fail the run, by an error finding, a deadlock or a wrong number. A sweep's
# acquiring waits are, in order: score_b, slope_b of the first step; score_b, [scores were read], turned, weights,
# slope_b of the loop; turned, weights of the last one.
_ACQUIRE = r"\{[^{}]*try_wait\.parity\.acquire\.cluster[^{}]*\}"
_TELL = r"\{ \.reg \.b32 there;[^}]*release\.cluster[^}]*\}"
_COMMIT = r"(tcgen05\.commit\S+\s+\[\S+\], )\S+;"
_MEET = r"barrier\.cluster\.arrive[^\n]*\s+barrier\.cluster\.wait[^\n]*"
BROKEN = {
    "dV before P is there": inside("dv", drop(_ACQUIRE, 3)),
    "dV of the last step before P is there": inside("dv", drop(_ACQUIRE, -1)),
    "scores over unread ones": inside("dk", drop(_ACQUIRE, 3)),
    "dK before dS is there": inside("dk", drop(_ACQUIRE, 5)),
    "dQ before the keys are there": inside("dq", drop(_ACQUIRE, 0)),
    "a CTA does not say that its tile is there": inside("dk", drop(_TELL, 0)),
    "P handed over without wait::st": inside("dv", drop(r"tcgen05\.wait::st[^\n]*", 0)),
    "dS handed over without wait::st": inside("dq", drop(r"tcgen05\.wait::st[^\n]*", 0)),
    "no proxy fence behind cleared rows": inside("dq", drop(r"fence\.proxy\.async[^\n]*", 0)),
    "no proxy fence before dK is stored": inside("dk", drop(r"fence\.proxy\.async[^\n]*", -1)),
    "commits to the leader alone": inside("dq", edit(_COMMIT, r"\g<1>1;")),
    "a query too many is seen": inside("dk", edit(r"(shl\.b32 %r\d+, )-1", r"\g<1>-2")),
    "the first product adds": inside("dk", edit(r"setp\.ne\.b32 add, %r\d+, 0", "setp.ne.b32 add, 1, 0")),
    "the gradient is read before it is done": inside("dv", drop_wait(-1)),
    "the CTAs do not meet at the end": inside("dv", drop(_MEET, -1)),
}  # fmt: skip
QUICK = ("scores over unread ones", "a query too many is seen")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.prove) for name in BROKEN]
)
def test_a_broken_kernel_fails(name):
    case = Case("broken", b=1, t=300, s=200, n=1, k=1, d=256, kv_lens=(190,), q_lens=(290,))
    plan = plan_of(case)
    with pytest.raises(AssertionError):
        for seed in range(3):
            checked(plan, case, seed, 4, bind, edit=BROKEN[name])


# Under `prove` ------------------------------------------------------------------------------------------------------

OTHERS = [
    Case("causal", b=1, t=300, s=400, n=2, k=1, d=256, causal=True),
    Case("window", b=2, t=256, s=300, n=2, k=1, d=256, window=(150, 60), bottom_right=True, q_lens=(256, 140),
         kv_lens=(300, 131), fill="both"),
    Case("window_far", b=1, t=140, s=700, n=1, k=1, d=256, window=(2, 2)),
    Case("bottom_right", b=1, t=70, s=400, n=1, k=1, d=256, causal=True, bottom_right=True),
    Case("more_queries", b=1, t=400, s=70, n=1, k=1, d=256, causal=True, bottom_right=True),
    Case("segments", b=2, t=300, s=400, n=2, k=1, d=256, segments=4),
    Case("disjoint", b=1, t=140, s=270, n=1, k=1, d=256, segments=9, causal=True),
    Case("cap", b=1, t=200, s=300, n=2, k=1, d=256, soft_cap=2.0),
    Case("sinks", b=1, t=65, s=140, n=1, k=1, d=256, sinks=True),
    Case("lengths", b=2, t=257, s=129, n=1, k=1, d=256, q_lens=(129, 257), kv_lens=(1, 127), scale=0.3),
    Case("constant", b=1, t=150, s=270, n=1, k=1, d=256, fill="constant"),
    Case("d192", b=1, t=300, s=290, n=2, k=1, d=192, q_lens=(280,), kv_lens=(270,)),
    Case("d136_144", b=1, t=130, s=150, n=1, k=1, d=136, v=144, causal=True),
    Case("d256_128", b=1, t=200, s=300, n=2, k=1, d=256, v=128, soft_cap=2.0),
    Case("d64_256", b=1, t=200, s=300, n=2, k=1, d=64, v=256, window=(100, 30)),
    Case("d8_200", b=1, t=200, s=130, n=2, k=1, d=8, v=200, kv_lens=(128,)),
    Case("d200_72", b=1, t=127, s=257, n=2, k=1, d=200, v=72),
    Case("d248_192", b=1, t=64, s=63, n=3, k=1, d=248, v=192, segments=2),
]  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_backward_is_the_derivative_in_every_form(case):
    for seed in range(2):
        passes(case, ("bfloat16", "float16")[(seed + OTHERS.index(case)) % 2], seed, resident=2 + 4 * seed)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(30))
def test_in_many_schedules(seed):
    passes((*FULL, MANY)[seed % 4], seed=seed, resident=2 + 2 * (seed % 3))


@pytest.mark.prove
def test_the_same_bits_in_many_schedules():
    made = {bits(passes(MANY, seed=seed, resident=2 + 2 * (seed % 4))) for seed in range(12)}
    assert len(made) == 1
