"""mbarriers, named barriers, the cluster barrier, and fences."""

import numpy as np

from .barriers import MBarrier, find
from .effects import Effect, effect, lane_address, lane_value, reader, strict
from .parse import Reg, Sink

WARP = 32
_SHARED = ("shared", "shared::cta", "shared::cluster")
ONE = np.ones(1, np.uint32)
REG32 = {"r": "b32", "d": "lo32"}
_SCOPE = ("release", "acquire", "relaxed", "cta", "cluster")


def converged(w, ins):
    """`.aligned` and full-mask instructions need every live lane of the warp."""
    if not w.converged():
        w.report("not_converged", f"{w.active()} of {w.n} lanes execute {ins.parts[0]}, the others are elsewhere", ins)


# ---- mbarrier
@effect("mbarrier.init")
def mbarrier_init(program, ins):
    strict(ins, "init", "b64", *_SHARED[:2])
    at, count = lane_address(program, ins.args[0], ins, True), lane_value(program, ins.args[1], "u32", ins)

    def run(w):
        fresh = {}
        for lane in w.lanes():
            where, n = at(w, lane), count(w, lane)
            offset = where - w.cta.window
            if offset % 8:
                w.report("misaligned", f"mbarrier at shared offset {offset}: must be a multiple of 8", ins)
            if not 0 <= offset <= w.cta.shared.size - 8:
                w.report(
                    "out_of_bounds",
                    f"mbarrier at offset {offset} of {w.cta.shared.name}, which has {w.cta.shared.size} bytes",
                    ins,
                )
                continue
            if not 1 <= n < 1 << 20:
                w.report("mbarrier", f"mbarrier.init with count {n}: must be in 1..2^20-1", ins)
            if offset in fresh and fresh[offset] == n:  # lanes of one warp write the same: harmless
                w.report("duplicate_issue", "several lanes initialise the same mbarrier: elect one", ins)
                continue
            if offset in w.cta.mbarriers:
                w.report("mbarrier", f"mbarrier at offset {offset} is initialised again", ins)
            fresh[offset] = n
            w.machine.note(w, "init", offset + w.cta.window, ins)
            w.cta.mbarriers[offset] = MBarrier(w.cta, offset, n)
            w.machine.order.born(w, w.cta.mbarriers[offset])
        w.machine.events += 1
        return True

    return Effect(run, ins)


@effect("mbarrier.inval")
def mbarrier_inval(program, ins):
    strict(ins, "inval", "b64", *_SHARED[:2])
    at = lane_address(program, ins.args[0], ins, True)

    def run(w):
        for lane in w.lanes():
            offset = at(w, lane) - w.cta.window
            if w.cta.mbarriers.pop(offset, None) is None:
                w.report("mbarrier", f"mbarrier.inval at offset {offset}: no mbarrier there", ins)
        return True

    return Effect(run, ins)


@effect("mbarrier.arrive", "mbarrier.expect_tx")
def mbarrier_arrive(program, ins):
    strict(ins, "arrive", "expect_tx", "b64", *_SHARED, *_SCOPE)
    arrives, expects = "arrive" in ins.parts, "expect_tx" in ins.parts
    args = list(ins.args)
    state = args.pop(0) if arrives and isinstance(args[0], (Reg, Sink)) else None
    remote = "shared::cluster" in ins.parts
    if remote and isinstance(state, Reg):
        raise ins.error("a remote arrive has no state result")
    at = lane_address(program, args[0], ins, True)
    operand = lane_value(program, args[1], "u32", ins) if len(args) > 1 else lambda w, lane: 1
    row = (("d", "b64"), state.index) if isinstance(state, Reg) else None
    plain = arrives and not expects and not remote
    counts = reader(program, args[1], "u32", ins) if len(args) > 1 else lambda w: ONE
    base = reader(program, args[0].base, "b32" if not isinstance(args[0].base, Reg) else REG32[args[0].base.cls], ins)
    what = "mbarrier." + ".".join(p for p in ("arrive", "expect_tx") if p in ins.parts)
    relaxed = "relaxed" in ins.parts

    def one(w, report, where, lanes, given):
        barrier = find(w.cta, where, report, what)
        if barrier is None:
            return
        if barrier.cta is not w.cta and not remote:
            report("mbarrier", f"{what} on {barrier.cta.name} without .shared::cluster")
        w.machine.order.uses(w, barrier, ins)
        for lane in lanes:
            if row is not None:
                w.v[row[0]][row[1]][lane] = barrier.phase
            if expects:
                barrier.expect(operand(w, lane), report)
                if arrives:
                    barrier.arrive(1, report, given)
            else:
                barrier.arrive(operand(w, lane), report, given)

    def run(w):
        report = w.reporter(ins)
        w.machine.release(w)
        lanes = w.lanes()
        given = w.machine.order.release(w, ins, relaxed) if arrives else None
        if arrives:
            for where in sorted({at(w, lane) for lane in lanes}):
                w.machine.note(w, "arrive", where, ins)
        if len(lanes) > 1 and plain:
            where, each = base(w), counts(w)
            total = int(each[0]) * len(lanes)
            barrier = w.cta.mbarriers.get(at(w, lanes[0]) - w.cta.window)
            if (
                barrier is not None
                and barrier.pending >= total
                and bool((where == where[0]).all() and (each == each[0]).all())
            ):
                # all lanes arrive at one barrier, and not beyond the phase
                if row is not None:
                    np.copyto(w.v[row[0]][row[1]], barrier.phase, where=True if w.mask is None else w.mask)
                w.machine.order.uses(w, barrier, ins)
                barrier.arrive(total, report, given)
                return True
        for lane in lanes:
            one(w, report, at(w, lane), (lane,), given)
        return True

    return Effect(run, ins, yields=True)


