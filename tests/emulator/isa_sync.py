"""Barriers, mbarriers, fences, and what the lanes of a warp do together: elect, vote, shfl, bar.warp, setmaxnreg,
griddepcontrol, mapa.
"""

import numpy as np

from .barriers import MBarrier, find
from .effects import Effect, effect, lane_address, lane_value, reader, strict
from .parse import Imm, Pair, Reg, Sink

WARP = 32
_SHARED = ("shared", "shared::cta", "shared::cluster")
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
            if offset in w.cta.mbarriers:
                w.report("mbarrier", f"mbarrier at offset {offset} is initialised again", ins)
            w.cta.mbarriers[offset] = MBarrier(w.cta, offset, n)
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
    what = "mbarrier." + ".".join(p for p in ("arrive", "expect_tx") if p in ins.parts)

    def run(w):
        report = w.reporter(ins)
        w.machine.release(w)
        for lane in w.lanes():
            where = at(w, lane)
            barrier = find(w.cta, where, report, what)
            if barrier is None:
                continue
            if barrier.cta is not w.cta and not remote:
                report("mbarrier", f"{what} on {barrier.cta.name} without .shared::cluster")
            if row is not None:
                w.v[row[0]][row[1]][lane] = barrier.phase
            if expects:
                barrier.expect(operand(w, lane), report)
                if arrives:
                    barrier.arrive(1, report)
            else:
                barrier.arrive(operand(w, lane), report)
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
        if "barriers" not in w.memo:
            if aligned:
                converged(w, ins)
            w.machine.release(w)
            report = w.reporter(ins)
            held = []
            for g in range(w.gang):
                lane = g * WARP if w.mask is None else w.lead
                n = count(w, lane) if count else WARP * w.cta.warps
                held.append((*w.cta.barriers.arrive(index(w, lane), n, w, 1, report), index(w, lane), n))
            if not waits:
                return True
            w.memo["barriers"] = held
        held = w.memo["barriers"]
        if all(b.generation != g for b, g, _, _ in held):
            w.wait = None
            return True
        w.wait = (
            lambda: all(b.generation != g for b, g, _, _ in held),
            lambda: (
                "waits at "
                + ", ".join(f"barrier {i} with {b.arrived} of {n} threads" for b, g, i, n in held if b.generation == g)
            ),
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
    arriving = "arrive" in ins.parts

    def run(w):
        state = w.cta.cluster_state
        if arriving:
            if "aligned" in ins.parts:
                converged(w, ins)
            w.machine.release(w)
            state.arrive(w, w.reporter(ins))
            return True
        goal = state.goal(w)
        if state.generation >= goal:
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
        for g in range(w.gang):
            w.cta.shared.fence(w.warp + g)
        return True

    return Effect(run, ins)


@effect("fence.mbarrier_init", "fence.acq_rel", "fence.sc", "fence.proxy.tensormap", "membar", "fence.proxy.alias")
def plain_fence(program, ins):
    return Effect(lambda w: True, ins)


# ---- the lanes of a warp
@effect("elect.sync")
def elect(program, ins):
    pair = ins.args[0]
    if not isinstance(pair, Pair):
        raise ins.error("elect form not emulated")
    who = pair.first.index if isinstance(pair.first, Reg) else None
    pred = pair.second.index

    def run(w):
        converged(w, ins)
        row = w.v[("p", "pred")][pred]
        if w.mask is None:
            row[:] = False
            row[::WARP] = True
            if who is not None:
                w.v[("r", "b32")][who][:] = 0
        else:
            for g in range(w.gang):
                part = slice(g * WARP, (g + 1) * WARP)
                active = w.mask[part]
                if active.any():
                    leader = int(active.argmax())
                    row[part][active] = np.arange(WARP)[: len(active)][active] == leader
                    if who is not None:
                        w.v[("r", "b32")][who][part][active] = leader
        return True

    return Effect(run, ins)


@effect("vote.sync")
def vote(program, ins):
    mode = ins.parts[2]
    if mode not in ("any", "all", "ballot", "uni") or ins.parts[3] not in ("pred", "b32"):
        raise ins.error("vote form not emulated")
    source = ins.args[1]
    read = reader(program, source, "pred", ins)
    dst = ins.args[0]

    def run(w):
        converged(w, ins)
        active = np.ones(w.n, bool) if w.mask is None else w.mask
        value = np.broadcast_to(read(w), (w.n,))
        for g in range(w.gang):
            part = slice(g * WARP, (g + 1) * WARP)
            p, a = value[part], active[part]
            if not a.any():
                continue
            if mode == "ballot":
                bits = sum(1 << i for i in np.flatnonzero(p & a).tolist())
                w.v[("r", "b32")][dst.index][part][a] = bits
            else:
                yes = {"any": (p & a).any(), "all": (p | ~a).all(), "uni": (p | ~a).all() or (~p | ~a).all()}[mode]
                w.v[("p", "pred")][dst.index][part][a] = yes
        return True

    return Effect(run, ins)


@effect("shfl.sync")
def shuffle(program, ins):
    mode = ins.parts[2]
    if mode not in ("idx", "bfly", "up", "down") or ins.parts[3:] != ("b32",):
        raise ins.error("shuffle form not emulated")
    dst, pred = (ins.args[0].first, ins.args[0].second) if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    value, lane, clamp = (reader(program, ins.args[i], "b32", ins) for i in (1, 2, 3))
    fixed = all(isinstance(ins.args[i], Imm) for i in (2, 3))
    lanes = np.arange(WARP)
    known = {}

    def sources(b, c):
        """(source lane, in range) of every lane."""
        cmask, seg = c & 31, (c >> 8) & 31
        top = (lanes & seg) | (cmask & ~seg)
        low = lanes & seg
        if mode == "idx":
            j = low | (b & ~seg)
            ok = j <= top
        elif mode == "bfly":
            j = lanes ^ b
            ok = j <= top
        elif mode == "down":
            j = lanes + b
            ok = j <= top
        else:
            j = lanes - b
            ok = j >= top
        return np.where(ok, j, lanes) & 31, ok

    def run(w):
        converged(w, ins)
        x = value(w)
        if x.shape[0] == 1:
            x = np.broadcast_to(x, (w.n,))
        b = np.broadcast_to(lane(w), (w.n,))
        c = np.broadcast_to(clamp(w), (w.n,))
        row = w.v[("r", "b32")][dst.index]
        if fixed and w.mask is None and pred is None and w.n % WARP == 0:
            if "j" not in known:
                known["j"] = sources(b[:WARP].astype(np.int64), c[:WARP].astype(np.int64))[0]
            row[:] = x.reshape(-1, WARP)[:, known["j"]].reshape(-1)
            return True
        for g in range(w.gang):
            part = slice(g * WARP, (g + 1) * WARP)
            j, ok = sources(b[part].astype(np.int64), c[part].astype(np.int64))
            active = slice(None) if w.mask is None else w.mask[part]
            row[part][active] = x[part][j][active]
            if isinstance(pred, Reg):
                w.v[("p", "pred")][pred.index][part][active] = ok[active]
        return True

    return Effect(run, ins)


@effect("redux.sync")
def redux(program, ins):
    op, kind = ins.parts[2], ins.parts[-1]
    fns = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    if op not in fns or ins.parts[3:-1] not in ((), ("NaN",), ("abs",)) or "abs" in ins.parts:
        raise ins.error("redux form not emulated")
    fn = fns[op] if kind != "f32" or "NaN" in ins.parts else {"min": np.fmin, "max": np.fmax}[op]
    read, dst = reader(program, ins.args[1], kind, ins), ins.args[0]

    def run(w):
        converged(w, ins)
        x = read(w)
        for g in range(w.gang):
            part = slice(g * WARP, (g + 1) * WARP)
            a = np.ones(WARP, bool) if w.mask is None else w.mask[part]
            w.v[(dst.cls, kind)][dst.index][part][a] = fn.reduce(x[part][a])
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
        for g in range(w.gang):
            w.cta.register_budget[w.warp + g] = count.value
        total = WARP * sum(w.cta.register_budget.values())
        if total > 65536:
            w.report("registers", f"warps hold {total} registers after setmaxnreg, an SM has 65536", ins)
        return True

    return Effect(run, ins)


@effect("griddepcontrol")
def griddepcontrol(program, ins):
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
        value = (at(w) & at(w).dtype.type(0xFFFFFF)) | (rank(w).astype(at(w).dtype) << at(w).dtype.type(24))
        np.copyto(w.v[(dst.cls, kind)][dst.index], value, where=True if w.mask is None else w.mask)
        return True

    return Effect(run, ins)
