"""The order in which each role of a sweep waits, signals and touches memory, in the words of ../protocol.py.

Both CTAs of a pair; names end with the CTA's rank. Versions: a tile is copied (even), then cleared past a length (odd);
scores and P, or dP and dS, of a place's use number i are 2 i and 2 i + 1.
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.bwd.protocol import BOTH, Roles
from jax_fa4.kernels.sm100.bwd.wide.plan import Sweep
from jax_fa4.kernels.sm100.events import Arrive, Event, Name, Protocol, Read, Recorder, Wait, Write, ring_counts


def counted(plan: Sweep) -> dict[Name, int]:
    """Arrivals of each barrier."""
    counts: dict[Name, int] = {}
    for rank in range(plan.ctas):
        for name, n in ring_counts(plan.rings).items():
            ring = next(r for r in plan.rings if r.name == name[0])
            counts[*name, rank] = n + (plan.arrivals(ring, rank) - ring.full) * (name[1] == "full")
        counts["laid", rank] = len(BOTH)
    return counts | {("free",): plan.ctas * (len(BOTH) + 2)}


class Sweeping(Roles):
    """The agents of one CTA of the pair."""

    plan: Sweep

    def __init__(self, plan: Sweep, steps: int, r: Recorder, rank: int):
        super().__init__(plan, steps, r)
        self.rank, self.leads = rank, rank == plan.leader
        self.load()
        self.mma()
        for group, warp in BOTH:
            self.compute(group, warp)

    def use(self, n: int) -> tuple[int, int]:
        """(place, how often it was used before) of step n."""
        return n % self.plan.places, n // self.plan.places

    def full(self, ring: str, stage: int = 0) -> tuple:
        return self.at(ring, "full", stage)

    def lead(self, ring: str, side: str, stage: int = 0) -> tuple:
        """The leader's barrier."""
        return (ring, side, stage, self.plan.leader)

    def leave(self, me: list[Event]) -> None:
        """All warps of both CTAs meet at the end."""
        me += [Arrive(("free",), 0), Wait(("free",), 0)]

    def bring(self, me: list[Event], ring: str, stage: int, before: int) -> None:
        self.fetched(me, self.full(ring, stage), before, Write(self.at(ring, stage), 2 * before))

    def load(self) -> None:
        me, plan = self.of("load"), self.plan
        for n in range(self.steps):
            stage, before = self.use(n)
            if n == 0:
                self.bring(me, "score_a", 0, 0)
            me.append(Wait(self.full("scores", stage), before - 1))
            self.bring(me, "score_b", stage, before)
            if not plan.by_query:
                me.append(Wait(self.at("stats", "empty", n % 2), n // 2 - 1))
                self.bring(me, "stats", n % 2, n // 2)
            if plan.slopes:
                if n == 0:
                    self.bring(me, "slope_a", 0, 0)
                me.append(Wait(self.full("slopes", stage), before - 1))
                self.bring(me, "slope_b", stage, before)
            me.append(Wait(self.at("turned", "empty", stage), before - 1))
            self.bring(me, "turned", stage, before)
        self.leave(me)

    # The MMA warp --------------------------------------------------------------------------------------------------
    def own(self, me: list[Event], part: str) -> None:
        """The CTA's rows are there; cleared past a length."""
        me += [Wait(self.full(part), 0), Write(self.at(part, 0), 1)]

    def other(self, me: list[Event], part: str, n: int) -> None:
        """A tile of the other side is there; the leader is told."""
        stage, before = self.use(n)
        me += [Wait(self.full(part, stage), before), Write(self.at(part, stage), 2 * before + 1)]
        if not self.leads:
            me.append(Arrive(self.lead(part, "full", stage), before))

    def operand(self, part: str, stage: int, before: int) -> None:
        self.touch(Read, (part, stage), 2 * before + 1)

    def square(self, kind: type, name: str, stage: int, version: int) -> None:
        for who in BOTH:
            self.touch(kind, (name, stage, *who), version)

    def scores(self, me: list[Event], n: int) -> None:
        stage, before = self.use(n)
        self.other(me, "score_b", n)
        if self.leads:
            if self.plan.slopes and n > 0:
                me.append(Wait(self.lead("scores", "empty"), n - 1))
            self.r.start(me, self.pipe)
            self.operand("score_a", 0, 0)
            self.operand("score_b", stage, before)
            self.square(Write, "s", stage, 2 * before)
            self.signal("scores", "full", stage, phase=before)

    def slopes(self, me: list[Event], n: int) -> None:
        stage, before = self.use(n)
        self.other(me, "slope_b", n)
        if self.leads:
            self.r.start(me, self.pipe)
            self.operand("slope_a", 0, 0)
            self.operand("slope_b", stage, before)
            self.square(Write, "dp", stage, 2 * before)
            self.signal("slopes", "full", stage, phase=before)

    def add(self, me: list[Event], n: int) -> None:
        """gradient += (P or dS) turned."""
        stage, before = self.use(n)
        self.other(me, "turned", n)
        if self.leads:
            me.append(Wait(self.lead("weights", "full", stage), before))
            self.r.start(me, self.pipe)
            self.square(Read, "dp" if self.plan.slopes else "s", stage, 2 * before + 1)
            self.operand("turned", stage, before)
            self.touch(Write, (self.plan.gradient,), n)
            if n + 1 < self.steps:
                self.signal("turned", "empty", stage, phase=before)
            else:
                self.signal("final", "full", 0, phase=0)

    def mma(self) -> None:
        me, slopes = self.of("mma"), self.plan.slopes
        self.own(me, "score_a")
        self.scores(me, 0)
        if slopes:
            self.own(me, "slope_a")
            self.slopes(me, 0)
        for n in range(self.steps - 1):
            self.scores(me, n + 1)
            self.add(me, n)
            if slopes:
                self.slopes(me, n + 1)
        self.add(me, self.steps - 1)
        self.leave(me)
        me.append(Write(self.at("tmem"), 1))

    def compute(self, group: int, warp: int) -> None:
        me, plan, who = self.of("compute", group, warp), self.plan, (group, warp)
        for n in range(self.steps):
            stage, before = self.use(n)
            statistics: list[Event] = []
            if not plan.by_query:
                me.append(Wait(self.full("stats", n % 2), n // 2))
                statistics = [Read(self.at("stats", n % 2), 2 * (n // 2))]
            me += [Wait(self.full("scores", stage), before), Read(self.at("s", stage, *who), 2 * before)]
            if plan.slopes:
                me.append(Arrive(self.lead("scores", "empty"), n))
                me += statistics
                me += [Wait(self.full("slopes", stage), before), Read(self.at("dp", stage, *who), 2 * before)]
            me += [*statistics, Write(self.at("dp" if plan.slopes else "s", stage, *who), 2 * before + 1)]
            me.append(Arrive(self.lead("weights", "full", stage), before))
            if not plan.by_query:
                me.append(Arrive(self.at("stats", "empty", n % 2), n // 2))
        me.append(Wait(self.full("final"), 0))
        self.lay_down(me, who, ((plan.gradient, "score_a", self.steps - 1),))
        self.leave(me)


def protocol(plan: Sweep, steps: int) -> Protocol:
    """Every agent of a pair that visits `steps` >= 1 tiles of the other side, of all its heads."""
    recorder = Recorder(counted(plan))
    for rank in range(plan.ctas):
        Sweeping(plan, steps, recorder, rank)
    return recorder.protocol()
