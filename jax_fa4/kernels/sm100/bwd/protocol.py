"""The order in which each role of the Blackwell backward waits, signals and touches memory, for some steps of a CTA.

In the words of fwd/protocol.py, and as there: it follows the role files line by line, whoever changes the order of
signals there changes it here, and tests search it for deadlock and overwriting before anything is compiled. Not in it:
the turns of an ordered plan, which are of several CTAs, see order.py.
"""

from __future__ import annotations

from typing import Any

from jax_fa4.kernels.sm100.bwd.plan import GROUP, SLICE, WARP, Plan
from jax_fa4.kernels.sm100.events import Arrive, Event, Protocol, Read, Recorder, Wait, Write, ring_counts

WARPS = GROUP // WARP
BOTH = [(g, w) for g in range(2) for w in range(WARPS)]  # group and warp of the compute warps


class Roles:
    """What the roles of every form of the backward have alike. `rank`: of a pair's CTA, last in names; None: alone."""

    rank: int | None = None

    def __init__(self, plan: Any, steps: int, r: Recorder):
        self.plan, self.steps, self.r = plan, steps, r
        self.pipe = r.of("tensor pipe")  # one of both CTAs of a pair

    def at(self, *name: Any) -> tuple:
        """A barrier, cell or agent of this CTA."""
        return name if self.rank is None else (*name, self.rank)

    def everywhere(self, *name: Any) -> list[tuple]:
        """Of each CTA of the pair."""
        return [name] if self.rank is None else [(*name, rank) for rank in range(self.plan.ctas)]

    def of(self, *name: Any) -> list[Event]:
        return self.r.of(*self.at(*name))

    def fetched(self, by: list[Event], barrier: tuple, phase: int, write: Write) -> None:
        """A copy: bytes are expected; it starts; it writes and completes on its own."""
        by.append(Arrive(barrier, phase))
        copy = self.r.of("copy", *write)
        self.r.start(by, copy)
        copy += [write, Arrive(barrier, phase)]

    def signal(self, *barrier: Any, phase: int) -> None:
        """Of the tensor pipe, behind what it was given before."""
        self.pipe += [Arrive(b, phase) for b in self.everywhere(*barrier)]

    def touch(self, kind: type, cell: tuple, version: int) -> None:
        """By the tensor pipe, in each CTA."""
        self.pipe += [kind(c, version) for c in self.everywhere(*cell)]

    def lay_down(self, me: list[Event], who: tuple[int, int], gradients: tuple[tuple[str, str, int], ...]) -> None:
        """Gradients leave: (name, the operand whose place it takes, version of the sum)."""
        me.append(Read(self.at("tmem"), 0))
        for name, kept, version in gradients:
            me += [Read(self.at(name), version), Write(self.at(kept, 0), 2)]
        self.meet(me, "laid", 0)
        if who == (0, 0):
            for _, kept, _ in gradients:
                copy = self.of("store", kept)
                self.r.start(me, copy)
                copy.append(Read(self.at(kept, 0), 2))
                self.r.start(copy, me)  # it has read before the warp goes on

    def squares(self, kind: type, name: str, version: int) -> None:
        """Likewise what the compute warps read and write."""
        for who in BOTH:
            self.touch(kind, (name, *who), version)

    def meet(self, me: list[Event], name: str, phase: int) -> None:
        """A named barrier of some warps."""
        me += [Arrive(self.at(name), phase), Wait(self.at(name), phase)]


class Slices:
    """Slices of dQ on their way from a reduce warp's registers through shared memory. The first warp starts the copies,
    and waits for the one that had a place before, and so for all before it."""

    def __init__(self, roles: Roles, me: list[Event], warp: int, places: int):
        self.roles, self.me, self.warp = roles, me, warp
        self.last = [-1] * places  # copy that had this place
        self.sent = self.over = 0

    def send(self, s: int) -> None:
        """s: number of the slice in its step."""
        roles, room, number = self.roles, s % len(self.last), self.sent
        while self.warp == 0 and self.over <= self.last[room]:
            roles.r.start(roles.of("add", self.over), self.me)
            self.over += 1
        roles.meet(self.me, "slice", 2 * number)
        self.me.append(Write(roles.at("part", room, self.warp), number))
        roles.meet(self.me, "slice", 2 * number + 1)
        if self.warp == 0:
            copy = roles.of("add", number)
            roles.r.start(self.me, copy)
            copy += [Read(roles.at("part", room, w), number) for w in range(WARPS)]
        self.last[room], self.sent = number, number + 1


