"""Words for what agents of a kernel do to barriers and memory, in order. Standard library only.

An agent is a warp, a started copy or the in-order tensor pipe. `phase` and `version` say what the author means; the
checker in tests/protocol.py proves that the machine can see nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Name = tuple[Any, ...]


class Arrive(NamedTuple):
    """`arrivals` meant for phase `phase` (0, 1, ...) of a barrier."""

    barrier: Name
    phase: int
    arrivals: int = 1


class Wait(NamedTuple):
    """Until phase `phase` has completed; -1, a producer's first wait, passes at once. The machine compares parities."""

    barrier: Name
    phase: int


class Write(NamedTuple):
    """Makes version `version` of a piece of memory."""

    cell: Name
    version: int


class Read(NamedTuple):
    """Must see version `version`."""

    cell: Name
    version: int


Event = Arrive | Wait | Write | Read


class Protocol(NamedTuple):
    """Agents' events in program order, and the arrivals that complete a phase of each barrier."""

    agents: dict[Name, list[Event]]
    counts: dict[Name, int]


class Recorder:
    """Builds a Protocol. Copies and products that run on their own are agents of their own, started by a token."""

    def __init__(self, counts: dict[Name, int]):
        self.agents: dict[Name, list[Event]] = {}
        self.counts = dict(counts)
        self._tokens = 0

    def of(self, *name: Any) -> list[Event]:
        return self.agents.setdefault(name, [])

    def start(self, by: list[Event], on: list[Event]) -> None:
        """`on` goes no further before `by` got here."""
        token = ("start", self._tokens)
        self._tokens += 1
        self.counts[token] = 1
        by.append(Arrive(token, 0))
        on.append(Wait(token, 0))

    def protocol(self) -> Protocol:
        return Protocol(self.agents, self.counts)


def ring_counts(rings: tuple[Any, ...]) -> dict[Name, int]:
    """Arrivals by (ring, side, stage) from a plan's table; a stage with bytes has the copy's completion on top."""
    counts: dict[Name, int] = {}
    for ring in rings:
        for stage in range(ring.stages):
            if ring.full:
                counts[ring.name, "full", stage] = ring.full + (ring.bytes > 0)
            if ring.empty:
                counts[ring.name, "empty", stage] = ring.empty
    return counts
