"""The order in which each role of the forward waits, signals and touches memory, for one CTA and `blocks` key blocks.

Follows the role files line by line: whoever changes the order of signals there changes it here, and tests/protocol.py
searches it for deadlock and overwriting before anything is compiled.
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.events import Arrive, Event, Protocol, Read, Recorder, Wait, Write, ring_counts
from jax_fa4.kernels.sm100.fwd.plan import WARP, Plan

WARPS = 4  # of a group


class _Forward:
    def __init__(self, plan: Plan, blocks: int):
        self.plan, self.blocks = plan, blocks
        counts = ring_counts(plan.rings)
        counts |= {("hand", s, w): 2 for s in range(2) for w in range(WARPS)}  # named barriers 1..8, in warps
        counts["free",] = WARPS + 1
        self.r = Recorder(counts)
        self.pipe = self.r.of("tensor pipe")

    def use(self, which: int) -> tuple[int, int]:
        """(stage, how often the stage was used before) of K or V number `which` in K0 V0 K1 ..."""
        return which % self.plan.stages, which // self.plan.stages

    def fetched(self, by: list[Event], barrier: tuple, phase: int, write: Write) -> None:
        """A TMA load: expects bytes, starts; the copy writes and completes on its own."""
        by.append(Arrive(barrier, phase))
        copy = self.r.of("load", *write)
        self.r.start(by, copy)
        copy += [write, Arrive(barrier, phase)]

    def load(self) -> None:
        me = self.r.of("load")
        for which in range(2 * self.blocks):
            stage, before = self.use(which)
            me.append(Wait(("kv", "empty", stage), before - 1))
            # Even versions are loads, odd ones the zeroed edge.
            self.fetched(me, ("kv", "full", stage), before, Write(("kv", stage), 2 * before))
            if which == 0:
                for s in range(2):
                    self.fetched(me, ("q", "full", s), 0, Write(("q", s), 0))

    def edge(self) -> None:
        stage, _ = self.use(1)
        me = self.r.of("edge")
        me += [Wait(("kv", "full", stage), 0), Write(("kv", stage), 1), Arrive(("edge", "full", 0), 0)]

    def scores(self, me: list[Event], s: int, block: int) -> None:
        stage, before = self.use(2 * block)
        self.r.start(me, self.pipe)
        self.pipe += [Read(("q", s), 0), Read(("kv", stage), 2 * before)]
        for w in range(WARPS):
            self.pipe += [Write(("s low", s, w), block)]
            self.pipe += [Write(("p", s, w, i), 2 * block) for i in range(4)]  # P's quarters lie over S
        self.pipe.append(Arrive(("scores", "full", s), block))

    def output(self, me: list[Event], s: int, block: int) -> None:
        early = self.plan.early
        stage, before = self.use(2 * block + 1)
        me.append(Wait(("probs", "full", s), block))
        for quarters in (range(early), range(early, 4)):
            if not quarters:
                continue
            if quarters[0]:
                me.append(Wait(("rest", "full", s), block))
            self.r.start(me, self.pipe)
            self.pipe.append(Read(("kv", stage), 2 * before + (block == 0)))
            for w in range(WARPS):
                self.pipe += [Read(("p", s, w, i), 2 * block + 1) for i in quarters]
        self.pipe += [Write(("o", s, w), 2 * block) for w in range(WARPS)]

    def commit(self, me: list[Event], barrier: tuple, phase: int) -> None:
        self.r.start(me, self.pipe)
        self.pipe.append(Arrive(barrier, phase))

    def mma(self) -> None:
        me = self.r.of("mma")
        me.append(Wait(("kv", "full", 0), 0))
        for s in range(2):
            me.append(Wait(("q", "full", s), 0))
            self.scores(me, s, 0)
        self.commit(me, ("kv", "empty", 0), 0)
        me.append(Wait(("edge", "full", 0), 0))
        for i in range(self.blocks):
            (v, before), (k, k_before) = self.use(2 * i + 1), self.use(2 * i + 2)
            me.append(Wait(("kv", "full", v), before))
            last = i == self.blocks - 1
            for s in range(2):
                self.output(me, s, i)
                if last:
                    self.commit(me, ("acc", "full", s), 0)
                    continue
                if s == 1:
                    self.commit(me, ("kv", "empty", v), before)
                else:
                    me.append(Wait(("kv", "full", k), k_before))
                self.scores(me, s, i + 1)
            if not last:
                self.commit(me, ("kv", "empty", k), k_before)
        me += [Arrive(("free",), 0), Wait(("free",), 0), Write(("tmem",), 1)]

    def softmax(self, s: int, w: int) -> None:
        me, plan = self.r.of("softmax", s, w), self.plan
        for i in range(self.blocks):
            me += [Wait(("scores", "full", s), i), Read(("s low", s, w), i)]
            me += [Read(("p", s, w, j), 2 * i) for j in range(4)]
            me += [Write(("stats", s, w), i), Arrive(("hand", s, w), i)]
            for j in range(4):
                me.append(Write(("p", s, w, j), 2 * i + 1))
                if j == plan.early - 1:
                    me.append(Arrive(("probs", "full", s), i, WARP))
            if plan.early < 4:
                me.append(Arrive(("rest", "full", s), i))
            me.append(Wait(("stats", "empty", s), i))
        me += [Write(("stats", s, w), self.blocks), Arrive(("hand", s, w), self.blocks)]

    def correct(self, w: int) -> None:
        me = self.r.of("correct", w)

        def synced(s: int, phase: int) -> None:
            me.extend((Arrive(("hand", s, w), phase), Wait(("hand", s, w), phase)))

        me += [Arrive(("probs", "full", s), 0, WARP) for s in range(2)]
        for s in range(2):
            synced(s, 0)
            if s == 0:
                me.append(Arrive(("stats", "empty", 0), 0, WARP))
        for i in range(1, self.blocks):
            for s in range(2):
                synced(s, i)
                # S of block i is there, so the product of block i - 1 is done: same pipe
                me += [Read(("stats", s, w), i), Write(("o", s, w), 2 * i - 1)]
                me.append(Arrive(("probs", "full", s), i, WARP))
                me.append(Arrive(("stats", "empty", 1 - s), i - (s == 0), WARP))
        me.append(Arrive(("stats", "empty", 1), self.blocks - 1, WARP))
        for s in range(2):
            synced(s, self.blocks)
            me += [Read(("stats", s, w), self.blocks), Wait(("acc", "full", s), 0), Read(("tmem",), 0)]
            me.append(Read(("o", s, w), 2 * self.blocks - 2))
            me += [self.out(Write, s), Arrive(("final", "full", s), 0, WARP)]
        me.append(Arrive(("free",), 0))

    def out(self, kind: type, s: int) -> Event:
        """Access to a tile of O in shared memory, which may have been Q's place."""
        return kind(("q" if self.plan.out_over_q else "out", s), 1)

    def store(self) -> None:
        me = self.r.of("store")
        for s in range(2):
            me.append(Wait(("final", "full", s), 0))
            copy = self.r.of("store", s)
            self.r.start(me, copy)
            copy.append(self.out(Read, s))


def protocol(plan: Plan, blocks: int) -> Protocol:
    """Every agent of one CTA that visits `blocks` >= 1 key blocks."""
    f = _Forward(plan, blocks)
    f.load()
    f.edge()
    f.mma()
    for s in range(2):
        for w in range(WARPS):
            f.softmax(s, w)
    for w in range(WARPS):
        f.correct(w)
    f.store()
    return f.r.protocol()
