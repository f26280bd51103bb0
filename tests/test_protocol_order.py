"""The protocol of every form of the Blackwell kernels is what its compiled warps do, wait by wait, signal by signal.

The protocol checker proves the table; here the table is held against the kernel, in a run of the emulator.
"""

import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import emulated
import numpy as np
import protocol as checker
import pytest
import test_emulated_sm100 as fwd
import test_emulated_sm100_bwd as bwd
import test_emulated_sm100_bwd_pair as bwd_pair
import test_emulated_sm100_bwd_wide as bwd_wide
import test_sm100_pair as fwd_pair
import test_sm100_wide as fwd_wide
from emulator import run
from launch import launches, to_emulator
from problems import Case, inputs
from protocol_order import COMMITS, backward_warp, differences, expected, forward_warp, seen
from test_compile_bwd import operands
from verifier.mutate import drop_wait

from jax_fa4.kernels.sm100.bwd import protocol as alone
from jax_fa4.kernels.sm100.bwd.pair import protocol as paired
from jax_fa4.kernels.sm100.bwd.wide import protocol as sweeping
from jax_fa4.kernels.sm100.events import Arrive, Wait
from jax_fa4.kernels.sm100.fwd import plan as forward_plan
from jax_fa4.kernels.sm100.fwd.protocol import protocol as forward_protocol
from jax_fa4.kernels.sm100.fwd.wide.protocol import protocol as wide_protocol

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")

# Lengths that end inside a block: there is something to clear. Three steps, so that rings of two places wrap.
FORWARD = Case("order", b=1, t=256, s=384, n=1, k=1, d=64, kv_lens=(364,))
BACKWARD = Case("order", b=1, t=384, s=256, n=1, k=1, d=128, q_lens=(370,), kv_lens=(250,))


@dataclass(frozen=True)
class Form:
    """A plan, its protocols by kernel (as the launcher's order has them, first the main one), and the case it runs."""

    case: Case
    plan: Any
    bind: Any
    protocols: tuple[tuple[Any, Any], ...]  # (what has the warps' numbers, Protocol) of each kernel that is compared
    first: int  # number of the first of them among the launches
    warp_of: Any
    named: tuple[str, ...]


def forward_form(case, plan_of, make, **fields):
    plan = plan_of(case, **fields)
    return Form(case, plan, forward_plan.bind, ((plan, make(plan, 3)),), 0, forward_warp, ("hand", "free"))


def backward_form(case, module, make, bind, kernels=None):
    plan = module.plan_of(case)
    kernels = kernels(plan) if kernels else ((plan, make(plan, 3)),)
    return Form(case, plan, bind, kernels, 1, backward_warp, ("laid", "slice", "free"))


def sweeps(plan):
    """dQ's other side are keys, of which there are two tiles."""
    return tuple((one, sweeping.protocol(one, 2 if one.by_query else 3)) for one in plan.sweeps)


def never_moved(plan, blocks):
    """With scores as small as here O is never rescaled, and not waited for."""
    return wide_protocol(plan, blocks, (False,) * (blocks - 1))


def deep(case, d, v=None, **sizes):
    return Case(**{**vars(case), "d": d, "v": v or d, **sizes})


FORMS = {
    "forward": lambda: forward_form(FORWARD, fwd.plan_of, forward_protocol, stage_cap=3),
    "forward of pairs": lambda: forward_form(
        deep(FORWARD, 128, t=512), fwd_pair.plan_of, forward_protocol, stage_cap=3
    ),
    "forward, wide": lambda: forward_form(deep(FORWARD, 256), fwd_wide.plan_of, never_moved),
    "backward": lambda: backward_form(BACKWARD, bwd, alone.protocol, bwd.bind),
    "backward at 64": lambda: backward_form(deep(BACKWARD, 64), bwd, alone.protocol, bwd.bind),
    "backward, serial": lambda: backward_form(deep(BACKWARD, 192, 128), bwd, alone.protocol, bwd.bind),
    "backward of pairs": lambda: backward_form(BACKWARD, bwd_pair, paired.protocol, bwd_pair.bind),
    "backward of pairs in parts": lambda: backward_form(
        deep(BACKWARD, 192, 128), bwd_pair, paired.protocol, bwd_pair.bind
    ),
    "backward, wide": lambda: backward_form(deep(BACKWARD, 256), bwd_wide, None, bwd_wide.bind, sweeps),
}
OFTEN = ("forward", "forward of pairs", "backward", "backward of pairs", "backward, wide")


