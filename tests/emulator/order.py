"""Happens-before: vector clocks of warps and of asynchronous engines, the edges between them, and accesses without one.

A clock says for every actor up to which of its events everything came before. It has two rows: what is ordered before
the actor's accesses, and what of it the asynchronous proxy sees (others' copies and products at once, threads' own
writes to shared memory after a fence.proxy.async). Actors are warps; the MMAs of a thread; the copies that count on one
mbarrier; the bulk reads, and the bulk writes, of a thread; a warp's cp.async, tcgen05.ld and tcgen05.st; a warpgroup's
wgmma. Edges: program order of a warp, mbarriers (all phases that are complete, as arrivals are read-modify-writes),
named barriers, the cluster barrier, waits for groups, releases and acquires in global and shared memory.

This finds a missing order also in schedules in which nothing went wrong. It does not see order among the lanes of a
warp (they count as one), nor scopes narrower than what a release has to reach.
"""

import numpy as np

from .shadow import ATOMIC, READ, WRITE, Shadow

SYSTEM = 0  # the actor of what was there before the launch


class Event:
    """An asynchronous operation: its number, its actor, and the clock of those who learn that it is complete."""

    def __init__(self, number, slot, clock):
        self.number, self.slot, self.clock = number, slot, clock


class Off:
    """No detector: every call does nothing."""

    on = False

    def __getattr__(self, name):
        return self._nothing

    def _nothing(self, *args, **kwargs):
        return None


