"""wgmma: Hopper's warpgroup MMA. One operation needs all four warps of a warpgroup; its registers are poison until it
completes.
"""

import re

import numpy as np

from . import tensor
from .effects import Effect, effect, lane_value, strict
from .engine import Operation
from .isa_sync import converged
from .order import READ
from .parse import Imm, Reg, Vec

GROUP_WARPS, WARP = 4, 32
SWIZZLE = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
RATE = 4096  # dense 16-bit FLOP a cycle and SM, sm_90


class Accumulator:
    """The registers of one accumulator while operations on them are in flight: the true values, and per warp how many
    operations hold it.
    """

    def __init__(self, registers):
        self.registers = registers
        self.values = np.zeros((len(registers), GROUP_WARPS * WARP), np.float32)
        self.holders = [0] * GROUP_WARPS
        self.matrix = None  # (64, N), when it is newer than `values`


class Warpgroup:
    """Queue state of one warpgroup."""

    def __init__(self):
        self.operations = []  # every wgmma so far
        self.done = 0
        self.next = [0] * GROUP_WARPS  # per warp: operations issued
        self.groups = [[] for _ in range(GROUP_WARPS)]  # per warp: operations issued at each commit
        self.accumulators = {}
        self.fenced = [False] * GROUP_WARPS
        self.trail = []  # lines of the wgmma instructions that some warp has executed and not every one
        self.left = 0  # so many before them
        self.at = [0] * GROUP_WARPS  # per warp: so many executed

    def together(self, warp, ins, report):
        """All `.sync.aligned`: the warps of a group execute the same ones, so none stands where only some come."""
        place = self.at[warp] - self.left
        self.at[warp] += 1
        if place == len(self.trail):
            self.trail.append(ins.line)
        elif self.trail[place] != ins.line:
            report(
                "wgmma_divergent",
                f"warp {warp} is at line {ins.line}, another of its warpgroup was at {self.trail[place]}",
            )
            self.trail[place] = ins.line
        while self.trail and min(self.at) > self.left:
            self.trail.pop(0)
            self.left += 1


class Pending:
    """One wgmma: which warps have issued it, and what it does."""

    def __init__(self, key):
        self.key = key
        self.warps = set()
        self.event, self.operands = None, ()
        self.finished = False


def to_matrix(values, n):
    """(N/2 registers, 128 threads) accumulator fragment -> (64, N)."""
    return values.reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, n)


def to_fragment(matrix, n):
    """(64, N) -> (N/2, 128)."""
    return matrix.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, 128)


def operand_a(words):
    """(4 registers, 128 threads) of packed 16-bit pairs -> (64, 16) words: register bit 0 = row half, bit 1 = column
    half.
    """
    pairs = (
        np.ascontiguousarray(words).view(np.uint16).reshape(2, 2, 4, 8, 4, 2)
    )  # column half, row half, warp, row, quad, element
    return pairs.transpose(2, 1, 3, 0, 4, 5).reshape(64, 16)


def descriptor(value, report):
    """Fields of a shared-memory matrix descriptor (sm_90)."""
    if (value >> 49) & 7:
        report(
            "bad_descriptor",
            f"descriptor {value:#018x}: base offset {(value >> 49) & 7} is not emulated (align the pattern)",
        )
    return (value & 0x3FFF) << 4, ((value >> 16) & 0x3FFF) << 4, ((value >> 32) & 0x3FFF) << 4, SWIZZLE[value >> 62]


def group_of(w):
    first = w.warp - w.warp % GROUP_WARPS
    return w.cta.wgmma.setdefault(first, Warpgroup()), first


@effect("wgmma.fence", "wgmma.commit_group")
def fence(program, ins):
    strict(ins, "fence", "commit_group", "sync", "aligned")
    committing = ins.parts[1] == "commit_group"

    def run(w):
        converged(w, ins)
        wg, first = group_of(w)
        warp = w.warp - first
        wg.together(warp, ins, w.reporter(ins))
        if committing:
            wg.groups[warp].append(wg.next[warp])
        else:
            wg.fenced[warp] = True
        return True

    return Effect(run, ins)


