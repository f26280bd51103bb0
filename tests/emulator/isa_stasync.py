"""st.async: threads' stores into the shared memory of a CTA of the cluster, whose bytes count on an mbarrier there.

Of the generic proxy, as PTX says: what an MMA or a copy reads after it needs a fence.proxy.async.
"""

import numpy as np

from .barriers import find
from .effects import Effect, address, effect, lane_address, reader, strict
from .engine import Operation
from .kinds import BITS
from .memory import UINT
from .order import WRITE
from .parse import Vec

_TYPES = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
_FORM = ("async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", *_TYPES)


@effect("st.async")
def store(program, ins):
    strict(ins, *_FORM)
    kind = ins.parts[-1]
    if kind not in _TYPES or "shared::cluster" not in ins.parts or "mbarrier::complete_tx::bytes" not in ins.parts:
        raise ins.error("st.async is emulated into shared::cluster, with bytes that complete on an mbarrier")
    sources = ins.args[1].items if isinstance(ins.args[1], Vec) else (ins.args[1],)
    count = next((int(p[1]) for p in ins.parts if p in ("v2", "v4")), 1)
    width = BITS[kind] // 8
    if len(sources) != count or width * count > 16:
        raise ins.error(f"{len(sources)} sources of {width} bytes for a vector of {count}")
    reads = [reader(program, s, kind, ins) for s in sources]
    to, signal = address(program, ins.args[0], ins, True), lane_address(program, ins.args[2], ins, True)
    total = width * count

    def run(w):
        rows = [np.ascontiguousarray(read(w)).view(UINT[width]) for read in reads]
        places = to(w)
        for lane in w.lanes():
            words = np.array([row[lane if row.shape[0] > 1 else 0] for row in rows], UINT[width])
            _one(w, ins, int(places[lane]), signal(w, lane), words, total)
        return True

    return Effect(run, ins, yields=True)


def _one(w, ins, place, signal, words, total):
    """The store of one lane, which completes whenever it likes."""
    report, machine, order = w.reporter(ins), w.machine, w.machine.order
    cta, offset = w.cta.peer(place), place & 0xFFFFFF
    if cta is None:
        report("out_of_bounds", f"st.async to address {place:#x}, which names no CTA of the cluster")
        return
    if offset % total:
        report("misaligned", f"st.async of {total} bytes to shared offset {offset}")
        return
    if offset + total > cta.shared.size:
        report("out_of_bounds", f"st.async to shared offset {offset} of {cta.name}, which has {cta.shared.size} bytes")
        return
    if signal >> 24 != place >> 24:
        report("mbarrier", f"st.async stores to CTA rank {place >> 24}, its mbarrier is in rank {signal >> 24}")
    barrier = find(w.cta, signal, report, "st.async")
    if barrier is not None:
        order.uses(w, barrier, ins)
    event = order.issue(w, ins, "stores", (id(w), id(barrier)), f"an st.async of {w.name}")
    order.words(w, ins, cta.shared, event, WRITE, np.arange(offset // 4, (offset + total) // 4))
    cells, where = np.array([offset // 16]), np.array([offset], np.uint32)
    cta.shared.writers[cells] += 1  # stores to other words of a cell may be under way: no conflict, see order.py
    cta.shared.writing += 1
    target = cta.shared.data[offset : offset + total]
    if machine.rng.random() < machine.policy.early_poison:
        target[:] = 0xFF
    machine.count(w, "store.async", total)
    cta.in_flight += 1

    def finish():
        if cta.exited and cta is not w.cta:
            report("remote_exit", f"an st.async ends when {cta.name} has exited")
        cta.shared.end(cells, True)
        cta.shared.store(where, words[None, :], words.itemsize, len(words), report)
        cta.shared.wrote(cells, w.warp)
        cta.shared.released[cells] = True  # by its bytes: who has waited for them may fence for the writer
        cta.in_flight -= 1
        if barrier is not None:
            barrier.complete(total, report, order.completed(event, generic=True))

    machine.engine.submit(Operation(finish, f"st.async to {cta.name}"))
