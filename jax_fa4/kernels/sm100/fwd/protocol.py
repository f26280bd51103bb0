"""The order in which each role of the forward waits, signals and touches memory, for `blocks` key blocks.

Of one CTA, or of the two of a pair: then names end with the CTA's rank.

Follows the role files line by line: whoever changes the order of signals there changes it here, and tests/protocol.py
searches it for deadlock and overwriting before anything is compiled.
"""

from __future__ import annotations

from typing import Any

from jax_fa4.kernels.sm100.events import Arrive, Event, Protocol, Read, Recorder, Wait, Write, ring_counts
from jax_fa4.kernels.sm100.fwd.plan import WARP, Plan

WARPS = 4  # of a group


# Of a pair these stand in the leader alone; the leader's products signal the others in both CTAs.
LED = ("q", "kv", "edge", "probs", "rest")


def _counts(plan: Plan) -> dict[tuple, int]:
    counts = ring_counts(plan.rings)
    counts |= {("hand", s, w): 2 for s in range(2) for w in range(WARPS)}  # named barriers 1..8, in warps
    counts["free",] = WARPS + 1
    if not plan.pair:
        return counts
    each = {(*name, rank): count for name, count in counts.items() for rank in range(plan.ctas)}
    ours = {("q", "full"), ("kv", "full")}  # a copy of each CTA completes them
    each |= {b: n + 1 for b, n in each.items() if b[:2] in ours}
    return {b: n for b, n in each.items() if b[0] != "free"} | {("free",): 2 * (3 * WARPS + 4)}  # all warps of both


