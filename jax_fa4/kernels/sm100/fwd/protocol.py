"""The order in which each role of the forward waits, signals and touches memory, for some pairs of query tiles.

Of one CTA, or of the two of a pair: then names end with the CTA's rank.

Follows the role files line by line: whoever changes the order of signals there changes it here, and tests/protocol.py
searches it for deadlock and overwriting before anything is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_fa4.kernels.sm100.events import Arrive, Event, Protocol, Read, Recorder, Wait, Write, ring_counts
from jax_fa4.kernels.sm100.fwd.plan import WARP, Plan

WARPS = 4  # of a group


# Of a pair these stand in the leader alone; the leader's products signal the others in both CTAs.
LED = ("q", "kv", "k", "v", "edge", "probs", "rest")


def counted(plan: Plan, hands: int = 2) -> dict[tuple, int]:
    """Arrivals of each barrier. hands: named barriers of a warp of softmax and one of correction."""
    counts = ring_counts(plan.rings)
    counts |= {("hand", s, w): 2 for s in range(hands) for w in range(WARPS)}  # in warps
    counts["free",] = WARPS + 1
    if not plan.pair:
        return counts
    each = {(*name, rank): count for name, count in counts.items() for rank in range(plan.ctas)}
    ours = {(name, "full") for name in ("q", "kv", "k", "v")}  # a copy of each CTA completes them
    each |= {b: n + 1 for b, n in each.items() if b[:2] in ours}
    warps = plan.ctas * plan.threads // WARP
    return {b: n for b, n in each.items() if b[0] != "free"} | {("free",): warps}


class Pair(NamedTuple):
    """One pair of query tiles: as in mask.py."""

    blocks: int
    lead: int = 0
    trail: int = 0

    def of(self, s: int) -> tuple[int, int]:
        """[first, last) of the blocks that tile s takes."""
        return (self.lead, self.blocks) if s == 0 else (0, self.blocks - self.trail)


class Agents:
    """The agents of one CTA; `r` and `pipe` are those of the pair. `uses`, `rounds` and `turn` count what earlier pairs
    of query tiles took."""

    def __init__(self, plan: Plan, pairs: tuple[Pair, ...], r: Recorder, rank: int | None = None):
        self.plan, self.r, self.rank = plan, r, rank
        self.pipe = self.r.of("tensor pipe")
        self.again = plan.workers > 0
        self.turn, self.uses, self.rounds = 0, 0, [0, 0]
        for pair in pairs:
            assert 0 <= min(pair[1:]) and max(pair[1:]) < pair.blocks, pair
            self.now, self.last = pair, self.turn + 1 == len(pairs)
            self.play()
            self.turn, self.uses = self.turn + 1, self.uses + 2 * pair.blocks
            self.rounds = [r + b - a for s, r in enumerate(self.rounds) for a, b in [pair.of(s)]]

    def play(self) -> None:
        self.load()
        self.edge()
        self.mma()
        for w in range(WARPS):
            for s in range(self.plan.queries):
                self.softmax(s, w)
            self.correct(w)
        self.store()

    def round(self, s: int, block: int) -> int:
        return self.rounds[s] + block - self.now.of(s)[0]

    @property
    def leads(self) -> bool:
        return self.rank in (None, self.plan.leader)

    def at(self, *name: Any) -> tuple:
        """A barrier, cell or agent of this CTA; a barrier that the MMA warp waits for is the leader's."""
        if self.rank is None:
            return name
        led = name[0] in LED and name[1:2] == ("full",)
        return (*name, self.plan.leader if led else self.rank)

    def everywhere(self, *name: Any) -> list[tuple]:
        """Of each CTA of the pair."""
        return [name] if self.rank is None else [(*name, rank) for rank in range(self.plan.ctas)]

    def of(self, *name: Any) -> list[Event]:
        return self.r.of(*self.at(*name))

    def warp_arrives(self, barrier: tuple, phase: int) -> Arrive:
        """128 threads arrive one by one within a CTA, by warps across a pair."""
        return Arrive(barrier, phase, 1 if self.plan.pair else WARP)

    def use(self, which: int) -> tuple[int, int]:
        """(stage, how often the stage was used before) of the pair's K or V number `which` in K0 V0 K1 ..."""
        which += self.uses
        return which % self.plan.stages, which // self.plan.stages

    def fetched(self, by: list[Event], barrier: tuple, phase: int, write: Write) -> None:
        """A TMA load: expects bytes, those of both CTAs of a pair; starts; the copy writes and completes on its own."""
        if self.leads:
            by.append(Arrive(barrier, phase))
        copy = self.r.of("load", *write)
        self.r.start(by, copy)
        copy += [write, Arrive(barrier, phase)]

    def load(self) -> None:
        me, stages, tiles = self.of("load"), self.plan.stages, 2 * self.now.blocks
        for which in range(tiles):
            stage, before = self.use(which)
            me.append(Wait(self.at("kv", "empty", stage), before - 1))
            # Even versions are loads, odd ones the zeroed edge.
            self.fetched(me, self.at("kv", "full", stage), before, Write(self.at("kv", stage), 2 * before))
            if which == 0 and not self.plan.packed:
                for s in range(2):
                    if self.again:
                        me.append(Wait(("q", "empty", s), self.turn - 1))
                    self.fetched(me, self.at("q", "full", s), self.turn, Write(self.at("q", s), self.turn))
        drained = stages - 2 if self.plan.pair else stages if self.again and self.last else 0
        for which in range(tiles, tiles + drained):
            stage, before = self.use(which)
            me.append(Wait(self.at("kv", "empty", stage), before - 1))
        if self.again and self.last:
            me += [Wait(("q", "empty", s), self.turn) for s in range(2)]
        self.leave(me)

    def leave(self, me: list[Event]) -> None:
        """Of a pair every warp stays until all have come."""
        if self.plan.pair:
            me += [Arrive(("free",), 0), Wait(("free",), 0)]

    def edge(self) -> None:
        stage, before = self.use(1)
        me = self.of("edge")
        if self.again:
            me.append(Wait(("edge", "empty", 0), self.turn - 1))
        if self.leads:
            me.append(Wait(self.at("kv", "full", stage), before))
            if self.plan.pair:
                me.append(Arrive(("landed", "full", 0, 1 - self.rank), 0))
        else:
            me.append(Wait(self.at("landed", "full", 0), 0))
        me += [Write(self.at("kv", stage), 2 * before + 1), Arrive(self.at("edge", "full", 0), self.turn)]
        self.leave(me)

    # The tensor pipe is one of both CTAs of a pair: what it touches it touches in each.
    def touch(self, kind: type, cell: tuple, version: int) -> None:
        self.pipe += [kind(c, version) for c in self.everywhere(*cell)]

    def scores(self, me: list[Event], s: int, block: int) -> None:
        stage, before = self.use(2 * block)
        round = self.round(s, block)
        self.r.start(me, self.pipe)
        self.touch(Read, ("q", s), self.turn)
        self.touch(Read, ("kv", stage), 2 * before)
        for w in range(WARPS):
            self.touch(Write, ("s low", s, w), round)
            for i in range(4):  # P's quarters lie over S
                self.touch(Write, ("p", s, w, i), 2 * round)
        self.signal(("scores", "full", s), round)

    def signal(self, barrier: tuple, phase: int) -> None:
        self.pipe += [Arrive(b, phase) for b in self.everywhere(*barrier)]

    def output(self, me: list[Event], s: int, block: int) -> None:
        early, round = self.plan.early, self.round(s, block)
        stage, before = self.use(2 * block + 1)
        me.append(Wait(self.at("probs", "full", s), round))
        for quarters in (range(early), range(early, 4)):
            if not quarters:
                continue
            if quarters[0]:
                me.append(Wait(self.at("rest", "full", s), round))
            self.r.start(me, self.pipe)
            self.touch(Read, ("kv", stage), 2 * before + (block == 0))
            for w in range(WARPS):
                for i in quarters:
                    self.touch(Read, ("p", s, w, i), 2 * round + 1)
        for w in range(WARPS):
            self.touch(Write, ("o", s, w), 2 * round)

    def commit(self, me: list[Event], barrier: tuple, phase: int) -> None:
        self.r.start(me, self.pipe)
        self.signal(barrier, phase)

    def mma(self) -> None:
        me, pair = self.of("mma"), self.plan.pair
        if self.leads:
            self.multiply(me, pair)
        if not self.last:
            return
        if pair:
            self.leave(me)
        else:
            me += [Arrive(("free",), 0), Wait(("free",), 0)]
        me.append(Write(self.at("tmem"), 1))

    def free_queries(self, me: list[Event]) -> None:
        if self.again:
            for s in range(2):
                self.commit(me, ("q", "empty", s), self.turn)

    def multiply(self, me: list[Event], pair: bool) -> None:
        blocks, lead, trail = self.now
        (k, k_before), second = self.use(0), blocks - trail
        me.append(Wait(self.at("kv", "full", k), k_before))
        for s in range(2):
            me.append(Wait(self.at("q", "full", s), self.turn))
            if s == 1 or lead == 0:
                self.scores(me, s, 0)
        if not pair:
            self.commit(me, ("kv", "empty", k), k_before)
        if blocks == 1:
            self.free_queries(me)
        me.append(Wait(self.at("edge", "full", 0), self.turn))
        for i in range(blocks):
            (now, had), (v, before), (k, k_before) = (self.use(2 * i + j) for j in range(3))
            more = i + 1 < blocks
            me.append(Wait(self.at("kv", "full", v), before))
            if i >= lead:
                self.output(me, 0, i)
                if not more:
                    self.commit(me, ("acc", "full", 0), self.turn)
            if more:
                if pair:
                    self.commit(me, ("kv", "empty", now), had)
                me.append(Wait(self.at("kv", "full", k), k_before))
                self.scores(me, 0, i + 1)
            if i < second:
                self.output(me, 1, i)
                if i + 1 == second:
                    self.commit(me, ("acc", "full", 1), self.turn)
            if more:
                self.commit(me, ("kv", "empty", v), before)
                if i + 1 < second:
                    self.scores(me, 1, i + 1)
                if not pair:
                    self.commit(me, ("kv", "empty", k), k_before)
                if i + 2 == blocks:
                    self.free_queries(me)
            elif self.again:
                self.commit(me, ("kv", "empty", v), before)
        if self.again:
            me.append(Arrive(("edge", "empty", 0), self.turn))

    def softmax(self, s: int, w: int) -> None:
        me, plan, (first, last) = self.of("softmax", s, w), self.plan, self.now.of(s)
        if plan.packed:
            me += [Write(self.at("q", s), 0), Arrive(self.at("q", "full", s), 0, WARP)]
        if self.again:
            me.append(Wait(("stats", "empty", s), self.rounds[s] + self.turn - 1))
        for block in range(first, last):
            i = self.round(s, block)
            spent = i + self.turn
            me += [Wait(self.at("scores", "full", s), i), Read(self.at("s low", s, w), i)]
            me += [Read(self.at("p", s, w, j), 2 * i) for j in range(4)]
            me += [Write(self.at("stats", s, w), spent), Arrive(self.at("hand", s, w), spent)]
            for j in range(4):
                me.append(Write(self.at("p", s, w, j), 2 * i + 1))
                if j == plan.early - 1:
                    me.append(self.warp_arrives(self.at("probs", "full", s), i))
            if plan.early < 4:
                me.append(Arrive(self.at("rest", "full", s), i))
            me.append(Wait(self.at("stats", "empty", s), spent))
        final = self.final(s)
        me += [Write(self.at("stats", s, w), final), Arrive(self.at("hand", s, w), final)]
        self.leave(me)

    def final(self, s: int) -> int:
        """Number of the hand-over of sum and maximum."""
        return self.round(s, self.now.of(s)[1]) + self.turn

    def synced(self, w: int, s: int, phase: int) -> None:
        hand = self.at("hand", s, w)
        self.of("correct", w).extend((Arrive(hand, phase), Wait(hand, phase)))

    def freed(self, w: int, s: int, phase: int) -> None:
        self.of("correct", w).append(Arrive(self.at("stats", "empty", s), phase, WARP))

    def take(self, w: int, s: int, block: int) -> None:
        """S of this block is there, so the product of the block before is done: same pipe."""
        i = self.round(s, block)
        me = self.of("correct", w)
        me += [Read(self.at("stats", s, w), i + self.turn), Write(self.at("o", s, w), 2 * i - 1)]
        me.append(self.warp_arrives(self.at("probs", "full", s), i))

    def correct(self, w: int) -> None:
        me, (blocks, lead, trail) = self.of("correct", w), self.now
        second = blocks - trail

        def phase(s: int, block: int) -> int:
            return self.round(s, block) + self.turn

        if self.turn == 0:
            me += [self.warp_arrives(self.at("probs", "full", s), 0) for s in range(2)]
        if lead == 0:
            self.synced(w, 0, phase(0, 0))
            self.freed(w, 0, phase(0, 0))
        self.synced(w, 1, phase(1, 0))
        for i in range(1, blocks):
            self.synced(w, 0, phase(0, i))
            if i > lead:
                self.take(w, 0, i)
            if i <= second:
                self.freed(w, 1, phase(1, i - 1))
            if i < second:
                self.synced(w, 1, phase(1, i))
                self.take(w, 1, i)
            self.freed(w, 0, phase(0, i))
        if trail == 0:
            self.freed(w, 1, phase(1, blocks - 1))
        for s in range(2):
            self.finish(w, s)
        if self.plan.pair:
            self.leave(me)
        elif self.last:
            me.append(Arrive(("free",), 0))

    def finish(self, w: int, s: int) -> None:
        me, final = self.of("correct", w), self.final(s)
        self.synced(w, s, final)
        me.append(Read(self.at("stats", s, w), final))
        if self.again:
            self.freed(w, s, final)
            me.append(Wait(("final", "empty", s), self.turn - 1))
        me += [Wait(self.at("acc", "full", s), self.turn), Read(self.at("tmem"), 0)]
        me.append(Read(self.at("o", s, w), 2 * (final - self.turn) - 2))
        if not self.last:
            me.append(Arrive(("probs", "full", s), final - self.turn, WARP))
        if not self.plan.splits:
            me += [self.out(Write, s), Arrive(self.at("final", "full", s), self.turn, WARP)]

    def out(self, kind: type, s: int) -> Event:
        """Access to a tile of O in shared memory, which may have been Q's place."""
        return kind(self.at("q" if self.plan.out_over_q else "out", s), self.turn + 1)

    def store(self) -> None:
        me = self.of("store")
        if self.plan.splits:
            return
        copies = []
        for s in range(2):
            me.append(Wait(self.at("final", "full", s), self.turn))
            copy = self.of("store", self.turn, s)
            self.r.start(me, copy)
            copy.append(self.out(Read, s))
            copies.append(copy)
        if self.again:
            for copy in copies:
                self.r.start(copy, me)  # the wait for its group
            me += [Arrive(("final", "empty", s), self.turn) for s in range(2)]
        self.leave(me)


def protocol(plan: Plan, *pairs: Pair | int) -> Protocol:
    """Every agent of one CTA, or of a pair of CTAs, that takes these pairs of query tiles one after the other; a number
    is a pair of so many blocks."""
    assert plan.workers or len(pairs) == 1, pairs
    recorder = Recorder(counted(plan))
    for rank in range(plan.ctas) if plan.pair else (None,):
        Agents(plan, tuple(x if isinstance(x, Pair) else Pair(x) for x in pairs), recorder, rank)
    return recorder.protocol()
