"""The order in which each role at depth 256 waits, signals and touches memory, in the words of fwd/protocol.py."""

from __future__ import annotations

from collections.abc import Sequence

from jax_fa4.kernels.sm100.events import Arrive, Event, Protocol, Read, Recorder, Wait, Write
from jax_fa4.kernels.sm100.fwd.plan import WARP
from jax_fa4.kernels.sm100.fwd.protocol import WARPS, Agents, Pair, counted
from jax_fa4.kernels.sm100.fwd.wide.plan import Wide

LAST = 2  # third set of named barriers; the others are of even and odd blocks


class _Wide(Agents):
    plan: Wide
    moved: Sequence[bool]  # whether a maximum has moved with block 1, 2, ..., so that O is rescaled

    @property
    def blocks(self) -> int:
        return self.now.blocks

    def used(self, ring: str, block: int) -> tuple[int, int]:
        """(stage, how often it was used before) of a block's tile."""
        stages = self.plan.stages_of(ring)
        return block % stages, block // stages

    def load(self) -> None:
        me = self.of("load")
        for i in range(self.blocks):
            for ring in ("k", "v"):
                stage, before = self.used(ring, i)
                me.append(Wait(self.at(ring, "empty", stage), before - 1))
                write = Write(self.at(ring, stage), 2 * before)  # odd versions are the zeroed edge
                self.fetched(me, self.at(ring, "full", stage), before, write)
                if i == 0 and ring == "k":
                    self.fetched(me, self.at("q", "full", 0), 0, Write(self.at("q", 0), 0))
        for ring, count in (("k", self.plan.stages - 1), ("v", self.plan.value_stages)):
            for i in range(self.blocks, self.blocks + count):
                stage, before = self.used(ring, i)
                me.append(Wait(self.at(ring, "empty", stage), before - 1))
        self.leave(me)

    def edge(self) -> None:
        me = self.of("edge")
        if self.leads:
            me += [Wait(self.at("v", "full", 0), 0), Arrive(("landed", "full", 0, 1 - (self.rank or 0)), 0)]
        else:
            me.append(Wait(self.at("landed", "full", 0), 0))
        me += [Write(self.at("v", 0), 1), Arrive(self.at("edge", "full", 0), 0)]
        self.leave(me)

    def block_scores(self, me: list[Event], i: int) -> None:
        (stage, before), b = self.used("k", i), i % 2
        me.append(Wait(self.at("k", "full", stage), before))
        self.r.start(me, self.pipe)
        self.touch(Read, ("q", 0), 0)
        self.touch(Read, ("k", stage), 2 * before)
        for w in range(WARPS):
            self.touch(Write, ("s low", b, w), i)
            for j in range(4):
                self.touch(Write, ("p", b, w, j), 2 * i)
        self.signal(("scores", "full", b), i // 2)

    def block_output(self, me: list[Event], i: int, frees: bool) -> None:
        (stage, before), b, early = self.used("v", i), i % 2, self.plan.early
        me.append(Wait(self.at("v", "full", stage), before))
        for ring, quarters in (("probs", range(early)), ("rest", range(early, 4))):
            me.append(Wait(self.at(ring, "full", b), i // 2))
            self.r.start(me, self.pipe)
            self.touch(Read, ("v", stage), 2 * before + (i == 0))
            for w in range(WARPS):
                for j in quarters:
                    self.touch(Read, ("p", b, w, j), 2 * i + 1)
            if ring == "probs" and frees:
                k, k_before = self.used("k", i)
                self.signal(("k", "empty", k), k_before)
        for w in range(WARPS):
            self.touch(Write, ("o", w), 2 * i)
        self.signal(("v", "empty", stage), before)

    def multiply(self, me: list[Event], pair: bool) -> None:
        me.append(Wait(self.at("q", "full", 0), 0))
        self.block_scores(me, 0)
        me.append(Wait(self.at("edge", "full", 0), 0))
        for i in range(self.blocks - 1):
            self.block_scores(me, i + 1)
            self.block_output(me, i, True)
        self.block_output(me, self.blocks - 1, False)

    def softmax(self, s: int, w: int) -> None:
        me, early = self.of("softmax", w), self.plan.early
        for i in range(self.blocks):
            b = i % 2
            me += [Wait(self.at("scores", "full", b), i // 2), Read(self.at("s low", b, w), i)]
            me += [Read(self.at("p", b, w, j), 2 * i) for j in range(4)]
            me += [Write(self.at("stats", b, w), i // 2), Arrive(self.at("hand", b, w), i // 2)]
            for j in range(4):
                me.append(Write(self.at("p", b, w, j), 2 * i + 1))
                if j == early - 1:
                    me.append(Arrive(self.at("probs", "full", b), i // 2))
            me.append(Arrive(self.at("rest", "full", b), i // 2))
        me += [Write(self.at("stats", LAST, w), 0), Arrive(self.at("hand", LAST, w), 0)]
        self.leave(me)

    def correct(self, w: int) -> None:
        me = self.of("correct", w)

        def synced(which: int, phase: int) -> None:
            me.extend((Arrive(self.at("hand", which, w), phase), Wait(self.at("hand", which, w), phase)))

        def done(i: int) -> None:
            """Negative: passes at once."""
            stage, before = self.used("v", i)
            me.append(Wait(self.at("v", "empty", stage), before))

        synced(0, 0)
        me.append(Arrive(self.at("probs", "full", 0), 0))
        for i in range(1, self.blocks):
            synced(i % 2, i // 2)
            me.append(Read(self.at("stats", i % 2, w), i // 2))
            done(i - self.plan.value_stages)
            if self.moved[i - 1]:
                done(i - 1)
                me.append(Write(self.at("o", w), 2 * i - 1))
            me.append(Arrive(self.at("probs", "full", i % 2), i // 2))
        synced(LAST, 0)
        me.append(Read(self.at("stats", LAST, w), 0))
        done(self.blocks - 1)
        me += [Read(self.at("tmem"), 0), Read(self.at("o", w), 2 * self.blocks - 2)]
        me += [self.out(Write, 0), Arrive(self.at("final", "full", 0), 0, WARP)]
        self.leave(me)

    def store(self) -> None:
        me = self.of("store")
        me.append(Wait(self.at("final", "full", 0), 0))
        copy = self.of("store", 0)
        self.r.start(me, copy)
        copy.append(self.out(Read, 0))
        self.leave(me)


def protocol(plan: Wide, blocks: int, moved: Sequence[bool] | None = None) -> Protocol:
    """Every agent of a pair that visits `blocks` >= 1 key blocks. moved: by block from the second on, of all warps;
    None: always."""
    recorder = Recorder(counted(plan, hands=3))
    kind = type("Moved", (_Wide,), {"moved": (True,) * (blocks - 1) if moved is None else tuple(moved)})
    for rank in range(plan.ctas):
        kind(plan, (Pair(blocks),), recorder, rank)
    return recorder.protocol()
