"""The order of signals of each Blackwell role, searched exhaustively; and the checker itself against brute force."""

import random
from dataclasses import replace

import protocol as checker
import pytest

from jax_fa4.kernels.sm100.events import Arrive, Protocol, Read, Wait, Write
from jax_fa4.kernels.sm100.fwd.plan import Plan
from jax_fa4.kernels.sm100.fwd.protocol import Pair, protocol

FULL = Plan("bfloat16", 128, 128)
PLANS = {
    "d64": Plan("bfloat16", 64, 64),
    "d128": FULL,
    "d192": Plan("bfloat16", 192, 128),  # O over Q, two stages
    "decode": replace(FULL, splits=True, packed=True),
    "p at once": replace(FULL, early=4, stage_cap=2),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("blocks", (1, 2, 3))
def test_forward_has_no_deadlock_and_overwrites_nothing(name, blocks):
    assert checker.check(protocol(PLANS[name], blocks)) == []


AGAIN = replace(FULL, workers=2, registers=(184, 80, 64))
PAIRS = {
    "same": (2, 2),
    "one block each": (1, 1, 1),
    "long and short": (3, 1, 2),
    "halves left out": (Pair(2, 1, 0), Pair(3, 1, 1), Pair(3, 0, 2)),
}


@pytest.mark.parametrize("plan", (AGAIN, Plan("bfloat16", 64, 64, workers=2, stage_cap=2)), ids=("d128", "two stages"))
@pytest.mark.parametrize("name", PAIRS)
def test_several_pairs_in_a_cta(name, plan):
    assert checker.check(protocol(plan, *PAIRS[name])) == []


@pytest.mark.parametrize("pair", [Pair(2, 1), Pair(3, 1, 1), Pair(3, 0, 2), Pair(4, 1, 3), Pair(3, 0, 1)], ids=str)
@pytest.mark.parametrize("name", ("d128", "d192"))
def test_halves_may_be_left_out(name, pair):
    assert checker.check(protocol(PLANS[name], pair)) == []


def test_forward_wraps_its_ring():
    p = protocol(FULL, 4)
    assert max(e.phase for e in p.agents["load",] if isinstance(e, Wait)) >= 1
    assert checker.check(p) == []


def without(p: Protocol, role: str, kind: type, ring: str) -> Protocol:
    """Every such event of that role dropped, as a deleted line of its file would."""

    def kept(agent, events):
        return [e for e in events if not (agent[0] == role and isinstance(e, kind) and e.barrier[0] == ring)]

    return p._replace(agents={a: kept(a, events) for a, events in p.agents.items()})


def recount(p: Protocol, ring: str, count: int) -> Protocol:
    return p._replace(counts={b: count if b[0] == ring else n for b, n in p.counts.items()})


BREAKS = {
    "load overwrites a stage": ("load", Wait, "kv", "overwrite"),
    "edge patches what is not there": ("edge", Wait, "kv", "overwrite"),
    "V used before its edge is zero": ("mma", Wait, "edge", "overwrite"),
    "products before their operands": ("mma", Wait, "kv", "overwrite"),
    "scores before Q": ("mma", Wait, "q", "overwrite"),
    "P V before P": ("mma", Wait, "probs", "overwrite"),
    "P V before the last quarter of P": ("mma", Wait, "rest", "overwrite"),
    "tensor memory freed early": ("mma", Wait, "free", "overwrite"),
    "softmax reads S too early": ("softmax", Wait, "scores", "overwrite"),
    "factors overwritten": ("softmax", Wait, "stats", "overwrite"),
    "P never handed over": ("softmax", Arrive, "probs", "deadlock"),
    "the rest of P never handed over": ("softmax", Arrive, "rest", "deadlock"),
    "no statistics": ("softmax", Arrive, "hand", "deadlock"),
    "correction does not wait for statistics": ("correct", Wait, "hand", "overwrite"),
    "correction never joins": ("correct", Arrive, "probs", "deadlock"),
    "factor slots never freed": ("correct", Arrive, "stats", "deadlock"),
    "O read before its last product": ("correct", Wait, "acc", "overwrite"),
    "O stored before it is written": ("store", Wait, "final", "overwrite"),
    "O never announced": ("correct", Arrive, "final", "deadlock"),
    "the edge never announced": ("edge", Arrive, "edge", "deadlock"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_dropped_signal_is_found(name):
    role, kind, ring, expected = BREAKS[name]
    broken = without(protocol(FULL, 3), role, kind, ring)
    assert broken != protocol(FULL, 3)
    kinds = {fault.kind for fault in checker.check(broken)}
    assert expected in kinds, kinds


BREAKS_AGAIN = {
    "next Q over the last": ("load", Wait, "q", "overwrite"),
    "edge of a stage's older phase": ("edge", Wait, "edge", "early wait"),
    "next O over the last": ("correct", Wait, "final", "overwrite"),
    "next statistics over the last": ("softmax", Wait, "stats", "overwrite"),
    "O of the last pair overwritten": ("mma", Wait, "probs", "overwrite"),
    "O never free for the next pair": ("correct", Arrive, "probs", "deadlock"),
    "the edge never freed": ("mma", Arrive, "edge", "deadlock"),
    "O's place never freed": ("store", Arrive, "final", "deadlock"),
}


@pytest.mark.parametrize("name", BREAKS_AGAIN)
def test_a_dropped_signal_between_pairs_is_found(name):
    role, kind, ring, expected = BREAKS_AGAIN[name]
    whole = protocol(AGAIN, 2, 2)
    broken = without(whole, role, kind, ring)
    kinds = {fault.kind for fault in checker.check(broken)}
    assert expected in kinds, kinds


def test_wrong_counts_are_found():
    p = protocol(FULL, 2)
    assert {f.kind for f in checker.check(recount(p, "probs", 128))} & {"wrong phase", "overwrite"}
    assert "unbalanced" in {f.kind for f in checker.check(recount(p, "final", 100))}
    assert {f.kind for f in checker.check(recount(p, "final", 129))} == {"deadlock"}


def test_a_stage_freed_one_product_early_is_found():
    """V released after the first of the two products that read it: only a ring that wraps shows it."""
    p = protocol(FULL, 3)
    pipe = list(p.agents["tensor pipe",])
    first = next(i for i, e in enumerate(pipe) if isinstance(e, Arrive) and e.barrier == ("kv", "empty", 1))
    token = pipe[first - 1]
    reads = [i for i, e in enumerate(pipe[:first]) if isinstance(e, Read) and e.cell == ("kv", 1)]
    start = reads[len(reads) // 2] - 1  # the second product's token
    moved = [*pipe[:start], token, pipe[first], *pipe[start : first - 1], *pipe[first + 1 :]]
    starts = {e.barrier for e in (token, pipe[start])}
    mma = [e for e in p.agents["mma",] if not (isinstance(e, Arrive) and e.barrier == token.barrier)]
    at = next(i for i, e in enumerate(mma) if isinstance(e, Arrive) and e.barrier == pipe[start].barrier)
    mma.insert(at, Arrive(token.barrier, 0))
    assert len(starts) == 2
    broken = p._replace(agents={**p.agents, ("tensor pipe",): moved, ("mma",): mma})
    assert "overwrite" in {f.kind for f in checker.check(broken)}


def test_a_wait_that_an_older_phase_satisfies_is_found():
    """Only the parity errs: counted, the wait is right. The machine lets it pass at once."""
    x, b = ("x",), ("b",)
    agents = {
        ("producer",): [Arrive(b, 0), Write(x, 0), Arrive(b, 1)],
        ("consumer",): [Wait(b, 1), Read(x, 0)],
    }
    p = Protocol(agents, {b: 1})
    assert search(p) == "overwrite"
    assert {f.kind for f in checker.check(p)} == {"early wait"}


def test_a_wait_whose_phase_may_be_gone_is_found():
    b = ("b",)
    p = Protocol({("producer",): [Arrive(b, 0), Arrive(b, 1)], ("consumer",): [Wait(b, 0)]}, {b: 1})
    assert search(p) == "deadlock"
    assert {f.kind for f in checker.check(p)} == {"missed wait"}


def test_an_arrival_that_may_fall_into_an_older_phase_is_found():
    b = ("b",)
    p = Protocol({("one",): [Arrive(b, 0)], ("two",): [Arrive(b, 1)]}, {b: 1})
    assert "wrong phase" in {f.kind for f in checker.check(p)}


# The checker against a search of all interleavings ------------------------------------------------------------------


def search(p: Protocol, limit: int = 20000):
    """The first fault of the machine itself, parity waits and all, over every interleaving; None = none; 'large'."""
    agents = list(p.agents)
    barriers = sorted({e.barrier for events in p.agents.values() for e in events if isinstance(e, Arrive | Wait)})
    cells = [(a, i, e) for a in agents for i, e in enumerate(p.agents[a]) if isinstance(e, Read | Write)]
    seen, stack = set(), [((0,) * len(agents), (0,) * len(barriers))]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > limit:
            return "large"
        at, arrived = state
        moves = 0
        for n, agent in enumerate(agents):
            if at[n] == len(p.agents[agent]):
                continue
            e, counts = p.agents[agent][at[n]], list(arrived)
            if isinstance(e, Wait):
                done = arrived[barriers.index(e.barrier)] // p.counts[e.barrier]
                if done % 2 == e.phase % 2:
                    continue
            elif isinstance(e, Arrive):
                counts[barriers.index(e.barrier)] += e.arrivals
            else:
                for other, i, x in cells:
                    behind = at[agents.index(other)] <= i and (other, i) != (agent, at[n])
                    if x.cell == e.cell and behind and checker._must_precede(x, e):
                        return "overwrite"
            moves += 1
            stack.append(((*at[:n], at[n] + 1, *at[n + 1 :]), tuple(counts)))
        if not moves and any(i < len(p.agents[a]) for a, i in zip(agents, at, strict=True)):
            return "deadlock"
    return None


def random_ring(rng: random.Random) -> Protocol:
    """A producer and one or two consumers on a ring, some with a random event dropped, doubled or moved."""
    stages, rounds, consumers = rng.randint(1, 2), rng.randint(1, 4), rng.randint(1, 2)
    counts = {}
    for s in range(stages):
        counts["full", s], counts["empty", s] = 1, consumers
    agents = {("producer",): [], **{("consumer", c): [] for c in range(consumers)}}
    for i in range(rounds):
        s, n = i % stages, i // stages
        agents["producer",] += [Wait(("empty", s), n - 1), Write((s,), n), Arrive(("full", s), n)]
        for c in range(consumers):
            agents["consumer", c] += [Wait(("full", s), n), Read((s,), n), Arrive(("empty", s), n)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        events = agents[rng.choice(list(agents))]
        if not events:
            continue
        i = rng.randrange(len(events))
        how = rng.choice(("drop", "double", "move"))
        e = events.pop(i) if how != "double" else events[i]
        if how != "drop":
            events.insert(rng.randint(0, len(events)), e)
    return Protocol(agents, counts)


def test_what_the_checker_passes_survives_every_interleaving():
    rng, passed, failed = random.Random(1), 0, 0
    for _ in range(1500):
        p = random_ring(rng)
        found = search(p)
        if found == "large":
            continue
        faults = checker.check(p)
        if faults:
            failed += 1
        else:
            passed += 1
            assert found is None, (found, p)
    assert passed > 200 and failed > 200, (passed, failed)


def test_every_fault_of_the_machine_is_found_before_it_can_be_missed():
    """The other direction: where brute force finds a fault, so does the checker."""
    rng, hits = random.Random(2), 0
    for _ in range(600):
        p = random_ring(rng)
        if search(p) in ("overwrite", "deadlock"):
            hits += 1
            assert checker.check(p), p
    assert hits > 100
