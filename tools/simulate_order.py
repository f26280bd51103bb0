"""What a fixed order of dQ costs the Blackwell backward, by simulating its schedule: `python tools/simulate_order.py`.

CTAs take key tiles in the order of work, an SM holds one. A step (one query tile) takes the clocks of the unit that is
busiest by the counts of tests/test_counted_sm100_bwd.py. Its dQ then leaves: in the ordered form when the key tiles of
lower rank have added theirs, and the next may add when this one is complete and the news of it has gone through L2.
Nothing here was measured on Blackwell: the way through L2 is an assumption, and is swept.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import heapq
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jax_fa4.kernels.common.tiles import key_tiles, query_tiles, sectioned, up  # noqa: E402
from jax_fa4.mask import UNBOUNDED, Band  # noqa: E402

TILE = (128, 128)
SMS = 148  # of a B200
STEP = {64: 2440, 128: 4104}  # clocks of a step, shared memory being the bound
STAGING = {64: 512, 128: 1024}  # clocks in which a step's dQ is written to shared memory and read from there
SLICES = {64: 2, 128: 4}  # pieces in which it goes
BEGIN = 3000  # clocks of a CTA beside its steps: start, K and V, dK and dV
DONE = 0.6  # share of the way through L2 until an addition is complete; the rest is the news of it
PASSES = 400
Item = tuple[int, int]  # key tile, head


@dataclass(frozen=True)
class Call:
    """One call: lengths, heads of all examples, depth, sides of the band."""

    name: str
    length: int
    heads: int
    depth: int
    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @property
    def band(self) -> Band:
        return Band(self.left, self.right, 0, self.length, self.length)

    @property
    def banded(self) -> bool:
        return min(self.left, self.right) < UNBOUNDED

    @property
    def tiles(self) -> int:
        return up(self.length, TILE[1])

    def visits(self, tile: int) -> range:
        return range(*query_tiles(tile, TILE, self.band, self.banded))


@dataclass(frozen=True)
class Order:
    """`items`: key tiles in the order of work. `walk`: what one does, as (query tile, key tile that adds there before
    it or -1). `early`: a turn is given up when the addition is complete, and the next one's only begins then; else the
    next one's begins at once, and the turn is given up when it has begun or must wait itself."""

    name: str
    items: Callable[[Call], list[Item]]
    walk: Callable[[Call, int], list[tuple[int, int]]]
    second: Callable[[Call, int], list[tuple[int, int]]] | None = None  # of the second half of the heads
    early: bool = False


def last_keys_first(call: Call, tile: int) -> list[tuple[int, int]]:
    """Turns as in jax_fa4/kernels/sm100/bwd/plan.turn."""
    made = []
    for m in call.visits(tile):
        last = key_tiles(m, TILE, call.band, call.banded)[1]
        made.append((m, -1 if tile + 1 == last else tile + 1))
    return made


def first_keys_first(call: Call, tile: int) -> list[tuple[int, int]]:
    """The other way round."""
    made = []
    for m in call.visits(tile):
        first = key_tiles(m, TILE, call.band, call.banded)[0]
        made.append((m, -1 if tile == first else tile - 1))
    return made


