"""ld, st, atom, red, stmatrix, ldmatrix: threads' own accesses to global and shared memory."""

import numpy as np

from .arith import bf16_to_f32, f32_to_bf16
from .effects import Effect, address, effect, lane_value, reader
from .kinds import BITS, DTYPE, SIGNED, full_kind
from .memory import UINT
from .order import ATOMIC, READ, WRITE
from .parse import Imm, Reg, Sink, Vec

_ORDER = ("relaxed", "acquire", "release", "acq_rel", "volatile", "weak", "gpu", "cta", "sys", "cluster", "nc", "noftz")
_HINT = (
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L1::evict_normal",
    "L2::128B",
    "L2::256B",
    "L2::64B",
    "L1::evict_unchanged",
)
_SPACES = ("global", "shared", "shared::cta", "shared::cluster")
WARP = 32


def _shape(ins, extra=()):
    """(space, element kind, vector length) of a load or store; anything unknown is a hard error."""
    space, kind, count = None, ins.parts[-1], 1
    if kind not in DTYPE or kind in ("pred", "f32x2"):
        raise ins.error(f"type .{kind} is not emulated here")
    for part in ins.parts[1:-1]:
        if part in _SPACES:
            space = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1])
        elif part not in _ORDER and part not in _HINT and part not in extra:
            raise ins.error(f"modifier .{part} is not emulated")
    if space is None:
        raise ins.error("generic addresses are not emulated: name a state space")
    return space, kind, count


def _locate(w, space, addresses, ins, what):
    """(Space, offsets, CTA or None). The CTA is set for shared memory."""
    if space == "global":
        found, off = w.machine.globals.resolve(addresses, w.reporter(ins), what)
        return found, off, None
    cta = w.cta
    if space == "shared::cluster":
        cta = w.cta.peer(int(addresses[0]))
        if cta is None:
            w.report("out_of_bounds", f"{what}: address {int(addresses[0]):#x} names no CTA of the cluster", ins)
            return None, None, None
        if cta.exited and cta is not w.cta:
            w.report("remote_exit", f"{what} of {cta.name}, which has exited", ins)
    return cta.shared, addresses - np.uint32(cta.window), cta


def _touch(w, cta, off, total, write, ins):
    """Races of a thread's access with asynchronous operations, and generic-proxy writes."""
    shared = cta.shared
    if not (write or shared.writing):
        return
    cells = (off >> np.uint32(4)).astype(np.int64)
    cells = np.minimum(cells, len(shared.writers) - 1)
    if shared.writing or (write and shared.reading):
        shared.check(cells, write, w.reporter(ins), f"{total}-byte thread {'store' if write else 'load'}")
    if write:
        shared.wrote(cells, w.warp)


def _items(operand):
    return operand.items if isinstance(operand, Vec) else (operand,)


@effect("ld")
def load(program, ins):
    space, kind, count = _shape(ins)
    dsts = _items(ins.args[0])
    if len(dsts) != count:
        raise ins.error(f"{len(dsts)} results for a vector of {count}")
    at = address(program, ins.args[1], ins, space != "global")
    width = BITS[kind] // 8
    rows = [None if isinstance(d, Sink) else ((d.cls, full_kind(d.cls, kind)), d.index) for d in dsts]
    for d in dsts:
        if isinstance(d, Reg):
            program.destination(d, kind, ins)
    cause = "load." + space.split("::")[0]
    spins = "acquire" in ins.parts or "volatile" in ins.parts
    strong = spins or "relaxed" in ins.parts

    def run(w):
        addresses = at(w)
        if w.mask is not None:
            addresses = addresses[w.mask]
        found, off, cta = _locate(w, space, addresses, ins, "load")
        if spins:
            w.machine.poll(w)
            w.machine.force_yield(w)
        if found is None:
            return True
        if cta is not None:
            _touch(w, cta, off, width * count, False, ins)
        w.machine.order.thread(w, found, off, width * count, ATOMIC if strong else READ, ins)
        if strong:
            w.machine.order.flag(w, ins, found, off, True, False)
        words = found.load(off, width, count, w.reporter(ins))
        w.machine.count(w, cause, len(off) * width * count)
        words = words.view(DTYPE[kind])
        for k, row in enumerate(rows):
            if row is None:
                continue
            target = w.v[row[0]][row[1]]
            if w.mask is None:
                target[:] = words[:, k]
            else:
                target[w.mask] = words[:, k]
        return True

    return Effect(run, ins, yields=spins)


