"""Holds a protocol, the order of signals that tests/protocol.py proves, against a run of the compiled kernel.

Barriers have names there and places here, so one name must go with one place throughout. What the tensor pipe signals
is compared with the commits, which arrive later than they are issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax_fa4.kernels.sm100.events import Arrive, Event, Name, Protocol, Wait

COMMITS = "commits"
CLUSTER = "free"  # of pairs the last meeting is the cluster's barrier, which is not traced
Words = dict[Any, list[tuple[str, Any]]]


def forward_warp(plan: Any, role: str, *numbers: Any) -> int | None:
    """The warp that an agent of the forward is; None: a copy."""
    first = {"load": plan.LOAD, "edge": plan.EDGE, "mma": plan.MMA, "store": plan.STORE}
    if role == "softmax":
        return plan.SOFTMAX + sum(4**i * n for i, n in enumerate(reversed(numbers)))
    if role == "correct":
        return plan.CORRECT + numbers[0]
    return first.get(role) if not numbers else None


def backward_warp(plan: Any, role: str, *numbers: Any) -> int | None:
    """Likewise of the backward."""
    if role == "compute":
        return plan.COMPUTE + 4 * numbers[0] + numbers[1]
    if role == "reduce":
        return plan.REDUCE + numbers[0]
    return {"load": plan.LOAD, "mma": plan.MMA}.get(role)


def expected(plan: Any, p: Protocol, warp_of: Callable, named: tuple[str, ...]) -> Words:
    """{(rank, warp): [(what, barrier's name)]} of every warp; named: which are named barriers."""
    pair = bool(getattr(plan, "pair", False))
    made: Words = {}
    for (role, *numbers), events in p.agents.items():
        rank = numbers.pop() if pair and numbers else 0
        warp = warp_of(plan, role, *numbers)
        if warp is not None:
            assert (rank, warp) not in made, (role, numbers)
            made[rank, warp] = list(_words(events, named, pair))
    made[COMMITS] = [("commit", e.barrier) for e in p.agents["tensor pipe",] if isinstance(e, Arrive)]
    return made


def _words(events: list[Event], named: tuple[str, ...], pair: bool) -> Iterator[tuple[str, Name]]:
    """Tokens of started copies left out; arriving at a named barrier and waiting for it is one word."""
    kept = [e for e in events if isinstance(e, Arrive | Wait) and e.barrier[0] != "start"]
    kept = [e for e in kept if not (pair and e.barrier[0] == CLUSTER)]
    for i, e in enumerate(kept):
        is_named = e.barrier[0] in named
        if isinstance(e, Wait):
            if not is_named:
                yield "wait", e.barrier
        elif is_named:
            then = kept[i + 1] if i + 1 < len(kept) else None
            yield ("bar.sync" if isinstance(then, Wait) and then.barrier == e.barrier else "bar.arrive"), e.barrier
        else:
            yield "arrive", e.barrier


def seen(plan: Any, trace: list, want: Words) -> Words:
    """The same of the first CTA, or pair, of a run; barriers by place."""
    ctas = plan.ctas if getattr(plan, "pair", False) else 1
    made: Words = {who: [] for who in want}
    for e in trace:
        setting_up = e.kind == "init" or (e.kind.startswith("bar") and e.barrier == 0)
        if setting_up or e.cta[0] >= ctas or any(e.cta[1:]):
            continue
        place = ("bar" if e.kind.startswith("bar") else "mbarrier", e.barrier, e.owner)
        who = COMMITS if e.kind == "commit" else (e.cta[0], e.warp)
        made.setdefault(who, []).append((e.kind, place))
    return made


def differences(want: Words, got: Words) -> list[str]:
    """Where they are not the same up to names."""
    names: dict[Any, Any] = {}
    places: dict[Any, Any] = {}
    wrong = [f"warp {who}, of which the protocol knows nothing: {got[who]}" for who in got if who not in want]
    for who, words in want.items():
        if [w for w, _ in words] != [g for g, _ in got[who]]:
            wrong.append(f"warp {who}: {[w for w, _ in words]} expected, {[g for g, _ in got[who]]} seen")
            continue
        for (word, name), (_, place) in zip(words, got[who], strict=True):
            if names.setdefault(name, place) != place or places.setdefault(place, name) != name:
                wrong.append(f"warp {who}: {word} at {place}, which is {places.get(place)}, not {name}")
    return wrong
