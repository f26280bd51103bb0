"""Kernel -> segments of generated Python over numpy rows.

A *segment* is straight-line code that one warp runs without looking up. Pure
instructions become
*micro-operations*; independent ones of the same kind are grouped into one numpy call on many register rows (measured:
a row of
32 lanes costs about 1 us a call whatever it computes, so 64 grouped rows are 5 to 10 times cheaper than 64 calls).
Effects (memory, barriers, asynchronous work) keep their order. Everything else is a hard error when the kernel is
built.
"""

from dataclasses import dataclass, field

import numpy as np

from . import effects, isa_alu
from .kinds import BITS, CLASS_BITS, DTYPE, full_kind
from .launch import PARAM_SPACE, PARAM_STATE, SHARED_SPACE
from .parse import Imm, Mem, Pair, Reg, Special, Sym, Vec

SHARED_BASE = 1024  # the first KiB of shared memory belongs to the system on sm_90 and later
KNOWN_SPECIAL = {
    "tid.x",
    "tid.y",
    "tid.z",
    "ntid.x",
    "ntid.y",
    "ntid.z",
    "ctaid.x",
    "ctaid.y",
    "ctaid.z",
    "nctaid.x",
    "nctaid.y",
    "nctaid.z",
    "laneid",
    "warpid",
    "nwarpid",
    "cluster_ctarank",
    "cluster_nctarank",
    "cluster_ctaid.x",
    "cluster_ctaid.y",
    "cluster_ctaid.z",
    "cluster_nctaid.x",
    "cluster_nctaid.y",
    "cluster_nctaid.z",
    "clusterid.x",
    "clusterid.y",
    "clusterid.z",
    "nclusterid.x",
    "nclusterid.y",
    "nclusterid.z",
    "is_explicit_cluster",
    "lanemask_lt",
    "lanemask_le",
    "lanemask_eq",
    "lanemask_gt",
    "lanemask_ge",
    "smid",
    "dynamic_smem_size",
    "total_smem_size",
}


@dataclass
class Micro:
    """One pure operation: dst = fn(*srcs). A source is (class, index, kind) or a constant array of one element."""

    fn: object
    dst: tuple
    srcs: tuple
    line: int

    def signature(self):
        return (
            self.fn,
            self.dst[0],
            self.dst[2],
            tuple("c" if isinstance(s, np.ndarray) else (s[0], s[2]) for s in self.srcs),
        )


@dataclass
class Segment:
    """Straight-line code and how it ends: ("fall"|"jump", next), ("branch", pred, negated, taken, next), ("exit",),
    ("block", effect, next).
    """

    index: int
    first: int
    items: list = field(default_factory=list)  # Micro or (effect number)
    end: tuple = ("fall", 0)
    yields: bool = False
    families: dict = field(default_factory=dict)
    full: object = None
    masked: object = None


def identity(x):
    return x


