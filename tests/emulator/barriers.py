"""mbarriers and named barriers: counts, phases, and the findings that their misuse gives."""

MAX_COUNT = (1 << 20) - 1
WARP = 32


class MBarrier:
    """An mbarrier object at a shared address of one CTA.

    `phase` counts completed phases. A phase completes when `pending` arrivals and `tx` bytes are both zero;
    `observed` is the
    highest value of `phase` that a successful wait has seen: an arrival two phases later without one is a phase
    overrun.
    """

    def __init__(self, cta, at, count):
        self.cta, self.at = cta, at
        self.expected = self.pending = count
        self.tx = self.phase = self.observed = 0
        self.given = self.known = None  # clocks: of this phase's arrivals so far, of all completed phases
        self.born = 0  # the event in which it was initialised
        self.copies = False  # has it ever expected bytes? Then what it guards came by copy, not from tcgen05

    def __str__(self):
        arrivals = f"{self.pending} of {self.expected} arrivals pending"
        return f"mbarrier {self.at} of {self.cta.name}: phase {self.phase}, {arrivals}, {self.tx} bytes pending"

    def arrive(self, count, report, clock=None):
        """`clock`: what the arrival releases."""
        self.given = self.cta.machine.order.joined(self.given, clock)
        if self.phase >= 2 and self.observed < self.phase - 1:
            report(
                "phase_overrun",
                f"arrival in phase {self.phase}, but no wait has seen phase {self.phase - 2} complete: {self}",
            )
        if count > self.pending:
            report("mbarrier", f"{count} arrivals with {self.pending} pending: {self}")
            self.pending = count
        self.pending -= count
        self._advance()

    def expect(self, count, report):
        self.copies = True
        self.tx += count
        self._bytes(report)

    def complete(self, count, report, clock=None):
        self.given = self.cta.machine.order.joined(self.given, clock)
        self.tx -= count
        self._bytes(report)
        self._advance()

    def _bytes(self, report):
        if abs(self.tx) > MAX_COUNT:
            report("mbarrier", f"transaction count {self.tx} is outside +-{MAX_COUNT}: {self}")

    def _advance(self):
        self.cta.machine.events += 1
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.known, self.given = self.cta.machine.order.joined(self.known, self.given), None
            self.cta.machine.completed = True

    def passed(self, parity):
        """try_wait.parity: is the phase of this parity the one that completed last?"""
        if (self.phase & 1) == parity:
            return False
        self.observed = self.phase
        return True


def find(cta, at, report, what):
    """The mbarrier at a shared::cluster address, or None after a finding."""
    owner = cta.peer(at)
    offset = at & 0xFFFFFF
    if owner is None:
        report("out_of_bounds", f"{what}: address {at:#x} names no CTA of the cluster")
        return None
    if owner.exited and owner is not cta:
        report("remote_exit", f"{what} at {owner.name}, which has exited")
    barrier = owner.mbarriers.get(offset)
    if barrier is None:
        report("mbarrier", f"{what} at shared offset {offset} of {owner.name}: no mbarrier was initialised there")
    return barrier


class _Named:
    def __init__(self):
        self.arrived, self.count, self.generation, self.names = 0, None, 0, []
        self.meeting = [None]  # the clock of those who have arrived in this generation


class NamedBarriers:
    """The sixteen `bar` barriers of a CTA. Arrivals are whole warps."""

    def __init__(self, cta):
        self.cta = cta
        self.table = {}

    def get(self, index):
        return self.table.setdefault(index, _Named())

    def arrive(self, index, count, unit, report, clock=None):
        """A warp arrives at barrier `index` of `count` threads. Returns (barrier, generation to wait for,
        its meeting)."""
        if not 0 <= index < 16:
            report("named_barrier", f"barrier {index} does not exist (0..15)")
        if count % WARP or count <= 0:
            report("named_barrier", f"barrier {index}: {count} threads is no multiple of {WARP}")
        b = self.get(index)
        if b.count is not None and b.count != count:
            report("named_barrier", f"barrier {index}: {count} threads here, {b.count} at {', '.join(b.names)}")
        if unit.name in b.names:
            report("named_barrier", f"barrier {index}: {unit.name} arrives twice at one phase")
        b.count = count
        generation, meeting = b.generation, b.meeting
        meeting[0] = unit.machine.order.joined(meeting[0], clock)
        b.arrived += WARP
        b.names.append(unit.name)
        self.cta.machine.events += 1
        if b.arrived >= b.count:
            if b.arrived > b.count:
                report("named_barrier", f"barrier {index}: {b.arrived} threads arrived, {b.count} expected")
            b.arrived, b.count, b.names, b.meeting = 0, None, [], [None]
            b.generation += 1
            self.cta.machine.completed = True
        return b, generation, meeting

    def leftovers(self):
        return [(i, b) for i, b in self.table.items() if b.arrived]
