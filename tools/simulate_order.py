"""What a fixed order of dQ costs the Blackwell backward, by simulating its schedule: `python tools/simulate_order.py`.

CTAs, or pairs of them, take key tiles in the order of work, an SM holds one. A step (one query tile) takes the clocks
of the unit that is busiest by the counts of tests/test_counted_sm100_bwd*.py. Its dQ then leaves: in the ordered form
when those before it in turn have added theirs. A turn is given up when the next step has begun to add, or at once by
whoever must wait; the next one hears of it when the additions are complete and the news has gone through L2. Either
form ends a tile when its additions are complete. Without an order dQ's workspace is zeroed before, and read behind;
with one who is first stores, so nothing is zeroed, and all copies of dQ are read. Nothing here was measured on
Blackwell: the way through L2 is an assumption, and is swept.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jax_fa4.kernels.common.tiles import key_tiles, query_tiles, up  # noqa: E402
from jax_fa4.kernels.sm100.bwd.order import course, placed, turn, walk  # noqa: E402
from jax_fa4.kernels.sm100.bwd.pair.plan import PairPlan, choose  # noqa: E402
from jax_fa4.kernels.sm100.bwd.plan import SECTION, Plan  # noqa: E402
from jax_fa4.mask import UNBOUNDED, Band  # noqa: E402
from jax_fa4.spec import AttentionSpec, Problem  # noqa: E402

SMS = 148  # of a B200
BEGIN = 3000  # clocks of a CTA beside its steps: start, K and V, dK and dV
DONE = 0.6  # share of the way through L2 until an addition is complete; the rest is the news of it
MEMORY = 4300  # bytes of device memory a clock: 8 TB/s at 1.86 GHz


@dataclass(frozen=True)
class Unit:
    """Clocks of a step, shared memory being the bound; those in which its dQ is written to shared memory and read from
    there; pieces in which it goes; SMs that work on it."""

    step: int
    staging: int
    slices: int
    sms: int = 1


# By depth, of a pair of CTAs and of one
UNITS = {(64, False): Unit(2248, 512, 2), (128, False): Unit(3912, 1024, 4), (128, True): Unit(3336, 512, 4, 2)}


@dataclass(frozen=True)
class Call:
    """One call: lengths, heads of all examples, depth, sides of the band."""

    name: str
    length: int
    heads: int
    depth: int
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    copies: int = 0  # of dQ; 0: as the plan has them

    @property
    def band(self) -> Band:
        return Band(self.left, self.right, 0, self.length, self.length)

    @property
    def banded(self) -> bool:
        return min(self.left, self.right) < UNBOUNDED

    @property
    def plan(self) -> Plan | PairPlan:
        spec = AttentionSpec(deterministic=True, band=self.banded)
        sizes = 1, self.length, self.length, self.heads, self.heads, self.depth, self.depth
        plan = choose(Problem(spec, *sizes, "bfloat16", "bwd"))
        assert isinstance(plan, Plan | PairPlan), plan
        return plan

    @property
    def unit(self) -> Unit:
        return UNITS[self.depth, isinstance(self.plan, PairPlan)]

    @property
    def size(self) -> tuple[int, int]:
        """(queries, keys) of a tile."""
        return 128, 128 * self.unit.sms

    @property
    def tiles(self) -> int:
        return up(self.length, self.size[1])

    @property
    def extents(self) -> dict[str, int]:
        sizes = {"B": 1, "T": self.length, "S": self.length, "N": self.heads, "K": self.heads}
        return self.plan.extents(sizes)

    def visits(self, tile: int) -> tuple[int, int]:
        return query_tiles(tile, self.size, self.band, self.banded)


Work = Iterator[tuple[int, list[tuple[Any, int]]]]  # of each place: (queries to visit, their places in turn, and ranks)


def as_built(call: Call) -> Work:
    """The order of jax_fa4/kernels/sm100/bwd/order.py: (line, query tile, copy), rank."""
    copies, banded = call.copies or call.extents["C"], call.banded
    for index in range(call.tiles * call.heads):
        tile, line, rising = placed(index, call.tiles, call.heads, SECTION, banded)
        first, last = call.visits(tile)
        path = course(tile, (first, last), rising, (call.tiles, copies), banded)
        made = []
        for m in walk(path, last - first):
            copy, rank = turn(tile, m, key_tiles(m, call.size, call.band, banded), path, copies, banded)
            made.append(((line, m, copy), rank))
        yield last - first, made


def last_keys_first(call: Call) -> Work:
    """One direction, one copy, across the heads of a section: what there was before."""
    for index in range(call.tiles * call.heads):
        tile, line, _ = placed(index, call.tiles, call.heads, SECTION, False)
        first, last = call.visits(tile)
        ends = [key_tiles(m, call.size, call.band, call.banded)[1] for m in range(first, last)]
        yield last - first, [((line, m), end - 1 - tile) for m, end in zip(range(first, last), ends, strict=True)]


ORDERS = {"as it is": as_built, "one direction, one copy": last_keys_first}


def not_ordered(call: Call, latency: int, sms: int) -> float:
    """Clocks until the last CTA has ended, the first keys first."""
    unit, ends = call.unit, [0.0] * (sms // call.unit.sms)
    for first, last in sorted((call.visits(t) for t in range(call.tiles)), key=lambda v: v[0] - v[1]):
        for _ in range(call.heads):
            done = BEGIN + (last - first) * unit.step + unit.staging + DONE * latency
            heapq.heapreplace(ends, ends[0] + done)
    return max(ends)


def ordered(call: Call, work: Work, latency: int, sms: int) -> float:
    """Clocks until the last CTA has ended. One pass is enough, as nobody waits for a later place: that is asserted."""
    unit, ends = call.unit, [0.0] * (sms // call.unit.sms)
    piece = unit.staging / unit.slices
    told: dict[Any, list[float]] = {}  # when the one with a rank, and all before it, are known to have added
    for _, places in work:
        made = ends[0] + BEGIN
        free = complete = 0.0
        before = None
        for place, rank in places:
            turns = told.setdefault(place, [])
            mine = rank == len(turns) + (before is not None and before[0] == place)
            assert mine, f"{call.name}: rank {rank} at {place}, where {len(turns)} have been"
            made = max(made + unit.step, free)  # dQ leaves tensor memory when the one before it has left shared memory
            got = max(made, turns[-1]) if turns else made
            if before is not None:
                before[1].append(max(made if got > made else got + piece, complete) + (1 - DONE) * latency)
            free = got + unit.staging
            complete = free + DONE * latency
            before = place, turns
        if before is not None:
            before[1].append(complete + (1 - DONE) * latency)
        heapq.heapreplace(ends, max(made, complete))
    return max(ends)


def workspace(call: Call, zeroed: int, read: int) -> float:
    """Clocks in which so many copies of dQ in float32 are zeroed and read, at the speed of device memory."""
    return (zeroed + read) * 4 * call.heads * call.length * call.depth / MEMORY


def calls() -> list[Call]:
    made = []
    for length, heads, depth in (
        (2048, 32, 64), (2048, 32, 128), (8192, 16, 128), (4096, 2, 64), (4096, 2, 128), (4096, 8, 128),
        (2048, 16, 128), (1024, 64, 128), (2048, 128, 128), (1024, 16, 64), (16384, 4, 128),
    ):  # fmt: skip
        heads_of = f"{length}, {heads} heads, depth {depth}"
        made.append(Call(f"causal, {heads_of}", length, heads, depth, right=0))
        made.append(Call(f"full, {heads_of}", length, heads, depth))
    return [*made, Call("window 1024, 8192, 16 heads, depth 128", 8192, 16, 128, 1024, 0)]


def table(latencies: list[int], sms: int, chosen: list[Call]) -> list[dict]:
    rows = []
    for call in chosen:
        for name, order in ORDERS.items():
            one = call if name == "as it is" else replace(call, copies=1)
            copies = one.copies or one.extents["C"]
            before, after = workspace(call, zeroed=1, read=1), workspace(call, zeroed=0, read=copies)
            ratios, alone = {}, {}
            for n in latencies:
                loose, tight = not_ordered(call, n, sms), ordered(one, order(one), n, sms)
                ratios[n], alone[n] = round((loose + before) / (tight + after), 2), round(loose / tight, 2)
            rows.append({"call": call.name, "order": name, "copies": copies, "ratio": ratios, "main kernel": alone})
            print(f"{call.name:42} {name:24} copies {copies} {ratios} {alone}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=int, nargs="+", default=[1500, 3000], help="clocks through L2, swept")
    parser.add_argument("--sms", type=int, default=SMS)
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    rows = table(args.latency, args.sms, calls())
    if args.json:
        what = {"what": "predicted speed of the ordered Blackwell backward over the other; simulated, not measured"}
        what |= {"command": " ".join(["python tools/simulate_order.py", *sys.argv[1:]])}
        what |= {"date": datetime.date.today().isoformat(), "sms": args.sms}
        units = {f"{depth}{' pair' * pair}": unit.step for (depth, pair), unit in UNITS.items()}
        Path(args.json).write_text(json.dumps(what | {"step": units, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