class Alone(Roles):
    """Of one CTA. Versions: a tile is copied (even), then cleared past a length (odd); S and P of step n are 3 n and
    3 n + 1, dP and dS likewise, and dQ 3 n + 2 where it takes their place."""

    plan: Plan

    def place(self, ring: str, n: int) -> tuple[int, int]:
        """(stage, how often it was used before) of step n."""
        stages = 2 if ring == "stats" else self.plan.stages_of(ring)
        return n % stages, n // stages

    def play(self) -> None:
        self.load()
        self.mma()
        for group, warp in BOTH:
            self.compute(group, warp)
        for warp in range(WARPS):
            self.reduce(warp)

    def load(self) -> None:
        me = self.of("load")
        for n in range(self.steps):
            for ring, kept in (("q", "k"), ("stats", "v"), ("dout", "")):
                if n == 0 and kept == "k":
                    self.fetched(me, ("k", "full", 0), 0, Write(("k", 0), 0))
                stage, before = self.place(ring, n)
                me.append(Wait((ring, "empty", stage), before - 1))
                self.fetched(me, (ring, "full", stage), before, Write((ring, stage), 2 * before))
                if n == 0 and kept == "v":
                    self.fetched(me, ("v", "full", 0), 0, Write(("v", 0), 0))

    # The MMA warp --------------------------------------------------------------------------------------------------
    def taken(self, me: list[Event], ring: str, n: int) -> None:
        """Waits for a tile and clears what is past a length."""
        stage, before = self.place(ring, n)
        me += [Wait((ring, "full", stage), before), Write((ring, stage), 2 * before + 1)]

    def operand(self, ring: str, n: int) -> None:
        stage, before = self.place(ring, n)
        self.pipe.append(Read((ring, stage), 2 * before + 1))

    def scores(self, me: list[Event], n: int) -> None:
        self.taken(me, "q", n)
        self.r.start(me, self.pipe)
        self.operand("k", 0)
        self.operand("q", n)
        self.squares(Write, "s", 3 * n)
        self.signal("scores", "full", 0, phase=n)

    def slopes(self, me: list[Event], n: int) -> None:
        if not self.plan.serial:
            self.taken(me, "dout", n)
        self.r.start(me, self.pipe)
        self.operand("v", 0)
        self.operand("dout", n)
        self.squares(Write, "dp", 3 * n)
        self.signal("slopes", "full", 0, phase=n)
        if self.plan.serial:
            self.free(me, "dout", n)

    def free(self, me: list[Event], ring: str, n: int) -> None:
        stage, before = self.place(ring, n)
        self.r.start(me, self.pipe)
        self.signal(ring, "empty", stage, phase=before)

    def values(self, me: list[Event], n: int) -> None:
        me.append(Wait(("probs", "full", 0), n))
        self.r.start(me, self.pipe)
        self.squares(Read, "s", 3 * n + 1)
        self.operand("dout", n)
        self.pipe.append(Write(("dv",), n))
        if not self.plan.serial:
            stage, before = self.place("dout", n)
            self.signal("dout", "empty", stage, phase=before)

    def keys_queries(self, me: list[Event], n: int) -> None:
        me.append(Wait(("ds", "full", 0), n))
        self.r.start(me, self.pipe)
        self.squares(Read, "dp", 3 * n + 1)
        self.operand("q", n)
        self.pipe.append(Write(("dk",), n))
        stage, before = self.place("q", n)
        self.signal("q", "empty", stage, phase=before)
        if self.plan.dq_apart:
            me.append(Wait(("dq", "empty", 0), n - 1))
        self.r.start(me, self.pipe)
        self.squares(Read, "square", n)
        self.operand("k", 0)
        for cell, version in self.sums(n):
            self.pipe.append(Write(cell, version))
        self.signal("dq", "full", 0, phase=n)

    def sums(self, n: int) -> list[tuple[tuple, int]]:
        """Where dQ of step n lies."""
        if self.plan.dq_apart:
            return [(("dq",), n)]
        names = ("s", "dp") if self.plan.serial else ("dp",)
        return [((name, *who), 3 * n + 2) for name in names for who in BOTH]

    def skewed(self, me: list[Event]) -> None:
        self.taken(me, "k", 0)
        self.scores(me, 0)
        self.taken(me, "v", 0)
        self.slopes(me, 0)
        self.values(me, 0)
        for n in range(self.steps - 1):
            self.scores(me, n + 1)
            self.keys_queries(me, n)
            if not self.plan.dq_apart:
                me.append(Wait(("dq", "empty", 0), n))
            self.slopes(me, n + 1)
            self.values(me, n + 1)
        self.keys_queries(me, self.steps - 1)

    def in_turn(self, me: list[Event]) -> None:
        self.taken(me, "k", 0)
        for n in range(self.steps):
            me.append(Wait(("dq", "empty", 0), n - 1))
            self.scores(me, n)
            self.taken(me, "dout", n)
            self.values(me, n)
            if n == 0:
                self.taken(me, "v", 0)
            self.slopes(me, n)
            self.keys_queries(me, n)

    def mma(self) -> None:
        me = self.of("mma")
        (self.in_turn if self.plan.serial else self.skewed)(me)
        self.r.start(me, self.pipe)
        self.signal("final", "full", 0, phase=0)
        self.meet(me, "free", 0)
        me.append(Write(("tmem",), 1))

    # The others ----------------------------------------------------------------------------------------------------
    def compute(self, group: int, warp: int) -> None:
        me, who = self.of("compute", group, warp), (group, warp)
        for n in range(self.steps):
            stage, before = self.place("stats", n)
            statistics = Read(("stats", stage), 2 * before)
            me += [Wait(("stats", "full", stage), before), Wait(("scores", "full", 0), n)]
            me += [Read(("s", *who), 3 * n), statistics, Write(("s", *who), 3 * n + 1), Arrive(("probs", "full", 0), n)]
            me += [Wait(("slopes", "full", 0), n), Read(("dp", *who), 3 * n), statistics]
            me += [Write(("dp", *who), 3 * n + 1), Write(("square", *who), n), Arrive(("ds", "full", 0), n)]
            me.append(Arrive(("stats", "empty", stage), before))
        last = self.steps - 1
        me.append(Wait(("final", "full", 0), 0))
        self.lay_down(me, who, (("dv", "v", last), ("dk", "k", last)))
        me.append(Arrive(("free",), 0))

    def reduce(self, warp: int) -> None:
        me, plan = self.of("reduce", warp), self.plan
        count, slices = -(-plan.depth // SLICE), Slices(self, me, warp, plan.slices)
        for n in range(self.steps):
            me += [Wait(("dq", "full", 0), n), Read(("tmem",), 0)]
            for s in range(count):
                if s == 0 or not plan.at_once:
                    me += [Read(cell, version) for cell, version in self.sums(n)]
                if s == (0 if plan.at_once else count - 1):
                    me.append(Arrive(("dq", "empty", 0), n))
                slices.send(s)
        me.append(Arrive(("free",), 0))


def protocol(plan: Plan, steps: int) -> Protocol:
    """Every agent of a CTA that visits `steps` >= 1 query tiles, of all its heads."""
    assert not plan.ordered, "turns are not in it"
    counts = ring_counts(plan.rings) | {("laid",): len(BOTH), ("slice",): WARPS}
    recorder = Recorder(counts | {("free",): len(BOTH) + WARPS + 1})
    Alone(plan, steps, recorder).play()
    return recorder.protocol()
