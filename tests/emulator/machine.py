"""CTAs, warps and lanes: register files, divergence, and the loop that runs one warp until it blocks or yields."""

import numpy as np

from .barriers import NamedBarriers
from .codegen import compile_segment
from .kinds import CLASS_DTYPE, view
from .memory import Shared
from .tmem import TensorMemory

LANES = 32
BUDGET = 20000  # segments that a warp runs before others get a turn
BLOCKED, YIELDED, DONE = "blocked", "yielded", "done"


class _Views(dict):
    """(class, kind) -> list of register rows of one unit, made when first used."""

    def __init__(self, files, lo, hi):
        super().__init__()
        self.files, self.lo, self.hi = files, lo, hi

    def __missing__(self, key):
        self[key] = list(view(self.files[key[0]][:, self.lo : self.hi], *key))
        return self[key]


class _Matrices(dict):
    """(class, kind) -> all rows of one unit as one array."""

    def __init__(self, files, lo, hi):
        super().__init__()
        self.files, self.lo, self.hi = files, lo, hi

    def __missing__(self, key):
        self[key] = view(self.files[key[0]][:, self.lo : self.hi], *key)
        return self[key]


class RegisterFile:
    """Rows of all threads of a CTA; poisoned. Kept and reused by the CTAs that follow in the same slot."""

    def __init__(self, program, threads):
        self.files = {c: np.empty((max(1, n), threads), CLASS_DTYPE[c]) for c, n in program.rows.items()}
        self.views, self.matrices = {}, {}

    def poison(self):
        for cls, rows in self.files.items():
            rows[:] = False if cls == "p" else np.iinfo(rows.dtype).max

    def of(self, lo, hi):
        if (lo, hi) not in self.views:
            self.views[lo, hi] = _Views(self.files, lo, hi)
            self.matrices[lo, hi] = _Matrices(self.files, lo, hi)
        return self.views[lo, hi], self.matrices[lo, hi]


