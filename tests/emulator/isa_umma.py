"""tcgen05.mma: descriptors, the pair of CTAs, and the operation in flight. kind::f16 with float32 accumulators."""

from dataclasses import dataclass

import numpy as np

from . import tensor
from .effects import Effect, effect, lane_value, reader
from .engine import Operation
from .isa_tcgen05 import check_fence, group_number, mma_queue
from .order import READ, WRITE
from .parse import Mem, Vec

RATE = 8192  # dense 16-bit FLOP a cycle and SM, sm_100
SWIZZLE = {0: "none", 2: "128B", 4: "64B", 6: "32B"}
LANES = 128


@dataclass(frozen=True)
class Shape:
    """Fields of the 32-bit instruction descriptor. M is the pair's for cta_group::2."""

    m: int
    n: int
    dtype: str
    negate_a: bool
    negate_b: bool
    a_major_k: bool
    b_major_k: bool


def instruction_descriptor(value, group, report):
    """Shape, or None after a finding."""
    d, a, b = (value >> 4) & 3, (value >> 7) & 7, (value >> 10) & 7
    n, m = ((value >> 17) & 63) * 8, ((value >> 24) & 31) * 16
    wrong = []
    if d != 1:
        wrong.append(f"D type {d} is not float32")
    if a != b or a > 1:
        wrong.append(f"operand types {a}, {b} are not both float16 or both bfloat16")
    if value & 0b1111 or value & (1 << 6) or value & (1 << 23) or value >> 29:
        wrong.append("sparsity, saturation, reserved or shift bits are set")
    allowed = {1: (64, 128), 2: (128, 256)}[group]
    if m not in allowed or not 8 * group <= n <= 256 or n % (16 if m == 128 or group == 2 else 8):
        wrong.append(f"M {m}, N {n} are not a shape of cta_group::{group}")
    if wrong:
        report("bad_descriptor", f"instruction descriptor {value:#010x}: {'; '.join(wrong)}")
        return None
    bit = lambda i: bool(value >> i & 1)  # noqa: E731
    return Shape(m, n, "bf16" if a else "f16", bit(13), bit(14), not bit(15), not bit(16))


def smem_descriptor(value, report):
    """(start, leading, stride, swizzle) or None after a finding."""
    mode = value >> 61
    if (value >> 46) & 7 != 1 or mode not in SWIZZLE or (value >> 52) & 0x1FF or (value >> 49) & 7:
        report(
            "bad_descriptor",
            f"shared-memory descriptor {value:#018x}: constant {(value >> 46) & 7} (must be 1), base offset "
            f"{(value >> 49) & 7}, swizzle {mode} (0, 2, 4, 6 are emulated), bits 52-60 {(value >> 52) & 0x1FF:#x}",
        )
        return None
    return (value & 0x3FFF) << 4, ((value >> 16) & 0x3FFF) << 4, ((value >> 32) & 0x3FFF) << 4, SWIZZLE[mode]