class Program:
    """Everything about a kernel that does not depend on a launch. `kernel` is parse.Kernel."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.rows = dict(kernel.registers)
        self.special = {}  # (class, what) -> row
        self.shared_at, self.static_bytes = self._place_shared()
        self.effects = []
        self.constants = []
        self.segments = self._segments()

    def _place_shared(self):
        at, where = SHARED_BASE, {}
        for name, (align, size) in self.kernel.shared.items():
            at = -(-at // align) * align
            where[name] = at
            at += size
        if self.kernel.dynamic:
            at = -(-at // 1024) * 1024
            where[self.kernel.dynamic] = at
        return where, at

    # ---- operands
    def special_row(self, cls, what):
        key = (cls, what)
        if key not in self.special:
            self.special[key] = self.rows[cls]
            self.rows[cls] += 1
        return self.special[key]

    def source(self, operand, kind, instruction):
        """A micro-operation's source: (class, index, kind) or constant."""
        if isinstance(operand, Reg):
            if (operand.cls == "p") != (kind == "pred") or (
                operand.cls != "p" and BITS[kind] > CLASS_BITS[operand.cls]
            ):
                raise instruction.error(f"register of {CLASS_BITS[operand.cls]} bits used as .{kind}")
            return (operand.cls, operand.index, kind)
        if isinstance(operand, Imm):
            return constant(operand, kind, instruction)
        if isinstance(operand, Special):
            if operand.name not in KNOWN_SPECIAL:
                raise instruction.error(f"special register %{operand.name} is not emulated")
            return ("r", self.special_row("r", operand.name), kind)
        if isinstance(operand, Sym):
            if operand.name in self.shared_at:
                cls = "d" if BITS[kind] == 64 else "r"
                return (cls, self.special_row(cls, ("shared", operand.name)), kind)
            param = next(p for p in self.kernel.params if p.name == operand.name)
            return constant(Imm(PARAM_STATE + param.offset), kind, instruction)
        raise instruction.error(f"operand {operand} where .{kind} is expected")

    def destination(self, operand, kind, instruction):
        if not isinstance(operand, Reg):
            raise instruction.error(f"result {operand} is no register")
        if operand.cls != "p" and BITS[kind] > CLASS_BITS[operand.cls]:
            raise instruction.error(f".{kind} result in a {CLASS_BITS[operand.cls]}-bit register")
        return (operand.cls, operand.index, full_kind(operand.cls, kind))

    # ---- instruction -> micro-operations
    def pure(self, ins):
        """List of micro-operations, or None if the instruction is not pure."""
        head, last = ins.parts[0], ins.parts[-1]
        if head == "mov":
            return self.mov(ins, last)
        if head == "cvta":
            return self.cvta(ins)
        if head == "ld" and ins.parts[1] == "param":
            return self.load_param(ins)
        entry = isa_alu.lookup(ins)
        if entry is None:
            return None
        fn, result, kinds = entry
        dst, rest = ins.args[0], ins.args[1:]
        if head != "cvt":  # only conversions may read or write a register wider than their type
            for operand, kind in zip(ins.args, (result, *kinds), strict=True):
                if isinstance(operand, Reg) and CLASS_BITS[operand.cls] != BITS[kind]:
                    raise ins.error(f"register of {CLASS_BITS[operand.cls]} bits used as .{kind}")
        srcs = tuple(self.source(a, k, ins) for a, k in zip(rest, kinds, strict=True))
        if isinstance(dst, Pair):  # setp p|q: q is the complement for ordered comparisons
            raise ins.error("two-result setp is not emulated")
        return [Micro(fn, self.destination(dst, result, ins), srcs, ins.line)]

    def mov(self, ins, kind):
        if len(ins.parts) != 2 or len(ins.args) != 2:
            raise ins.error("mov form not emulated")
        dst, src = ins.args
        if isinstance(dst, Vec) or isinstance(src, Vec):
            whole, pack = (src, dst) if isinstance(dst, Vec) else (dst, src)
            bits = int(kind[1:])
            if len(pack.items) != 2 or bits not in (32, 64):
                raise ins.error("only two-element packs are emulated")
            half = f"b{bits // 2}"
            out = []
            for item, part in zip(pack.items, (f"lo{bits // 2}", f"hi{bits // 2}"), strict=True):
                if isinstance(dst, Vec):
                    if not isinstance(item, Reg):  # a sink
                        continue
                    out.append(
                        Micro(identity, self.destination(item, half, ins), (self.source(whole, part, ins),), ins.line)
                    )
                else:
                    out.append(
                        Micro(identity, (whole.cls, whole.index, part), (self.source(item, half, ins),), ins.line)
                    )
            return out
        return [Micro(identity, self.destination(dst, kind, ins), (self.source(src, kind, ins),), ins.line)]

    def cvta(self, ins):
        to, space = ins.parts[1] == "to", ins.parts[2] if ins.parts[1] == "to" else ins.parts[1]
        shifts = {"param": PARAM_SPACE - PARAM_STATE, "shared": SHARED_SPACE}
        shift = shifts.get(space.split("::")[0], 0)
        if space.split("::")[0] not in ("param", "global", "const", "shared") or ins.parts[-1] != "u64":
            raise ins.error("cvta form not emulated")
        move = np.uint64(shift)
        fn = identity if not shift else (lambda a: a - move) if to else (lambda a: a + move)
        return [Micro(fn, self.destination(ins.args[0], "u64", ins), (self.source(ins.args[1], "u64", ins),), ins.line)]

    def load_param(self, ins):
        kind = ins.parts[-1]
        dsts = ins.args[0].items if isinstance(ins.args[0], Vec) else (ins.args[0],)
        where = ins.args[1]
        if not isinstance(where, Mem) or not isinstance(where.base, Sym) or kind not in DTYPE:
            raise ins.error("ld.param form not emulated")
        at = next(p for p in self.kernel.params if p.name == where.base.name).offset + where.offset
        out = []
        for i, dst in enumerate(dsts):
            full = full_kind(dst.cls, kind)
            row = self.special_row(dst.cls, ("param", at + i * BITS[kind] // 8, kind))
            out.append(Micro(identity, (dst.cls, dst.index, full), ((dst.cls, row, full),), ins.line))
        return out

    # ---- segments
    def _segments(self):
        code = self.kernel.instructions
        decoded = [self._decode(i) for i in code]
        n = len(code)
        leaders = {0, n}
        for i, (what, value) in enumerate(decoded):
            if what == "branch":
                leaders |= {code[i].target, i + 1}
            elif what == "exit":
                leaders.add(i + 1)
            elif what == "effect":
                effect = self.effects[value]
                if effect.blocking:
                    leaders |= {i, i + 1}
                elif effect.yields:
                    leaders.add(i + 1)
        leaders = sorted(leaders)
        number = {at: k for k, at in enumerate(leaders)}
        segments = []
        for k, at in enumerate(leaders):
            segment = Segment(k, at)
            segments.append(segment)
            if at == n:  # falling off the end
                segment.end = ("exit",)
                break
            stop = leaders[k + 1]
            segment.end = ("fall", k + 1)
            for i in range(at, stop):
                what, value = decoded[i]
                count_family(segment.families, code[i])
                if what == "pure":
                    segment.items += value
                elif what == "branch":
                    guard, target = code[i].guard, number[code[i].target]
                    segment.end = (
                        ("jump", target) if guard is None else ("branch", guard[0].index, guard[1], target, k + 1)
                    )
                elif what == "exit":
                    guard = code[i].guard
                    segment.end = (
                        ("exit",) if guard is None else ("branch", guard[0].index, guard[1], len(leaders) - 1, k + 1)
                    )
                elif self.effects[value].blocking:
                    segment.end = ("block", value, k + 1)
                else:
                    segment.items.append(value)
                    segment.yields = self.effects[value].yields
        return segments

    def _decode(self, ins):
        head = ins.parts[0]
        if head == "bra":
            if ins.parts[1:] not in ((), ("uni",)):
                raise ins.error("branch form not emulated")
            return "branch", None
        if ins.op in ("ret", "exit"):
            return "exit", None
        micros = self.pure(ins)
        if micros is not None and ins.guard is None:
            return "pure", micros
        effect = effects.guarded_pure(self, ins, micros) if micros is not None else effects.build(self, ins)
        self.effects.append(effect)
        return "effect", len(self.effects) - 1


def constant(imm, kind, instruction):
    """A literal as an array of one element of `kind` (two for f32x2)."""
    dtype = DTYPE[kind]
    if kind == "pred":
        return np.array([bool(imm.value)])
    bits = 8 * dtype.itemsize if kind != "f32x2" else 64
    if not imm.is_float and kind in ("f32", "f64", "f32x2") and imm.value not in (0,):
        # an integer literal in a float position holds the value, not the bits; compilers write 0f... there
        raise instruction.error(f"integer literal {imm.value} as .{kind}")
    if not -(1 << (bits - 1)) <= imm.value < 1 << bits:
        if bits == 64 or imm.is_float:
            raise instruction.error(f"literal {imm.value} does not fit .{kind}")
    raw = (imm.value & ((1 << bits) - 1)).to_bytes(bits // 8, "little")
    return np.frombuffer(raw, dtype).copy()


def count_family(families, instruction):
    name = effects.family(instruction)
    families[name] = families.get(name, 0) + 1
