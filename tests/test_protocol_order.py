"""The forward's protocol, role by role, is what its compiled warps do: same waits and arrivals, in the same order.

The protocol checker proves the table; here the table is held against the kernel, in a run of the emulator. Barriers
have names there and places here, so one place must go with one name throughout.
"""

import importlib.util

import numpy as np
import pytest
from emulated import forward
from problems import Case
from test_emulated_sm100 import plan_of
from verifier.mutate import drop_wait

from jax_fa4.kernels.sm100.events import Arrive, Wait
from jax_fa4.kernels.sm100.fwd.plan import bind
from jax_fa4.kernels.sm100.fwd.protocol import protocol

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")

BLOCKS = 3
# A length that ends inside a block: the edge warp has work.
CASE = Case("order", b=1, t=256, s=128 * BLOCKS, n=1, k=1, d=64, kv_lens=(128 * BLOCKS - 20,))
NAMED = ("hand", "free")  # named barriers; the others are mbarriers


def expected(plan, blocks=BLOCKS):
    """{warp: [(what, barrier's name)]}; commits of the MMA warp apart, as they arrive later."""
    agents = protocol(plan, blocks).agents
    first = {"load": plan.LOAD, "edge": plan.EDGE, "mma": plan.MMA, "store": plan.STORE, "correct": plan.CORRECT}
    made = {}
    for name, events in agents.items():
        role, numbers = name[0], name[1:]
        if role == "softmax":
            warp = plan.SOFTMAX + 4 * numbers[0] + numbers[1]
        elif role == "correct" or (role in first and not numbers):
            warp = first[role] + (numbers[0] if numbers else 0)
        else:
            continue
        made[warp] = list(_words(events))
    made["commits"] = [("commit", e.barrier) for e in agents["tensor pipe",] if isinstance(e, Arrive)]
    return made


def _words(events):
    """Tokens of started copies left out; arriving at a named barrier and waiting for it is one word."""
    events = [e for e in events if isinstance(e, Arrive | Wait) and e.barrier[0] != "start"]
    for i, e in enumerate(events):
        named = e.barrier[0] in NAMED
        if isinstance(e, Wait):
            if not named:
                yield "wait", e.barrier
        elif named:
            then = events[i + 1] if i + 1 < len(events) else None
            synced = isinstance(then, Wait) and then.barrier == e.barrier
            yield "bar.sync" if synced else "bar.arrive", e.barrier
        else:
            yield "arrive", e.barrier


def seen(plan, seed, edit=lambda ptx: ptx):
    """The same, from a run; barriers by place."""
    trace = []
    forward(plan, bind, CASE, seed, trace=trace, edit=edit)
    made = {warp: [] for warp in [*expected(plan)] if warp != "commits"} | {"commits": []}
    for e in trace:
        if e.kind == "init" or (e.kind.startswith("bar") and e.barrier == 0):  # setting up
            continue
        if any(e.cta):  # with one pair of tiles the other CTAs of a persistent plan have nothing to do
            continue
        place = ("bar" if e.kind.startswith("bar") else "mbarrier", e.barrier)
        made["commits" if e.kind == "commit" else e.warp].append((e.kind, place))
    return made


def differences(want, got):
    """Where they are not the same up to names."""
    names, places, wrong = {}, {}, []
    for warp, words in want.items():
        if [w for w, _ in words] != [g for g, _ in got[warp]]:
            wrong.append(f"warp {warp}: {[w for w, _ in words]} expected, {[g for g, _ in got[warp]]} seen")
            continue
        for (word, name), (_, place) in zip(words, got[warp], strict=True):
            if names.setdefault(name, place) != place or places.setdefault(place, name) != name:
                wrong.append(f"warp {warp}: {word} at {place}, which is {places.get(place)}, not {name}")
    return wrong


@pytest.mark.parametrize("seed", (0, 4))
def test_the_kernel_follows_its_protocol(seed):
    plan = plan_of(CASE, stage_cap=3)
    want = expected(plan)
    assert len(want) == 17 and min(map(len, want.values())) >= 2, "every warp of the sixteen says something"
    assert not differences(want, seen(plan, seed))


def test_a_protocol_in_another_order_is_noticed():
    plan = plan_of(CASE, stage_cap=3)
    got, rng, noticed, tried = seen(plan, 0), np.random.default_rng(0), 0, 0
    for warp, words in expected(plan).items():
        changed = expected(plan)
        at = int(rng.integers(len(words) - 1))
        if words[at] == words[at + 1]:
            continue
        changed[warp][at : at + 2] = words[at + 1], words[at]
        tried += 1
        noticed += bool(differences(changed, got))
    assert noticed == tried >= 12


def test_a_kernel_without_a_wait_is_noticed():
    plan = plan_of(CASE, stage_cap=3)
    assert differences(expected(plan), seen(plan, 0, edit=drop_wait(3)))
