"""cp.async.bulk and cp.reduce.async.bulk: tensor and linear copies, their groups and waits."""

from functools import partial

import numpy as np

from . import tma
from .barriers import find
from .effects import Effect, effect, lane_address, lane_value
from .engine import Operation
from .launch import PARAM_SPACE, PARAM_STATE
from .memory import CELL
from .order import ATOMIC, READ, WRITE

_HINTS = ("L2::cache_hint", "tile", "bulk_group", "mbarrier::complete_tx::bytes")


class Group:
    """One thread's bulk group: operations that still read their source, and that still write their destination."""

    def __init__(self):
        self.reads = self.writes = self.size = 0
        self.read_waited = False
        self.read_event = self.write_event = None  # the newest ones; see order.py


def groups(cta, thread):
    """(committed groups, [open group]) of a thread."""
    return cta.bulk.setdefault(thread, ([], [Group()]))


def _several(w, ins):
    if w.active() > 1:
        w.report("duplicate_issue", f"{w.active()} lanes issue the same copy: elect one", ins)


def _descriptor(w, where, ins):
    desc = w.machine.maps.get(where - PARAM_SPACE)
    if desc is None:
        raw = PARAM_STATE <= where < PARAM_SPACE
        hint = "a parameter's address without cvta.param" if raw else f"parameter offset {where - PARAM_SPACE}"
        w.report("bad_descriptor", f"no tensor map at address {where:#x} ({hint})", ins)
    return desc


def _poison(w, shared, cells):
    if w.machine.rng.random() < w.machine.policy.early_poison:
        shared.typed(8, 2)[cells] = np.uint64(0xFFFFFFFFFFFFFFFF)


