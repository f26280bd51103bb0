"""Who touched which word of memory last: the table that conflicting accesses without an order are read from.

An event is a number that grows with time and belongs to one actor: a warp between two of its releases, or one operation
of an asynchronous engine. Every word of four bytes (or piece of tensor memory) has the event of its last write, and of
the last read and the last atomic of each actor. What two actors do to parts of one word is no conflict.
"""

import numpy as np

READ, WRITE, ATOMIC = "read", "write", "atomic"


class Plane:
    """One event for each word; views of several words in a row."""

    def __init__(self, words):
        self.flat = np.zeros(words, np.int32)
        self.views = {1: self.flat.reshape(-1, 1), 4: self.flat.reshape(-1, 4)}
        self.last = 0  # the newest event in it

    def view(self, count):
        if count not in self.views:
            self.views[count] = self.flat.reshape(-1, count)
        return self.views[count]

    def set(self, count, index, event):
        self.view(count)[index] = event
        self.last = event


class Conflict:
    """An earlier access that the actor does not know of: what it was, its event, and the word."""

    def __init__(self, how, event, word):
        self.how, self.event, self.word = how, event, word


class Shadow:
    """The planes of one range of memory. `count` words in a row are addressed together: `index` counts such rows."""

    def __init__(self, words):
        self.words = -(-words // 8) * 8
        self.writes, self.parts = Plane(self.words), None  # parts: was the last write one of less than a word?
        self.others = {READ: {}, ATOMIC: {}}  # (actor, less than a word?) -> Plane

    def conflict(self, known, slot_of, how, count, index, part=False):
        """The first access that conflicts with this one and of which `known` (event by actor) does not say that it
        came before; None if there is none."""
        found = self._last_write(known, slot_of, count, index, part)
        if found is not None or (how == READ and not self.others[ATOMIC]):
            return found
        for kind in (READ, ATOMIC):
            if how == kind:
                continue
            for (slot, less), plane in self.others[kind].items():
                if plane.last > known[slot] and not (part and less):
                    events = plane.view(count)[index]
                    newest = int(events.max(initial=0))  # a copy that lies outside its tensor touches nothing
                    if newest > known[slot]:
                        return Conflict(kind, newest, self._word(count, index, events > known[slot]))
        return None

    def _last_write(self, known, slot_of, count, index, part):
        events = self.writes.view(count)[index]
        if events.size > 512:  # one copy mostly
            low, high = int(events.min()), int(events.max())
            if low == high and high <= known[slot_of[high]]:
                return None
        bad = events > known[slot_of[events]]
        if part and self.parts is not None:
            bad &= ~self.parts.reshape(-1, count)[index]
        if not bad.any():
            return None
        return Conflict(WRITE, int(events[bad][0]), self._word(count, index, bad))

    def _word(self, count, index, bad):
        return int(np.arange(self.words).reshape(-1, count)[index][bad][0])

    def record(self, slot, event, how, count, index, part=False):
        if how == WRITE:
            self.writes.set(count, index, event)
            if part and self.parts is None:
                self.parts = np.zeros(self.words, bool)
            if self.parts is not None:
                self.parts.reshape(-1, count)[index] = part
            return
        planes = self.others[how]
        key = slot, part
        if key not in planes:
            planes[key] = Plane(self.words)
        planes[key].set(count, index, event)