def traces(form, seed, edit=None):
    """What the warps of each compared kernel did. As it was compiled it leaves no finding, not even an advisory."""
    inp, made = inputs(form.case, form.plan.dtype), []
    given = operands(form.plan, form.case, inp) if form.first else forward_operands(form, inp)
    memory = {b.name: given[b.name] for b in form.plan.inputs}
    shapes = {"B": form.case.b, "T": form.case.t, "S": form.case.s, "N": form.case.n, "K": form.case.k}
    memory |= bwd.empty_outputs(form.plan, shapes)
    calls = launches(form.plan, form.bind, shapes, (edit or str)(emulated.ptx_of(form.plan)))
    for call in calls[: form.first + len(form.protocols)]:
        trace: list = []
        report = run(call.ptx, to_emulator(call), memory, seed=seed, trace=trace)
        assert edit is not None or not report.findings, report.findings
        memory |= report.outputs
        made.append(trace)
    return made[form.first :]


def forward_operands(form, inp):
    ints, floats = emulated.value_operands(form.case)
    q, k, v = (emulated.raw(x, form.plan.dtype) for x in (inp.query, inp.key, inp.value))
    return {"q": q, "k": k, "v": v, "ints": ints, "floats": floats}


def told(form, seed, edit=None):
    """Differences of all kernels."""
    wrong = []
    for (plan, p), trace in zip(form.protocols, traces(form, seed, edit), strict=True):
        want = expected(plan, p, form.warp_of, form.named)
        wrong += differences(want, seen(plan, trace, want))
    return wrong


@needs_compiler
@pytest.mark.parametrize("seed", (0, 4))
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.prove) for n in FORMS])
def test_the_kernel_follows_its_protocol(name, seed):
    form = FORMS[name]()
    for plan, p in form.protocols:
        want = expected(plan, p, form.warp_of, form.named)
        ctas = plan.ctas if getattr(plan, "pair", False) else 1
        silent = [who for who, words in want.items() if not words]  # at most the MMA warp of who does not lead
        assert len(want) >= 10 * ctas + 1 and silent in ([], [(1, getattr(plan, "MMA", None))]), silent
    assert not told(form, seed)


def swapped(want, who, at):
    """The words of a warp with two neighbours exchanged."""
    words = list(want[who])
    words[at : at + 2] = words[at + 1], words[at]
    return {**want, who: words}


@needs_compiler
@pytest.mark.parametrize("name", OFTEN)
def test_a_protocol_in_another_order_is_noticed(name):
    form, rng = FORMS[name](), np.random.default_rng(0)
    noticed = tried = 0
    for (plan, p), trace in zip(form.protocols, traces(form, 0), strict=True):
        want = expected(plan, p, form.warp_of, form.named)
        got = seen(plan, trace, want)
        for who, words in want.items():
            at = int(rng.integers(max(len(words) - 1, 1)))
            if len(words) > 1 and words[at] != words[at + 1]:
                tried += 1
                noticed += bool(differences(swapped(want, who, at), got))
    assert noticed == tried >= 10, (noticed, tried)


@needs_compiler
@pytest.mark.parametrize("name", ("forward", "backward", "backward of pairs"))
def test_a_kernel_without_a_wait_is_noticed(name):
    assert told(FORMS[name](), 0, edit=drop_wait(-3))
    assert COMMITS in expected(FORMS[name]().plan, FORMS[name]().protocols[0][1], FORMS[name]().warp_of, ())


# The backward's protocols; the forward's are in tests/test_protocol.py, test_sm100_pair.py and test_sm100_wide.py -----


def plans():
    """Of each kind of the backward: name -> (module with its protocol, plan)."""
    one, serial = (bwd.plan_of(deep(BACKWARD, d, v)) for d, v in ((64, 64), (192, 128)))
    made = {"d64": (alone, one), "d128": (alone, bwd.plan_of(BACKWARD, at_once=False)), "serial": (alone, serial)}
    made |= {"pairs": (paired, bwd_pair.plan_of(BACKWARD))}
    made |= {"pairs in parts": (paired, bwd_pair.plan_of(deep(BACKWARD, 192, 128)))}
    return made | {f"sweep {x.gradient}": (sweeping, x) for x in bwd_wide.plan_of(deep(BACKWARD, 256)).sweeps}


SLOW = {("pairs", 3), ("pairs in parts", 2), ("pairs in parts", 3)}  # a minute together


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param(name, n, marks=pytest.mark.prove if n > 3 or (name, n) in SLOW else ())
        for name in ("d64", "d128", "serial", "pairs", "pairs in parts", "sweep dv", "sweep dk", "sweep dq")
        for n in (1, 2, 3, 5)
    ],
)
def test_no_deadlock_and_no_overwriting(name, steps):
    module, plan = plans()[name]
    assert checker.check(module.protocol(plan, steps)) == []