class _Forward:
    """The agents of one CTA; `r` and `pipe` are those of the pair."""

    def __init__(self, plan: Plan, blocks: int, r: Recorder, rank: int | None = None):
        self.plan, self.blocks, self.r, self.rank = plan, blocks, r, rank
        self.pipe = self.r.of("tensor pipe")

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
        """(stage, how often the stage was used before) of K or V number `which` in K0 V0 K1 ..."""
        return which % self.plan.stages, which // self.plan.stages

    def fetched(self, by: list[Event], barrier: tuple, phase: int, write: Write) -> None:
        """A TMA load: expects bytes, those of both CTAs of a pair; starts; the copy writes and completes on its own."""
        if self.leads:
            by.append(Arrive(barrier, phase))
        copy = self.r.of("load", *write)
        self.r.start(by, copy)
        copy += [write, Arrive(barrier, phase)]

    def load(self) -> None:
        me, stages = self.of("load"), self.plan.stages
        for which in range(2 * self.blocks):
            stage, before = self.use(which)
            me.append(Wait(self.at("kv", "empty", stage), before - 1))
            # Even versions are loads, odd ones the zeroed edge.
            self.fetched(me, self.at("kv", "full", stage), before, Write(self.at("kv", stage), 2 * before))
            if which == 0:
                for s in range(2):
                    self.fetched(me, self.at("q", "full", s), 0, Write(self.at("q", s), 0))
        if self.plan.pair:
            for which in range(2 * self.blocks, 2 * self.blocks + stages - 2):
                stage, before = self.use(which)
                me.append(Wait(self.at("kv", "empty", stage), before - 1))
        self.leave(me)

    def leave(self, me: list[Event]) -> None:
        """Of a pair every warp stays until all have come."""
        if self.plan.pair:
            me += [Arrive(("free",), 0), Wait(("free",), 0)]

    def edge(self) -> None:
        stage, _ = self.use(1)
        me = self.of("edge")
        if self.leads:
            me.append(Wait(self.at("kv", "full", stage), 0))
            if self.plan.pair:
                me.append(Arrive(("landed", "full", 0, 1 - self.rank), 0))
        else:
            me.append(Wait(self.at("landed", "full", 0), 0))
        me += [Write(self.at("kv", stage), 1), Arrive(self.at("edge", "full", 0), 0)]
        self.leave(me)

    # The tensor pipe is one of both CTAs of a pair: what it touches it touches in each.
    def touch(self, kind: type, cell: tuple, version: int) -> None:
        self.pipe += [kind(c, version) for c in self.everywhere(*cell)]

    def scores(self, me: list[Event], s: int, block: int) -> None:
        stage, before = self.use(2 * block)
        self.r.start(me, self.pipe)
        self.touch(Read, ("q", s), 0)
        self.touch(Read, ("kv", stage), 2 * before)
        for w in range(WARPS):
            self.touch(Write, ("s low", s, w), block)
            for i in range(4):  # P's quarters lie over S
                self.touch(Write, ("p", s, w, i), 2 * block)
        self.signal(("scores", "full", s), block)

    def signal(self, barrier: tuple, phase: int) -> None:
        self.pipe += [Arrive(b, phase) for b in self.everywhere(*barrier)]

    def output(self, me: list[Event], s: int, block: int) -> None:
        early = self.plan.early
        stage, before = self.use(2 * block + 1)
        me.append(Wait(self.at("probs", "full", s), block))
        for quarters in (range(early), range(early, 4)):
            if not quarters:
                continue
            if quarters[0]:
                me.append(Wait(self.at("rest", "full", s), block))
            self.r.start(me, self.pipe)
            self.touch(Read, ("kv", stage), 2 * before + (block == 0))
            for w in range(WARPS):
                for i in quarters:
                    self.touch(Read, ("p", s, w, i), 2 * block + 1)
        for w in range(WARPS):
            self.touch(Write, ("o", s, w), 2 * block)

    def commit(self, me: list[Event], barrier: tuple, phase: int) -> None:
        self.r.start(me, self.pipe)
        self.signal(barrier, phase)

    def mma(self) -> None:
        me, pair = self.of("mma"), self.plan.pair
        if self.leads:
            self.multiply(me, pair)
        if pair:
            self.leave(me)
        else:
            me += [Arrive(("free",), 0), Wait(("free",), 0)]
        me.append(Write(self.at("tmem"), 1))

    def multiply(self, me: list[Event], pair: bool) -> None:
        me.append(Wait(self.at("kv", "full", 0), 0))
        for s in range(2):
            me.append(Wait(self.at("q", "full", s), 0))
            self.scores(me, s, 0)
        if not pair:
            self.commit(me, ("kv", "empty", 0), 0)
        me.append(Wait(self.at("edge", "full", 0), 0))
        for i in range(self.blocks):
            (now, had), (v, before), (k, k_before) = (self.use(2 * i + j) for j in range(3))
            me.append(Wait(self.at("kv", "full", v), before))
            last = i == self.blocks - 1
            for s in range(2):
                self.output(me, s, i)
                if last:
                    self.commit(me, ("acc", "full", s), 0)
                    continue
                if s == 1:
                    self.commit(me, ("kv", "empty", v), before)
                else:
                    if pair:
                        self.commit(me, ("kv", "empty", now), had)
                    me.append(Wait(self.at("kv", "full", k), k_before))
                self.scores(me, s, i + 1)
            if not last and not pair:
                self.commit(me, ("kv", "empty", k), k_before)

    def softmax(self, s: int, w: int) -> None:
        me, plan = self.of("softmax", s, w), self.plan
        for i in range(self.blocks):
            me += [Wait(self.at("scores", "full", s), i), Read(self.at("s low", s, w), i)]
            me += [Read(self.at("p", s, w, j), 2 * i) for j in range(4)]
            me += [Write(self.at("stats", s, w), i), Arrive(self.at("hand", s, w), i)]
            for j in range(4):
                me.append(Write(self.at("p", s, w, j), 2 * i + 1))
                if j == plan.early - 1:
                    me.append(self.warp_arrives(self.at("probs", "full", s), i))
            if plan.early < 4:
                me.append(Arrive(self.at("rest", "full", s), i))
            me.append(Wait(self.at("stats", "empty", s), i))
        me += [Write(self.at("stats", s, w), self.blocks), Arrive(self.at("hand", s, w), self.blocks)]
        self.leave(me)

    def correct(self, w: int) -> None:
        me = self.of("correct", w)

        def synced(s: int, phase: int) -> None:
            me.extend((Arrive(self.at("hand", s, w), phase), Wait(self.at("hand", s, w), phase)))

        def freed(s: int, phase: int) -> None:
            me.append(Arrive(self.at("stats", "empty", s), phase, WARP))

        me += [self.warp_arrives(self.at("probs", "full", s), 0) for s in range(2)]
        for s in range(2):
            synced(s, 0)
            if s == 0:
                freed(0, 0)
        for i in range(1, self.blocks):
            for s in range(2):
                synced(s, i)
                # S of block i is there, so the product of block i - 1 is done: same pipe
                me += [Read(self.at("stats", s, w), i), Write(self.at("o", s, w), 2 * i - 1)]
                me.append(self.warp_arrives(self.at("probs", "full", s), i))
                freed(1 - s, i - (s == 0))
        freed(1, self.blocks - 1)
        for s in range(2):
            synced(s, self.blocks)
            me += [Read(self.at("stats", s, w), self.blocks), Wait(self.at("acc", "full", s), 0)]
            me += [Read(self.at("tmem"), 0), Read(self.at("o", s, w), 2 * self.blocks - 2)]
            me += [self.out(Write, s), Arrive(self.at("final", "full", s), 0, WARP)]
        if self.plan.pair:
            self.leave(me)
        else:
            me.append(Arrive(("free",), 0))

    def out(self, kind: type, s: int) -> Event:
        """Access to a tile of O in shared memory, which may have been Q's place."""
        return kind(self.at("q" if self.plan.out_over_q else "out", s), 1)

    def store(self) -> None:
        me = self.of("store")
        for s in range(2):
            me.append(Wait(self.at("final", "full", s), 0))
            copy = self.of("store", s)
            self.r.start(me, copy)
            copy.append(self.out(Read, s))
        self.leave(me)


def protocol(plan: Plan, blocks: int) -> Protocol:
    """Every agent of one CTA, or of a pair, that visits `blocks` >= 1 key blocks."""
    recorder = Recorder(_counts(plan))
    for rank in range(plan.ctas) if plan.pair else (None,):
        f = _Forward(plan, blocks, recorder, rank)
        f.load()
        f.edge()
        f.mma()
        for s in range(2):
            for w in range(WARPS):
                f.softmax(s, w)
        for w in range(WARPS):
            f.correct(w)
        f.store()
    return recorder.protocol()
