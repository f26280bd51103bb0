"""run(ptx, launch, memory, seed) -> Report: one kernel launch from text to numbers and findings."""

import random
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from . import (
    isa_async,
    isa_cpasync,
    isa_memory,
    isa_stasync,
    isa_sync,
    isa_tcgen05,
    isa_umma,
    isa_warp,
    isa_wgmma,
    tensor,
)
from .barriers import WARP
from .counters import Counters
from .engine import Engine
from .findings import ERROR, Findings
from .kinds import DTYPE
from .launch import pack
from .machine import Cta, RegisterFile
from .memory import Global
from .order import Off, Order
from .parse import parse
from .program import Program
from .schedule import Scheduler, policy_of

ISA = (
    isa_async,
    isa_cpasync,
    isa_memory,
    isa_stasync,
    isa_sync,
    isa_tcgen05,
    isa_umma,
    isa_warp,
    isa_wgmma,
)  # importing them registers their instructions
_programs = {}


class Sync(NamedTuple):
    """One thing that a warp did to a barrier. kind: init, arrive (also with bytes), commit, wait (passed), or for named
    barriers bar.arrive and bar.sync. barrier: shared offset of an mbarrier, or a named barrier's number. owner: rank in
    the cluster of the CTA whose barrier it is; a commit to several is one of each."""

    cta: tuple
    warp: int
    kind: str
    barrier: int
    line: int
    owner: int


@dataclass
class Report:
    """`outputs`: every buffer after the launch. `findings`: list, errors first. `deadlock`: None or a Deadlock.
    `counters`: Counters. `reached`: lines of the text that some warp executed.
    """

    outputs: dict
    findings: list
    deadlock: object
    counters: Counters
    reached: frozenset

    @property
    def errors(self):
        return [f for f in self.findings if f.severity == ERROR]

    def check(self):
        """Raise AssertionError with the report's text unless the launch ended and has no error finding."""
        text = "\n".join(str(f) for f in self.errors)
        if self.deadlock is not None:
            text = f"{self.deadlock}\n{text}"
        if text:
            raise AssertionError(text)
        return self


def load(ptx, entry=None):
    """The Program of a kernel of `ptx`. `entry`: a part of its name; may be left out if the module has one kernel."""
    if ptx not in _programs:
        if len(_programs) > 32:
            _programs.clear()
        _programs[ptx] = {}
    cache = _programs[ptx]
    if entry not in cache:
        kernels = parse(ptx)
        found = [k for name, k in kernels.items() if entry is None or entry in name]
        if len(found) != 1:
            raise ValueError(f"entry {entry!r} names {len(found)} of the kernels {list(kernels)}")
        cache[entry] = Program(found[0])
    return cache[entry]


def run(ptx, launch, memory, seed=0, exact=False, resident=2, tolerate=(), trace=None, order=True):
    """Run one launch.

    ptx: module text. launch: Launch. memory: {name: array or Uninitialised}; arrays are copied, never written.
    seed: 0 quick, others adversarial. exact: the MMA's own rounding instead of float32 BLAS. resident: clusters at a
    time. tolerate: error kinds to report as advisory, for foreign kernels that are known right on hardware.
    trace: a list, to which every Sync is added as it happens. order: look for accesses that nothing orders,
    too (order.py), also among the warps that issue one wgmma.
    """
    with np.errstate(all="ignore"):
        machine = Machine(load(ptx, launch.entry), launch, memory, seed, exact)
        machine.findings.tolerated = frozenset(tolerate)
        machine.trace, machine.order = trace, Order() if order else Off()
        try:
            deadlock = Scheduler(machine, resident).run()
            machine.finish(deadlock)
            out, findings = machine.globals.outputs(), machine.findings.all()
            return Report(out, findings, deadlock, machine.counters, machine.reached())
        finally:
            machine.dissolve()


