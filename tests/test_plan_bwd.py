"""The Hopper backward as data, no compiler: visits and turns against mask.visible, launches on ints, forms by depth."""

import heapq
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.ffi.buffers import VALUES
from jax_fa4.kernels import of_every_shape, select
from jax_fa4.kernels.common.parts import SMEM_LIMIT
from jax_fa4.kernels.common.tiles import key_tiles, query_tiles, up
from jax_fa4.kernels.sm90.bwd.order import alternating, placed, together, turn, visited
from jax_fa4.kernels.sm90.bwd.plan import SMS, Plan, abreast, bind, native, section_of, sectioned
from jax_fa4.mask import UNBOUNDED, Band, visible
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

SIZES = ((4, 8), (4, 4))  # (queries, keys): small twins of real tiles, so that brute force can see all pairs
SIDES = st.sampled_from((0, 1, 2, 5, 9, UNBOUNDED))


def problem(d, v=None, dtype="bfloat16", n=4, k=2, **spec):
    return Problem(AttentionSpec(**spec), 2, 200, 333, n, k, d, v or d, dtype, "bwd")


@st.composite
def bands(draw):
    """(T, S, Band) with lengths, windows and offsets of every sign."""
    t, s = draw(st.integers(1, 25)), draw(st.integers(1, 33))
    q_len, kv_len = draw(st.integers(0, t)), draw(st.integers(0, s))
    offset = draw(st.sampled_from((0, kv_len - q_len, draw(st.integers(-25, 25)))))
    return t, s, Band(draw(SIDES), draw(SIDES), offset, q_len, kv_len)


def visits_of(t, s, size, band, banded, rising=0):
    """{key tile: query tiles}, as the kernel walks them."""
    ranges = {n: query_tiles(n, size, band, banded) for n in range(up(s, size[1]))}
    return {n: [visited(i, r, rising) for i in range(*r)] for n, r in ranges.items()}


