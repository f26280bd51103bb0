"""tcgen05 but for the MMA: allocation, loads and stores of tensor memory, waits, commit, fences."""

from itertools import pairwise

import numpy as np

from .barriers import find
from .effects import Effect, effect, lane_address, lane_value, reader, registers_of, strict
from .engine import Operation
from .isa_sync import converged
from .order import READ, WRITE
from .parse import Instruction, Mem, Vec
from .tmem import POISON

WARP = 32


def group_number(ins):
    """1 or 2 from `.cta_group::N`."""
    found = [int(p[-1]) for p in ins.parts if p.startswith("cta_group::")]
    if len(found) != 1 or found[0] not in (1, 2):
        raise ins.error("cta_group::1 or ::2 expected")
    return found[0]


def check_fence(w, ins):
    """Advisory: a tcgen05 access after a wait with no fence::after_thread_sync between."""
    if w.unfenced:
        w.report("missing_tcgen05_fence", "no tcgen05.fence::after_thread_sync since the last barrier wait", ins)


@effect("tcgen05.alloc")
def alloc(program, ins):
    strict(ins, "alloc", "cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32")
    group = group_number(ins)
    dst, columns = lane_address(program, ins.args[0], ins, True), lane_value(program, ins.args[1], "u32", ins)

    def run(w):
        converged(w, ins)
        report, cta = w.reporter(ins), w.cta
        n = columns(w, w.lead)
        if group == 1:
            return _allocate_one(w, ins, {cta: w}, n, dst(w, w.lead))
        pair = [c for c in cta.cluster if c.rank >> 1 == cta.rank >> 1]
        if len(pair) != 2:
            report("tmem_alloc", "cta_group::2 in a cluster without the peer CTA")
            return True
        requests = w.machine.pair_requests.setdefault(id(pair[0]), {})
        if "asked" not in w.memo:
            w.memo["asked"] = True
            requests.setdefault(cta.rank, []).append((n, dst(w, w.lead), w))
            w.machine.events += 1
        asked = [requests.get(c.rank) for c in pair]
        if "given" in w.memo or (cta.rank in requests.get("given", {}) and requests["given"][cta.rank]):
            requests["given"][cta.rank] -= 1
            w.wait = None
            return True
        if all(asked):
            (n0, at0, w0), (n1, at1, w1) = asked[0].pop(0), asked[1].pop(0)
            if n0 != n1 or (at0 & 0xFFFFFF) != (at1 & 0xFFFFFF):
                report(
                    "tmem_alloc",
                    f"the pair asks for {n0} and {n1} columns at offsets {at0 & 0xFFFFFF}, {at1 & 0xFFFFFF}",
                )
            if not _allocate_one(w, ins, dict(zip(pair, (w0, w1), strict=True)), n0, at0):
                asked[0].insert(0, (n0, at0, w0))
                asked[1].insert(0, (n1, at1, w1))
                return False
            given = requests.setdefault("given", {})
            for c in pair:
                given[c.rank] = given.get(c.rank, 0) + (c is not cta)
            return True
        ready = lambda: all(requests.get(c.rank) for c in pair) or requests.get("given", {}).get(cta.rank)  # noqa: E731
        w.wait = (ready, lambda: f"waits for the peer's tcgen05.alloc of {n} columns", ins, "alloc")
        return False

    return Effect(run, ins, blocking=True)