@effect("st")
def store(program, ins):
    space, kind, count = _shape(ins)
    srcs = _items(ins.args[1])
    if len(srcs) != count:
        raise ins.error(f"{len(srcs)} sources for a vector of {count}")
    at = address(program, ins.args[0], ins, space != "global")
    reads = [reader(program, s, "b" + kind[1:] if isinstance(s, Imm) and s.is_float else kind, ins) for s in srcs]
    width = BITS[kind] // 8
    cause = "store." + space.split("::")[0]
    release = "release" in ins.parts or "volatile" in ins.parts
    strong = release or "relaxed" in ins.parts

    def run(w):
        addresses = at(w)
        if w.mask is not None:
            addresses = addresses[w.mask]
        found, off, cta = _locate(w, space, addresses, ins, "store")
        if found is None:
            return True
        if cta is not None:
            _touch(w, cta, off, width * count, True, ins)
        w.machine.order.thread(w, found, off, width * count, ATOMIC if strong else WRITE, ins)
        if strong:
            w.machine.order.flag(w, ins, found, off, False, True)
        words = np.empty((len(off), count), UINT[width])
        for k, read in enumerate(reads):
            row = read(w)
            row = np.ascontiguousarray(row).view(UINT[width])
            words[:, k] = row if row.shape[0] == 1 or w.mask is None else row[w.mask]
        found.store(off, words, width, count, w.reporter(ins))
        w.machine.count(w, cause, len(off) * width * count)
        if cta is None or release:
            w.machine.events += 1
        return True

    return Effect(run, ins, yields=release)


_ATOMIC = {
    "add": lambda old, x: old + x,
    "exch": lambda old, x: x,
    "min": min,
    "max": max,
    "or": lambda old, x: old | x,
    "and": lambda old, x: old & x,
    "xor": lambda old, x: old ^ x,
    "inc": lambda old, x: type(old)(0) if old >= x else old + type(old)(1),
}


@effect("atom", "red")
def atomic(program, ins):
    head = ins.parts[0]
    ops = [p for p in ins.parts[1:-1] if p in _ATOMIC or p == "cas"]
    if len(ops) != 1:
        raise ins.error("atomic operation not emulated")
    op = ops[0]
    space, kind, count = _shape(ins, (op,))
    returns = head == "atom"
    at = address(program, ins.args[1 if returns else 0], ins, space != "global")
    values = ins.args[(2 if returns else 1) :]
    reads = [lane_value_raw(program, s, kind, ins) for s in _items(values[0])]
    swap = lane_value_raw(program, values[1], kind, ins) if op == "cas" else None
    dsts = _items(ins.args[0]) if returns else ()
    rows = [None if isinstance(d, Sink) else ((d.cls, full_kind(d.cls, kind)), d.index) for d in dsts]
    width, dtype = BITS[kind] // 8, DTYPE[kind]

    def run(w):
        addresses = at(w)
        lanes = list(w.lanes())
        w.machine.rng.shuffle(lanes)  # the order of atomics is free
        w.machine.events += 1
        w.machine.poll(w)
        for lane in lanes:
            found, off, cta = _locate(w, space, addresses[lane : lane + 1], ins, head)
            if found is None:
                return True
            if cta is not None:
                _touch(w, cta, off, width * count, True, ins)
            w.machine.order.thread(w, found, off, width * count, ATOMIC, ins)
            w.machine.order.flag(w, ins, found, off, returns, True)
            old = found.load(off, width, count, w.reporter(ins)).view(dtype).copy()
            new = np.empty_like(old)
            for k, read in enumerate(reads):
                if op == "cas":
                    new[0, k] = swap(w, lane) if old[0, k] == read(w, lane) else old[0, k]
                elif kind == "bf16":
                    pair = bf16_to_f32(np.array([old[0, k], read(w, lane)], np.uint16))
                    new[0, k] = f32_to_bf16(pair[:1] + pair[1:])[0]
                else:
                    new[0, k] = _ATOMIC[op](old[0, k], read(w, lane))
            found.store(off, new.view(UINT[width]), width, count, w.reporter(ins))
            for k, row in enumerate(rows):
                if row is not None:
                    w.v[row[0]][row[1]][lane] = old[0, k]
        w.machine.count(w, "atomic." + space.split("::")[0], len(lanes) * width * count)
        return True

    return Effect(run, ins, yields=True)


