"""What the lanes of a warp do together (elect, vote, shfl, redux), setmaxnreg, griddepcontrol, mapa, hints."""

import numpy as np

from .effects import Effect, effect, reader, strict
from .isa_sync import converged
from .parse import Imm, Pair, Reg

WARP = 32
SM_REGISTERS = 65536


def active_lanes(w):
    return np.ones(w.n, bool) if w.mask is None else w.mask


@effect("elect.sync")
def elect(program, ins):
    pair = ins.args[0]
    if not isinstance(pair, Pair):
        raise ins.error("elect form not emulated")
    who = pair.first.index if isinstance(pair.first, Reg) else None
    pred = pair.second.index

    def run(w):
        converged(w, ins)
        active = active_lanes(w)
        leader = int(active.argmax())
        row = w.v[("p", "pred")][pred]
        row[active] = False
        row[leader] = True
        if who is not None:
            w.v[("r", "b32")][who][active] = leader
        return True

    return Effect(run, ins)


@effect("vote.sync")
def vote(program, ins):
    mode = ins.parts[2]
    if mode not in ("any", "all", "ballot", "uni") or ins.parts[3:] != ("b32" if mode == "ballot" else "pred",):
        raise ins.error("vote form not emulated")
    read, dst = reader(program, ins.args[1], "pred", ins), ins.args[0]

    def run(w):
        converged(w, ins)
        active = active_lanes(w)
        p = np.broadcast_to(read(w), (w.n,))[active]
        if mode == "ballot":
            bits = sum(1 << int(lane) for lane in np.flatnonzero(active)[p])
            w.v[("r", "b32")][dst.index][active] = bits
        else:
            yes = {"any": p.any(), "all": p.all(), "uni": p.all() or not p.any()}[mode]
            w.v[("p", "pred")][dst.index][active] = yes
        return True

    return Effect(run, ins)


def shuffle_sources(mode, b, c):
    """(source lane, in range) of every lane, for the lane operand `b` and the clamp-and-segment operand `c`."""
    lanes = np.arange(WARP)
    clamp, segment = c & 31, (c >> 8) & 31
    top = (lanes & segment) | (clamp & ~segment)
    if mode == "idx":
        j = (lanes & segment) | (b & ~segment)
    elif mode == "bfly":
        j = lanes ^ b
    elif mode == "down":
        j = lanes + b
    else:
        j = lanes - b
    ok = j >= top if mode == "up" else j <= top
    return np.where(ok, j, lanes) & 31, ok


@effect("shfl.sync")
def shuffle(program, ins):
    mode = ins.parts[2]
    if mode not in ("idx", "bfly", "up", "down") or ins.parts[3:] != ("b32",):
        raise ins.error("shuffle form not emulated")
    dst, pred = (ins.args[0].first, ins.args[0].second) if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    value, lane, clamp = (reader(program, ins.args[i], "b32", ins) for i in (1, 2, 3))
    known = None
    if all(isinstance(ins.args[i], Imm) for i in (2, 3)):
        known = shuffle_sources(mode, *(np.int64(ins.args[i].value) for i in (2, 3)))

    def run(w):
        converged(w, ins)
        x = np.broadcast_to(value(w), (w.n,))
        wide = [np.broadcast_to(f(w), (w.n,)).astype(np.int64) for f in (lane, clamp)] if known is None else None
        j, ok = known or shuffle_sources(mode, *wide)
        row = w.v[("r", "b32")][dst.index]
        if w.mask is None:
            row[:] = x[j]
        else:
            row[w.mask] = x[j][w.mask]
        if isinstance(pred, Reg):
            np.copyto(w.v[("p", "pred")][pred.index], ok, where=active_lanes(w))
        return True

    return Effect(run, ins)


REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@effect("redux.sync")
def redux(program, ins):
    op, kind = ins.parts[2], ins.parts[-1]
    if op not in REDUCE or ins.parts[3:-1] not in ((), ("NaN",)) or kind not in ("s32", "u32", "b32", "f32"):
        raise ins.error("redux form not emulated")
    fn = REDUCE[op] if kind != "f32" or "NaN" in ins.parts else {"min": np.fmin, "max": np.fmax}[op]
    read, dst = reader(program, ins.args[1], kind, ins), ins.args[0]

    def run(w):
        converged(w, ins)
        active = active_lanes(w)
        w.v[(dst.cls, kind)][dst.index][active] = fn.reduce(np.broadcast_to(read(w), (w.n,))[active])
        return True

    return Effect(run, ins)


@effect("setmaxnreg")
def setmaxnreg(program, ins):
    strict(ins, "inc", "dec", "sync", "aligned", "u32")
    count = ins.args[0]
    if not isinstance(count, Imm) or not 24 <= count.value <= 256 or count.value % 8:
        raise ins.error("register count must be a literal multiple of 8 in 24..256")

    def run(w):
        converged(w, ins)
        w.cta.register_budget[w.warp] = count.value
        total = WARP * sum(w.cta.register_budget.values())
        if total > SM_REGISTERS:
            w.report("registers", f"warps hold {total} registers after setmaxnreg, an SM has {SM_REGISTERS}", ins)
        return True

    return Effect(run, ins)


@effect("griddepcontrol")
def griddepcontrol(program, ins):
    """Launches are emulated one after the other: whatever came before is complete."""
    strict(ins, "wait", "launch_dependents")
    return Effect(lambda w: True, ins)


@effect("nanosleep", "prefetch", "prefetchu")
def hint(program, ins):
    return Effect(lambda w: True, ins, yields=True)


@effect("mapa")
def mapa(program, ins):
    strict(ins, "shared::cluster", "u32", "u64")
    kind = ins.parts[-1]
    at, rank = reader(program, ins.args[1], kind, ins), reader(program, ins.args[2], "u32", ins)
    dst = ins.args[0]

    def run(w):
        address = at(w)
        t = address.dtype.type
        value = (address & t(0xFFFFFF)) | (rank(w).astype(t) << t(24))
        np.copyto(w.v[(dst.cls, kind)][dst.index], value, where=True if w.mask is None else w.mask)
        return True

    return Effect(run, ins)