@effect("wgmma.wait_group")
def wait(program, ins):
    keep = ins.args[0]
    if not isinstance(keep, Imm):
        raise ins.error("literal group count expected")

    def run(w):
        wg, first = group_of(w)
        goal = 0
        committed = wg.groups[w.warp - first]
        if len(committed) > keep.value:
            goal = max(goal, committed[len(committed) - 1 - keep.value])
        if wg.done >= goal:
            if goal:
                w.machine.order.learn(w, wg.operations[goal - 1].event)
            w.wait = None
            wg.fenced[w.warp - first] = False  # the accumulators are the threads' again
            wg.together(w.warp - first, ins, w.reporter(ins))
            return True
        w.wait = (
            lambda: wg.done >= goal,
            lambda: f"waits for wgmma {goal} of warpgroup {first // 4}: {wg.done} done, warps have issued {wg.next}",
            ins,
            "wgmma",
        )
        return False

    return Effect(run, ins, blocking=True)


def unfenced_write(program, ins):
    """The last instruction that writes a register of this wgmma after the wgmma.fence before it, or None.

    Straight-line code only: the search ends at a label or branch.
    """
    code = program.kernel.instructions
    at = next(i for i, other in enumerate(code) if other is ins)
    mine = {(r.cls, r.index) for a in ins.args[:2] if isinstance(a, Vec) for r in a.items}
    targets = {c.target for c in code if c.target is not None}
    for i in range(at - 1, -1, -1):
        other = code[i]
        if i + 1 in targets or other.parts[0] in ("bra", "ret", "exit") or other.op.startswith("wgmma.fence"):
            return None
        if other.parts[0] in ("wgmma", "st", "stmatrix", "red", "bar", "mbarrier", "fence", "cp") or not other.args:
            continue
        first = other.args[0]
        written = first.items if isinstance(first, Vec) else (first,)
        if any(isinstance(r, Reg) and (r.cls, r.index) in mine for r in written):
            return other
    return None


_FORM = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16\.bf16|f16\.f16)$")


@effect("wgmma.mma_async")
def mma(program, ins):
    return Effect(Mma(program, ins).run, ins)


class Mma:
    """One wgmma instruction: what its text says, and what happens when a warp issues it."""

    def __init__(self, program, ins):
        form = _FORM.match(ins.op)
        if not form:
            raise ins.error("wgmma form not emulated")
        self.ins = ins
        self.n, self.dtype = int(form.group(1)), form.group(2).split(".")[0]
        d, a, b, scale, *rest = ins.args
        if not isinstance(d, Vec) or len(d.items) != self.n // 2 or self.n % 8 or not 8 <= self.n <= 256:
            raise ins.error(f"accumulator of {len(d.items)} registers for N = {self.n}")
        self.registers = tuple(r.index for r in d.items)
        self.rows = np.array(self.registers)
        from_registers = isinstance(a, Vec)
        flags = [x.value if isinstance(x, Imm) else None for x in rest]
        if None in flags or len(flags) != (3 if from_registers else 4) or flags[:2] != [1, 1]:
            raise ins.error("scale factors other than 1, or transpose flags missing")
        self.a_major_k, self.b_major_k = (True if from_registers else flags[2] == 0), flags[-1] == 0
        self.a_registers = np.array([r.index for r in a.items]) if from_registers else None
        self.read_a = None if from_registers else lane_value(program, a, "b64", ins)
        self.read_b = lane_value(program, b, "b64", ins)
        self.read_scale = lane_value(program, scale, "pred", ins)
        self.written = unfenced_write(program, ins)
        self.cycles = 2 * 64 * self.n * 16 / RATE
        self.smem = (0 if from_registers else 64 * 16 * 2) + self.n * 16 * 2

    def run(self, w):
        ins = self.ins
        converged(w, ins)
        wg, first = group_of(w)
        report, machine, lane = w.reporter(ins), w.machine, w.lead
        if self.written is not None:
            line = self.written.line
            report("wgmma_divergent", f"line {line} writes a register of this wgmma after the last wgmma.fence")
        warp = w.warp - first
        wg.together(warp, ins, report)
        if not wg.fenced[warp]:
            report("wgmma_divergent", "wgmma without a wgmma.fence before it or since the last wait")
            wg.fenced[warp] = True
        key = (
            ins.line,
            self.read_a(w, lane) if self.read_a else None,
            self.read_b(w, lane),
            bool(self.read_scale(w, lane)),
        )
        index = wg.next[warp]
        wg.next[warp] += 1
        if index == len(wg.operations):
            op = Pending(key)
            wg.operations.append(op)
            InFlight(self, w, wg, first, op).submit()
        op = wg.operations[index]
        if op.key != key:
            issued = f"warp {warp} issues wgmma (line, descriptors, scale) {key}, the warpgroup's first warp {op.key}"
            report("wgmma_divergent", issued)
        self.ordered(w, first, op)
        self.hold(w, wg, warp, first)
        op.warps.add(warp)
        if len(op.warps) == GROUP_WARPS:
            op.start()
        machine.count(w, "tensor.cycles", self.cycles / GROUP_WARPS)
        machine.count(w, "mma.read", self.smem / GROUP_WARPS)
        return True

    def ordered(self, w, first, op):
        """The operands are ordered before every warp's issue: PTX does not promise that a wgmma waits for all four."""
        order, ins = w.machine.order, self.ins
        if not order.on:
            return
        op.event = order.issue(w, ins, "wgmma", (id(w.cta), first), f"a wgmma of {w.cta.name}", in_order=True)
        for o in op.operands:
            order.cells(w, ins, o.shared, op.event, READ, o.cells)

    def hold(self, w, wg, warp, first):
        """Take the warp's accumulator registers, which become poison until its last operation on them is done."""
        acc = wg.accumulators.get(self.registers)
        if acc is None:
            acc = wg.accumulators[self.registers] = Accumulator(self.registers)
        if acc.holders[warp] == 0:
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            if acc.matrix is not None:
                acc.values, acc.matrix = to_fragment(acc.matrix, self.n).copy(), None
            part = w.cta.registers.files["r"][:, (first + warp) * WARP : (first + warp + 1) * WARP]
            acc.values[:, lanes] = part[self.rows].view(np.float32)
            part[self.rows] = np.uint32(0xFFFFFFFF)
        acc.holders[warp] += 1


