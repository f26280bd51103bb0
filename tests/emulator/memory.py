"""Byte memory with shadow state: what is initialised, what an asynchronous operation is reading or writing, bounds,
proxies.

Shadow granularity: initialised per byte, asynchronous readers and writers per 16-byte cell of shared memory.
Everything starts as 0xFF bytes (NaN as bfloat16, float16 and float32, -1 as an integer).
"""

import numpy as np

from .launch import PARAM_STATE, Uninitialised

POISON = 0xFF
CELL = 16
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ONES = {w: UINT[w](int.from_bytes(b"\x01" * w, "little")) for w in UINT}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}
BUFFER_BITS = 36  # each global buffer owns 64 GiB of the emulated space: no access can reach its neighbour


class Space:
    """One range of bytes. `size` is exact; the arrays are padded to whole 16-byte cells."""

    def __init__(self, size, name):
        padded = -(-size // 32) * 32
        self.size, self.name = size, name
        self.data = np.full(padded, POISON, np.uint8)
        self.init = np.zeros(padded, np.uint8)
        self.ragged = padded != size
        self.complete = False  # every byte initialised: loads skip the check
        self.views = {}
        self.shadow, self.log = None, []  # who touched which word last, and reads before the first write; see order.py

    def typed(self, width, count, shadow=False):
        """(elements, count) view of data or initialised bytes."""
        key = (width, count, shadow)
        if key not in self.views:
            self.views[key] = (self.init if shadow else self.data).view(UINT[width]).reshape(-1, count)
        return self.views[key]

    def fill(self, array):
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        self.data[: raw.size] = raw
        self.init[: raw.size] = 1
        self.complete = not self.ragged

    def load(self, off, width, count, report):
        """(lanes, count) words at byte offsets `off` (unsigned array). `report(kind, message)` takes findings."""
        total = width * count
        if int(np.bitwise_or.reduce(off)) & (total - 1):
            report("misaligned", f"{total}-byte load from {self.name} at offset {int(off[off % total != 0][0])}")
            off = off - off % off.dtype.type(total)
        index = (off >> off.dtype.type(SHIFT[total])).astype(np.int64)
        try:
            if self.ragged and int(off.max()) + total > self.size:
                raise IndexError
            out = self.typed(width, count)[index]
            if not self.complete and not (self.typed(width, count, True)[index] == ONES[width]).all():
                bad = int(off[(self.typed(width, count, True)[index] != ONES[width]).any(axis=1)][0])
                report("uninitialised_read", f"{total}-byte load from {self.name} at offset {bad}: nobody wrote there")
            return out
        except IndexError:
            good = off.astype(np.float64) + total <= self.size
            bad = int(off[~good][0])
            report(
                "out_of_bounds",
                f"{total}-byte load from {self.name} of {self.size} bytes at offset {_signed(bad, off)}",
            )
            out = np.full((len(off), count), ~UINT[width](0), UINT[width])
            if good.any():
                out[good] = self.load(off[good], width, count, report)
            return out

    def store(self, off, values, width, count, report):
        """Store (lanes, count) words at byte offsets `off`."""
        total = width * count
        if int(np.bitwise_or.reduce(off)) & (total - 1):
            report("misaligned", f"{total}-byte store to {self.name} at offset {int(off[off % total != 0][0])}")
            off = off - off % off.dtype.type(total)
        index = (off >> off.dtype.type(SHIFT[total])).astype(np.int64)
        try:
            if self.ragged and int(off.max()) + total > self.size:
                raise IndexError
            self.typed(width, count)[index] = values
            if not self.complete:
                self.typed(width, count, True)[index] = ONES[width]
        except IndexError:
            good = off.astype(np.float64) + total <= self.size
            bad = int(off[~good][0])
            report(
                "out_of_bounds", f"{total}-byte store to {self.name} of {self.size} bytes at offset {_signed(bad, off)}"
            )
            if good.any():
                values = np.broadcast_to(values, (len(off), count))
                self.store(off[good], values[good], width, count, report)


def _signed(value, array):
    bits = 8 * array.dtype.itemsize
    return value - (1 << bits) if value >> (bits - 1) else value


class Shared(Space):
    """A CTA's shared memory, with the readers and writers in flight of each 16-byte cell and the generic writes that
    no proxy fence covers yet.
    """

    def __init__(self, size, name):
        super().__init__(size, name)
        cells = len(self.data) // CELL
        self.writers = np.zeros(cells, np.int16)
        self.readers = np.zeros(cells, np.int16)
        self.writing = self.reading = 0
        self.dirty = np.zeros(
            cells, np.int16
        )  # 1 + warp of a generic write since that warp's last proxy fence; 0 clean
        self.released = np.zeros(cells, bool)  # the writer has passed a barrier since
        self.any_dirty = False

    def check(self, cells, write, report, what):
        """Report a race if `cells` are under an asynchronous write (or read, when we write)."""
        if self.writing and self.writers[cells].any():
            at = int(cells.ravel()[self.writers[cells].ravel() != 0][0]) * CELL
            report("race", f"{what} of {self.name} offset {at} while an asynchronous copy still writes it")
        if write and self.reading and self.readers[cells].any():
            at = int(cells.ravel()[self.readers[cells].ravel() != 0][0]) * CELL
            report("race", f"{what} of {self.name} offset {at} while an asynchronous operation still reads it")

    def begin(self, cells, write, report, what):
        """An asynchronous operation starts on unique `cells`."""
        if len(cells) and int(cells.max()) >= len(self.writers):
            report(
                "out_of_bounds",
                f"{what} reaches offset {int(cells.max()) * CELL} of {self.name}, which has {self.size} bytes",
            )
            cells = cells[cells < len(self.writers)]
        self.check(cells, write, report, what)
        if not write and self.any_dirty and self.dirty[cells].any():
            at = int(cells[self.dirty[cells] != 0][0]) * CELL
            report(
                "missing_proxy_fence",
                f"{what} of {self.name} offset {at}, written by warp {int(self.dirty[cells].max()) - 1} "
                "through the generic proxy with no fence.proxy.async since",
            )
        if write:
            self.writers[cells] += 1
            self.writing += 1
            self.dirty[cells] = 0
        else:
            self.readers[cells] += 1
            self.reading += 1
        return cells

    def end(self, cells, write):
        if write:
            self.writers[cells] -= 1
            self.writing -= 1
        else:
            self.readers[cells] -= 1
            self.reading -= 1

    def wrote(self, cells, warp):
        """A generic store by `warp`."""
        self.dirty[cells] = warp + 1
        self.released[cells] = False
        self.any_dirty = True

    def fence(self, warp):
        """fence.proxy.async by `warp`: covers its own writes and those of warps that have since passed a barrier."""
        if self.any_dirty:
            self.dirty[(self.dirty == warp + 1) | self.released] = 0
            self.any_dirty = bool(self.dirty.any())

    def release(self, warp):
        """`warp` arrived at a barrier: others may now fence on its behalf."""
        if self.any_dirty:
            self.released |= self.dirty == warp + 1


class Global:
    """The launch's buffers, each in its own 64 GiB of address space."""

    def __init__(self, memory):
        self.spaces, self.shapes = {}, {}
        self.by_index = []
        for name, value in memory.items():
            if isinstance(value, Uninitialised):
                shape, dtype = tuple(value.shape), np.dtype(value.dtype)
                space = Space(int(np.prod(shape)) * dtype.itemsize, f"buffer {name}")
            else:
                value = np.asarray(value)
                shape, dtype = value.shape, value.dtype
                space = Space(value.nbytes, f"buffer {name}")
                space.fill(value)
            self.spaces[name] = space
            self.shapes[name] = (shape, dtype)
            self.by_index.append(space)
        self.index = {name: i for i, name in enumerate(self.spaces)}

    def address(self, name):
        return (self.index[name] + 1) << BUFFER_BITS

    def find(self, address):
        """(space, base) of one address, or (None, 0)."""
        i = (address >> BUFFER_BITS) - 1
        if 0 <= i < len(self.by_index):
            return self.by_index[i], (i + 1) << BUFFER_BITS
        return None, 0

    def resolve(self, addresses, report, what):
        """Space and unsigned offsets of an address array that lies in one buffer; None after a finding."""
        first = int(addresses[0])
        space, base = self.find(first)
        if space is None:
            where = "the parameter block" if first >= PARAM_STATE else "no buffer"
            report("out_of_bounds", f"{what} at address {first:#x}, which is in {where}")
            return None, None
        return space, addresses - np.uint64(base)

    def outputs(self):
        """Copies of all buffers as the caller shaped them."""
        out = {}
        for name, (shape, dtype) in self.shapes.items():
            out[name] = self.spaces[name].data[: self.spaces[name].size].view(dtype).reshape(shape).copy()
        return out