@pytest.mark.parametrize("blocks", (3, pytest.param(5, marks=pytest.mark.prove)))
def test_rescaling_or_not_is_safe(blocks):
    """Deep forwards wait for O only where a maximum has moved: every mixture of that."""
    for moved in itertools.product((False, True), repeat=blocks - 1):
        assert checker.check(wide_protocol(fwd_wide.PLAN, blocks, moved)) == [], moved


# What is dropped -> (form, role, kind of event, ring, side, fault)
BREAKS = {
    "Q over a Q in use": ("d128", "load", Wait, "q", "empty", "overwrite"),
    "dO over a dO in use": ("d128", "load", Wait, "dout", "empty", "overwrite"),
    "products before their operands": ("d128", "mma", Wait, "q", "full", "overwrite"),
    "dV before P": ("d128", "mma", Wait, "probs", "full", "overwrite"),
    "dK before dS": ("d128", "mma", Wait, "ds", "full", "overwrite"),
    "dP over a dQ that nobody has read": ("d128", "mma", Wait, "dq", "empty", "overwrite"),
    "S over a dQ that nobody has read": ("serial", "mma", Wait, "dq", "empty", "overwrite"),
    "memory freed early": ("d128", "mma", Wait, "free", None, "overwrite"),
    "P before S": ("d128", "compute", Wait, "scores", "full", "overwrite"),
    "dS before dP": ("d64", "compute", Wait, "slopes", "full", "overwrite"),
    "dK laid down early": ("d64", "compute", Wait, "final", "full", "overwrite"),
    "stored before all have laid down": ("d64", "compute", Wait, "laid", None, "overwrite"),
    "P never announced": ("d64", "compute", Arrive, "probs", "full", "deadlock"),
    "statistics never freed": ("d64", "compute", Arrive, "stats", "empty", "deadlock"),
    "dQ read early": ("d64", "reduce", Wait, "dq", "full", "overwrite"),
    "dQ never freed": ("d64", "reduce", Arrive, "dq", "empty", "deadlock"),
    "a slice sent before all have written it": ("d64", "reduce", Wait, "slice", None, "wrong phase"),
    "pairs: Q over a Q in use": ("pairs", "load", Wait, "scores", "full", "overwrite"),
    "pairs: turned dO over one in use": ("pairs", "load", Wait, "doutt", "empty", "overwrite"),
    "pairs: dQ before what was sent": ("pairs", "mma", Wait, "trade", "full", "overwrite"),
    "pairs: dQ before what is kept": ("pairs", "mma", Wait, "square", "full", "overwrite"),
    "pairs: dQ over scores nobody has read": ("pairs", "mma", Wait, "scores", "empty", "overwrite"),
    "pairs: the leader not told of Q": ("pairs", "mma", Arrive, "q", "full", "deadlock"),
    "pairs: bytes never expected": ("pairs", "mma", Arrive, "trade", "full", "deadlock"),
    "pairs: dS over what a product reads": ("pairs", "compute", Wait, "dq", "full", "overwrite"),
    "pairs: dQ never freed": ("pairs", "reduce", Arrive, "dq", "empty", "deadlock"),
    "sweeps: scores nobody has read": ("sweep dk", "mma", Wait, "scores", "empty", "overwrite"),
    "sweeps: a sum before its weights": ("sweep dq", "mma", Wait, "weights", "full", "overwrite"),
    "sweeps: a tile over one in use": ("sweep dv", "load", Wait, "turned", "empty", "overwrite"),
    "sweeps: scores over P": ("sweep dv", "load", Wait, "scores", "full", "overwrite"),
    "sweeps: the leader not told": ("sweep dv", "mma", Arrive, "score_b", "full", "deadlock"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_dropped_signal_is_found(name):
    form, role, kind, ring, side, fault = BREAKS[name]
    module, plan = plans()[form]
    good = module.protocol(plan, 2 if form == "pairs" else 3)

    def dropped(agent, e):
        hit = agent[0] == role and isinstance(e, kind) and e.barrier[0] == ring
        return hit and (side is None or e.barrier[1] == side)

    agents = {agent: [e for e in events if not dropped(agent, e)] for agent, events in good.agents.items()}
    assert agents != good.agents
    assert fault in {f.kind for f in checker.check(good._replace(agents=agents))}


def test_fewer_arrivals_than_the_bytes_are_found():
    """What the other CTA sends are four copies: with one fewer counted the product starts on three quarters of it."""
    module, plan = plans()["pairs"]
    good = module.protocol(plan, 2)
    counts = {b: n - (b[0] == "trade") for b, n in good.counts.items()}
    assert checker.check(good._replace(counts=counts))