def _allocate_one(w, ins, warps, n, at):
    """Allocate the same columns in the CTAs of `warps`, each of whose warps asks and writes the address there; False if
    they do not fit yet."""
    report, ctas = w.reporter(ins), [*warps]
    size = n if 32 <= n <= 512 and n & (n - 1) == 0 else 32
    rooms = set(ctas[0].tmem.room(size)).intersection(*(c.tmem.room(size) for c in ctas[1:]))
    if not rooms:
        tmem = ctas[0].tmem
        w.wait = (
            lambda: all(c.tmem.room(size) for c in ctas),
            lambda: f"waits for {n} columns of tensor memory, allocated: {tmem.allocations}",
            ins,
            "alloc",
        )
        return False
    first = w.machine.rng.choice(sorted(rooms)) if w.machine.policy.shuffle else min(rooms)
    offset = at & 0xFFFFFF
    for c, own in warps.items():
        c.tmem.use_group(len(ctas), report)
        c.tmem.allocate(n, first, report)
        where = np.array([offset], np.uint32)
        c.shared.store(where, np.array([[first]], np.uint32), 4, 1, report)
        c.shared.wrote(np.array([offset // 16]), own.warp)
        w.machine.order.thread(own, c.shared, where, 4, WRITE, ins)
    w.machine.events += 1
    w.wait = None
    return True


@effect("tcgen05.dealloc")
def dealloc(program, ins):
    strict(ins, "dealloc", "cta_group::1", "cta_group::2", "sync", "aligned", "b32")
    group = group_number(ins)
    at, columns = lane_value(program, ins.args[0], "b32", ins), lane_value(program, ins.args[1], "u32", ins)

    def together(w, pair):
        """A warp of each CTA of the pair must ask, and for the same: the first waits for the other. False: not yet."""
        asked = w.machine.pair_frees.setdefault(id(pair[0]), {c.rank: [] for c in pair})
        if "turn" not in w.memo:
            w.memo["turn"] = len(asked[w.cta.rank])
            asked[w.cta.rank].append((at(w, w.lead), columns(w, w.lead)))
            w.machine.events += 1
        turn = w.memo["turn"]
        ready = lambda: all(len(x) > turn for x in asked.values())  # noqa: E731
        gone = [c for c in pair if c.exited and len(asked[c.rank]) <= turn]
        if not ready() and not gone:
            w.wait = (
                lambda: ready() or any(c.exited for c in pair),
                lambda: "waits for the peer's tcgen05.dealloc",
                ins,
                "dealloc",
            )
            return False
        w.wait = None
        wanted = {x[turn] for x in asked.values() if len(x) > turn}
        if gone or len(wanted) > 1:
            what = ", ".join(f"{n} columns at {first}" for first, n in sorted(wanted))
            left = f"; {gone[0].name} has exited without" if gone else ""
            w.report("tmem_alloc", f"the pair frees {what}{left}", ins)
        return True

    def run(w):
        converged(w, ins)
        report = w.reporter(ins)
        w.cta.tmem.use_group(group, report)
        if group == 2:
            pair = [c for c in w.cta.cluster if c.rank >> 1 == w.cta.rank >> 1]
            if len(pair) != 2:
                report("tmem_alloc", "cta_group::2 in a cluster without the peer CTA")
            elif not together(w, pair):
                return False
        first, n = at(w, w.lead), columns(w, w.lead)
        if w.cta.tmem.allocations.get(first) == n:
            w.machine.order.columns(w, ins, w.cta.tmem, WRITE, first, n, slice(None))
        w.cta.tmem.free(first, n, report)
        w.machine.events += 1
        return True

    return Effect(run, ins, blocking=True, yields=True)


@effect("tcgen05.relinquish_alloc_permit")
def relinquish(program, ins):
    strict(ins, "relinquish_alloc_permit", "cta_group::1", "cta_group::2", "sync", "aligned")

    def run(w):
        converged(w, ins)
        w.cta.tmem.relinquished = True
        return True

    return Effect(run, ins)


@effect("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(program, ins):
    after = ins.parts[1].endswith("after_thread_sync")

    def run(w):
        if after:
            w.unfenced = False
        return True

    return Effect(run, ins)


# ---- loads and stores
def shape_map(shape, count, half=0):
    """(lane, column) offsets of every (register, thread): arrays of shape (registers, 32)."""
    t = np.arange(WARP)[None, :]
    if shape == "32x32b":
        r = np.arange(count)[:, None]
        return t + 0 * r, r + 0 * t
    if shape == "16x64b":
        r = np.arange(count)[:, None]
        return (t >> 2) + 8 * (t & 1) + 0 * r, 2 * r + ((t >> 1) & 1)
    if shape == "16x128b":
        r = np.arange(2 * count)[:, None]
        return (t >> 2) + 8 * (r & 1), 4 * (r >> 1) + (t & 3)
    if shape == "16x256b":
        r = np.arange(4 * count)[:, None]
        return (t >> 2) + 8 * ((r >> 1) & 1), 8 * (r >> 2) + 2 * (t & 3) + (r & 1)
    if shape == "16x32bx2":
        r = np.arange(count)[:, None]
        return (t & 15) + 0 * r, r + (t >> 4) * half
    return None


class _Access:
    """What ld and st share: registers, addresses, checks."""

    def __init__(self, program, ins, mem, registers, half):
        parts = ins.parts
        shapes = [p for p in parts if shape_map(p, 1) is not None]
        counts = [int(p[1:]) for p in parts if p[0] == "x" and p[1:].isdigit()]
        for p in parts[1:]:
            if p not in ("ld", "st", "sync", "aligned", "b32", *shapes, *(f"x{c}" for c in counts)):
                raise ins.error(f"modifier .{p} is not emulated")
        if len(shapes) != 1 or len(counts) != 1:
            raise ins.error("tensor memory access form not emulated")
        self.shape, self.ins = shapes[0], ins
        self.lane_map, self.column_map = shape_map(self.shape, counts[0], half)
        items = registers.items if isinstance(registers, Vec) else (registers,)
        if len(items) != len(self.lane_map):
            raise ins.error(f"{len(items)} registers, {self.shape}.x{counts[0]} takes {len(self.lane_map)}")
        self.columns = int(self.column_map.max()) + 1
        self.straight = self.shape == "32x32b"
        if not isinstance(mem, Mem):
            raise ins.error("tensor memory address expected")
        self.read_address, self.offset = reader(program, mem.base, "b32", ins), mem.offset
        index = [r.index if hasattr(r, "index") else None for r in items]
        self.items = items
        run = None not in index and all(b - a == 1 for a, b in pairwise(index))
        self.rows = slice(index[0], index[0] + len(index)) if run else (None if None in index else np.array(index))

    def place(self, w):
        """(first column, quarter, first lane) of the warp's access, or None after a finding."""
        row = self.read_address(w)
        first = int(row[0])
        if (row != first).any():
            w.report("lane_quarter", "the lanes of a warp give different tensor memory addresses", self.ins)
        first = (first + self.offset) & 0xFFFFFFFF
        lane, column, quarter = first >> 16, first & 0xFFFF, w.warp % 4
        allowed = (32 * quarter,) if self.straight else (32 * quarter, 32 * quarter + 16)
        if lane not in allowed:
            reach = f"it may only {allowed[0]}..{allowed[0] + 31}"
            w.report("lane_quarter", f"warp {w.warp} accesses lanes from {lane}, {reach}", self.ins)
            return None
        return column, quarter, lane

    def groups(self, lane):
        """The groups of 16 lanes of an access from `lane`."""
        return slice(lane // 16, lane // 16 + (2 if self.straight else 1))

    def where(self, column, lane):
        """Index of tensor memory's data."""
        if self.straight:
            return slice(column, column + self.columns), slice(lane, lane + WARP)
        return column + self.column_map, lane + self.lane_map


def _event(w, ins, kind):
    """The load or store as an operation of its own; the warp's own ones are in order."""
    name = f"a tcgen05.{kind} of {w.name} that it has not waited for"
    made = w.machine.order.issue(w, ins, "tcgen05." + kind, (id(w),), name, in_order=True)
    w.tmem_events[kind] = made
    return made


def first_uses(program, ins):
    """(copied, used): instructions that copy, and the first that computes with, results of a load before its wait::ld.

    The compiler moves register packs up between load and wait; they cost nothing, hardware honours the dependence.
    Arithmetic on
    the results there is what a forgotten wait looks like.
    """
    code = program.kernel.instructions
    held = {(r.index) for r in ins.args[0].items} if isinstance(ins.args[0], Vec) else {ins.args[0].index}
    tainted = {("r", i) for i in held}
    copied = False
    at = next(i for i, other in enumerate(code) if other is ins)
    for other in code[at + 1 :]:
        if (
            other.op.startswith("tcgen05.wait::ld")
            or other.op in ("ret", "exit")
            or (other.parts[0] == "bra" and other.guard is None)
        ):
            return copied, None
        if other.parts[0] == "bra":
            continue
        registers = registers_of(other)
        if other.op.startswith("tcgen05.ld"):
            continue
        if other.parts[0] == "mov":
            reads = registers_of(Instruction(other.op, other.args[1:], None, other.line, other.text))
            if any(r in tainted for r in reads):
                copied = True
                tainted |= set(registers_of(Instruction(other.op, other.args[:1], None, other.line, other.text)))
        elif any(r in tainted for r in registers):
            return copied, other
    return copied, None


@effect("tcgen05.ld")
def load(program, ins):
    a = _Access(program, ins, ins.args[1], ins.args[0], ins.args[2].value if len(ins.args) > 2 else 0)
    if a.rows is None:
        raise ins.error("registers expected")
    n = a.columns
    copied, used = first_uses(program, ins)

    def run(w):
        converged(w, ins)
        check_fence(w, ins)
        report, machine, tmem = w.reporter(ins), w.machine, w.cta.tmem
        if used is not None:
            report("read_before_wait", f"line {used.line} uses the result before a tcgen05.wait::ld: {used.text[:60]}")
        place = a.place(w)
        if place is None or not tmem.check(place[0], n, report, "load"):
            return True
        column, quarter, lane = place
        tmem.conflict(column, n, quarter, ("mma_writes", "stores"), report, "load")
        early = copied or used or machine.rng.random() < machine.policy.tmem_early
        where = a.where(column, lane)
        if not tmem.init[where].all():
            bad = column + int(np.argmax(~tmem.init[where].all(axis=1)))
            report("uninitialised_read", f"load of tensor memory column {bad}: nobody wrote there")
        machine.count(w, "tmem.load", 4 * WARP * len(a.lane_map))
        target = w.m[("r", "b32")]
        target[a.rows] = tmem.data[where] if early else POISON
        if used is not None:  # hardware honours the register dependence: by its first use the load is complete
            return True
        machine.order.columns(w, ins, tmem, READ, column, n, a.groups(lane), _event(w, ins, "ld"))
        tmem.loads[column : column + n, quarter] += 1
        w.tmem_pending.append((tmem, None if early else (target, a.rows, where), column, n, quarter))
        return True

    return Effect(run, ins)


@effect("tcgen05.st")
def store(program, ins):
    mem, regs = (ins.args[0], ins.args[1]) if len(ins.args) == 2 else (ins.args[0], ins.args[2])
    a = _Access(program, ins, mem, regs, ins.args[1].value if len(ins.args) > 2 else 0)
    n = a.columns
    reads = [reader(program, r, "b32", ins) for r in a.items] if a.rows is None else None

    def run(w):
        converged(w, ins)
        check_fence(w, ins)
        report, machine, tmem = w.reporter(ins), w.machine, w.cta.tmem
        place = a.place(w)
        if place is None or not tmem.check(place[0], n, report, "store"):
            return True
        column, quarter, lane = place
        tmem.conflict(column, n, quarter, ("mma_writes", "mma_reads", "loads"), report, "store")
        machine.order.columns(w, ins, tmem, WRITE, column, n, a.groups(lane), _event(w, ins, "st"))
        early = machine.rng.random() < machine.policy.tmem_early
        where = a.where(column, lane)
        if reads is None:
            words = w.m[("r", "b32")][a.rows]
        else:
            words = np.stack([np.broadcast_to(r(w), (w.n,)) for r in reads])
        tmem.data[where] = words if early else POISON
        tmem.init[where] = True
        tmem.stores[column : column + n, quarter] += 1
        w.tmem_stores.append((tmem, None if early else (where, words.copy()), column, n, quarter))
        machine.count(w, "tmem.store", 4 * WARP * len(a.lane_map))
        return True

    return Effect(run, ins)


def flush_loads(w):
    for tmem, late, column, n, quarter in w.tmem_pending:
        if late is not None:
            target, rows, where = late
            target[rows] = tmem.data[where]
        tmem.loads[column : column + n, quarter] -= 1
    w.tmem_pending = []


def flush_stores(w):
    for tmem, late, column, n, quarter in w.tmem_stores:
        if late is not None:
            where, words = late
            tmem.data[where] = words
        tmem.stores[column : column + n, quarter] -= 1
    w.tmem_stores = []


def flush(w):
    """Let everything that the unit has in flight finish."""
    flush_loads(w)
    flush_stores(w)


@effect("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(program, ins):
    strict(ins, "wait::ld", "wait::st", "sync", "aligned")
    loads = ins.parts[1] == "wait::ld"

    def run(w):
        converged(w, ins)
        (flush_loads if loads else flush_stores)(w)
        w.machine.order.learn(w, w.tmem_events.pop("ld" if loads else "st", None))
        return True

    return Effect(run, ins, blocking=True)


@effect("tcgen05.commit")
def commit(program, ins):
    strict(
        ins,
        "commit",
        "cta_group::1",
        "cta_group::2",
        "mbarrier::arrive::one",
        "shared::cluster",
        "multicast::cluster",
        "b64",
    )
    at = lane_address(program, ins.args[0], ins, True)
    multicast = "multicast::cluster" in ins.parts
    mask = lane_value(program, ins.args[1], "u16", ins) if multicast else None
    group = group_number(ins)

    def run(w):
        report, machine = w.reporter(ins), w.machine
        w.cta.tmem.use_group(group, report)
        if w.active() > 1:
            w.report("duplicate_issue", f"{w.active()} lanes commit: elect one", ins)
        for lane in w.lanes():
            where = at(w, lane)
            targets = [where]
            if multicast:
                targets = [(c.rank << 24) | (where & 0xFFFFFF) for c in w.cta.cluster if mask(w, lane) >> c.rank & 1]
            for target in targets:
                machine.note(w, "commit", target, ins)
            barriers = [b for b in (find(w.cta, t, report, "tcgen05.commit") for t in targets) if b is not None]
            queue = mma_queue(w, lane)
            if multicast and not machine.products.get(queue):
                report("empty_commit", "a commit to several CTAs with no MMA since the thread's last one")
            machine.products[queue] = 0
            for b in barriers:
                machine.order.uses(w, b, ins)
            event = machine.order.issue(w, ins, "mma", queue, f"an MMA of {w.name}", in_order=True)
            clock = None if event is None else event.clock

            def finish(barriers=barriers, home=w.cta, clock=clock):
                for b in barriers:
                    if b.cta.exited and b.cta is not home:
                        report("remote_exit", f"a commit arrives at {b.cta.name}, which has exited")
                    b.arrive(1, report, clock)

            machine.engine.submit(Operation(finish, f"tcgen05.commit of {w.name}"), queue)
        return True

    return Effect(run, ins, yields=True)


def mma_queue(w, lane):
    """Key of the in-order pipeline of one thread's MMAs and commits."""
    return ("mma", id(w.cta), w.warp + lane // WARP)