@effect("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(program, ins):
    parts = ins.parts[3:] if ins.parts[0] == "cp" and ins.parts[1] == "async" else ins.parts[4:]
    reduce = ins.parts[1] == "reduce"
    rank = int(parts[1][0]) if len(parts) > 1 and parts[1][1:] == "d" else 0
    if not 1 <= rank <= 5:
        raise ins.error("tensor rank not understood")
    known = (
        *_HINTS,
        "global",
        "shared::cta",
        "shared::cluster",
        "multicast::cluster",
        "cta_group::1",
        "cta_group::2",
    ) + (("add",) if reduce else ())
    for p in parts[2:]:
        if p not in known:
            raise ins.error(f"modifier .{p} is not emulated")
    if reduce and "add" not in parts:
        raise ins.error("only .add reductions are emulated")
    if "bulk_group" in parts:
        return _tensor_store(program, ins, rank, reduce)
    if reduce or "mbarrier::complete_tx::bytes" not in parts:
        raise ins.error("completion mechanism not emulated")
    return _tensor_load(program, ins, rank, parts)


def _coordinates(program, mem, rank, ins):
    if mem.coords is None or len(mem.coords) != rank:
        raise ins.error(f"{rank} coordinates expected")
    reads = [lane_value(program, c, "s32", ins) for c in mem.coords]
    return lambda w, lane: [r(w, lane) for r in reads]


def _tensor_load(program, ins, rank, parts):
    dst = lane_address(program, ins.args[0], ins, True)
    where, coords = lane_address(program, ins.args[1], ins, False), _coordinates(program, ins.args[1], rank, ins)
    bar = lane_address(program, ins.args[2], ins, True)
    multicast = "multicast::cluster" in parts
    mask = lane_value(program, ins.args[3], "u16", ins) if multicast else None
    pair = "cta_group::2" in parts

    def run(w):
        _several(w, ins)
        report = w.reporter(ins)
        for lane in w.lanes():
            desc = _descriptor(w, where(w, lane), ins)
            if desc is None:
                continue
            if len(desc.dims) != rank:
                report("bad_descriptor", f"{rank} coordinates for a tensor map of rank {len(desc.dims)}")
                continue
            at, signal = dst(w, lane), bar(w, lane)
            targets = [w.cta.peer(at)]
            if multicast:
                targets = [c for i, c in enumerate(w.cta.cluster) if mask(w, lane) >> i & 1]
            if None in targets:
                report("out_of_bounds", f"destination {at:#x} names no CTA of the cluster")
                continue
            for cta in targets:
                own = (cta.rank << 24) | (signal & 0xFFFFFF) if multicast else signal
                if not multicast and (own >> 24) != cta.rank and not (pair and (own >> 25) == (cta.rank >> 1)):
                    report("mbarrier", f"the copy goes to CTA rank {cta.rank}, its mbarrier is in rank {own >> 24}")
                barrier = find(w.cta, own, report, "tensor copy")
                if barrier is not None:
                    w.machine.order.uses(w, barrier, ins)
                start_load(w, ins, desc, coords(w, lane), cta, at & 0xFFFFFF, barrier)
        return True

    return Effect(run, ins, yields=True)


def start_load(w, ins, desc, coords, cta, offset, barrier):
    """One box into one CTA."""
    report, machine = w.reporter(ins), w.machine
    if offset % 128:
        report("misaligned", f"tensor copy to shared offset {offset}: must be a multiple of 128")
        return
    if cta.exited:
        report("remote_exit", f"tensor copy into {cta.name}, which has exited")
    cells = cta.shared.begin(tma.box_cells(offset, desc.box_bytes, desc.swizzle), True, report, "tensor copy write")
    space, order = machine.globals.spaces[desc.buffer], machine.order
    event = order.issue(w, ins, "copies", _counting(barrier, cta), "a copy into shared memory")
    order.cells(w, ins, cta.shared, event, WRITE, cells)
    order.words(w, ins, space, event, READ, partial(tma.box_words, desc, coords))
    _poison(w, cta.shared, cells)
    early = machine.rng.random() < machine.policy.read_early
    box = tma.read_box(desc, space, coords, report) if early else None
    machine.count(w, "tma.write", desc.box_bytes)
    cta.in_flight += 1

    def finish():
        data = box if box is not None else tma.read_box(desc, space, coords, report)
        words = np.ascontiguousarray(data).reshape(-1).view(np.uint64).reshape(-1, 2)[: len(cells)]
        cta.shared.typed(8, 2)[cells] = words
        cta.shared.typed(8, 2, True)[cells] = np.uint64(0x0101010101010101)
        cta.shared.end(cells, True)
        cta.in_flight -= 1
        if barrier is not None:
            if barrier.cta.exited and barrier.cta is not cta:
                report("remote_exit", f"bytes count on an mbarrier of {barrier.cta.name}, which has exited")
            barrier.complete(desc.box_bytes, report, order.completed(event))

    machine.engine.submit(Operation(finish, f"tensor load to offset {offset} of {cta.name}"))


def _counting(barrier, cta):
    """Names the copies that count on one mbarrier."""
    return (id(barrier),) if barrier is not None else (id(cta), "nowhere")


def _tensor_store(program, ins, rank, reduce):
    where, coords = lane_address(program, ins.args[0], ins, False), _coordinates(program, ins.args[0], rank, ins)
    src = lane_address(program, ins.args[1], ins, True)

    def run(w):
        _several(w, ins)
        report = w.reporter(ins)
        for lane in w.lanes():
            desc = _descriptor(w, where(w, lane), ins)
            if desc is None:
                continue
            if len(desc.dims) != rank:
                report("bad_descriptor", f"{rank} coordinates for a tensor map of rank {len(desc.dims)}")
                continue
            offset = src(w, lane) - w.cta.window
            if offset % 128:
                report("misaligned", f"tensor store from shared offset {offset}: must be a multiple of 128")
                continue
            cells = tma.box_cells(offset, desc.box_bytes, desc.swizzle)
            to = coords(w, lane)
            space = w.machine.globals.spaces[desc.buffer]

            def put(words, desc=desc, to=to, space=space):
                box = words.reshape(-1).view(tma.RAW[desc.element_bytes]).reshape(tuple(reversed(desc.box)))
                w.machine.count(
                    w, "tma.reduce" if reduce else "tma.store", tma.write_box(desc, space, to, box, reduce, report)
                )

            into = space, ATOMIC if reduce else WRITE, partial(tma.box_words, desc, to)
            start_store(w, ins, lane, cells, put, into)
        return True

    return Effect(run, ins, yields=True)


def start_store(w, ins, lane, cells, put, into):
    """Read `cells` of the CTA's shared memory, then `put(words)`; both belong to the thread's open bulk group. into:
    (space, how, words) that it writes."""
    machine, shared, report = w.machine, w.cta.shared, w.reporter(ins)
    cells = shared.begin(cells, False, report, "bulk copy read")
    if not (shared.typed(8, 2, True)[cells] == np.uint64(0x0101010101010101)).all():
        report("uninitialised_read", "a bulk copy reads shared memory that nobody wrote")
    group = groups(w.cta, w.lo + lane)[1][0]
    group.reads += 1
    group.writes += 1
    group.size += 1
    order, thread = machine.order, (id(w.cta), w.lo + lane)
    group.read_event = order.issue(w, ins, "bulk reads", thread, f"a bulk copy of {w.name} that reads")
    order.cells(w, ins, shared, group.read_event, READ, cells)
    group.write_event = order.issue(w, ins, "bulk writes", thread, f"a bulk copy of {w.name} that writes")
    order.words(w, ins, into[0], group.write_event, into[1], into[2])
    machine.count(w, "bulk.read", len(cells) * CELL)
    held = []

    def read():
        held.append(shared.typed(8, 2)[cells].copy())
        shared.end(cells, False)
        group.reads -= 1
        machine.events += 1

    def write():
        put(held[0])
        group.writes -= 1
        machine.events += 1

    machine.engine.fresh += 1
    key = ("bulk", machine.engine.fresh)
    machine.engine.submit(Operation(read, f"bulk read in {w.cta.name}"), key)
    machine.engine.submit(Operation(write, f"bulk write from {w.cta.name}"), key)


@effect("cp.async.bulk.commit_group")
def commit_group(program, ins):
    def run(w):
        for lane in w.lanes():
            key = w.lo + lane
            if key in w.cta.bulk:
                committed, open_group = w.cta.bulk[key]
                committed.append(open_group[0])
                open_group[0] = Group()
        return True

    return Effect(run, ins)


@effect("cp.async.bulk.wait_group")
def wait_group(program, ins):
    read = ins.parts[4:] == ("read",)
    if ins.parts[4:] not in ((), ("read",)):
        raise ins.error("modifier not emulated")
    keep = lane_value(program, ins.args[0], "u32", ins)

    def run(w):
        held = []
        for lane in w.lanes():
            if (key := w.lo + lane) in w.cta.bulk:
                committed = w.cta.bulk[key][0]
                held += committed[: max(0, len(committed) - keep(w, lane))]

        def busy():
            return [g for g in held if g.reads or (g.writes and not read)]

        if busy():
            w.wait = (lambda: not busy(), lambda: f"waits for {len(busy())} bulk groups", ins, "bulk")
            return False
        for g in held:
            g.read_waited = True
            w.machine.order.learn(w, g.read_event)
            if not read:
                w.machine.order.learn(w, g.write_event)
        w.wait = None
        return True

    return Effect(run, ins, blocking=True)


@effect("cp.async.bulk", "cp.reduce.async.bulk")
def linear(program, ins):
    reduce = ins.parts[1] == "reduce"
    parts = ins.parts[4:] if reduce else ins.parts[3:]
    if parts and parts[0] == "prefetch":
        return Effect(lambda w: True, ins)
    kinds = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "s32": "int32", "u32": "uint32"}
    kind = next((p for p in parts if p in kinds), None)
    known = (*_HINTS, "global", "shared::cta", "shared::cluster") + (("add", "noftz", kind) if reduce else ())
    for p in parts:
        if p not in known:
            raise ins.error(f"modifier .{p} is not emulated")
    to, source = parts[0], parts[1]
    if reduce and (to, source) != ("global", "shared::cta"):
        raise ins.error("only reductions to global memory are emulated")
    if to == "global":
        return _linear_store(program, ins, kinds[kind] if reduce else None)
    return _linear_load(program, ins, source)


