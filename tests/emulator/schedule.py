"""Who runs next: warps, asynchronous operations, clusters. Adversarial by seed; deadlock = nothing can move.

Seed 0 is the quick one: warps in order, asynchronous work at once, sources read early. Other seeds draw a policy: how
soon
asynchronous operations finish, whether their sources are read at start or end, how often a warp is preempted.
"""

from dataclasses import dataclass

from . import machine as m


@dataclass
class Policy:
    """Probabilities of one seed.

    `haste`: complete an asynchronous operation rather than run a warp. `order`: which one finishes first, "any", the
    "newest" or the "oldest". `starve`: the kind of operation that comes last. `handoff`: whoever completes a barrier's
    phase is interrupted, and one that waited for it runs at once. `slow`: share of the warps that run only when no
    other can, drawn anew now and then. `scatter`: clusters start in any order, which hardware does not promise either.
    """

    haste: float = 1.0
    read_early: float = 1.0
    early_poison: float = 0.0
    preempt: float = 0.0
    spurious: float = 0.0
    tmem_early: float = 1.0
    shuffle: bool = False
    handoff: float = 0.0
    scatter: bool = False
    order: str = "any"
    starve: str = ""
    slow: float = 0.0


def policy_of(seed, rng):
    """Seed 0: quick. Even seeds: lazy asynchrony. Odd seeds: eager. The rest is drawn."""
    if seed == 0:
        return Policy()
    lazy = seed % 2 == 0
    return Policy(
        haste=rng.choice((0.0, 0.1)) if lazy else rng.choice((0.5, 0.9)),
        read_early=rng.choice((0.0, 0.5)) if lazy else 0.5,
        early_poison=rng.choice((0.5, 1.0)),
        preempt=rng.choice((0.1, 0.4, 0.9)),
        spurious=rng.choice((0.0, 0.1)),
        tmem_early=rng.choice((0.0, 0.5)),
        shuffle=True,
        handoff=rng.choice((0.0, 0.5, 0.9)),
        slow=rng.choice((0.0, 0.3, 0.5)),
        scatter=rng.random() < 0.5,
        order=ORDERS[seed // 2 % 4 if lazy else rng.randrange(4)],
        starve=STARVED[seed // 2 % 4 if lazy else rng.randrange(4)],
    )


@dataclass
class Deadlock:
    """Why nothing can move: one line for each warp that has not exited."""

    lines: list

    def __str__(self):
        return "deadlock:\n  " + "\n  ".join(self.lines)


# Seeds 2, 4, 6, 8 and so on: nobody starved, bulk stores and reductions last, loads last, tensor-core work last.
ORDERS = ("any", "newest", "any", "oldest")
STARVED = ("mma", "", "bulk", "free")
SEEDS = (0, 1, 2, 3, 4, 6, 8)  # the quick schedule, two eager ones, one of each lazy kind
PATIENCE = 64  # rounds of polling without any event before spinning warps count as stuck


class Scheduler:
    """Runs the launch's clusters, at most `resident` at a time."""

    def __init__(self, machine, resident):
        self.machine, self.resident = machine, resident
        self.units = []
        self.turn = 0
        self.slow, self.until = set(), 0

    def run(self):
        """None, or a Deadlock."""
        machine, rng = self.machine, self.machine.rng
        policy, engine = machine.policy, machine.engine
        waiting = machine.cluster_indices()
        if policy.scatter:
            rng.shuffle(waiting)
        live = 0
        quiet, last = 0, -1
        while True:
            while waiting and live < self.resident:
                self.units += machine.start_cluster(waiting.pop(0))
                live += 1
            if machine.finished_clusters:
                live -= machine.finished_clusters
                machine.finished_clusters = 0
                continue
            if not self.units and not waiting and not len(engine):
                return None
            ready = [u for u in self.units if u.wait is None or u.wait[0]()]
            if machine.events != last:
                quiet, last = 0, machine.events
            keys = engine.candidates() if len(engine) else ()
            if keys and (not ready or rng.random() < policy.haste):
                if policy.shuffle:
                    fed = [k for k in keys if not policy.starve or policy.starve not in k[0]] or keys
                    pick = {"newest": fed[-1:], "oldest": fed[:1]}.get(policy.order, fed)
                    engine.complete(rng.choice(pick))
                else:
                    for key in keys:
                        engine.complete(key)
                continue
            if ready and all(u.polled_at == machine.events for u in ready):
                quiet += 1  # everyone who could run only polls
                if quiet > PATIENCE * (1 + len(ready)):
                    if keys:
                        engine.complete(rng.choice(keys))
                        continue
                    return self.deadlock()
            if not ready:
                if not self.units:
                    if len(engine):
                        return Deadlock(
                            [f"asynchronous work can never complete: {q[0].what}" for q in engine.queues.values()]
                        )
                    continue
                # nothing can move: let blocked try_waits time out, once each, before calling it a deadlock
                tries = [u for u in self.units if u.wait[3] == "try_wait" and u.polls < PATIENCE]
                if not tries:
                    return self.deadlock()
                for u in tries:
                    u.polls += 1
                    u.memo["refuse"] = True
                    u.wait = None
                ready = tries
            unit = self.choose(ready)
            self.turn += 1
            unit.wait = None
            outcome = unit.run()
            if outcome == m.DONE:
                self.units.remove(unit)

    def choose(self, ready):
        machine, policy = self.machine, self.machine.policy
        if not policy.shuffle:
            return ready[self.turn % len(ready)]
        if machine.completed and machine.rng.random() < policy.handoff:
            woken = [u for u in ready if u.wait is not None]
            if woken:
                ready = woken
        machine.completed = False
        if policy.slow:
            if self.turn >= self.until:
                self.slow = {u for u in self.units if machine.rng.random() < policy.slow}
                self.until = self.turn + machine.rng.randrange(20, 200)
            ready = [u for u in ready if u not in self.slow] or ready
        return machine.rng.choice(ready)

    def deadlock(self):
        lines = []
        for u in self.units:
            segment = self.machine.program.segments[u.pc]
            code = self.machine.program.kernel.instructions
            ins = u.wait[2] if u.wait else code[min(segment.first, len(code) - 1)]
            why = u.wait[1]() if u.wait else f"spins, last at {ins.text[:80]}"
            source = f", source line {ins.source[1]}" if ins.source else ""
            lines.append(f"{u.name}: line {ins.line}{source}: {why}")
        return Deadlock(lines)