def lane_of_rows(rows, split, n):
    """How one CTA's share of D lies: list of (row slice, column slice of D, lanes). `split`: layout of 64 rows over
    128 lanes by columns.
    """
    if rows == 128:
        return [(slice(0, 128), slice(0, n), slice(0, 128))]
    if split:  # M = 128 over a pair: lane = m + 64 * (n >= N / 2)
        return [(slice(0, 64), slice(0, n // 2), slice(0, 64)), (slice(0, 64), slice(n // 2, n), slice(64, 128))]
    return [(slice(16 * i, 16 * i + 16), slice(0, n), slice(32 * i, 32 * i + 16)) for i in range(4)]


@effect("tcgen05.mma")
def mma(program, ins):
    for p in ins.parts[2:]:
        if p not in ("cta_group::1", "cta_group::2", "kind::f16") and not p.startswith("collector::a::"):
            raise ins.error(f"modifier .{p} is not emulated")
    if "kind::f16" not in ins.parts:
        raise ins.error("only kind::f16 is emulated")
    group = group_number(ins)
    d, a, b, idesc, *rest = ins.args
    if not isinstance(d, Mem) or d.offset:
        raise ins.error("accumulator address expected")
    mask_reads = None
    if rest and isinstance(rest[0], Vec):
        if len(rest[0].items) != 4 * group:
            raise ins.error(f"{4 * group} words of disabled lanes expected")
        mask_reads = [lane_value(program, x, "b32", ins) for x in rest.pop(0).items]
    if len(rest) != 1:
        raise ins.error("scale-input-d is not emulated")
    read_d, read_b = lane_value(program, d.base, "b32", ins), lane_value(program, b, "b64", ins)
    from_tmem = isinstance(a, Mem)
    read_a = lane_value(program, a.base if from_tmem else a, "b32" if from_tmem else "b64", ins)
    a_offset = a.offset if from_tmem else 0
    read_i, read_add = lane_value(program, idesc, "b32", ins), reader(program, rest[0], "pred", ins)

    def run(w):
        check_fence(w, ins)
        report = w.reporter(ins)
        if w.active() > 1:
            report("duplicate_issue", f"{w.active()} lanes issue the same MMA: elect one")
        pair = [w.cta]
        if group == 2:
            pair = [c for c in w.cta.cluster if c.rank >> 1 == w.cta.rank >> 1]
            if len(pair) != 2 or any(c.exited for c in pair):
                report("remote_exit", "cta_group::2 without a live peer CTA")
                return True
        for lane in w.lanes():
            shape = instruction_descriptor(read_i(w, lane), group, report)
            if shape is None:
                continue
            add = read_add(w)
            add = bool(add[lane if add.shape[0] > 1 else 0])
            off = [m(w, lane) for m in mask_reads] if mask_reads else []
            av = (read_a(w, lane) + a_offset) & (0xFFFFFFFF if from_tmem else (1 << 64) - 1)
            operation = Umma(w, ins, pair, shape, read_d(w, lane), av, from_tmem, read_b(w, lane), add, off)
            if operation.valid:
                operation.submit(mma_queue(w, lane))
        return True

    return Effect(run, ins, yields=True)


class Umma:
    """One MMA: operands of each CTA of `pair`, columns it occupies, and its completion."""

    def __init__(self, w, ins, pair, shape, d, a, from_tmem, b, add, off):
        self.w, self.ins, self.pair, self.shape, self.add, self.off = w, ins, pair, shape, add, off
        self.machine, self.report = w.machine, w.reporter(ins)
        self.group = len(pair)
        self.rows = shape.m // self.group
        self.split = self.group == 2 and shape.m == 128
        self.column, self.a_column = d & 0xFFFF, a & 0xFFFF
        self.columns = shape.n // 2 if self.split else shape.n
        self.from_tmem = from_tmem
        self.valid = self._check_tmem(d, a) and self._operands(a, b)

    def _check_tmem(self, d, a):
        ok = True
        base = d >> 16
        if base not in ((0, 16) if self.rows == 64 and not self.split else (0,)):
            self.report("lane_quarter", f"accumulator at lane {base}")
            ok = False
        self.base_lane = base
        if self.from_tmem and (a >> 16) != base:
            self.report("lane_quarter", f"A at lane {a >> 16} of tensor memory, D at {base}")
            ok = False
        if self.from_tmem and not self.shape.a_major_k:
            self.report("bad_descriptor", "A in tensor memory must be K-major")
            ok = False
        for cta in self.pair:
            t = cta.tmem
            t.use_group(self.group, self.report)
            ok = ok and t.check(self.column, self.columns, self.report, "MMA accumulator")
            if self.from_tmem:
                ok = ok and t.check(self.a_column, 8, self.report, "MMA operand A")
        return ok

    def _operands(self, a, b):
        shape, report = self.shape, self.report
        db = smem_descriptor(b, report)
        da = None if self.from_tmem else smem_descriptor(a, report)
        if db is None or (da is None and not self.from_tmem):
            return False
        make = tensor.Operand
        n = shape.n // self.group
        self.b = [make(c.shared, *db, shape.b_major_k, n, shape.dtype) for c in self.pair]
        self.a = (
            [] if self.from_tmem else [make(c.shared, *da, shape.a_major_k, self.rows, shape.dtype) for c in self.pair]
        )
        return True

    def _mark(self, delta):
        for c in self.pair:
            c.tmem.mma_writes[self.column : self.column + self.columns] += delta
            if self.from_tmem:
                c.tmem.mma_reads[self.a_column : self.a_column + 8] += delta

    def submit(self, key):
        machine, report = self.machine, self.report
        everywhere = slice(None)
        for c in self.pair:
            c.tmem.conflict(self.column, self.columns, everywhere, ("loads", "stores"), report, "MMA write")
            if self.from_tmem:
                c.tmem.conflict(self.a_column, 8, everywhere, ("stores",), report, "MMA operand read")
        for o in (*self.a, *self.b):
            o.begin(report, "MMA operand read")
        self._mark(1)
        self._ordered(key)
        shape = self.shape
        cycles = 2 * shape.m * shape.n * tensor.K / RATE / self.group
        smem = (0 if self.from_tmem else self.rows * tensor.K * 2) + shape.n // self.group * tensor.K * 2
        for c in self.pair:
            machine.counters.add_cta(c, self.w.warp, "tensor.cycles", cycles)
            machine.counters.add_cta(c, self.w.warp, "mma.read", smem)
        self.held = None
        if not self.from_tmem and machine.rng.random() < machine.policy.read_early:
            self.held = (
                self._read()
            )  # operands in shared memory must be ready now; A in tensor memory may come from an MMA before
        machine.products[key] = machine.products.get(key, 0) + 1
        machine.engine.submit(Operation(self.finish, f"tcgen05.mma of {self.w.name}"), key)

    def _ordered(self, key):
        """Everything that it reads and writes is ordered before it: by the thread's own MMAs or by the thread."""
        w, ins, order = self.w, self.ins, self.machine.order
        event = order.issue(w, ins, "mma", key, f"an MMA of {w.name}", in_order=True)
        for o in (*self.a, *self.b):
            order.cells(w, ins, o.shared, event, READ, o.cells)
        for c in self.pair:
            if self.from_tmem:
                order.columns(w, ins, c.tmem, READ, self.a_column, 8, slice(None), event)
            order.columns(w, ins, c.tmem, WRITE, self.column, self.columns, self._groups(), event)

    def _groups(self):
        """The groups of 16 lanes that D lies in."""
        return slice(self.base_lane // 16, None, 2) if self.rows == 64 and not self.split else slice(None)

    def _read(self):
        report = self.report
        b = np.concatenate([o.read(report, "MMA operand B") for o in self.b])
        if self.from_tmem:
            a = [self._a_from_tmem(c) for c in self.pair]
        else:
            a = [o.read(report, "MMA operand A") for o in self.a]
        if self.shape.negate_b:
            b = -b
        return [-x for x in a] if self.shape.negate_a else a, b

    def _a_from_tmem(self, cta):
        """(rows, 16): element k of row m in lane(m), column k / 2, half k % 2."""
        at = slice(self.a_column, self.a_column + 8)
        if not cta.tmem.init[at, self._a_lanes()].all():
            self.report(
                "uninitialised_read", f"MMA operand A from tensor memory column {self.a_column}: nobody wrote there"
            )
        words = cta.tmem.data[at, self._a_lanes()]
        pairs = np.ascontiguousarray(words).view(np.uint16).reshape(8, self.rows, 2)
        if self.split:
            twin = cta.tmem.data[at, 64:128]
            if (twin != words).any():
                self.report("bad_descriptor", "M = 128 of a pair: A must be duplicated in lanes 0-63 and 64-127")
        return tensor.widen(pairs.transpose(1, 0, 2).reshape(self.rows, tensor.K), self.shape.dtype)

    def _a_lanes(self):
        if self.rows == 128:
            return slice(0, 128)
        if self.split:
            return slice(0, 64)
        return np.concatenate([np.arange(32 * i, 32 * i + 16) for i in range(4)]) + self.base_lane

    def finish(self):
        a, b = self.held or self._read()
        self.held = None
        for o in (*self.a, *self.b):
            o.end()
        self._mark(-1)
        for index, cta in enumerate(self.pair):
            if cta.exited and cta is not self.w.cta:
                self.report("remote_exit", f"an MMA of the pair ends when {cta.name} has exited")
            self._write(cta, a[index], b, self.off[4 * index : 4 * index + 4])
        self.machine.events += 1

    def _write(self, cta, a, b, off):
        tmem, n = cta.tmem, self.shape.n
        places = lane_of_rows(self.rows, self.split, n)
        at = slice(self.column, self.column + self.columns)
        if self.rows == 128 and not any(off) and self.machine.transposed:
            block = tmem.data[at].view(np.float32)
            if self.add and not tmem.init[at].all():
                tmem.uninitialised(self.column, self.columns, slice(None), self.report, "MMA accumulator read")
            block[...] = self.machine.transposed(a, b, block if self.add else None)
            tmem.init[at] = True
            return
        c = np.empty((self.rows, n), np.float32) if self.add else None
        if self.add:
            for rows, cols, lanes in places:
                lanes = slice(lanes.start + self.base_lane, lanes.stop + self.base_lane)
                tmem.uninitialised(self.column, self.columns, lanes, self.report, "MMA accumulator read")
                width = cols.stop - cols.start
                c[rows, cols] = tmem.data[self.column : self.column + width, lanes].view(np.float32).T
        out = self.machine.matmul(a, b, c, self.shape.dtype)
        disabled = (
            np.unpackbits(np.array(off, np.uint32).view(np.uint8), bitorder="little").astype(bool) if any(off) else None
        )
        for rows, cols, lanes in places:
            lanes = np.arange(lanes.start, lanes.stop) + self.base_lane
            value = np.ascontiguousarray(out[rows, cols].T).view(np.uint32)
            if disabled is not None:
                keep = ~disabled[lanes]
                lanes, value = lanes[keep], value[:, keep]
            width = cols.stop - cols.start
            tmem.data[self.column : self.column + width, lanes] = value
            tmem.init[self.column : self.column + width, lanes] = True