class Order:
    """Clocks of one launch."""

    on = True

    def __init__(self):
        self.names, self.slots = ["the host"], {}
        self.width, self.last = 64, 0
        self.slot_of = np.zeros(4096, np.int32)
        self.lines = [0]
        self.flags = {}  # (space, byte offset) -> clock that was released there

    # ---- actors and events
    def slot(self, key, name):
        """The actor's number; `name(key)` says what it is."""
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = len(self.names)
            self.names.append(name)
            while slot >= self.width:
                self.width *= 2
        return slot

    def event(self, slot, line):
        self.last += 1
        if self.last >= len(self.slot_of):
            self.slot_of = np.concatenate([self.slot_of, np.zeros_like(self.slot_of)])
        self.slot_of[self.last] = slot
        self.lines.append(line)
        return self.last

    def start(self, w):
        """A warp begins."""
        w.slot = self.slot(("warp", id(w)), w.name)
        w.clock = np.zeros((2, self.width), np.int32)
        w.fenced = w.heard = None  # the clock at its last fence; what its relaxed loads have read since
        self._tick(w, 0)

    def _tick(self, w, line):
        if w.clock.shape[1] != self.width:
            w.clock = self._fit(w.clock)
        w.event = self.event(w.slot, line)
        w.clock[0, w.slot] = w.event

    def _fit(self, clock):
        wide = np.zeros((2, self.width), np.int32)
        wide[:, : clock.shape[1]] = clock
        return wide

    def known(self, w):
        """The warp's clock, as wide as there are actors."""
        if w.clock.shape[1] != self.width:
            w.clock = self._fit(w.clock)
        return w.clock

    def joined(self, one, other):
        """Both; may be one of them. None is the beginning."""
        if one is None or other is None:
            return other if one is None else one
        if one.shape != other.shape:
            one, other = self._fit(one), self._fit(other)
        return np.maximum(one, other)

    # ---- edges
    def release(self, w, ins, relaxed=False):
        """The clock that the warp gives away here."""
        if relaxed:
            return w.fenced
        given = w.clock.copy()
        self._tick(w, ins.line)
        return given

    def acquire(self, w, clock):
        if clock is not None:
            w.clock = self.joined(w.clock, clock)

    def fence(self, w, ins):
        """fence.acq_rel and the like: relaxed operations before and after it release and acquire."""
        self.acquire(w, w.heard)
        w.heard = None
        w.fenced = self.release(w, ins)

    def proxy_fence(self, w, ins):
        w.clock[1] = w.clock[0]
        self._tick(w, ins.line)

    def issue(self, w, ins, kind, which, name, in_order=False):
        """An asynchronous operation of the warp, by the actor (kind, which). in_order: it follows the actor's earlier
        ones."""
        slot = self.slot((kind, *which), name)
        number = self.event(slot, ins.line)
        clock = self.known(w).copy()
        if in_order:
            clock[:, slot] = number
        return Event(number, slot, clock)

    def completed(self, event, generic=False):
        """The clock of those who learn that it is complete. generic: its writes went through the generic proxy."""
        if event.clock.shape[1] <= event.slot:
            event.clock = self._fit(event.clock)
        event.clock[: 2 - generic, event.slot] = event.number
        return event.clock

    def learn(self, w, event, generic=False):
        """The warp has waited for the operation. generic: its writes went through the generic proxy."""
        if event is not None:
            known = self.known(w)
            known[0, event.slot] = max(known[0, event.slot], event.number)
            if not generic:
                known[1, event.slot] = max(known[1, event.slot], event.number)

    # ---- mbarriers
    def born(self, w, barrier):
        barrier.born = w.event

    def uses(self, w, barrier, ins):
        """Is the mbarrier's initialisation ordered before this?"""
        if barrier.born > self.known(w)[0, self.slot_of[barrier.born]]:
            by = self.names[self.slot_of[barrier.born]]
            text = f"used with no order after its initialisation by {by}: mbarrier {barrier.at} of {barrier.cta.name}"
            w.report("race", text, ins)

    # ---- accesses
    def thread(self, w, space, off, total, how, ins):
        """`total` bytes each at the byte offsets `off`, by the lanes of a warp."""
        size, part = max(total, 4), total < 4
        index = (off // off.dtype.type(size)).astype(np.int64)
        if len(index) and int(index.max()) * size >= space.size:
            return  # reported as out of bounds
        self._access(w, ins, space, (w.event, w.slot, self.known(w)), how, size // 4, index, part)

    def cells(self, w, ins, space, event, how, cells):
        """Cells of 16 bytes, by an asynchronous operation."""
        if event.clock.shape[1] != self.width:
            event.clock = self._fit(event.clock)
        self._access(w, ins, space, (event.number, event.slot, event.clock), how, 4, cells, False, how == READ)

    def words(self, w, ins, space, event, how, index):
        """Words of global memory, by an asynchronous operation. index: word numbers, or a function that gives them."""
        if event.clock.shape[1] != self.width:
            event.clock = self._fit(event.clock)
        self._access(w, ins, space, (event.number, event.slot, event.clock), how, 1, index, False, how == READ)

    def _access(self, w, ins, space, actor, how, count, index, part, proxy=False):
        number, slot, clock = actor
        shadow = space.shadow
        if shadow is None:
            if how == READ and space.log is not None:  # nobody has written there yet: most buffers are only read
                space.log.append((slot, number, count, index, part))
                return
            shadow = space.shadow = self._begin(space)
        if callable(index):
            index = index()
        found = shadow.conflict(clock[int(proxy)], self.slot_of, how, count, index, part)
        if found is not None:
            unordered = shadow.conflict(clock[0], self.slot_of, how, count, index, part) if proxy else found
            if unordered is not None:
                self._report(w, ins, space.name, unordered, how, f"offset {4 * unordered.word}")
            else:
                by = self.names[self.slot_of[found.event]]
                text = f"read of {space.name} offset {4 * found.word}, written by {by} through the generic proxy: no "
                w.report("missing_proxy_fence", text + "fence.proxy.async between that write and this operation", ins)
        shadow.record(slot, number, how, count, index, part)

    def _begin(self, space):
        """The first write: now the reads before it matter."""
        made = Shadow(-(-space.size // 4))
        for slot, number, count, index, part in space.log or ():
            made.record(slot, number, READ, count, index() if callable(index) else index, part)
        space.log = None
        return made

    def _report(self, w, ins, where, found, how, place):
        by, line = self.names[self.slot_of[found.event]], self.lines[found.event]
        since = f" (line {line})" if line else ""
        text = f"{how} of {where} {place} with no order after the {found.how} by {by}{since}"
        w.report("race", text, ins)

    # ---- tensor memory
    def columns(self, w, ins, tmem, how, first, columns, lanes, event=None):
        """Tensor memory by an asynchronous operation, or by the warp itself. lanes: slice of groups of 16 lanes."""
        if tmem.shadow is None:
            tmem.shadow = Shadow(512 * 8)
        if event is None:
            number, slot, clock = w.event, w.slot, self.known(w)
        else:
            if event.clock.shape[1] != self.width:
                event.clock = self._fit(event.clock)
            number, slot, clock = event.number, event.slot, event.clock
        index = slice(first, first + columns), lanes
        found = tmem.shadow.conflict(clock[0], self.slot_of, how, 8, index)
        if found is not None:
            self._report(w, ins, f"tensor memory of {tmem.cta.name}", found, how, f"column {found.word // 8}")
        tmem.shadow.record(slot, number, how, 8, index)

    # ---- flags in memory
    def flag(self, w, ins, space, off, loads, stores):
        """Atomics and ordered loads and stores at the byte offsets `off`: what they release and acquire."""
        parts = ins.parts
        ordered = "acq_rel" in parts
        places = {(id(space), int(x)) for x in off}
        if loads:
            heard = None
            for at in places:
                heard = self.joined(heard, self.flags.get(at))
            if ordered or "acquire" in parts:
                self.acquire(w, heard)
            elif heard is not None:
                w.heard = self.joined(w.heard, heard)
        if stores:
            given = self.release(w, ins) if ordered or "release" in parts else w.fenced
            for at in places:
                before = self.flags.get(at) if loads or ins.parts[0] == "red" else None
                self.flags[at] = self.joined(before, given)


__all__ = ["ATOMIC", "READ", "SYSTEM", "WRITE", "Event", "Off", "Order"]