class Cta:
    """One thread block: shared memory, tensor memory, barriers, its warps. `window` is its shared address space's
    base.
    """

    def __init__(self, machine, registers, index, cluster_index, rank):
        self.machine, self.registers, self.index, self.rank = machine, registers, index, rank
        self.cluster_index = cluster_index
        self.cluster = None  # list of CTAs, set by the machine
        self.window = rank << 24
        program = machine.program
        self.name = f"CTA {index[0]},{index[1]},{index[2]}"
        self.shared = Shared(program.static_bytes + machine.launch.shared_bytes, f"shared memory of {self.name}")
        self.tmem = TensorMemory(self)
        self.barriers = NamedBarriers(self)
        self.mbarriers = {}
        self.wgmma = {}
        self.bulk = {}  # thread -> its bulk groups
        self.cp_async = {}  # warp -> its cp.async groups
        self.in_flight = 0  # copies into this CTA's shared memory
        self.exited = self.exited_warps = 0
        threads = int(np.prod(machine.launch.block))
        self.threads, self.warps = threads, -(-threads // LANES)
        registers.poison()
        self._specials()
        self.units = [Unit(self, w) for w in range(self.warps)]
        self.register_budget = {}

    def _specials(self):
        launch, files = self.machine.launch, self.registers.files
        t = np.arange(self.threads, dtype=np.uint32)
        bx, by, _ = launch.block
        lane = t % 32
        values = {
            "tid.x": t % bx,
            "tid.y": t // bx % by,
            "tid.z": t // (bx * by),
            "laneid": lane,
            "warpid": t // 32,
            "nwarpid": self.warps,
            "cluster_ctarank": self.rank,
            "cluster_nctarank": int(np.prod(launch.cluster)),
            "smid": 0,
            "is_explicit_cluster": int(np.prod(launch.cluster) > 1),
            "dynamic_smem_size": launch.shared_bytes,
            "total_smem_size": launch.shared_bytes + self.machine.program.static_bytes,
            "lanemask_eq": np.uint32(1) << lane,
            "lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
        }
        values["lanemask_le"] = values["lanemask_lt"] | values["lanemask_eq"]
        values["lanemask_gt"], values["lanemask_ge"] = ~values["lanemask_le"], ~values["lanemask_lt"]
        for k, axis in enumerate("xyz"):
            values |= {
                f"ntid.{axis}": launch.block[k],
                f"nctaid.{axis}": launch.grid[k],
                f"ctaid.{axis}": self.index[k],
                f"cluster_nctaid.{axis}": launch.cluster[k],
                f"cluster_ctaid.{axis}": self.index[k] % launch.cluster[k],
                f"clusterid.{axis}": self.index[k] // launch.cluster[k],
                f"nclusterid.{axis}": launch.grid[k] // launch.cluster[k],
            }
        program = self.machine.program
        for (cls, what), row in program.special.items():
            if isinstance(what, str):
                files[cls][row, :] = values[what]
            elif what[0] == "shared":
                files[cls][row, :] = self.window + program.shared_at[what[1]]
            else:
                _, at, kind = what
                files[cls][row, :] = self.machine.param_word(at, kind, cls)

    def peer(self, address):
        """The CTA that a shared::cluster address names, or None."""
        rank = address >> 24
        return self.cluster[rank] if 0 <= rank < len(self.cluster) else None


class Unit:
    """One warp: program counter, active lanes, pending divergent paths."""

    def __init__(self, cta, warp):
        self.cta, self.machine = cta, cta.machine
        self.warp = warp
        self.lo = warp * LANES
        self.hi = min(self.lo + LANES, cta.threads)
        self.n = self.hi - self.lo
        self.v, self.m = cta.registers.of(self.lo, self.hi)
        self.pc, self.at_end = 0, False
        self.mask = self.mask2 = None
        self.lead = 0
        self.alive = None  # lanes that have not exited, None = all
        self.pend = []  # (segment, mask) of the other divergent paths
        self.wait = None  # why blocked: (test, description)
        self.memo = {}
        self.done = False
        self.polls, self.polled_at = 0, -1
        self.tmem_pending = []  # tcgen05.ld not yet waited for
        self.tmem_stores = []
        self.tmem_events = {}  # "ld", "st" -> the newest one's event
        self.slot = self.event = self.clock = self.fenced = self.heard = None  # see order.py
        self.unfenced = False  # synchronised since the last tcgen05.fence::after_thread_sync
        self.hits = [0] * len(cta.machine.program.segments)

    @property
    def name(self):
        return f"{self.cta.name} warp {self.warp}"

    def set_mask(self, mask):
        self.mask = mask
        if mask is None:
            self.mask2, self.lead = None, 0
        else:
            self.mask2 = np.repeat(mask, 2)
            self.lead = int(mask.argmax())

    def lanes(self):
        """Active lanes as Python ints."""
        return range(self.n) if self.mask is None else np.flatnonzero(self.mask).tolist()

    def active(self):
        return self.n if self.mask is None else int(np.count_nonzero(self.mask))

    def converged(self):
        return not self.pend

    def report(self, kind, message, instruction):
        self.machine.findings.add(kind, message, instruction, self.name)

    def reporter(self, instruction):
        """report(kind, message) bound to this unit and instruction."""
        return lambda kind, message: self.machine.findings.add(kind, message, instruction, self.name)

    # ---- running
    def run(self):
        """Run until the unit blocks, yields, exits or must be split."""
        machine = self.machine
        segments, effects = machine.program.segments, machine.program.effects
        schedule = machine.preempt
        hits = self.hits
        before = machine.events
        for _ in range(BUDGET):
            segment = segments[self.pc]
            if not self.at_end:
                hits[self.pc] += 1
                if self.mask is None:
                    if segment.full is None:
                        segment.full = compile_segment(machine.program, segment, False)
                    segment.full(self)
                else:
                    if segment.masked is None:
                        segment.masked = compile_segment(machine.program, segment, True)
                    segment.masked(self)
            self.at_end = False
            end = segment.end
            kind = end[0]
            if kind == "branch":
                self.branch(end)
            elif kind == "block":
                self.machine.executed = end[1]
                if effects[end[1]].run(self) is False:
                    self.at_end = True
                    return BLOCKED
                self.memo = {}
                self.pc = end[2]
                if self.pend:
                    self.reconverge()
                if effects[end[1]].yields and schedule():
                    return YIELDED
                continue
            elif kind == "exit":
                if self.exit():
                    return DONE
                continue
            else:
                self.pc = end[1]
            if self.pend:
                self.reconverge()
            if segment.yields and schedule():
                return YIELDED
        if machine.events == before:  # a long computation, or a loop that waits for what nobody signals
            machine.poll(self)
        return YIELDED

    def branch(self, end):
        _, pred, negated, taken, other = end
        p = self.v[("p", "pred")][pred]
        if negated:
            p = ~p
        if self.mask is not None:
            p = p & self.mask
        count = np.count_nonzero(p)
        total = self.n if self.mask is None else np.count_nonzero(self.mask)
        if count == total:
            self.pc = taken
        elif count == 0:
            self.pc = other
        else:
            rest = ~p if self.mask is None else self.mask & ~p
            self.pend.append((taken, p.copy()))
            self.pc = other
            self.set_mask(rest)
        return True

    def reconverge(self):
        """The path with the lowest program counter runs first; paths that meet are merged."""
        self.pend.append((self.pc, self.mask))
        low = min(pc for pc, _ in self.pend)
        mask = None
        for pc, m in self.pend:
            if pc == low:
                mask = m if mask is None else mask | m
        self.pend = [(pc, m) for pc, m in self.pend if pc != low]
        self.pc = low
        if not self.pend and self.alive is None and mask.all():
            mask = None
        self.set_mask(mask)

    def exit(self):
        """Lanes of the current path exit; True if the whole unit has."""
        if not self.pend:
            self.done = True
            self.machine.unit_exited(self)
            return True
        gone = self.mask
        self.alive = (np.ones(self.n, bool) if self.alive is None else self.alive) & ~gone
        low = min(pc for pc, _ in self.pend)
        mask = None
        for pc, m in self.pend:
            if pc == low:
                mask = m if mask is None else mask | m
        self.pend = [(pc, m) for pc, m in self.pend if pc != low]
        self.pc = low
        self.set_mask(mask)
        return False