def shifted(group: int) -> Callable[[Call, int], list[tuple[int, int]]]:
    """Full masks: of `group` key tiles in a row, which must run at a time, each starts one query tile later than the
    one before it and ends with those that it left out; groups take turns one after the other."""

    @functools.cache
    def turns(call: Call, m: int) -> dict[int, int]:
        """Key tile -> the one before it at query tile m."""
        steps = len(call.visits(0))
        line = sorted(range(call.tiles), key=lambda i: (i // group, (m - i % group) % steps, i))
        line = [call.tiles - 1 - i for i in line]
        return dict(zip(line, [-1, *line], strict=False))

    def walk(call: Call, tile: int) -> list[tuple[int, int]]:
        seen, at = list(call.visits(tile)), (call.tiles - 1 - tile) % group % call.tiles
        return [(m, turns(call, m)[tile]) for m in seen[at:] + seen[:at]]

    return walk


def by_head(call: Call) -> list[Item]:
    return [(call.tiles - 1 - n % call.tiles, n // call.tiles) for n in range(call.tiles * call.heads)]


def across_heads(call: Call) -> list[Item]:
    """First tiles of all heads, then second ones."""
    return [sectioned(n, call.tiles, call.heads, call.heads, True) for n in range(call.tiles * call.heads)]


def halves(call: Call) -> list[Item]:
    """Half of the heads with the last keys first, then the others with the first keys first: under a causal mask short
    tiles, long tiles; long tiles, short tiles."""
    falling = up(call.heads, 2)
    lines = [sectioned(n, call.tiles, falling, falling, True) for n in range(call.tiles * falling)]
    rising = call.heads - falling
    more = [sectioned(n, call.tiles, rising, rising, False) for n in range(call.tiles * rising)]
    return lines + [(tile, falling + head) for tile, head in more]


ORDERS = [
    Order("head by head, turns given up when complete", by_head, last_keys_first, early=True),
    Order("head by head, turns given up one step later", by_head, last_keys_first),
    Order("across heads, turns given up one step later", across_heads, last_keys_first),
    Order("across heads, in two halves, one step later", halves, last_keys_first, first_keys_first),
    Order("shifted in groups of 16", by_head, shifted(16)),
]


def not_ordered(call: Call, sms: int) -> float:
    """Clocks until the last CTA has ended, the first keys first."""
    ends = [0.0] * sms
    for tile in sorted(range(call.tiles), key=lambda t: -len(call.visits(t))):
        for _ in range(call.heads):
            heapq.heapreplace(ends, ends[0] + BEGIN + len(call.visits(tile)) * STEP[call.depth])
    return max(ends)


def one_pass(call: Call, order: Order, news: dict, latency: int, sms: int) -> float:
    """All CTAs in the order of work. news: (head, key tile, query tile) -> when the next one knows; is updated."""
    step, staging, piece = STEP[call.depth], STAGING[call.depth], STAGING[call.depth] / SLICES[call.depth]
    ends = [0.0] * sms
    for tile, head in order.items(call):
        made = ends[0] + BEGIN
        free = complete = 0.0
        before = None
        walk = order.second if order.second and head >= up(call.heads, 2) else order.walk
        for m, other in walk(call, tile):
            made = max(made + step, free)  # dQ leaves tensor memory when the one before it has left shared memory
            got = max(made, news.get((head, other, m), 0.0)) if other >= 0 else made
            if before is not None:
                given = max(made if got > made else got + piece, complete)
                news[head, tile, before] = given + (1 - DONE) * latency
            complete = got + staging + DONE * latency
            free = complete if order.early else got + staging
            if order.early:
                news[head, tile, m] = complete + (1 - DONE) * latency
            else:
                before = m
        if before is not None:
            news[head, tile, before] = complete + (1 - DONE) * latency
        heapq.heapreplace(ends, max(made, complete))
    return max(ends)


def ordered(call: Call, order: Order, latency: int, sms: int) -> float:
    """Clocks until the last CTA has ended. Where CTAs wait for later ones of their group, passes repeat until no time
    moves: times only grow."""
    news: dict = {}
    last = one_pass(call, order, news, latency, sms)
    for _ in range(PASSES):
        again = one_pass(call, order, news, latency, sms)
        if again == last:
            return last
        last = again
    raise RuntimeError(f"{order.name}, {call.name}: times still move after {PASSES} passes; do CTAs wait in a circle?")


def calls() -> list[Call]:
    made = []
    for length, heads, depth in ((2048, 32, 64), (2048, 32, 128), (8192, 16, 128), (4096, 2, 128)):
        made.append(Call(f"causal, {length}, {heads} heads, depth {depth}", length, heads, depth, right=0))
        made.append(Call(f"full, {length}, {heads} heads, depth {depth}", length, heads, depth))
    return [*made, Call("window 1024, 8192, 16 heads, depth 128", 8192, 16, 128, 1024, 0)]


def table(latencies: list[int], sms: int) -> list[dict]:
    rows = []
    for call in calls():
        loose = not_ordered(call, sms)
        for order in ORDERS:
            if call.banded and order.name.startswith("shifted"):
                continue
            ratios = {n: round(loose / ordered(call, order, n, sms), 2) for n in latencies}
            rows.append({"call": call.name, "order": order.name, "ratio": ratios})
            print(f"{call.name:36} {order.name:46} {ratios}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=int, nargs="+", default=[1500, 3000], help="clocks through L2, swept")
    parser.add_argument("--sms", type=int, default=SMS)
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    rows = table(args.latency, args.sms)
    if args.json:
        what = {"what": "predicted speed of the ordered Blackwell backward over the other; simulated, not measured"}
        what |= {"command": " ".join(["python tools/simulate_order.py", *sys.argv[1:]])}
        what |= {"date": datetime.date.today().isoformat(), "sms": args.sms, "step": STEP}
        Path(args.json).write_text(json.dumps(what | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