def lane_value_raw(program, operand, kind, ins):
    """Lane's numpy scalar of `kind`."""
    read = reader(program, operand, kind, ins)
    return lambda w, lane: (lambda row: row[lane if row.shape[0] > 1 else 0])(read(w))


@effect("stmatrix.sync.aligned.m8n8", "ldmatrix.sync.aligned.m8n8")
def matrix(program, ins):
    """8x8 tiles of 16-bit elements: lane 8k + r gives the address of row r of tile k; lane 4i + j holds elements 2j,
    2j+1 of row i.
    """
    storing = ins.parts[0] == "stmatrix"
    tail = ins.parts[4:]
    trans = "trans" in tail
    rest = [p for p in tail if p != "trans"]
    if (
        len(rest) != 3
        or rest[0] not in ("x1", "x2", "x4")
        or rest[1] not in ("shared", "shared::cta")
        or rest[2] != "b16"
    ):
        raise ins.error("matrix form not emulated")
    tiles = int(rest[0][1])
    mem, regs = (ins.args[0], ins.args[1]) if storing else (ins.args[1], ins.args[0])
    at = address(program, mem, ins, True)
    indices = [r.index for r in _items(regs)]
    if len(indices) != tiles:
        raise ins.error(f"{len(indices)} registers for {tiles} tiles")

    def run(w):
        if w.mask is not None and not w.converged():
            w.report("not_converged", "a matrix instruction needs the whole warp", ins)
        addresses = at(w)
        shared = w.cta.shared
        off = addresses[: 8 * tiles] - np.uint32(w.cta.window)
        cells = np.minimum((off >> np.uint32(4)).astype(np.int64), len(shared.writers) - 1)
        if shared.writing or (storing and shared.reading):
            shared.check(cells, storing, w.reporter(ins), "matrix " + ("store" if storing else "load"))
        w.machine.order.thread(w, shared, off, 16, WRITE if storing else READ, ins)
        if storing:
            shared.wrote(cells, w.warp)
            words = np.empty((tiles, 8, 4), np.uint32)
            for k, r in enumerate(indices):
                words[k] = w.v[("r", "b32")][r].reshape(8, 4)
            if trans:
                words = words.view(np.uint16).transpose(0, 2, 1).copy().view(np.uint32)
            shared.store(off, words.reshape(8 * tiles, 4), 4, 4, w.reporter(ins))
        else:
            words = shared.load(off, 4, 4, w.reporter(ins)).reshape(tiles, 8, 4)
            if trans:
                words = np.ascontiguousarray(words).view(np.uint16).transpose(0, 2, 1).copy().view(np.uint32)
            for k, r in enumerate(indices):
                w.v[("r", "b32")][r][:] = words[k].reshape(WARP)
        w.machine.count(w, ("store" if storing else "load") + ".shared", 128 * tiles)
        return True

    return Effect(run, ins)


__all__ = ["SIGNED", "atomic", "lane_value", "load", "matrix", "store"]
