"""The Blackwell backward with segment ids in a fixed order: who adds to which copy of dQ after whom.

On ints, where turns by name are the ranks of tickets, so that test_sm100_bwd_order's search speaks for them; then in
the emulator. No card has run this.
"""

import collections
import functools
import importlib.util
import random

import pytest
from compare import check
from problems import Case
from test_emulated_sm100_bwd import backward, plan_of
from test_sm90_segments import table, with_ids
from test_sm100_bwd_order import SIZE, drawn, run_at_random, search

from jax_fa4.kernels.common.tiles import up
from jax_fa4.kernels.sm100.bwd.order import among, lane, leg, placed, visit_among, walk
from jax_fa4.mask import UNBOUNDED, Band

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def named(ranges, tile, m, path, count, banded):
    """(copy of dQ, what its count says at the turn of `tile`) at query tile m: as turns.place_among finds them."""
    again = 0 if banded else leg(tile, ranges[tile], m, path)
    copy, apart = lane(tile, again, count, banded)
    others = range(tile - apart, -1, -apart) if path.rising else range(tile + apart, len(ranges), apart)
    for other in others:
        if ranges[other][0] <= m < ranges[other][1] and (banded or leg(other, ranges[other], m, path) == again):
            return copy, other + 1
    return copy, 0


def tickets(tiles, lines, band, banded, count, ids, section=3):
    """[(places, ranks)] of each ticket, as test_sm100_bwd_order.tickets; each waits by name for the ticket before."""
    ranges = table(*ids, SIZE, band, banded)
    sizes = (up(band.q_len, SIZE[0]), up(band.kv_len, SIZE[1]), count)
    made, met, last = [], collections.Counter(), {}
    for index in range(tiles * lines):
        tile, line, rising = placed(index, tiles, lines, section, banded)
        visits = ranges[tile]
        path = among(tile, visits, rising, sizes, banded)
        at = walk(path, visits[1] - visits[0])
        assert at == [visit_among(i, visits, path, banded) for i in range(*visits)], "load and products agree"
        assert sorted(at) == list(range(*visits)), (tile, at)
        places, ranks = [], []
        for m in at:
            copy, before = named(ranges, tile, m, path, count, banded)
            place = (line, m, copy)
            assert 0 <= copy < count and before == last.get(place, 0), (place, tile, before, last)
            places.append(place)
            ranks.append(met[place])
        for place in places:
            met[place] += 1
            last[place] = tile + 1
        made.append((places, ranks))
    return made


def some_ids(rng, t, s):
    """Of queries and keys: sequences in some order, or anything."""
    ids = [[rng.randrange(rng.choice((1, 2, 4, 30))) for _ in range(x)] for x in (t, s)]
    return [sorted(x, reverse=rng.random() < 0.3) for x in ids] if rng.random() < 0.6 else ids


def random_call(rng):
    tiles, lines, band, banded, count = drawn(rng)
    return tiles, lines, band, banded, count, some_ids(rng, 36, 4 * tiles)


@pytest.mark.parametrize("seed", range(200))
def test_turns_by_name_are_those_of_the_tickets_and_end_with_any_number_of_ctas(seed):
    rng = random.Random(seed)
    work = tickets(*random_call(rng))
    _, order = run_at_random(work, rng.randint(1, 12), rng)
    assert all(line == sorted(line) for line in order.values())
    assert sum(map(len, order.values())) == sum(len(places) for places, _ in work)


FULL, CAUSAL = Band(UNBOUNDED, UNBOUNDED, 0, 16, 16), Band(UNBOUNDED, 0, 0, 16, 16)
HALVES, ODD = [0] * 7 + [1] * 9, [2, 2, 2, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 1]


@pytest.mark.parametrize("resident", (1, 2, 3))
@pytest.mark.parametrize("ids", (HALVES, ODD), ids=("two", "odd"))
@pytest.mark.parametrize("band, count", [(FULL, 1), (FULL, 2), (CAUSAL, 1), (CAUSAL, 2)])
def test_no_interleaving_among_segments_is_stuck(band, count, ids, resident):
    states, stuck = search(tickets(4, 1, band, band is CAUSAL, count, (ids, ids)), resident)
    assert states > 10 and not stuck, stuck[:1]


# In the emulator ------------------------------------------------------------------------------------------------------

FORMS = {
    "causal": {"t": 400, "s": 400, "n": 1, "k": 1, "d": 64, "causal": True, "b": 2},
    "full": {"t": 512, "s": 500, "n": 2, "k": 1, "d": 64},
    "serial": {"t": 300, "s": 400, "n": 1, "k": 1, "d": 192, "v": 128, "causal": True},
}
KINDS = ("rising", "falling", "any order of sequences", "mixed", "one comes back")
OFTEN = {("causal", "any order of sequences"), ("full", "rising"), ("full", "one comes back")}


@needs_compiler
@pytest.mark.parametrize(
    "form, kind", [pytest.param(f, k, marks=() if (f, k) in OFTEN else pytest.mark.prove) for f in FORMS for k in KINDS]
)
def test_among_segments_the_order_is_fixed_and_leaves_out_what_nobody_shares(form, kind):
    case = Case(form, **{"b": 1, "segments": 5, **FORMS[form]})
    fill, plan = functools.partial(with_ids, case, kind), plan_of(case, deterministic=True)
    found, size = set(), (plan.tile, plan.tile)
    for seed in (0, 3):
        reports = []
        inp, got, memory = backward(plan, case, seed, fill=fill, reports=reports, resident=1 + seed)
        check(got, case, inp, plan.dtype)
        main = reports[1].counters.amounts
        added = sum(role.get(cause, 0) for role in main.values() for cause in ("bulk.reduce", "bulk.store"))
        found.add((memory["dq"].tobytes(), memory["dk"].tobytes(), memory["dv"].tobytes()))
    assert len(found) == 1, "bits differ between schedules"
    visits, count = 0, memory["turns"].shape[-1]
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        want = table(inp.q_segments[b], inp.kv_segments[b], size, Band(*case.sides, 0, q_len, kv_len), plan.band)
        assert memory["ranges"][b].tolist() == [list(x) for x in want]
        visits += sum(last - first for first, last in want)
        for m in range(memory["turns"].shape[2]):
            visitors = {0, *(1 + n for n, (first, end) in enumerate(want) if first <= m < end)}
            assert set(memory["turns"][b, :, m].reshape(-1).tolist()) <= visitors, (b, m)
            assert memory["turns"][b, :, m].any() == (len(visitors) > 1)
    assert added == 4 * plan.tile * plan.depth * visits * case.n
    assert plan.chained and count == {"causal": 2, "full": 4, "serial": 1}[form]