@settings(max_examples=600, deadline=None, derandomize=True)
@given(bands(), st.sampled_from(SIZES))
def test_a_key_tile_visits_the_query_tiles_that_see_it_and_no_other(case, size):
    t, s, band = case
    rows, keys = size
    pairs = {(i, j) for i, j in itertools.product(range(t), range(s)) if visible(i, j, band)}
    wanted = {(i // rows, j // keys) for i, j in pairs}
    banded = min(band.left, band.right) < UNBOUNDED
    for flag in {banded, True}:
        for rising in (0, 1):
            found = {(m, n) for n, steps in visits_of(t, s, size, band, flag, rising).items() for m in steps}
            assert found == wanted, (case, size, flag)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(bands(), st.sampled_from(SIZES), st.integers(0, 1))
def test_turns_are_counted_from_0_without_a_gap(case, size, rising):
    t, s, band = case
    banded = min(band.left, band.right) < UNBOUNDED
    ranks = {m: [] for m in range(up(t, size[0]))}
    for n, steps in visits_of(t, s, size, band, banded, rising).items():
        assert steps == sorted(steps, reverse=bool(rising)), "rising work visits queries descending"
        for m in steps:
            ranks[m].append(turn(n, key_tiles(m, size, band, banded), rising))
    for m, found in ranks.items():
        assert sorted(found) == list(range(len(found))), (case, m, found)
        assert found == sorted(found, reverse=not rising), "the last keys come first, or rising the first ones"


def turns_taken(waiting, wanted, resident, rng, reducers):
    """How many turns each place has had when all work is done. CTAs start in the order of `waiting`, (key tile, places
    that it visits), `resident` at a time, each runs on when its turn has come; `reducers` places may wait at once.

    wanted: of a key tile and a place, what its count must be.
    """
    turns, running = {}, []
    while waiting or running:
        while waiting and len(running) < resident:
            running.append(waiting.pop(0))
        rng.shuffle(running)
        moved = False
        for item in list(running):
            tile, left = item
            for place in left[:reducers]:
                if turns.get(place, 0) == wanted(tile, place):
                    turns[place] = turns.get(place, 0) + 1
                    left.remove(place)
                    moved = True
                    break
            if not left:
                running.remove(item)
                moved = True
        assert moved, (running, turns)
    return turns


ORDERED = (bands(), st.sampled_from(SIZES), st.integers(1, 5), st.randoms(use_true_random=False), st.integers(1, 2))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(*ORDERED, st.integers(1, 4), st.integers(0, 3))
def test_ordered_work_ends_with_any_number_of_ctas_resident(case, size, resident, rng, reducers, section, mirrored):
    t, s, band = case
    banded = min(band.left, band.right) < UNBOUNDED
    tiles, heads = up(s, size[1]), 5
    visits = [visits_of(t, s, size, band, banded, rising) for rising in (0, 1)]
    waiting, ways = [], {}
    for i in range(tiles * heads):
        tile, head, rising = placed(i, tiles, (heads, mirrored), section)
        ways[head] = rising
        waiting.append((tile, [(head, m) for m in visits[rising][tile]]))

    def wanted(tile, place):
        return turn(tile, key_tiles(place[1], size, band, banded), ways[place[0]])

    turns_taken(waiting, wanted, resident, rng, reducers)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(*ORDERED, st.integers(1, 7), st.integers(1, 3))
def test_ordered_work_that_alternates_ends(case, size, resident, rng, reducers, workers, group):
    """Some key tiles go down from the last queries and others up, and the first keys have the first turns."""
    t, s, band = case
    band = band._replace(left=UNBOUNDED)
    tiles, heads = up(s, size[1]), 5
    section = abreast(workers, tiles)
    visits, waiting = [visits_of(t, s, size, band, True, rising) for rising in (0, 1)], []
    for i in range(tiles * heads):
        tile, head = sectioned(i, tiles, heads, section, False)
        way = visits[alternating(i, tiles, section, workers)][tile]
        waiting.append((tile, [(head, g, m) for m in way for g in range(group)]))

    def wanted(tile, place):
        return turn(tile, key_tiles(place[2], size, band, True), 1)

    for (_, _, m), count in turns_taken(waiting, wanted, resident, rng, reducers).items():
        first, last = key_tiles(m, size, band, True)
        assert count == last - first


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.booleans())
def test_the_order_of_work_is_a_bijection_with_the_longest_first(tiles, heads, section, last_first):
    order = [sectioned(i, tiles, heads, section, last_first) for i in range(tiles * heads)]
    assert sorted(order) == [(t, h) for t in range(tiles) for h in range(heads)]
    sections = [h // section for _, h in order]
    assert sections == sorted(sections)
    for n in set(sections):
        mine = [t for t, h in order if h // section == n]
        assert mine == sorted(mine, reverse=last_first)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 9))
def test_mirrored_work_is_a_bijection_whose_last_heads_go_from_long_to_short(tiles, heads, section, mirrored):
    order = [placed(i, tiles, (heads, mirrored), section) for i in range(tiles * heads)]
    assert sorted((t, h) for t, h, _ in order) == [(t, h) for t in range(tiles) for h in range(heads)]
    late = min(heads // 2, mirrored)
    assert [rising for *_, rising in order] == [0] * tiles * (heads - late) + [1] * tiles * late
    for h in range(heads):
        mine = [t for t, head, _ in order if head == h]
        assert mine == sorted(mine, reverse=h < heads - late), "causal, the last keys have least to do"
    assert {h for _, h, rising in order if rising} == set(range(heads - late, heads))


def test_a_section_fits_the_l2_it_may_fill():
    plan = replace(select(problem(128), "sm_90a"), section=40)
    # 4,096 queries and keys at D128: Q, dO, K, V of 1 MiB each, dQ of 2 MiB
    assert section_of(plan, 64, 32, 1) == 40 // 6
    assert section_of(plan, 64, 32, 4) == 40 // (4 * 4 + 2)
    assert section_of(plan, 1 << 14, 1 << 13, 1) == 1
    assert section_of(replace(plan, section=0), 1, 1, 1) == 1


def time_in_turns(plan, queries, keys, heads, kv_heads, batch, section):
    """How much longer an ordered call takes than with no turn to wait for. A step takes one time, what is around a
    tile's steps one and a half; the next tile in the order of work adds to a place 0.6 after the one before: 1.4 us, by
    8,192 tiles of 8 visits in 3.84 ms with three key heads at a time (H200, 2026-11-30)."""
    tiles, group, lines = up(keys, plan.keys), heads // kv_heads, kv_heads * batch
    visits = up(queries, plan.rows) * group
    added = [[0.0] * visits for _ in range(lines)]
    free = [0.0] * SMS
    for i in range(tiles * lines):
        _, line = sectioned(i, tiles, lines, section, plan.ordered)
        t = free[0] + 1
        for v in range(visits):
            t = added[line][v] = max(t + 1, added[line][v] + 0.6)
        heapq.heapreplace(free, t + 0.5)
    return max(free) / (up(tiles * lines, SMS) * (visits + 1.5))


@pytest.mark.parametrize(
    "queries, heads, kv_heads, batch", [(4, 32, 4, 16), (64, 8, 8, 16), (256, 16, 16, 8), (1, 64, 8, 64)]
)
def test_few_queries_seldom_wait_for_their_turn(queries, heads, kv_heads, batch):
    plan = select(problem(128, deterministic=True), "sm_90a")
    tiles, group = up(16384, plan.keys), heads // kv_heads
    section = section_of(plan, up(queries, plan.rows), tiles, group)
    assert time_in_turns(plan, queries, 16384, heads, kv_heads, batch, section) < 1.1
    by_l2 = 32 * 1024 // (tiles * 64 + up(queries, plan.rows) * group * 64)  # KiB of K and V, of Q, dO and dQ
    assert time_in_turns(plan, queries, 16384, heads, kv_heads, batch, by_l2) > 1.5, "what the rule is for"


@pytest.mark.parametrize("depth, length, section", [(64, 4096, 10), (64, 16384, 2), (128, 1024, 21), (128, 8192, 2)])
def test_sections_of_as_many_queries_as_keys_go_by_the_l2_alone(depth, length, section):
    """As timed: docs/decisions/hopper_ordered_dq.md."""
    plan = select(problem(depth, deterministic=True), "sm_90a")
    assert section_of(plan, up(length, plan.rows), up(length, plan.keys), 1) == section


# (queries and keys, query heads, key heads, examples), causal: CTAs wait for the last one for 1.03 of the mean time
BALANCED = [(1024, 16, 16, 16), (4096, 16, 16, 4), (4096, 32, 4, 4), (16384, 16, 16, 1), (16384, 32, 4, 1)]


def time_of_all(plan, length, heads, kv_heads, batch, section):
    """When the last CTA ends, of the mean: each takes the next tile when it is done with one. A tile of keys takes a
    step for each 64 queries that see it, of each head, and one and a half around them."""
    tiles, group = up(length, plan.keys), heads // kv_heads
    free = [0.0] * plan.workers
    total = 0.0
    for i in range(tiles * kv_heads * batch):
        tile, _ = sectioned(i, tiles, kv_heads * batch, section, plan.ordered)
        took = group * (length - tile * plan.keys) / plan.rows + 1.5
        total += took
        heapq.heapreplace(free, free[0] + took)
    return max(free) * plan.workers / total


@pytest.mark.parametrize("length, heads, kv_heads, batch", BALANCED)
def test_a_causal_call_ends_on_all_ctas_at_about_the_same_time(length, heads, kv_heads, batch):
    plan = replace(select(problem(128, band=True), "sm_90a"), workers=132, section=0)
    tiles = up(length, plan.keys)
    section = section_of(plan, up(length, plan.rows), tiles, heads // kv_heads)
    assert section * tiles <= max(plan.workers, tiles), "more data in use than head by head"
    assert time_of_all(plan, length, heads, kv_heads, batch, section) < 1.03


def test_head_by_head_a_causal_call_waits_for_one_cta():
    """What the order avoids: the last head's longest tile starts late, and with groups of heads it is long."""
    plan = replace(select(problem(128, band=True), "sm_90a"), workers=132)
    assert time_of_all(plan, 4096, 32, 4, 4, 1) > 1.25
    assert time_of_all(plan, 1024, 16, 16, 16, 1) > 1.05


def test_causal_calls_whose_heads_share_keys_have_a_form_of_their_own():
    """Timed (H200): all heads at a query tile where they share keys, else an early LSE and values first at 16k."""
    for n, k in ((16, 16), (32, 4)):
        plan = select(replace(problem(128, band=True), t=16384, s=16384, n=n, k=k), "sm_90a")
        assert (plan.values_first, plan.early, plan.alternates) == (
            (True, True, False) if n == k else (False, False, True)
        )
    for kinds in ({"segments": True}, {"deterministic": True}, {"band": False}):
        assert not select(problem(128, **{"band": True, **kinds}), "sm_90a").alternates


def test_among_segments_more_heads_are_mixed_where_keys_wait_for_one_another():
    """Timed (H200): full and deterministic; with a band, or without an order, as without segments."""
    for d, mixed in ((64, 128), (128, 512), (256, 512)):
        both = select(problem(d, segments=True, deterministic=True), "sm_90a")
        assert both.section == mixed > select(problem(d, deterministic=True), "sm_90a").section
        for kinds in ({"segments": True}, {"segments": True, "deterministic": True, "band": True}):
            plain = {name: x for name, x in kinds.items() if name != "segments"}
            assert select(problem(d, **kinds), "sm_90a").section == select(problem(d, **plain), "sm_90a").section


@pytest.mark.parametrize("kinds", [{}, {"band": True}, {"band": True, "soft_cap": True}, {"deterministic": True}])
def test_stand_ins_have_every_plan_that_shapes_and_heads_choose(kinds):
    """What `precompile` builds for a kind, whose heads it does not know."""
    for d in (64, 96, 128, 256):
        kind = replace(problem(d, **kinds), n=8, k=8)
        made = {select(one, "sm_90a") for one in of_every_shape(kind, "sm_90a")}
        for (n, k), s in itertools.product(((8, 8), (32, 4), (3, 1)), (64, 1024, 4096, 16384, 1 << 17)):
            assert select(replace(kind, t=s, s=s, n=n, k=k), "sm_90a") in made, (d, kinds, n, k, s)


DEPTHS = [(d, v) for d in range(8, 257, 8) for v in (d, 8, 64, 128, 200, 256)] + [(192, 128)]


@pytest.mark.parametrize("more", [{}, {"segments": True, "soft_cap": True, "band": True, "deterministic": True}])
def test_every_depth_has_a_form_that_fits(more):
    for d, v in DEPTHS:
        plan = select(problem(d, v, **more), "sm_90a")
        assert plan.smem <= SMEM_LIMIT and plan.direction == "bwd"
        inner, inner_value = plan.inner, plan.inner_value
        assert inner - d < 64 and inner_value - v < 64
        # dK, dV, dQ and the 16-bit P and dS of a math thread are alive together; 32 more were enough so far.
        grads = max(inner, inner_value) if plan.apart else inner + inner_value
        held = grads // 2 + plan.rows * inner // (128 * plan.groups * plan.pieces)
        assert held + plan.rows // 2 + 32 <= plan.registers[1], (d, v, held)
        for name in ("q", "k", "dout"):
            shared = plan.groups if name == "k" and not plan.rows_shared else 1
            assert plan.depth_of(name) // shared % (plan.swizzle_of(name) // 2) == 0, (d, v, name)


def test_shared_memory_is_the_sum_of_its_places():
    plain = plan = replace(select(problem(128), "sm_90a"), workers=0)
    tiles = 2 * 128 * 128 * 2 + 2 * 2 * (64 * 128) * 2  # K and V; Q and dO twice
    assert plan.smem == tiles + 2 * 2 * 128 * 64 + 2 * 4 * 64 * 128 + 2 * 512 + 8 * (1 + 1 + 4 + 4 + 4)
    plan = select(problem(256), "sm_90a")
    tiles = 2 * 64 * 256 * 2 + 3 * 64 * 256 * 2  # K and V; Q twice, dO once
    squares = 2 * 2 * 64 * 64 + 4 * 64 * 64  # dS twice, P in float32
    assert plan.smem == tiles + squares + 2 * 4 * 64 * 64 + 2 * 512 + 8 * (1 + 1 + 4 + 2 + 2 * 2)
    more = select(problem(128, segments=True, deterministic=True), "sm_90a")
    assert more.smem == plain.smem + 16 * 2 + 4  # for each reduce warp how far it looks; the ticket
    loose = select(problem(128, segments=True), "sm_90a")
    assert loose.smem == plain.smem + 16 * 12


def test_rings_count_arrivals_and_bytes():
    plan = select(problem(192, 128), "sm_90a")
    assert plan.apart and plan.keys == plan.rows == 64
    by_name = {r.name: tuple(r)[1:] for r in plan.rings}
    assert by_name == {
        "k": ("load", "math", 1, 1, 0, 64 * 192 * 2),
        "v": ("load", "math", 1, 1, 0, 64 * 128 * 2),
        "q": ("load", "math", 2, 1, 8, 64 * 192 * 2 + 2 * 64 * 4),
        "dout": ("load", "math", 2, 1, 8, 64 * 128 * 2),
        "dq0": ("math", "reduce", 1, 4, 1, 0),  # each warpgroup's half of the depth
        "dq1": ("math", "reduce", 1, 4, 1, 0),
    }


def test_boxes_carry_what_the_rings_count():
    for d, v in ((64, 64), (72, 72), (96, 96), (192, 128), (8, 200), (256, 256), (136, 136)):
        plan = select(problem(d, v), "sm_90a")
        _, main, _ = bind(plan, plan.extents({"B": 2, "T": 200, "S": 333, "N": 4, "K": 2}))
        bytes_of = {r.name: r.bytes for r in plan.rings}
        bytes_of["q"] -= 8 * plan.rows  # the statistics come by a plain bulk copy
        for m in main.descriptors:
            rows, columns = m.box
            assert rows <= 256 and 2 * columns % m.swizzle == 0
            assert m.dims[1] <= columns == native(m.dims[1])
            assert rows * columns * 2 == bytes_of[m.tensor.removeprefix("d") if m.store else m.tensor]
            assert all(2 * s % 16 == 0 for i, s in enumerate(m.strides) if i != 1)


PRE_INPUTS = ("out", "dout", "lse", "dlse", "ints")


def test_a_launch_on_ints():
    plan = select(problem(72, 40, band=True, segments=True, deterministic=True), "sm_90a")
    e = plan.extents({"B": 3, "T": 200, "S": 333, "N": 6, "K": 2})
    assert e["I"] == VALUES.example(3) and e["M"] == 4
    pre, main, post = bind(plan, e)
    assert [k.name for k in (pre, main, post)] == ["bwd_pre", "backward", "bwd_post"]
    assert (pre.grid, main.grid, post.grid) == ((4 * 6 * 3, 1, 1), (3 * 2 * 3, 1, 1), (4 * 6 * 3, 1, 1))
    assert main.block == 384 and main.smem == plan.smem
    k, v, dk, dv, q, dout = main.descriptors
    assert k[:5] == ("k", (333, 72, 2, 3), (2 * 72, 1, 72, 333 * 2 * 72), (128, 128), False)
    assert dv[:5] == ("dv", (333, 40, 2, 3), (2 * 40, 1, 40, 333 * 2 * 40), (128, 64), True)
    assert q[:5] == ("q", (200, 72, 6, 3), (6 * 72, 1, 72, 200 * 6 * 72), (64, 128), False)
    assert dout[:5] == ("dout", (200, 40, 6, 3), (6 * 40, 1, 40, 200 * 6 * 40), (64, 64), False)
    assert (v.tensor, dk.tensor, v.box) == ("v", "dk", (128, 64))
    ids = ("q_segments", "kv_segments")
    assert main.pointers == ("stats", "work", "turns", "tickets", "ranges", "ints", "floats", *ids)
    assert pre.pointers == (*PRE_INPUTS, *ids, "stats", "work", "turns", "tickets", "ranges")
    assert pre.extents == ("T", "N", "M", "S") and pre.smem == 16 * 8
    names = [b.name for b in plan.inputs]
    assert names == ["q", "k", "v", "out", "dout", "lse", "dlse", "ints", "floats", "q_segments", "kv_segments"]
    sized = {b.name: b.sized(e) for b in plan.outputs}
    assert sized == {
        "dq": (3, 200, 6, 72), "dk": (3, 333, 2, 72), "dv": (3, 333, 2, 40), "stats": (3, 6, 4, 128),
        "work": (3, 6, 4, 64 * 72), "turns": (3, 6, 4), "tickets": (1,), "ranges": (3, 3, 2),
    }  # fmt: skip
    assert [b.role for b in plan.outputs] == ["out"] * 3 + ["scratch"] * 5
    plain = select(problem(72, 40), "sm_90a")
    assert [b.name for b in plain.outputs] == ["dq", "dk", "dv", "stats", "work"]


def test_strides_and_scratch_beyond_int32():
    plan = select(problem(128), "sm_90a")
    e = plan.extents({"B": 2, "T": 1 << 20, "S": 1, "N": 64, "K": 1})
    _, main, _ = bind(plan, e)
    assert main.descriptors[4].strides[3] == 1 << 33
    work = next(b for b in plan.outputs if b.name == "work")
    assert work.elements(e) == 2 << 33


def test_what_a_plan_cannot_be_is_refused_by_name():
    for d, v, words in ((12, None, "12 of query"), (128, 264, "264 of value"), (264, None, "multiples of 8 up to 256")):
        with pytest.raises(Unsupported, match=words):
            select(problem(d, v), "sm_90a")
    with pytest.raises(AssertionError, match=r"\d{6}"):
        Plan("bfloat16", 256, 256, apart=True, pieces=2)  # dO twice too


def test_plans_are_keys():
    one = select(problem(128, band=True), "sm_90a")
    assert one == select(problem(128, n=8, k=1, band=True, lengths=True, sinks=True), "sm_90a"), (
        "lengths, sinks and heads are no part of a backward plan"
    )
    assert hash(one) == hash(replace(one))
    others = [{}, {"band": True, "deterministic": True}, {"band": True, "soft_cap": True}]
    assert len({one, *(select(problem(128, **spec), "sm_90a") for spec in others)}) == 4


def test_dk_and_dv_share_places_only_in_one_swizzle():
    """64 queries a step at depth 64 read K in halves of 32 columns, V whole: dV came out wrong with workers."""
    with pytest.raises(AssertionError, match="dK and dV leave through the places of dQ"):
        Plan("bfloat16", 64, 64, rows=64, workers=3)
    assert Plan("bfloat16", 64, 64, rows=128, workers=3).places == 1 + 1


def test_calls_at_depth_128_are_in_step_with_two_kept_and_long_causal_ones_in_turns():
    """H200, 2026-11-30, TFLOP/s: full 4k 595 against 562, causal 1k 347 against 338, 4k 517 against 510."""
    kind = Problem(AttentionSpec(), 16, 1024, 1024, 16, 16, 128, 128, "bfloat16", "bwd")
    for length in (1024, 16384):
        full, causal = (
            select(replace(kind, t=length, s=length, spec=AttentionSpec(band=band)), "sm_90a") for band in (False, True)
        )
        assert full.workers and full.kept == 2 and not full.turns
        assert causal.turns == (not causal.workers) == (length > 8192) == causal.early
        assert causal.kept == (2 if length <= 8192 else 0)


def test_turns_of_heads_that_share_keys_go_head_by_head_where_that_was_faster():
    """Timed at 32:4, 32:8 and 16:8 heads, depths 64 and 128."""
    spec = AttentionSpec(band=True, deterministic=True)
    for heads, kv_heads, depth, alternates in (
        (32, 4, 128, 1),
        (32, 8, 128, 1),
        (16, 8, 128, 0),
        (8, 8, 128, 0),
        (32, 4, 64, 0),
    ):
        for length in (1024, 4096, 16384):
            case = Problem(spec, 1, length, length, heads, kv_heads, depth, depth, "bfloat16", "bwd")
            plan = select(case, "sm_90a")
            assert plan.alternates == alternates and plan.mirrored and plan.workers, (plan, length)
            assert not select(replace(case, spec=replace(spec, segments=True)), "sm_90a").alternates


def test_kinds_that_were_not_timed_keep_what_registers_hold():
    kind = Problem(AttentionSpec(soft_cap=True), 16, 1024, 1024, 16, 16, 128, 128, "bfloat16", "bwd")
    for other in (kind, replace(kind, d=64, v=64), replace(kind, spec=AttentionSpec(segments=True))):
        plan = select(other, "sm_90a")
        assert plan.turns and not (plan.kept or plan.late or plan.early or plan.values_first), plan


def missed(plan, length, heads, kv_heads, batch, window=UNBOUNDED, megabytes=25):
    """Causal: share of visits whose Q, dO and dQ are not in an L2 that holds so much of what was visited last. A step
    takes all CTAs one time. Half of an H200's 50 MiB: its two parts hold copies of what both read."""
    tiles, group = up(length, plan.keys), heads // kv_heads
    lines, section = kv_heads * batch, section_of(plan, up(length, plan.rows), tiles, group)
    room = megabytes * 2**20 // (plan.rows * plan.depth * 8)
    held, count, walks = {}, [0, 0], []
    waiting = iter(range(tiles * lines))

    def walk(index):
        tile, line = sectioned(index, tiles, lines, section, plan.ordered)
        band = Band(window, 0, 0, length, length)
        visits = query_tiles(tile, (plan.rows, plan.keys), band, True)
        if not (plan.alternates and together(window, length)):
            return [(line, g, m) for g in range(group) for m in range(*visits)]
        rising = alternating(index, tiles, section, plan.workers)
        return [(line, g, visited(i, visits, rising)) for i in range(*visits) for g in range(group)]

    walks = [iter(()) for _ in range(plan.workers)]
    while walks:
        for cta, left in enumerate(walks):
            place = next(left, None)
            if place is None and (index := next(waiting, None)) is not None:
                walks[cta] = iter(walk(index))
                place = next(walks[cta])
            if place is None:
                walks[cta] = None
                continue
            there = held.pop(place, None)
            held[place] = True  # the last one visited
            count[there is None] += 1
            if len(held) > room:
                del held[next(iter(held))]
        walks = [left for left in walks if left is not None]
    return count[1] / sum(count)


@pytest.mark.parametrize("depth, length, heads, kv_heads, batch", [(128, 4096, 32, 4, 4), (64, 4096, 32, 4, 4)])
def test_heads_that_share_keys_find_in_l2_what_others_have_read(depth, length, heads, kv_heads, batch):
    """Without a GPU: an arithmetic model. Head after head most of it comes from DRAM; all heads at a time, little."""
    case = Problem(AttentionSpec(band=True), batch, length, length, heads, kv_heads, depth, depth, "bfloat16", "bwd")
    plan = select(case, "sm_90a")
    assert plan.alternates and missed(plan, length, heads, kv_heads, batch) < 0.1
    assert missed(replace(plan, alternates=False), length, heads, kv_heads, batch) > 0.4
    assert not select(replace(case, k=heads), "sm_90a").alternates
    assert missed(select(replace(case, n=16, k=16), "sm_90a"), length, 16, 16, batch) < 0.1


def test_a_window_s_heads_are_visited_one_after_the_other():
    assert together(UNBOUNDED, 4096) and together(4096, 4096) and not together(4095, 4096)
    plan = select(replace(problem(128, band=True), n=32, k=4), "sm_90a")
    assert plan.alternates and missed(plan, 8192, 32, 4, 1, window=1024) < 0.3