class Machine:
    """State of one launch that CTAs share."""

    def __init__(self, program, launch, memory, seed, exact):
        self.program, self.launch = program, launch
        self._check_launch()
        self.rng = random.Random(seed)
        self.policy = policy_of(seed, self.rng)
        self.globals = Global(memory)
        block, self.maps = pack(program.kernel, launch.params, self.globals.address)
        self.param_block = block
        self.findings, self.counters, self.engine = Findings(), Counters(launch.roles), Engine()
        self._check_maps()
        self.events = self.executed = self.finished_clusters = 0
        self.matmul = tensor.exact if exact else lambda a, b, c, dtype: tensor.fast(a, b, c)
        # D^T = B A^T + C^T for accumulators that lie column by column in tensor memory; None: only through matmul
        self.transposed = None if exact else lambda a, b, c: tensor.fast(b, a, c)
        self.pair_requests = {}  # tcgen05.alloc.cta_group::2 of a pair of CTAs
        self.pair_frees = {}  # and its dealloc
        self.products = {}  # thread that issues MMAs -> how many since its last commit
        self.slots = []  # register files free for the next CTA
        self.started = []  # weak references to all CTAs
        self.forced = False
        self.trace, self.order = None, Off()
        self.touched = set()  # segments that exited warps have run
        self.completed = False  # a barrier's phase has completed since the last choice

    def _check_launch(self):
        launch, kernel = self.launch, self.program.kernel
        if kernel.block and tuple(kernel.block) != tuple(launch.block):
            raise ValueError(f"block {launch.block}, the kernel requires {kernel.block}")
        if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
            raise ValueError(f"grid {launch.grid} is no multiple of cluster {launch.cluster}")
        if launch.shared_bytes + self.program.static_bytes > 233472:
            raise ValueError(
                f"shared memory: {launch.shared_bytes} dynamic + {self.program.static_bytes} static bytes > 233472"
            )

    def _check_maps(self):
        for at, desc in self.maps.items():
            if desc.buffer not in self.globals.spaces:
                known = list(self.globals.spaces)
                raise ValueError(f"descriptor at parameter offset {at} names buffer {desc.buffer!r} of {known}")

    def param_word(self, at, kind, cls):
        size = DTYPE[kind].itemsize
        value = np.frombuffer(self.param_block[at : at + size], DTYPE[kind])[0]
        bits = {"h": 16, "r": 32, "d": 64}[cls]
        return np.uint64(int(value.view(f"u{size}") if kind[0] in "fb" else value) & ((1 << bits) - 1)).astype(
            {"h": np.uint16, "r": np.uint32, "d": np.uint64}[cls]
        )

    # ---- clusters
    def cluster_indices(self):
        g, c = self.launch.grid, self.launch.cluster
        return [(x, y, z) for z in range(0, g[2], c[2]) for y in range(0, g[1], c[1]) for x in range(0, g[0], c[0])]

    def start_cluster(self, origin):
        """Units of the CTAs of one cluster."""
        cx, cy, cz = self.launch.cluster
        threads = int(np.prod(self.launch.block))
        ctas = []
        for z in range(cz):
            for y in range(cy):
                for x in range(cx):
                    registers = self.slots.pop() if self.slots else RegisterFile(self.program, threads)
                    index = (origin[0] + x, origin[1] + y, origin[2] + z)
                    ctas.append(Cta(self, registers, index, origin, len(ctas)))
        state = ClusterBarrier(ctas)
        self.started += map(weakref.ref, ctas)
        for cta in ctas:
            cta.cluster, cta.cluster_state = ctas, state
            for unit in cta.units:
                self.order.start(unit)
        return [u for cta in ctas for u in cta.units]

    def unit_exited(self, unit):
        cta = unit.cta
        self.events += 1
        self._count_unit(unit)
        for lane in range(unit.n):
            if (unit.lo + lane) in cta.bulk:
                committed, (open_group,) = cta.bulk[unit.lo + lane]
                bad = [g for g in committed if g.size and not g.read_waited]
                if open_group.size or bad:
                    what = (
                        f"{open_group.size} uncommitted copies"
                        if open_group.size
                        else f"{len(bad)} groups that it never waited for"
                    )
                    self.findings.add("unfinished", f"thread {unit.lo + lane} exits with {what}", None, unit.name)
        if unit.tmem_pending or unit.tmem_stores:
            self.findings.add(
                "unfinished", "the warp exits with tcgen05.ld or st that it never waited for", None, unit.name
            )
            isa_tcgen05.flush(unit)
        cta.exited_warps += 1
        if cta.exited_warps < cta.warps:
            return
        cta.exited = 1
        self._cta_exited(cta)
        if all(c.exited for c in cta.cluster):
            self.finished_clusters += 1
            self.slots += [c.registers for c in cta.cluster]

    def _cta_exited(self, cta):

        def report(kind, message):
            self.findings.add(kind, message, None, cta.name)

        if cta.in_flight:
            report("unfinished", f"{cta.in_flight} copies into {cta.shared.name} are in flight when it exits")
        for barrier in cta.mbarriers.values():
            if barrier.tx and not cta.in_flight:
                report("unfinished", f"bytes do not add up at exit: {barrier}")
        for index, b in cta.barriers.leftovers():
            report(
                "named_barrier",
                f"barrier {index} at exit: {b.arrived} of {b.count} threads arrived ({', '.join(b.names)})",
            )
        if cta.tmem.allocations:
            held = ", ".join(f"{n} columns at {c}" for c, n in cta.tmem.allocations.items())
            report("tmem_leak", f"tensor memory not deallocated at exit: {held}")
        for warp, c in cta.cp_async.items():
            if c.open[0] or any(g[0] for g in c.committed):
                report("unfinished", f"cp.async of warp {warp} in flight at exit")
        for wg in cta.wgmma.values():
            if any(n != len(wg.operations) for n in wg.next):
                report("wgmma_divergent", f"warps of a warpgroup issued {wg.next} wgmma")
            elif wg.trail:
                report(
                    "wgmma_divergent", f"only some warps came to line {wg.trail[0]}; they executed {wg.at} of its kind"
                )
            waited = wg.done == len(wg.operations)
            if not waited:
                report("unfinished", f"{len(wg.operations) - wg.done} wgmma in flight at exit")

    def _count_unit(self, unit):
        table = self.counters.instructions[self.counters.role(unit.warp)]
        for segment, hits in zip(self.program.segments, unit.hits, strict=True):
            if hits:
                self.touched.add(segment.index)
                for family, n in segment.families.items():
                    table[family] += n * hits

    def reached(self):
        """Lines of the segments that warps ran before they exited."""
        segments, code = self.program.segments, self.program.kernel.instructions
        ends = [s.first for s in segments[1:]] + [len(code)]
        return frozenset(
            ins.line for i in self.touched for ins in code[segments[i].first : max(ends[i], segments[i].first + 1)]
        )

    def finish(self, deadlock):
        if deadlock is None:
            while len(self.engine):
                keys = self.engine.candidates()
                if not keys:
                    break
                for key in keys:
                    self.engine.complete(key)

    def dissolve(self):
        """The end: takes apart what refers to itself. A launch is tens to hundreds of MB of arrays, of which Python's
        search for cycles knows nothing: it came late, and a test's process grew to 8 GB."""
        for cta in filter(None, (ref() for ref in self.started)):
            for unit in cta.units:
                vars(unit).clear()
            vars(cta).clear()
        vars(self.order).clear()
        vars(self).clear()

    # ---- services for effects
    def count(self, unit, cause, amount):
        self.counters.add(unit.warp, cause, amount)

    def poll(self, unit):
        """The unit looks at something that others change."""
        unit.polled_at = self.events

    def release(self, unit):
        """The unit arrives at a barrier."""
        unit.cta.shared.release(unit.warp)

    def note(self, unit, kind, barrier, ins, named=False):
        """For the trace. barrier: an address in the cluster's shared memory, or a named barrier of the unit's CTA."""
        if self.trace is not None:
            owner = unit.cta.rank if named else barrier >> 24
            self.trace.append(Sync(unit.cta.index, unit.warp, kind, barrier & 0xFFFFFF, ins.line, owner))

    def force_yield(self, unit):
        self.forced = True

    def preempt(self):
        """Should the running unit let others run here?"""
        if self.forced:
            self.forced = False
            return True
        p = max(self.policy.preempt, self.policy.handoff if self.completed else 0.0)
        return p > 0 and self.rng.random() < p

    def spurious(self):
        """Does a try_wait give up early?"""
        return self.policy.spurious > 0 and self.rng.random() < self.policy.spurious


class ClusterBarrier:
    """barrier.cluster: all warps of all CTAs of the cluster."""

    def __init__(self, ctas):
        self.total = sum(c.warps for c in ctas)
        self.arrived = self.generation = 0
        self.goals = {}
        self.given = self.known = None  # clocks: of this round's arrivals, of all rounds before

    def arrive(self, unit, report, clock=None):
        key = (unit.cta.rank, unit.warp)
        if self.goals.get(key, 0) > self.generation:
            report("named_barrier", "barrier.cluster.arrive twice without a wait")
        self.goals[key] = self.generation + 1
        self.arrived += 1
        self.given = unit.machine.order.joined(self.given, clock)
        unit.machine.events += 1
        if self.arrived == self.total:
            self.arrived = 0
            self.known, self.given = unit.machine.order.joined(self.known, self.given), None
            self.generation += 1

    def goal(self, unit):
        return self.goals.get((unit.cta.rank, unit.warp), 0)


__all__ = ["WARP", "Machine", "Report", "load", "run"]