def _check(w, ins, *values):
    for name, v in values:
        if v % 16:
            w.report("misaligned", f"bulk copy {name} {v:#x}: must be a multiple of 16", ins)
            return False
    return True


def _linear_store(program, ins, add):
    dst, src = lane_address(program, ins.args[0], ins, False), lane_address(program, ins.args[1], ins, True)
    size = lane_value(program, ins.args[2], "u32", ins)

    def run(w):
        _several(w, ins)
        report = w.reporter(ins)
        for lane in w.lanes():
            to, offset, n = dst(w, lane), src(w, lane) - w.cta.window, size(w, lane)
            if not _check(w, ins, ("destination", to), ("source", offset), ("size", n)):
                continue
            space, base = w.machine.globals.find(to)
            if space is None or to - base + n > space.size:
                report(
                    "out_of_bounds",
                    f"bulk copy of {n} bytes to {to:#x}: "
                    + (f"offset {to - base} of {space.name} of {space.size} bytes" if space else "no buffer"),
                )
                continue
            cells = offset // CELL + np.arange(n // CELL)

            def put(words, at=to - base, n=n, space=space):
                raw = words.reshape(-1).view(np.uint8)
                if add:
                    t = tma.RAW[4 if add[-2:] == "32" else 2]
                    if not space.complete and not space.init[at : at + n].all():
                        report("uninitialised_read", f"bulk reduction adds to bytes of {space.name} that nobody wrote")
                    raw = tma.add_raw(space.data[at : at + n].view(t), raw.view(t), add).view(np.uint8)
                space.data[at : at + n] = raw
                space.init[at : at + n] = 1
                w.machine.count(w, "bulk.reduce" if add else "bulk.store", n)

            into = space, ATOMIC if add else WRITE, _words(to - base, n)
            start_store(w, ins, lane, cells, put, into)
        return True

    return Effect(run, ins, yields=True)


