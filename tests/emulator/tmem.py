"""Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, allocation, and who is reading or writing which
columns.

Stored column-major, so that a warp's load of N columns is N row copies. Occupancy is kept per column and quarter of
32 lanes.
"""

import numpy as np

COLUMNS, LANES, QUARTERS = 512, 128, 4
POISON = np.uint32(0xFFFFFFFF)


class TensorMemory:
    """Columns, allocation state and the operations in flight."""

    def __init__(self, cta):
        self.cta = cta
        self.data = self.init = None  # made when first allocated: Hopper kernels never pay for it
        self.shadow = None  # who touched which columns last; see order.py
        self.owner = np.full(COLUMNS, -1, np.int32)
        self.allocations = {}  # first column -> columns
        self.relinquished = False
        self.smallest = COLUMNS
        self.group = None
        self.loads = np.zeros((COLUMNS, QUARTERS), np.int16)  # ld not yet waited for
        self.stores = np.zeros((COLUMNS, QUARTERS), np.int16)  # st not yet waited for
        self.mma_reads = np.zeros((COLUMNS, QUARTERS), np.int16)
        self.mma_writes = np.zeros((COLUMNS, QUARTERS), np.int16)

    def use_group(self, group, report):
        if self.group is not None and self.group != group:
            report("tmem_alloc", f"cta_group::{group} in a kernel that used cta_group::{self.group}")
        self.group = group

    def room(self, columns):
        """First columns where an allocation fits."""
        free = self.owner < 0
        return [c for c in range(0, COLUMNS - columns + 1, min(columns, 32)) if free[c : c + columns].all()]

    def allocate(self, columns, first, report):
        if columns < 32 or columns > 512 or columns & (columns - 1):
            report("tmem_alloc", f"allocation of {columns} columns: must be a power of two in 32..512")
        if self.relinquished:
            report("tmem_alloc", "allocation after relinquish_alloc_permit")
        if columns > self.smallest:
            report(
                "tmem_alloc", f"allocation of {columns} columns after one of {self.smallest}: allocations must not grow"
            )
        self.smallest = min(self.smallest, columns)
        if self.data is None:
            self.data = np.full((COLUMNS, LANES), POISON, np.uint32)
            self.init = np.zeros((COLUMNS, LANES), bool)
        self.owner[first : first + columns] = first
        self.allocations[first] = columns
        self.data[first : first + columns] = POISON
        self.init[first : first + columns] = False

    def free(self, address, columns, report):
        first = address & 0xFFFF
        if address >> 16 or self.allocations.get(first) != columns:
            held = ", ".join(f"{c}+{n}" for c, n in self.allocations.items()) or "nothing"
            report("tmem_alloc", f"dealloc of {columns} columns at {address:#x}, allocated: {held}")
            return
        busy = [
            name
            for name, table in (
                ("ld", self.loads),
                ("st", self.stores),
                ("mma", self.mma_reads),
                ("mma", self.mma_writes),
            )
            if table[first : first + columns].any()
        ]
        if busy:
            report("race", f"dealloc of columns {first}..{first + columns - 1} while {', '.join(busy)} is in flight")
        del self.allocations[first]
        self.owner[first : first + columns] = -1
        self.data[first : first + columns] = POISON
        self.init[first : first + columns] = False

    def check(self, first, columns, report, what):
        """Bounds and allocation of columns [first, first + columns)."""
        if first + columns > COLUMNS:
            report("out_of_bounds", f"{what} of columns {first}..{first + columns - 1}, tensor memory has {COLUMNS}")
            return False
        owners = self.owner[first : first + columns]
        if (owners < 0).any():
            bad = first + int(np.argmax(owners < 0))
            report("tmem_unallocated", f"{what} of column {bad}, which is not allocated")
            return False
        return True

    def conflict(self, first, columns, quarters, tables, report, what):
        """Report a race if any of `tables` (names) is busy there."""
        for name in tables:
            table = getattr(self, name)[first : first + columns, quarters]
            if table.any():
                column = first + int(np.argmax(table.reshape(columns, -1).any(axis=1)))
                doing = {
                    "loads": "a tcgen05.ld that nobody waited for reads",
                    "stores": "a tcgen05.st that nobody waited for writes",
                    "mma_reads": "an MMA in flight reads",
                    "mma_writes": "an MMA in flight writes",
                }[name]
                report("race", f"{what} of column {column} while {doing} it")
                return

    def uninitialised(self, first, columns, lanes, report, what):
        part = self.init[first : first + columns, lanes]
        if not part.all():
            column = first + int(np.argmax(~part.all(axis=1)))
            report("uninitialised_read", f"{what} of tensor memory column {column}: nobody wrote there")
