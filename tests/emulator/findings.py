"""What the emulator says is wrong: one record per kind and place, counted, with severity."""

from dataclasses import dataclass, field

ERROR, ADVISORY = "error", "advisory"

# kind -> severity. A kind that is not here cannot be reported: every kind has a negative test.
KINDS = {
    "out_of_bounds": ERROR,
    "misaligned": ERROR,
    "uninitialised_read": ERROR,
    "race": ERROR,  # a read or write of bytes that an asynchronous operation is still writing or reading
    "missing_proxy_fence": ERROR,
    "tmem_unallocated": ERROR,
    "tmem_alloc": ERROR,  # double, growing, after relinquish, bad column count, bad dealloc
    "tmem_leak": ERROR,
    "lane_quarter": ERROR,
    "mbarrier": ERROR,  # use before init, re-init, arrival overflow, transaction count overflow
    "phase_overrun": ERROR,
    "named_barrier": ERROR,
    "unfinished": ERROR,  # asynchronous work or transaction bytes left at exit
    "not_converged": ERROR,
    "bad_descriptor": ERROR,
    "wgmma_divergent": ERROR,
    "read_before_wait": ERROR,
    "remote_exit": ERROR,  # an operation on the shared memory of a CTA that has exited
    "registers": ERROR,  # setmaxnreg sums
    "duplicate_issue": ERROR,
    "missing_tcgen05_fence": ADVISORY,
    "empty_commit": ADVISORY,
}


@dataclass
class Finding:
    """One kind at one PTX line. `where` names CTA and warp of the first occurrence, `count` all of them."""

    kind: str
    severity: str
    line: int
    instruction: str
    where: str
    message: str
    count: int = 1

    def __str__(self):
        times = f" ({self.count} times)" if self.count > 1 else ""
        place = f"{self.severity}: {self.kind} at line {self.line} [{self.where}]"
        return f"{place}: {self.message}{times}\n    {self.instruction}"


@dataclass
class Findings:
    """Collects findings; the same kind at the same line is counted, not repeated."""

    table: dict = field(default_factory=dict)
    tolerated: frozenset = frozenset()  # error kinds that count as advisory in this run

    def add(self, kind, message, instruction=None, where=""):
        """Report `kind`. `instruction` is a parsed instruction or None (end of kernel)."""
        severity = ADVISORY if kind in self.tolerated else KINDS[kind]
        line = instruction.line if instruction is not None else 0
        key = (kind, line)
        if key in self.table:
            self.table[key].count += 1
            return
        text = instruction.text if instruction is not None else "at exit"
        self.table[key] = Finding(kind, severity, line, text[:160], where, message)

    def all(self):
        """Every finding, errors first."""
        return sorted(self.table.values(), key=lambda f: (f.severity != ERROR, f.line))
