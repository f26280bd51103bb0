"""The deterministic order of the Blackwell backward on ints: ranks, courses, and that no interleaving is a circle.

Every interleaving of small calls is searched; larger ones are played at random. The kernels run the same lines.
"""

import collections
import itertools
import random

import pytest

from jax_fa4.kernels.common.tiles import key_tiles, query_tiles, up
from jax_fa4.kernels.sm100.bwd.order import COPIES_BYTES, copies, course, placed, plain, turn, visit, walk
from jax_fa4.mask import UNBOUNDED, Band

SIZE = (4, 4)
SIDES = [(UNBOUNDED,) * 2, (UNBOUNDED, 0), (0, UNBOUNDED), (2, 1), (9, 3)]


def tickets(tiles, lines, band, banded, count, section=3):
    """[(places, ranks)] of each ticket: what it visits in order, as (line, query tile, copy), and its turn there."""
    made = []
    for index in range(tiles * lines):
        tile, line, rising = placed(index, tiles, lines, section, banded)
        first, last = query_tiles(tile, SIZE, band, banded)
        path = course(tile, (first, last), rising, (up(band.kv_len, 4), count), banded)
        at = walk(path, last - first)
        assert at == [visit(i, (first, last), path, banded) for i in range(first, last)], "load and products agree"
        assert sorted(at) == list(range(first, last)), (tile, at)
        turns = [turn(tile, m, key_tiles(m, SIZE, band, banded), path, count, banded) for m in at]
        made.append(([(line, m, copy) for m, (copy, _) in zip(at, turns, strict=True)], [rank for _, rank in turns]))
    return made


def drawn(rng):
    """(tiles, lines, band, banded, copies) of a random call; some lengths end before the last tile."""
    tiles, lines = rng.randint(1, 9), rng.randint(1, 8)
    sides = rng.choice(SIDES)
    keys = rng.choice([4 * tiles, rng.randint(0, 4 * tiles)])
    band = Band(*sides, rng.choice([0, rng.randint(-9, 9)]) if min(sides) < UNBOUNDED else 0, rng.randint(0, 36), keys)
    banded = min(sides) < UNBOUNDED or rng.random() < 0.3
    return tiles, lines, band, banded, rng.choice([1, 2, 3] if banded else [1, 2, 4, 8])


@pytest.mark.parametrize("seed", range(300))
def test_turns_follow_the_tickets(seed):
    """At each place ranks are 0, 1, ... in the order of tickets: so every wait is for a CTA that has started before.
    Every key tile visits the query tiles that it should, in one copy each."""
    tiles, lines, band, banded, count = drawn(random.Random(seed))
    made = tickets(tiles, lines, band, banded, count)
    met = collections.Counter()
    for places, ranks in made:
        for place, rank in zip(places, ranks, strict=True):
            assert rank == met[place] and 0 <= place[2] < count, (place, rank, met[place])
            met[place] += 1
    items = sorted(placed(index, tiles, lines, 3, banded)[:2] for index in range(tiles * lines))
    assert items == sorted(itertools.product(range(tiles), range(lines)))
    seen = collections.Counter()
    for line, m, _ in met.elements():
        seen[line, m] += 1
    for line, m in itertools.product(range(lines), range(up(band.q_len, 4))):
        assert seen[line, m] == sum(m in range(*query_tiles(tile, SIZE, band, banded)) for tile in range(tiles))


def steps(state, resident, work):
    """States that one CTA's next move leads to. state: (tickets taken, turns given by place, CTAs that run), a CTA
    being (ticket, steps done, whether it holds the turn of the last one), as in turns.add_in_turn."""
    taken, given, running = state
    if taken < len(work) and len(running) < resident:
        yield taken + 1, given, tuple(sorted((*running, (taken, 0, False)))), None
    for cta in running:
        ticket, done, holds = cta
        places, ranks = work[ticket]
        rest = tuple(other for other in running if other != cta)
        turns = dict(given)
        last = places[done - 1] if holds else None
        more = dict(turns)
        if holds:
            more[last] = more.get(last, 0) + 1
        if done == len(places):
            yield taken, frozenset(more.items()), rest, None
            continue
        if turns.get(places[done], 0) == ranks[done]:  # adds, and gives up the turn of the step before
            now = tuple(sorted((*rest, (ticket, done + 1, True))))
            yield taken, frozenset(more.items()), now, (ticket, places[done])
        elif holds:  # must wait: gives it up at once
            yield taken, frozenset(more.items()), tuple(sorted((*rest, (ticket, done, False)))), None


def search(work, resident, limit=400_000):
    """(states, stuck ones) of all interleavings. Each place is added to in the order of ranks by construction."""
    start = (0, frozenset(), ())
    found, todo, stuck = {start}, [start], []
    while todo:
        state = todo.pop()
        ahead = [s[:3] for s in steps(state, resident, work)]
        if not ahead and (state[0] < len(work) or state[2]):
            stuck.append(state)
        for s in ahead:
            if s not in found:
                found.add(s)
                todo.append(s)
        assert len(found) < limit, "too many states to search"
    return len(found), stuck