@effect("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(program, ins):
    strict(ins, "try_wait", "test_wait", "parity", "b64", *_SHARED[:2], *_SCOPE)
    parity = "parity" in ins.parts
    dst = ins.args[0]
    if not isinstance(dst, Reg) or dst.cls != "p":
        raise ins.error("wait result must be a predicate")
    at = lane_address(program, ins.args[1], ins, True)
    token = lane_value(program, ins.args[2], "u32" if parity else "b64", ins)
    trying = "try_wait" in ins.parts

    def test(w, peek=False):
        """Per lane: has the phase completed? All lanes nearly always share one barrier."""
        lanes = w.lanes()
        first = lanes[0]
        where, value = at(w, first), token(w, first)
        row = w.v[("p", "pred")][dst.index]
        barrier = find(w.cta, where, w.reporter(ins), "mbarrier wait")
        if barrier is None:
            row[:] = True
            return True
        if barrier.cta is not w.cta:
            w.report("mbarrier", "waiting on another CTA's mbarrier", ins)
        ok = barrier.passed(value & 1) if parity else barrier.phase != value
        if ok:
            barrier.observed = max(barrier.observed, barrier.phase if parity else value + 1)
            w.unfenced = w.unfenced or not barrier.copies
            w.machine.order.uses(w, barrier, ins)
            w.machine.order.acquire(w, barrier.known)
        if w.mask is None:
            row[:] = ok
        else:
            row[w.mask] = ok
        return ok

    def run(w):
        lanes = w.lanes()
        first = lanes[0]
        if w.memo.get("refuse"):  # the scheduler lets a blocked try_wait time out
            row = w.v[("p", "pred")][dst.index]
            row[slice(None) if w.mask is None else w.mask] = False
            return True
        ok = test(w)
        w.wait = None
        if ok:
            w.machine.note(w, "wait", at(w, first), ins)
            return True
        w.machine.poll(w)
        if not trying or w.machine.spurious():
            w.machine.force_yield(w)
            return True
        where, value = at(w, first), token(w, first)
        barrier = w.cta.mbarriers.get(where - w.cta.window)
        ready = (lambda: (barrier.phase & 1) != (value & 1)) if parity else (lambda: barrier.phase != value)
        w.wait = (ready, lambda: f"waits for phase parity {value} of {barrier}", ins, "try_wait")
        return False

    return Effect(run, ins, blocking=True, yields=True)


# ---- named barriers
@effect("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive")
def named(program, ins):
    strict(ins, "sync", "arrive", "aligned", "cta")
    index = lane_value(program, ins.args[0], "u32", ins)
    count = lane_value(program, ins.args[1], "u32", ins) if len(ins.args) > 1 else None
    waits = ins.parts[1] == "sync"
    if not waits and count is None:
        raise ins.error("arrive needs a thread count")
    aligned = ins.parts[0] == "bar" or "aligned" in ins.parts

    def run(w):
        if "held" not in w.memo:
            if aligned:
                converged(w, ins)
            w.machine.release(w)
            which = index(w, w.lead)
            n = count(w, w.lead) if count else WARP * w.cta.warps
            w.machine.note(w, "bar.sync" if waits else "bar.arrive", which, ins, named=True)
            given = w.machine.order.release(w, ins)
            barrier, generation, meeting = w.cta.barriers.arrive(which, n, w, w.reporter(ins), given)
            if not waits:
                return True
            w.memo["held"] = barrier, generation, which, n, meeting
        barrier, generation, which, n, meeting = w.memo["held"]
        if barrier.generation != generation:
            w.machine.order.acquire(w, meeting[0])
            w.wait = None
            return True
        w.wait = (
            lambda: barrier.generation != generation,
            lambda: f"waits at barrier {which} with {barrier.arrived} of {n} threads",
            ins,
            "bar",
        )
        return False

    return Effect(run, ins, blocking=waits, yields=True)


@effect("bar.warp.sync")
def warp_sync(program, ins):
    member = reader(program, ins.args[0], "b32", ins)

    def run(w):
        if int(member(w)[0]) == 0xFFFFFFFF:
            converged(w, ins)
        return True

    return Effect(run, ins)


@effect("barrier.cluster")
def cluster(program, ins):
    strict(ins, "cluster", "arrive", "wait", "aligned", "release", "acquire", "relaxed")
    arriving, relaxed = "arrive" in ins.parts, "relaxed" in ins.parts

    def run(w):
        state = w.cta.cluster_state
        if arriving:
            if "aligned" in ins.parts:
                converged(w, ins)
            w.machine.release(w)
            state.arrive(w, w.reporter(ins), w.machine.order.release(w, ins, relaxed))
            return True
        goal = state.goal(w)
        if state.generation >= goal:
            w.machine.order.acquire(w, state.known)
            w.wait = None
            return True
        w.wait = (
            lambda: state.generation >= goal,
            lambda: f"waits at the cluster barrier with {state.arrived} of {state.total} warps",
            ins,
            "cluster",
        )
        return False

    return Effect(run, ins, blocking=not arriving, yields=True)


# ---- fences
@effect("fence.proxy.async")
def proxy_fence(program, ins):
    strict(
        ins,
        "proxy",
        "async",
        "global",
        "shared::cta",
        "shared::cluster",
        "async::generic",
        "acquire",
        "release",
        "sync_restrict",
    )

    def run(w):
        w.cta.shared.fence(w.warp)
        w.machine.order.proxy_fence(w, ins)
        return True

    return Effect(run, ins)


@effect("fence.mbarrier_init", "fence.acq_rel", "fence.sc", "fence.proxy.tensormap", "membar", "fence.proxy.alias")
def plain_fence(program, ins):
    def run(w):
        w.machine.order.fence(w, ins)
        return True

    return Effect(run, ins)
