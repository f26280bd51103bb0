"""Registry of instructions with effects, and what the isa_* files need to write one.

An effect is `run(unit)`; a *blocking* one returns False until it may proceed and is then run again (it keeps what it
must
remember in `unit.memo`). `yields` marks points where another warp may be scheduled. `registers` are all that it reads
or
writes: grouping never moves a pure operation across them.
"""

from dataclasses import dataclass, field

import numpy as np

from .isa_alu import MUFU
from .parse import Imm, Mem, Pair, Reg, Sink, Special, Sym, Vec

FACTORIES = {}


@dataclass
class Effect:
    """What an instruction does beyond registers."""

    run: object
    instruction: object
    blocking: bool = False
    yields: bool = False
    registers: list = field(default_factory=list)


def effect(*prefixes):
    """Register `factory(program, instruction) -> Effect` for opcodes that start with one of `prefixes` (longest
    wins).
    """

    def keep(factory):
        for p in prefixes:
            FACTORIES[p] = factory
        return factory

    return keep


def build(program, ins):
    """The effect of an instruction; a hard error if nobody knows it."""
    parts = ins.parts
    for n in range(len(parts), 0, -1):
        factory = FACTORIES.get(".".join(parts[:n]))
        if factory is not None:
            made = factory(program, ins)
            made.registers = registers_of(ins)
            return under_guard(made, ins) if ins.guard else made
    raise ins.error(f"unknown instruction {ins.op}")


def strict(ins, *allowed):
    """Every part of the opcode after the first must be one of `allowed`; anything else is a hard error."""
    for part in ins.parts[1:]:
        if part not in allowed:
            raise ins.error(f"modifier .{part} of {ins.parts[0]} is not emulated")


def registers_of(ins):
    """All registers that occur in an instruction."""
    out = []

    def walk(x):
        if isinstance(x, Reg):
            out.append((x.cls, x.index))
        elif isinstance(x, Vec):
            for y in x.items:
                walk(y)
        elif isinstance(x, Pair):
            walk(x.first)
            walk(x.second)
        elif isinstance(x, Mem):
            walk(x.base)
            for y in x.coords or ():
                walk(y)
        elif not isinstance(x, (Imm, Special, Sym, Sink)):
            raise ins.error(f"operand {x!r}")

    for a in ins.args:
        walk(a)
    if ins.guard:
        walk(ins.guard[0])
    return out


def under_guard(made, ins):
    """The effect executed by the lanes whose predicate holds."""
    (reg, negated), inner = ins.guard, made.run

    def run(w):
        p = w.v[("p", "pred")][reg.index]
        p = ~p if negated else p
        active = p if w.mask is None else p & w.mask
        count = np.count_nonzero(active)
        if count == 0:
            return True
        if count == w.n:
            return inner(w)
        saved = w.mask
        w.set_mask(active)
        try:
            return inner(w)
        finally:
            w.set_mask(saved)

    made.run = run
    return made


def guarded_pure(program, ins, micros):
    """A predicated pure instruction."""
    from .codegen import _Source

    src = _Source(None)
    for m in micros:
        src.single(m, True)
    fn = src.function("guarded")
    (reg, negated) = ins.guard

    def run(w):
        p = w.v[("p", "pred")][reg.index]
        p = ~p if negated else p
        saved = w.mask
        w.set_mask(p if saved is None else p & saved)
        fn(w)
        w.set_mask(saved)
        return True

    out = Effect(run, ins)
    out.registers = registers_of(ins)
    return out


def reader(program, operand, kind, ins):
    """`read(unit)` -> row of the operand (a one-element array for constants)."""
    src = program.source(operand, kind, ins)
    if isinstance(src, np.ndarray):
        return lambda w: src
    key, index = (src[0], src[2]), src[1]
    return lambda w: w.v[key][index]


def lane_value(program, operand, kind, ins):
    """`read(unit, lane)` -> Python number of one lane."""
    src = program.source(operand, kind, ins)
    if isinstance(src, np.ndarray):
        value = src[0].item()
        return lambda w, lane: value
    key, index = (src[0], src[2]), src[1]
    return lambda w, lane: w.v[key][index][lane].item()


def address(program, mem, ins, shared):
    """`read(unit)` -> (n,) addresses: uint32 shared addresses or uint64 global ones."""
    if not isinstance(mem, Mem):
        raise ins.error(f"{mem} is no address")
    wide = isinstance(mem.base, Reg) and mem.base.cls == "d"
    kind = "b64" if wide or not shared else "b32"
    if isinstance(mem.base, Imm):
        raise ins.error("absolute addresses are not emulated")
    read = reader(program, mem.base, kind, ins)
    dtype = np.uint64 if kind == "b64" else np.uint32
    offset = dtype(mem.offset & (2 ** (64 if kind == "b64" else 32) - 1))

    def run(w):
        a = read(w) + offset if offset else read(w)
        return (a.astype(np.uint32) if shared and wide else a) if a.shape[0] == w.n else np.broadcast_to(a, (w.n,))

    return run


def lane_address(program, mem, ins, shared):
    """`read(unit, lane)` -> int address of one lane."""
    if not isinstance(mem, Mem):
        raise ins.error(f"{mem} is no address")
    wide = isinstance(mem.base, Reg) and mem.base.cls == "d"
    kind = "b64" if wide or (not shared and not isinstance(mem.base, Sym)) else "b32"
    if isinstance(mem.base, Sym) and not shared:
        kind = "b64"
    read, offset = lane_value(program, mem.base, kind, ins), mem.offset
    bits = 0xFFFFFFFF if shared else (1 << 64) - 1
    return lambda w, lane: (read(w, lane) + offset) & bits


_FLOAT = ("add", "sub", "mul", "fma", "max", "min", "neg", "abs")


def family(ins):
    """The counter that an instruction belongs to."""
    parts = ins.parts
    head, last = parts[0], parts[-1]
    if head in MUFU and last in ("f32", "f16", "f16x2", "bf16x2"):
        return "mufu." + head
    if last == "f32x2":
        return "fma2"
    if last in ("f32", "f64", "bf16") and head in _FLOAT:
        return "fma" if head not in ("max", "min") else "fminmax"
    if head in ("ld", "st", "atom", "red"):
        space = next(
            (p.split("::")[0] for p in parts if p.split("::")[0] in ("global", "shared", "param", "local")), "generic"
        )
        return f"{head}.{space}"
    if head == "tcgen05":
        return "tcgen05." + parts[1].split("::")[0]
    if head in (
        "mbarrier",
        "wgmma",
        "bar",
        "barrier",
        "shfl",
        "vote",
        "elect",
        "cvt",
        "mov",
        "setp",
        "selp",
        "bra",
        "fence",
        "stmatrix",
    ):
        return f"{head}.{parts[1]}" if head in ("mbarrier", "wgmma") else head
    if head == "cp":
        return ".".join(parts[:4]).split("::")[0]
    return "int"
