"""wgmma: Hopper's warpgroup MMA. One operation needs all four warps of a warpgroup; its registers are poison until it
completes.
"""

import re

import numpy as np

from . import tensor
from .effects import Effect, effect, lane_value, strict
from .engine import Operation
from .isa_sync import converged
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


class Pending:
    """One wgmma: which warps have issued it, and what it does."""

    def __init__(self, key):
        self.key = key
        self.warps = set()
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
            w.wait = None
            wg.fenced[w.warp - first] = False  # the accumulators are the threads' again
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
    form = _FORM.match(ins.op)
    if not form:
        raise ins.error("wgmma form not emulated")
    n, dtype = int(form.group(1)), form.group(2).split(".")[0]
    d, a, b, scale, *rest = ins.args
    if not isinstance(d, Vec) or len(d.items) != n // 2 or n % 8 or not 8 <= n <= 256:
        raise ins.error(f"accumulator of {len(d.items)} registers for N = {n}")
    registers = tuple(r.index for r in d.items)
    rows = np.array(registers)
    from_registers = isinstance(a, Vec)
    flags = [x.value if isinstance(x, Imm) else None for x in rest]
    if None in flags or len(flags) != (3 if from_registers else 4) or flags[:2] != [1, 1]:
        raise ins.error("scale factors other than 1, or transpose flags missing")
    a_major_k, b_major_k = (True if from_registers else flags[2] == 0), flags[-1] == 0
    a_regs = np.array([r.index for r in a.items]) if from_registers else None
    read_a = None if from_registers else lane_value(program, a, "b64", ins)
    read_b = lane_value(program, b, "b64", ins)
    read_scale = lane_value(program, scale, "pred", ins)
    written = unfenced_write(program, ins)
    cycles = 2 * 64 * n * 16 / RATE
    smem = (0 if from_registers else 64 * 16 * 2) + n * 16 * 2

    def run(w):
        converged(w, ins)
        wg, first = group_of(w)
        report, machine = w.reporter(ins), w.machine
        lane = w.lead
        if written is not None:
            report("wgmma_divergent", f"line {written.line} writes a register of this wgmma after the last wgmma.fence")
        key = (ins.line, None if from_registers else read_a(w, lane), read_b(w, lane), bool(read_scale(w, lane)))
        warp = w.warp - first
        if not wg.fenced[warp]:
            report("wgmma_divergent", "wgmma without a wgmma.fence before it or since the last wait")
            wg.fenced[warp] = True
        index = wg.next[warp]
        wg.next[warp] += 1
        if index == len(wg.operations):
            op = Pending(key)
            wg.operations.append(op)
            submit(w, wg, first, op)
        op = wg.operations[index]
        if op.key != key:
            report(
                "wgmma_divergent",
                f"warp {warp} issues wgmma (line, descriptors, scale) {key}, the warpgroup's first warp {op.key}",
            )
        hold(w, wg, warp, first)
        op.warps.add(warp)
        if len(op.warps) == GROUP_WARPS:
            op.start()
        machine.count(w, "tensor.cycles", cycles / GROUP_WARPS)
        machine.count(w, "mma.read", smem / GROUP_WARPS)
        return True

    def hold(w, wg, warp, first):
        acc = wg.accumulators.get(registers)
        if acc is None:
            acc = wg.accumulators[registers] = Accumulator(registers)
        if acc.holders[warp] == 0:
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            if acc.matrix is not None:
                acc.values, acc.matrix = to_fragment(acc.matrix, n).copy(), None
            part = w.cta.registers.files["r"][:, (first + warp) * WARP : (first + warp + 1) * WARP]
            acc.values[:, lanes] = part[rows].view(np.float32)
            part[rows] = np.uint32(0xFFFFFFFF)
        acc.holders[warp] += 1

    def submit(w, wg, first, op):
        machine, cta, report = w.machine, w.cta, w.reporter(ins)
        _, da, db, accumulate = op.key
        thread = slice(first * WARP, (first + GROUP_WARPS) * WARP)
        files = cta.registers.files["r"]
        what = "wgmma operand read"
        ob = tensor.Operand(cta.shared, *descriptor(db, report), b_major_k, n, dtype)
        oa = None if from_registers else tensor.Operand(cta.shared, *descriptor(da, report), a_major_k, 64, dtype)
        early = machine.rng.random() < machine.policy.read_early
        held = {}

        def read():
            held["b"] = ob.read(report, what)
            held["a"] = (
                tensor.widen(operand_a(files[a_regs, thread]), dtype) if from_registers else oa.read(report, what)
            )

        def start():
            for o in (oa, ob):
                if o is not None:
                    o.begin(report, what)
            if early:
                read()

        def finish():
            if not early:
                read()
            for o in (oa, ob):
                if o is not None:
                    o.end()
            acc = wg.accumulators[registers]
            c = None
            if accumulate:
                c = acc.matrix if acc.matrix is not None else to_matrix(acc.values, n)
            acc.matrix = machine.matmul(held["a"], held["b"], c, dtype)
            held.clear()
            for warp in range(GROUP_WARPS):
                acc.holders[warp] -= 1
                if acc.holders[warp] == 0:
                    values = to_fragment(acc.matrix, n)
                    at = slice((first + warp) * WARP, (first + warp + 1) * WARP)
                    files[:, at][rows] = np.ascontiguousarray(values[:, warp * WARP : (warp + 1) * WARP]).view(
                        np.uint32
                    )
            op.finished = True
            wg.done += 1
            machine.events += 1

        op.start = start
        machine.engine.submit(
            Operation(finish, f"wgmma of {cta.name} warpgroup {first // 4}", lambda: len(op.warps) == GROUP_WARPS),
            ("wgmma", id(cta), first),
        )

    return Effect(run, ins)
