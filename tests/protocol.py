"""Exhaustive check of a Protocol: deadlock, overwriting, and waits or arrivals that meet the wrong phase.

Why no interleavings are enumerated. Let every wait be for a number of completed phases, not for a parity. Then an
event, once possible, stays possible: more progress elsewhere never takes it away. So "e always precedes f" is decided
by one run: stop e's agent right before e, let everyone else run as far as they can, and see whether f happened. One
such run for every event decides every order. On top of that each wait is shown to meet the phase it means and no
other of the same parity, and each arrival to fall into its phase, which makes the machine's parity waits equal to the
counted ones. tests/test_protocol.py compares the verdicts with a search of all interleavings.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from jax_fa4.kernels.sm100.events import Arrive, Name, Protocol, Read, Wait, Write


class Fault(NamedTuple):
    """kind: deadlock | overwrite | early wait | missed wait | wrong phase | unbalanced."""

    kind: str
    text: str


class _Run:
    """One run as far as possible, with one agent optionally held before an event of it."""

    def __init__(self, p: Protocol, held: Name | None = None, at: int = 0):
        self.p, self.held, self.limit = p, held, at
        self.done = dict.fromkeys(p.agents, 0)
        self.arrived: dict[Name, int] = defaultdict(int)
        waiting: dict[Name, list[Name]] = defaultdict(list)
        ready = list(p.agents)
        while ready:
            agent = ready.pop()
            events = p.agents[agent]
            i, end = self.done[agent], at if agent == held else len(events)
            while i < end:
                event = events[i]
                if isinstance(event, Wait):
                    if self.phases(event.barrier) <= event.phase:
                        waiting[event.barrier].append(agent)
                        break
                elif isinstance(event, Arrive):
                    self.arrived[event.barrier] += event.arrivals
                    ready += waiting.pop(event.barrier, ())
                i += 1
            self.done[agent] = i

    def phases(self, barrier: Name) -> int:
        """Completed ones."""
        return self.arrived[barrier] // self.p.counts[barrier]


class _Places(NamedTuple):
    """(agent, position, event) of everything on one barrier or cell."""

    waits: dict[Name, list]
    arrivals: dict[Name, list]
    accesses: dict[Name, list]


def _places(p: Protocol) -> _Places:
    found = _Places(defaultdict(list), defaultdict(list), defaultdict(list))
    for agent, events in p.agents.items():
        for i, event in enumerate(events):
            if isinstance(event, Wait):
                found.waits[event.barrier].append((agent, i, event))
            elif isinstance(event, Arrive):
                found.arrivals[event.barrier].append((agent, i, event))
            else:
                found.accesses[event.cell].append((agent, i, event))
    return found


def _must_precede(a, b) -> bool:
    """Accesses of one cell: older versions first, and a version's writing before its reading."""
    if a.version != b.version:
        return a.version < b.version
    return isinstance(a, Write) and isinstance(b, Read)


def _stuck(p: Protocol, run: _Run) -> list[Fault]:
    faults = []
    for agent, events in p.agents.items():
        if run.done[agent] < len(events):
            event = events[run.done[agent]]
            have, need = run.arrived[event.barrier], p.counts[event.barrier]
            text = f"{agent} waits for phase {event.phase} of {event.barrier}; {have // need} phases are complete"
            faults.append(Fault("deadlock", f"{text}, {have % need} of {need} arrivals of the next"))
    return faults


def _check_arrival(p: Protocol, places: _Places, run: _Run, agent: Name, event: Arrive) -> list[Fault]:
    """`agent` is held before an arrival of phase n: nobody may arrive for n + 1, nor be at a wait for n + 1."""
    faults = []
    for other, i, later in places.arrivals[event.barrier]:
        if later.phase > event.phase and run.done[other] > i:
            text = f"{other} arrives at {event.barrier} for phase {later.phase} while {agent} has not for {event.phase}"
            faults.append(Fault("wrong phase", text))
    for other, i, later in places.waits[event.barrier]:
        if later.phase > event.phase and run.done[other] >= i and other != agent:
            text = (
                f"{other} can wait for phase {later.phase} of {event.barrier}, and may take an older one for it, while"
            )
            faults.append(Fault("early wait", f"{text} {agent} has not arrived for {event.phase}"))
    return faults


def _check_access(places: _Places, run: _Run, agent: Name, event) -> list[Fault]:
    """`agent` is held before an access: nothing that it must precede may have happened, by others or by itself."""
    faults = []
    for other, i, later in places.accesses[event.cell]:
        if run.done[other] > i and _must_precede(event, later):
            faults.append(Fault("overwrite", f"{other} does {later} while {agent} has not done {event}"))
    return faults


def check(p: Protocol) -> list[Fault]:
    """All faults; empty means that no interleaving deadlocks, overwrites or meets a wrong phase."""
    full = _Run(p)
    faults = _stuck(p, full)
    if faults:
        return faults
    places = _places(p)
    for barrier, have in full.arrived.items():
        if have % p.counts[barrier]:
            faults.append(Fault("unbalanced", f"{barrier} ends with {have} arrivals, phases take {p.counts[barrier]}"))
    for agent, events in p.agents.items():
        for i, event in enumerate(events):
            run = _Run(p, agent, i)
            if run.done[agent] < i:
                continue
            if isinstance(event, Arrive):
                faults += _check_arrival(p, places, run, agent, event)
            elif isinstance(event, Wait):
                if run.phases(event.barrier) > event.phase + 1:
                    text = (
                        f"{agent} can find phase {event.phase + 1} of {event.barrier} complete before it has waited for"
                    )
                    faults.append(Fault("missed wait", f"{text} {event.phase}"))
            else:
                faults += _check_access(places, run, agent, event)
        if len(faults) > 20:
            break
    return faults