class InFlight:
    """One wgmma of a warpgroup between issue and completion."""

    def __init__(self, form, w, wg, first, op):
        self.form, self.wg, self.first, self.op = form, wg, first, op
        self.cta, self.machine, self.report = w.cta, w.machine, w.reporter(form.ins)
        self.files = w.cta.registers.files["r"]
        _, da, db, self.accumulate = op.key
        shared, report = w.cta.shared, self.report
        self.b = tensor.Operand(shared, *descriptor(db, report), form.b_major_k, form.n, form.dtype)
        self.a = None
        if da is not None:
            self.a = tensor.Operand(shared, *descriptor(da, report), form.a_major_k, 64, form.dtype)
        self.early = w.machine.rng.random() < w.machine.policy.read_early
        self.held = None

    def submit(self):
        op, cta = self.op, self.cta
        op.start, op.operands = self.start, self.operands()
        what = f"wgmma of {cta.name} warpgroup {self.first // GROUP_WARPS}"
        operation = Operation(self.finish, what, lambda: len(op.warps) == GROUP_WARPS)
        self.machine.engine.submit(operation, ("wgmma", id(cta), self.first))

    def operands(self):
        return [o for o in (self.a, self.b) if o is not None]

    def read(self):
        what = "wgmma operand read"
        b = self.b.read(self.report, what)
        if self.a is not None:
            return self.a.read(self.report, what), b
        threads = slice(self.first * WARP, (self.first + GROUP_WARPS) * WARP)
        return tensor.widen(operand_a(self.files[self.form.a_registers, threads]), self.form.dtype), b

    def start(self):
        """All four warps have issued it."""
        for o in self.operands():
            o.begin(self.report, "wgmma operand read")
        if self.early:
            self.held = self.read()

    def finish(self):
        a, b = self.held or self.read()
        self.held = None
        for o in self.operands():
            o.end()
        n, acc = self.form.n, self.wg.accumulators[self.form.registers]
        c = None
        if self.accumulate:
            c = acc.matrix if acc.matrix is not None else to_matrix(acc.values, n)
        acc.matrix = self.machine.matmul(a, b, c, self.form.dtype)
        for warp in range(GROUP_WARPS):
            acc.holders[warp] -= 1
            if acc.holders[warp] == 0:
                values = to_fragment(acc.matrix, n)[:, warp * WARP : (warp + 1) * WARP]
                at = slice((self.first + warp) * WARP, (self.first + warp + 1) * WARP)
                self.files[:, at][self.form.rows] = np.ascontiguousarray(values).view(np.uint32)
        self.op.finished = True
        self.wg.done += 1
        self.machine.events += 1