SMALL = [
    (3, 1, Band(*SIDES[0], 0, 12, 12), False, 2),
    (3, 1, Band(*SIDES[0], 0, 12, 12), False, 1),
    (3, 2, Band(*SIDES[1], 0, 12, 12), True, 1),
    (4, 1, Band(*SIDES[1], 0, 16, 16), True, 2),
    (3, 2, Band(*SIDES[3], 0, 12, 12), True, 1),
    (4, 1, Band(*SIDES[0], 0, 8, 16), False, 4),
]


@pytest.mark.parametrize("resident", (1, 2, 3))
@pytest.mark.parametrize(
    "call", SMALL, ids=lambda call: f"{call[0]}x{call[1]}_{'band' if call[3] else 'full'}_{call[4]}"
)
def test_no_interleaving_is_stuck(call, resident):
    states, stuck = search(tickets(*call), resident)
    assert states > 10 and not stuck, stuck[:1]


@pytest.mark.parametrize("resident", (1, 2))
def test_an_order_that_waits_for_later_tickets_is_found_stuck(resident):
    """The shifted order with one copy, all of whose key tiles would have to run at once."""
    work = tickets(*SMALL[0])
    shifted = []
    for places, _ in work:  # at each query tile in the order in which tiles come there, if all run
        there = [sorted((flat(other).index(p), i) for i, (other, _) in enumerate(work)) for p in flat(places)]
        mine = next(i for i, (other, _) in enumerate(work) if other == places)
        shifted.append((flat(places), [[i for _, i in each].index(mine) for each in there]))
    assert search(shifted, resident)[1]
    assert not search(shifted, 3)[1], "with all of them resident it ends"


def flat(places):
    """The same in one copy."""
    return [(line, m, 0) for line, m, _ in places]


def run_at_random(work, resident, rng):
    """Events in some order, to the end: (how many added, by place; who did, one after the other, by place)."""
    state, order = (0, frozenset(), ()), collections.defaultdict(list)
    while state[0] < len(work) or state[2]:
        ahead = list(steps(state, resident, work))
        assert ahead, state
        *state, added = rng.choice(ahead)
        state = tuple(state)
        if added:
            order[added[1]].append(added[0])
    return state[1], order


@pytest.mark.parametrize("seed", range(100))
def test_larger_calls_end_with_any_number_of_ctas(seed):
    rng = random.Random(seed)
    added, order = run_at_random(tickets(*drawn(rng)), rng.randint(1, 12), rng)
    assert all(line == sorted(line) for line in order.values()), "of a place, in the order of tickets"
    assert dict(added) == {place: len(line) for place, line in order.items()}


def test_directions_and_shifts():
    """Causal: half of the lines go from short tiles to long ones, then half back. Full: all start where nobody is."""
    items = [placed(n, 4, 4, 32, True) for n in range(16)]
    assert [t for t, _, _ in items] == [3, 3, 2, 2, 1, 1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert [line for _, line, _ in items] == [0, 1] * 4 + [2, 3] * 4 and [r for *_, r in items] == [0] * 8 + [1] * 8
    assert placed(5, 4, 4, 32, False) == (2, 1, 0)
    band = Band(*SIDES[1], 0, 16, 16)
    assert walk(course(1, (1, 4), 0, (4, 1), True), 3) == [1, 2, 3]
    assert walk(course(1, (1, 4), 1, (4, 1), True), 3) == [3, 2, 1]
    assert query_tiles(1, SIZE, band, True) == (1, 4)
    starts = [course(t, (0, 8), 0, (4, 2), False).begin for t in range(4)]
    assert starts == [0, 2, 4, 6] and [course(t, (0, 8), 0, (4, 1), False).begin for t in range(4)] == [0] * 4
    assert [course(t, (0, 2), 0, (4, 2), False).begin for t in range(4)] == [0, 0, 1, 1]
    assert walk(course(3, (0, 8), 0, (4, 2), False), 8) == [6, 7, 0, 1, 2, 3, 4, 5]
    assert walk(plain(2, 5), 6) == [2, 3, 4, 2, 3, 4]


def test_copies_are_few_bytes_and_even_without_a_band():
    mib = 1 << 20
    assert copies(2, 4 * mib, 2, (32, 32), False) == 2 and copies(4, 4 * mib, 2, (32, 32), False) == 4
    assert copies(4, 8 * mib, 2, (32, 32), False) == 2 and copies(2, 9 * mib, 2, (32, 32), False) == 1
    assert copies(2, mib, 2, (8, 32), False) == 8, "few queries"
    assert copies(2, mib, 64, (32, 32), True) == 1, "few key tiles of a line run at a time"
    assert copies(4, mib, 2, (1, 32), False) == copies(4, mib, 2, (32, 1), False) == 1
    assert copies(4, None, 2, (32, 32), False) == 1, "a length that is not known when it is traced"
    for wanted, nbytes, queries, keys in itertools.product((1, 2, 4), (mib // 3, 3 * mib, 20 * mib), (2, 9), (2, 90)):
        for banded in (False, True):
            made = copies(wanted, nbytes, 2, (queries, keys), banded)
            assert made == 1 or (made * nbytes <= COPIES_BYTES and (banded or made % 2 == 0))
