"""The order in which each role of a pair's backward waits, signals and touches memory, in ../protocol.py's words.

Both CTAs; names end with the CTA's rank. Versions: a tile is copied (even), then cleared past a length (odd); S and P,
or dP and dS, of part u are 2 u and 2 u + 1, but see `over`.
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.bwd.pair.plan import PairPlan
from jax_fa4.kernels.sm100.bwd.protocol import BOTH, WARPS, Roles, Slices
from jax_fa4.kernels.sm100.events import Arrive, Event, Name, Protocol, Read, Recorder, Wait, Write, ring_counts


def counted(plan: PairPlan) -> dict[Name, int]:
    """Arrivals of each barrier. What the other CTA sends are as many copies as a warpgroup has warps."""
    counts: dict[Name, int] = {}
    for rank in range(plan.ctas):
        for name, n in ring_counts(plan.rings).items():
            ring = next(r for r in plan.rings if r.name == name[0])
            if name[1] == "full":
                n += plan.arrivals(ring, rank) - ring.full + (WARPS - 1) * (ring.name == "trade")
            counts[*name, rank] = n
        counts |= {("laid", rank): len(BOTH), ("slice", rank): WARPS}
    return counts | {("free",): plan.ctas * (len(BOTH) + WARPS + 2)}


class Pair(Roles):
    """The agents of one CTA of the pair."""

    plan: PairPlan

    def __init__(self, plan: PairPlan, steps: int, r: Recorder, rank: int):
        super().__init__(plan, steps, r)
        self.rank, self.leads, self.parts = rank, rank == plan.leader, plan.parts
        self.over: dict[tuple[str, int], int] = {}  # versions of the half of S^T's columns that dQ takes: see regions
        for u in range(self.parts * steps):
            self.over["s", u] = len(self.over)
            if u and u % self.parts == 0:  # dQ of a step is issued behind S^T of the next
                self.over["dq", u // self.parts - 1] = len(self.over)
        self.over["dq", steps - 1] = len(self.over)
        self.load()
        self.mma()
        for group, warp in BOTH:
            self.compute(group, warp)
        for warp in range(WARPS):
            self.reduce(warp)

    def lead(self, *barrier: str) -> tuple:
        """The leader's barrier of that name."""
        return (*barrier, 0, self.plan.leader)

    def leave(self, me: list[Event]) -> None:
        """All warps of both CTAs meet at the end."""
        me += [Arrive(("free",), 0), Wait(("free",), 0)]

    def full(self, ring: str, stage: int = 0) -> tuple:
        return self.at(ring, "full", stage)

    # The load warp -------------------------------------------------------------------------------------------------
    def bring(self, me: list[Event], ring: str, use: int, stage: int = 0) -> None:
        self.fetched(me, self.full(ring, stage), use, Write(self.at(ring, stage), 2 * use))

    def load(self) -> None:
        me = self.of("load")
        for u in range(self.parts * self.steps):
            n, first = u // self.parts, u % self.parts == 0
            if u == 0:
                self.bring(me, "k", 0)
            me.append(Wait(self.full("scores"), u - 1))
            self.bring(me, "q", u)
            if first:
                me.append(Wait(self.at("stats", "empty", n % 2), n // 2 - 1))
                self.bring(me, "stats", n // 2, n % 2)
            if u == 0:
                self.bring(me, "v", 0)
            me.append(Wait(self.full("slopes"), u - 1))
            self.bring(me, "dout", u)
            for ring in ("doutt", "qt"):
                me.append(Wait(self.at(ring, "empty", 0), u - 1))
                self.bring(me, ring, u)
            if u + 1 == self.parts:
                self.bring(me, "kt", 0)
        self.leave(me)

    # The MMA warp --------------------------------------------------------------------------------------------------
    def taken(self, me: list[Event], ring: str, use: int) -> None:
        """Waits for a tile, and clears what is past a length."""
        me += [Wait(self.full(ring), use), Write(self.at(ring, 0), 2 * use + 1)]

    def tell(self, me: list[Event], ring: str, use: int) -> None:
        if not self.leads:
            me.append(Arrive(self.lead(ring, "full"), use))

    def queries(self, me: list[Event], ring: str, u: int) -> None:
        self.taken(me, ring, u)
        self.tell(me, ring, u)

    def product(self, me: list[Event], *operands: tuple[str, int]) -> None:
        """Is issued; (ring, use) of its operands in shared memory, of both CTAs."""
        self.r.start(me, self.pipe)
        for ring, use in operands:
            self.touch(Read, (ring, 0), 2 * use + 1)

    def scores(self, me: list[Event], u: int, n: int, late: bool) -> None:
        self.queries(me, "q", u)
        if not self.leads:
            return
        if late and n > 0:
            me.append(Wait(self.lead("dq", "empty"), n - 1))
        self.product(me, ("k", 0), ("q", u))
        self.squares(Write, "s", 2 * u)
        self.squares(Write, "over", self.over["s", u])
        self.signal("scores", "full", 0, phase=u)

    def slopes(self, me: list[Event], u: int) -> None:
        self.queries(me, "dout", u)
        if self.leads:
            self.product(me, ("v", 0), ("dout", u))
            self.squares(Write, "dp", 2 * u)
            self.signal("slopes", "full", 0, phase=u)

    def values(self, me: list[Event], u: int) -> None:
        self.queries(me, "doutt", u)
        if self.leads:
            me += [Wait(self.lead("scores", "empty"), u), Wait(self.lead("probs", "full"), u)]
            self.product(me, ("doutt", u))
            self.squares(Read, "s", 2 * u + 1)
            self.touch(Write, ("dv",), u)
            self.signal("doutt", "empty", 0, phase=u)

    def dk(self, me: list[Event], u: int) -> None:
        self.queries(me, "qt", u)
        if self.leads:
            me.append(Wait(self.lead("ds", "full"), u))
            self.product(me, ("qt", u))
            self.squares(Read, "dp", 2 * u + 1)
            self.touch(Write, ("dk",), u)
            self.signal("qt", "empty", 0, phase=u)

    def dq(self, me: list[Event], n: int, more: bool) -> None:
        me += [Arrive(self.full("trade"), n), Wait(self.full("trade"), n)]
        self.tell(me, "trade", n)
        if not self.leads:
            return
        me.append(Wait(self.lead("square", "full"), n))
        if more:
            me.append(Wait(self.lead("scores", "empty"), self.parts * (n + 1)))
        elif self.parts == 1 and n > 0:
            me.append(Wait(self.lead("dq", "empty"), n - 1))
        self.product(me, ("kt", 0))
        for warp in range(WARPS):
            self.touch(Read, ("kept", warp), n)
            self.touch(Read, ("sent", warp), n)
        self.squares(Write, "over", self.over["dq", n])
        self.signal("dq", "full", 0, phase=n)

    def mma(self) -> None:
        me, parts = self.of("mma"), self.parts
        self.taken(me, "k", 0)
        self.scores(me, 0, 0, False)
        self.taken(me, "v", 0)
        self.slopes(me, 0)
        self.values(me, 0)
        for u in range(parts * self.steps):
            n, p = u // parts, u % parts
            last, more = p == parts - 1, n + 1 < self.steps
            if more or not last:
                self.scores(me, u + 1, n, p == 0)
            self.dk(me, u)
            if more or not last:
                self.slopes(me, u + 1)
            if last:
                if n == 0:
                    self.taken(me, "kt", 0)
                self.dq(me, n, more)
            if more or not last:
                self.values(me, u + 1)
        self.leave(me)
        me.append(Write(self.at("tmem"), 1))

    # The others ----------------------------------------------------------------------------------------------------
    def compute(self, group: int, warp: int) -> None:
        me, who, parts = self.of("compute", group, warp), (group, warp), self.parts
        s, dp, over = (self.at(name, *who) for name in ("s", "dp", "over"))
        for u in range(parts * self.steps):
            n, p = u // parts, u % parts
            statistics = Read(self.at("stats", n % 2), 2 * (n // 2))
            if p == 0:
                me.append(Wait(self.full("stats", n % 2), n // 2))
            me += [Wait(self.full("scores"), u), Read(s, 2 * u), Read(over, self.over["s", u])]
            me += [Arrive(self.lead("scores", "empty"), u), statistics]
            me += [Write(s, 2 * u + 1), Arrive(self.lead("probs", "full"), u)]
            me += [Wait(self.full("slopes"), u), Read(dp, 2 * u), statistics]
            me += [Write(dp, 2 * u + 1), Arrive(self.lead("ds", "full"), u)]
            if p == parts - 1:
                me.append(Arrive(self.at("stats", "empty", n % 2), n // 2))
            self.hand_over(me, who, n, p)
        me.append(Wait(self.full("dq"), self.steps - 1))
        last = parts * self.steps - 1
        self.lay_down(me, who, (("dv", "v", last), ("dk", "k", last)))
        self.leave(me)

    def hand_over(self, me: list[Event], who: tuple[int, int], n: int, p: int) -> None:
        """dS of the warp's keys: of group `rank` its CTA keeps it, the other's is sent."""
        group, warp = who
        keeps, last = group == self.rank, p == self.parts - 1
        if p == 0:
            me.append(Wait(self.full("dq"), n - 1))
        me.append(Write(self.at("kept" if keeps else "parcel", warp), n))
        if last and keeps:
            me.append(Arrive(self.lead("square", "full"), n))
        elif last:
            peer, copy = 1 - (self.rank or 0), self.of("parcel", warp, n)
            self.r.start(me, copy)
            copy += [Read(self.at("parcel", warp), n), Write(("sent", warp, peer), n)]
            copy.append(Arrive(("trade", "full", 0, peer), n))

    def reduce(self, warp: int) -> None:
        me, plan = self.of("reduce", warp), self.plan
        slices = Slices(self, me, warp, plan.slices)
        for n in range(self.steps):
            me += [Wait(self.full("dq"), n), Read(self.at("tmem"), 0)]
            me += [Read(self.at("over", group, warp), self.over["dq", n]) for group in range(2)]
            me.append(Arrive(self.lead("dq", "empty"), n))
            for s in range(plan.half // plan.slice):
                slices.send(s)
        self.leave(me)


def protocol(plan: PairPlan, steps: int) -> Protocol:
    """Every agent of a pair that visits `steps` >= 1 query tiles, of all its heads."""
    assert not plan.ordered, "turns are not in it"
    recorder = Recorder(counted(plan))
    for rank in range(plan.ctas):
        Pair(plan, steps, recorder, rank)
    return recorder.protocol()
