"""cp.async: a thread's own copies of 4, 8 or 16 bytes from global to shared memory, their groups, and arrival on an
mbarrier.
"""

import numpy as np

from .barriers import find
from .effects import Effect, address, effect, lane_address, lane_value, reader, strict
from .engine import Operation
from .order import READ, WRITE

_FORM = ("async", "ca", "cg", "shared", "shared::cta", "global", "L2::128B", "L2::256B", "L2::64B", "L2::cache_hint")


class _Copies:
    """A warp's copies: how many are in flight in the open group and in each committed one."""

    def __init__(self):
        self.open = [0, None]  # copies in flight, and the newest one's event
        self.committed = []


def copies(w):
    """The warp's groups; kept on the CTA so that exit checks see them."""
    return w.cta.cp_async.setdefault(w.warp, _Copies())


def queue(w):
    return ("cp.async", id(w.cta), w.warp)


@effect("cp.async.ca", "cp.async.cg")
def copy(program, ins):
    strict(ins, *_FORM)
    dst, src = address(program, ins.args[0], ins, True), address(program, ins.args[1], ins, False)
    size = ins.args[2].value
    if size not in (4, 8, 16) or ("cg" in ins.parts and size != 16):
        raise ins.error(f"copies of {size} bytes do not exist in this form")
    valid = reader(program, ins.args[3], "u32", ins) if len(ins.args) > 3 else None
    width = min(size, 8)
    words = size // width

    def run(w):
        report, machine, shared = w.reporter(ins), w.machine, w.cta.shared
        active = slice(None) if w.mask is None else w.mask
        to = (dst(w) - np.uint32(w.cta.window))[active]
        frm = src(w)[active]
        n = np.broadcast_to(valid(w), (w.n,))[active] if valid is not None else np.full(len(to), size, np.uint32)
        cells = np.unique((to >> np.uint32(4)).astype(np.int64))
        cells = shared.begin(cells, True, report, "cp.async write")
        group, order = copies(w).open, machine.order
        group[0] += 1
        event = group[1] = order.issue(w, ins, "cp.async", queue(w), f"a cp.async of {w.name}", in_order=True)
        order.cells(w, ins, shared, event, WRITE, cells)
        if (n > 0).any():
            space, base = machine.globals.find(int(frm[n > 0][0]))
            if space is not None:
                at = (frm[n > 0] - np.uint64(base)).astype(np.int64)[:, None] // 4 + np.arange(size // 4)
                at = at[at < space.size // 4]
                order.words(w, ins, space, event, READ, at)
        machine.count(w, "cp_async.write", len(to) * size)

        def finish():
            values = np.zeros((len(to), words), np.uint64 if width == 8 else np.uint32)
            some = n > 0
            if some.any():
                space, off = machine.globals.resolve(frm[some], report, "cp.async")
                if space is not None:
                    values[some] = space.load(off, width, words, report)
            keep = np.arange(size)[None, :] < n[:, None]  # bytes beyond the source size become zero
            values = np.where(keep, values.view(np.uint8).reshape(len(to), size), 0).astype(np.uint8).view(values.dtype)
            shared.end(cells, True)
            shared.store(to, values, width, words, report)
            shared.wrote(cells, w.warp)  # the generic proxy: MMAs and bulk copies need a proxy fence after it
            group[0] -= 1
            machine.events += 1

        machine.engine.submit(Operation(finish, f"cp.async of {w.name}"), queue(w))
        return True

    return Effect(run, ins, yields=True)


@effect("cp.async.commit_group")
def commit(program, ins):
    def run(w):
        c = copies(w)
        c.committed.append(c.open)
        c.open = [0, None]
        return True

    return Effect(run, ins)


@effect("cp.async.wait_group", "cp.async.wait_all")
def wait(program, ins):
    everything = ins.parts[2] == "wait_all"
    keep = lane_value(program, ins.args[0], "u32", ins) if not everything else None

    def run(w):
        c = copies(w)
        held = [*c.committed, c.open] if everything else c.committed[: max(0, len(c.committed) - keep(w, w.lead))]
        if any(g[0] for g in held):
            w.wait = (lambda: not any(g[0] for g in held), lambda: "waits for cp.async", ins, "cp.async")
            return False
        for g in held:
            w.machine.order.learn(w, g[1], generic=True)
        w.wait = None
        return True

    return Effect(run, ins, blocking=True)


@effect("cp.async.mbarrier.arrive")
def arrive(program, ins):
    strict(ins, "async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64")
    at = lane_address(program, ins.args[0], ins, True)
    counted = "noinc" in ins.parts

    def run(w):
        report, order = w.reporter(ins), w.machine.order
        event = order.issue(w, ins, "cp.async", queue(w), f"a cp.async of {w.name}", in_order=True)
        clock = None if event is None else event.clock
        for lane in w.lanes():
            barrier = find(w.cta, at(w, lane), report, "cp.async.mbarrier.arrive")
            if barrier is None:
                continue
            if not counted:
                barrier.pending += 1

            def finish(barrier=barrier):
                barrier.arrive(1, report, clock)

            w.machine.engine.submit(Operation(finish, f"cp.async arrival of {w.name}"), queue(w))
        return True

    return Effect(run, ins, yields=True)
