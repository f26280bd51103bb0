"""The Hopper backward with segment ids in a fixed order: who adds to dQ after whom, and that nobody visits in vain.

First the protocol on ints, no compiler; then its kernels in the emulator, with ids in many orders.
"""

import functools
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from compare import check
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Case
from test_compile_bwd import backward, built, plan_of
from test_plan_bwd import SIZES, bands

from jax_fa4.kernels.common.tiles import query_tiles, up
from jax_fa4.kernels.sm90.bwd.order import placed, visited
from jax_fa4.mask import UNBOUNDED, Band

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def shared(of_queries, of_keys, n, size, trip, lengths):
    """[first, last) of `trip` that key tile n visits: from the first query whose id lies in the range of its own to the
    last."""
    rows, keys = size
    own = of_keys[n * keys : min((n + 1) * keys, lengths[1])]
    begin, end = trip[0] * rows, min(trip[1] * rows, lengths[0])
    found = [i for i in range(begin, end) if len(own) and min(own) <= of_queries[i] <= max(own)]
    return (found[0] // rows, found[-1] // rows + 1) if found else (trip[0], trip[0])


def table(of_queries, of_keys, size, band, banded):
    """What the preprocess writes of an example."""
    made = []
    for n in range(up(len(of_keys), size[1])):
        trip = query_tiles(n, size, band, banded)
        made.append(shared(of_queries, of_keys, n, size, trip, (band.q_len, band.kv_len)))
    return made


def before(ranges, tile, m, rising):
    """What the count of query tile m is when it is the turn of `tile`: 1 + the nearest that comes before it, else 0."""
    others = range(tile - 1, -1, -1) if rising else range(tile + 1, len(ranges))
    return next((1 + n for n in others if ranges[n][0] <= m < ranges[n][1]), 0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    bands(),
    st.sampled_from(SIZES),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_ordered_work_among_segments_ends_and_every_visitor_adds_once(
    case, size, resident, rng, reducers, section, mirrored
):
    """CTAs start in the order of tickets; each visits what the table says, `reducers` tiles may wait at once."""
    t, s, band = case
    banded = min(band.left, band.right) < UNBOUNDED
    kinds = rng.choice((1, 2, 4, 30))
    ids = [[rng.randrange(kinds) for _ in range(x)] for x in (t, s)]
    if rng.random() < 0.6:
        ids = [sorted(x, reverse=rng.random() < 0.3) for x in ids]
    ranges = table(*ids, size, band, banded)
    tiles, heads = up(s, size[1]), 5
    waiting = [placed(i, tiles, (heads, mirrored), section) for i in range(tiles * heads)]
    running, turns, added = [], {}, {}
    while waiting or running:
        while waiting and len(running) < resident:
            tile, head, rising = waiting.pop(0)
            running.append((tile, head, rising, [visited(i, ranges[tile], rising) for i in range(*ranges[tile])]))
        rng.shuffle(running)
        moved = False
        for item in list(running):
            tile, head, rising, left = item
            for m in left[:reducers]:
                if turns.get((head, m), 0) == before(ranges, tile, m, rising):
                    turns[head, m] = tile + 1
                    added.setdefault((head, m), []).append(tile)
                    left.remove(m)
                    moved = True
                    break
            if not left:
                running.remove(item)
                moved = True
        assert moved, (case, size, ids, running, turns)
    rises = {
        head: rising for _, head, rising in (placed(i, tiles, (heads, mirrored), section) for i in range(tiles * heads))
    }
    for head in range(heads if tiles else 0):
        for m in range(up(t, size[0])):
            visitors = [n for n, (first, last) in enumerate(ranges) if first <= m < last]
            assert added.get((head, m), []) == sorted(visitors, reverse=not rises[head])


# In the emulator ------------------------------------------------------------------------------------------------------


def packed(rng, t):
    """Sequences one after the other, the shortest of a few rows."""
    cuts = np.sort(rng.choice(np.arange(1, t), 4, replace=False))
    return np.searchsorted(cuts, np.arange(t), side="right")


IDS = {
    "rising": packed,
    "falling": lambda rng, t: packed(rng, t)[::-1],
    "any order of sequences": lambda rng, t: np.array([3, 0, 4, 1, 2])[packed(rng, t)],
    "mixed": lambda rng, t: rng.integers(0, 3, t),
    "one comes back": lambda rng, t: np.where(np.arange(t) // 70 % 2, 7, packed(rng, t)),
}
FORMS = {
    "128 queries": {"t": 300, "s": 400, "n": 2, "k": 1, "d": 64, "causal": True},
    "64 queries": {"t": 200, "s": 390, "n": 1, "k": 1, "d": 128},
    "apart": {"t": 130, "s": 200, "n": 1, "k": 1, "d": 192, "v": 128, "causal": True},
}
OFTEN = {
    ("128 queries", "any order of sequences"),
    *(("64 queries", kind) for kind in ("falling", "mixed", "one comes back")),
    ("apart", "rising"),
}


def case_of(form, **more):
    return Case(form, **{"b": 1, "segments": 5, **FORMS[form], **more})


def with_ids(case, kind, inp):
    """The inputs with such ids, of keys as of queries as far as both go."""
    rng = np.random.default_rng(len(kind))
    made = np.stack([IDS[kind](rng, max(case.t, case.s)) for _ in range(case.b)]).astype(np.int32)
    return replace(inp, q_segments=made[:, : case.t].copy(), kv_segments=made[:, : case.s].copy())


def alone(inp):
    """Ids of which only the greatest is shared."""
    ids = 2 * inp.kv_segments
    return replace(inp, q_segments=2 * inp.q_segments, kv_segments=np.where(ids == ids.max(), ids, ids + 1))


def runs(case, fill, plan, seeds):
    """Of each seed (dQ's bits, bytes added to dQ, buffers), the gradients compared with the oracle's."""
    made = []
    for seed in seeds:
        reports = []
        inp, got, memory = backward(plan, case, seed, fill=fill, reports=reports, resident=1 + seed)
        check(got, case, inp, plan.dtype)
        main = reports[1].counters.amounts
        made.append((memory["work"].tobytes(), sum(role.get("bulk.reduce", 0) for role in main.values()), memory))
    return inp, made


def follows(case, fill, seeds=(0, 3), **fields):
    """The ordered form is right, the same in any schedule, and visits what the table says, which is exact."""
    plan = plan_of(case, deterministic=True, **fields)
    inp, made = runs(case, fill, plan, seeds)
    assert plan.chained and len({bits for bits, *_ in made}) == 1
    memory, size = made[0][2], (plan.rows, plan.keys)
    visits = 0
    for b, (q_len, kv_len) in enumerate(zip(*case.lengths, strict=True)):
        band = Band(*case.sides, case.offset[b], q_len, kv_len)
        want = table(inp.q_segments[b], inp.kv_segments[b], size, band, plan.band)
        assert memory["ranges"][b].tolist() == [list(x) for x in want]
        visits += sum(last - first for first, last in want)
        for m, last in enumerate(memory["turns"].reshape(case.b, case.n, -1, plan.halves if plan.apart else 1)[b, 0]):
            visitors = [n for n, (first, end) in enumerate(want) if first <= m < end]
            assert (last == 1 + min(visitors, default=-1)).all(), (b, m, last, visitors)
    assert {added for _, added, _ in made} == {4 * plan.rows * plan.depth * visits * case.n}
    return plan, made


@needs_compiler
@pytest.mark.parametrize(
    "form, kind", [pytest.param(f, k, marks=() if (f, k) in OFTEN else pytest.mark.prove) for f in FORMS for k in IDS]
)
def test_among_segments_the_order_is_fixed_and_leaves_out_what_nobody_shares(form, kind):
    case = case_of(form)
    follows(case, functools.partial(with_ids, case, kind))


@needs_compiler
@pytest.mark.parametrize("form", ["64 queries", pytest.param("apart", marks=pytest.mark.prove)])
def test_ids_that_nobody_shares(form):
    case = case_of(form, causal=False)
    plan, made = follows(case, alone)
    every = case.n * up(case.t, plan.rows) * up(case.s, plan.keys)
    assert 0 < made[0][1] < 4 * plan.rows * plan.depth * every


@needs_compiler
@pytest.mark.parametrize("form", ["64 queries", pytest.param("apart", marks=pytest.mark.prove)])
def test_the_ordered_form_visits_what_the_plain_one_does(form):
    case = case_of(form)
    fill = functools.partial(with_ids, case, "any order of sequences")
    _, loose = runs(case, fill, plan_of(case), (0,))
    _, ordered = follows(case, fill, seeds=(0,))
    assert ordered[0][1] == loose[0][1] > 0


EVERYTHING = {
    "b": 2, "n": 4, "k": 2, "window": (150, 20), "causal": False, "bottom_right": True, "q_lens": (130, 90),
    "kv_lens": (300, 170), "scale": 0.2, "soft_cap": 4.0,
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    "form, seed",
    [
        ("128 queries", 0),
        *(pytest.param(f, s, marks=pytest.mark.prove) for f in ("128 queries", "apart") for s in (2, 4)),
    ],
)
def test_every_kind_together_with_heads_in_reverse(form, seed):
    case = case_of(form, **EVERYTHING)
    plan = plan_of(case, deterministic=True, mirrored=2)
    _, made = runs(case, functools.partial(with_ids, case, "any order of sequences"), plan, (seed, seed + 1))
    assert plan.mirrored and made[0][0] == made[1][0]


@needs_compiler
def test_no_form_of_it_spills():
    """Of every plan that the tests above have built."""
    for form in FORMS:
        facts = built(plan_of(case_of(form), deterministic=True)).facts
        assert facts.spills == 0 and facts.serialised == () and len(facts.kernels) == 3