def _linear_load(program, ins, source):
    dst, src = (
        lane_address(program, ins.args[0], ins, True),
        lane_address(program, ins.args[1], ins, source != "global"),
    )
    size, bar = lane_value(program, ins.args[2], "u32", ins), lane_address(program, ins.args[3], ins, True)

    def run(w):
        _several(w, ins)
        report, machine, order = w.reporter(ins), w.machine, w.machine.order
        for lane in w.lanes():
            to, frm, n, signal = dst(w, lane), src(w, lane), size(w, lane), bar(w, lane)
            cta = w.cta.peer(to)
            if cta is None:
                report("out_of_bounds", f"destination {to:#x} names no CTA of the cluster")
                continue
            if not _check(w, ins, ("destination", to), ("source", frm), ("size", n)):
                continue
            if signal >> 24 != to >> 24:
                report("mbarrier", f"the copy goes to CTA rank {to >> 24}, its mbarrier is in rank {signal >> 24}")
            barrier = find(w.cta, signal, report, "bulk copy")
            if barrier is not None:
                order.uses(w, barrier, ins)
            event = order.issue(w, ins, "copies", _counting(barrier, cta), "a copy into shared memory")
            if source == "global":
                space, base = machine.globals.find(frm)
                if space is None or frm - base + n > space.size:
                    report(
                        "out_of_bounds",
                        f"bulk copy of {n} bytes from {frm:#x}: beyond {space.name if space else 'any buffer'}",
                    )
                    continue
                fetch, done = partial(_bytes, space, frm - base, n, report), None
                order.words(w, ins, space, event, READ, _words(frm - base, n))
            else:
                held = w.cta.shared.begin(
                    (frm & 0xFFFFFF) // CELL + np.arange(n // CELL), False, report, "bulk copy read"
                )
                fetch = partial(_bytes, w.cta.shared, frm & 0xFFFFFF, n, report)
                done = partial(w.cta.shared.end, held, False)
                order.cells(w, ins, w.cta.shared, event, READ, held)
                machine.count(w, "bulk.read", n)
            cells = cta.shared.begin((to & 0xFFFFFF) // CELL + np.arange(n // CELL), True, report, "bulk copy write")
            order.cells(w, ins, cta.shared, event, WRITE, cells)
            _poison(w, cta.shared, cells)
            early = fetch() if machine.rng.random() < machine.policy.read_early else None
            machine.count(w, "bulk.write", n)
            cta.in_flight += 1

            def finish(cta=cta, cells=cells, early=early, fetch=fetch, done=done, n=n, barrier=barrier, event=event):
                raw = early if early is not None else fetch()
                cta.shared.typed(8, 2)[cells] = raw.view(np.uint64).reshape(-1, 2)[: len(cells)]
                cta.shared.typed(8, 2, True)[cells] = np.uint64(0x0101010101010101)
                cta.shared.end(cells, True)
                if done is not None:
                    done()
                cta.in_flight -= 1
                if barrier is not None:
                    barrier.complete(n, report, order.completed(event))

            machine.engine.submit(Operation(finish, f"bulk load to {cta.name}"))
        return True

    return Effect(run, ins, yields=True)


def _words(at, n):
    return np.arange(at // 4, -(-(at + n) // 4))


def _bytes(space, at, n, report):
    if not space.complete and not space.init[at : at + n].all():
        report("uninitialised_read", f"a bulk copy reads bytes of {space.name} that nobody wrote")
    return space.data[at : at + n].copy()
