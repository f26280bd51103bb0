"""Problems that the benchmark times: a case and its label, and the named ones that stand for how attention is used."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

MIXED = (5000, 3000, 2000, 1500, 1000, 900, 800, 700, 500, 400, 300, 284)  # 16k tokens in twelve sequences
LABEL = re.compile(
    r"D(?P<depth>\d+)(,(?P<value_depth>\d+))? (?P<kind>full|causal|window (?P<window>\d+))"
    r"( (?P<packed>segments|varlen))? (T(?P<queries>\d+) )?S(?P<length>\d+) B(?P<batch>\d+)"
    r" N(?P<heads>\d+)(:(?P<kv_heads>\d+))?( (?P<dtype>\w+))?"
)


@dataclass(frozen=True)
class Case:
    """One problem. `length` queries and keys unless `queries` says otherwise; `batch` x `length` tokens."""

    depth: int
    length: int
    batch: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    value_depth: int = 0  # 0: as deep as the keys
    causal: bool = False
    window: int | None = None  # keys to the left, causal
    queries: int = 0  # 0: length
    dtype: str = "bfloat16"
    packed: str = ""  # sequences of the MIXED lengths one after the other, "segments" with ids or "varlen"

    @property
    def kind(self) -> str:
        """What a curve over lengths has in common: depths, mask, heads."""
        depth = f"D{self.depth}" + (f",{self.value_depth}" if self.value_depth else "")
        mask = "causal" if self.causal else "full"
        mask = f"window {self.window}" if self.window is not None else mask
        mask = f"{mask} {self.packed}" if self.packed else mask
        queries = f" T{self.queries}" if self.queries else ""
        return f"{depth} {mask}{queries} {self._heads}"

    @property
    def _heads(self) -> str:
        heads = f"N{self.heads}" + (f":{self.kv_heads}" if self.kv_heads else "")
        return heads if self.dtype == "bfloat16" else f"{heads} {self.dtype}"

    @property
    def label(self) -> str:
        return f"{self.kind.removesuffix(self._heads)}S{self.length} B{self.batch} {self._heads}"

    @staticmethod
    def from_label(text: str) -> Case:
        """The case of that label, as a report holds it. A window is causal."""
        found = LABEL.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no label of a case, such as 'D128 causal S4096 B4 N16:4'")
        whole = {name: int(found[name] or 0) for name in ("depth", "value_depth", "queries", "length", "batch")}
        return Case(
            **whole,
            heads=int(found["heads"]),
            kv_heads=int(found["kv_heads"] or 0),
            causal=found["kind"] != "full",
            window=int(found["window"]) if found["window"] else None,
            dtype=found["dtype"] or "bfloat16",
            packed=found["packed"] or "",
        )

    @property
    def sequences(self) -> tuple[int, ...]:
        """Lengths of packed sequences: MIXED, in proportion."""
        lengths = [n * self.length // sum(MIXED) for n in MIXED]
        return (lengths[0] + self.length - sum(lengths), *lengths[1:])

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head; causal counted as half the square, as everybody does."""
        t, s = self.queries or self.length, self.length
        if self.packed:
            return sum(n * n for n in self.sequences) * (0.5 if self.causal else 1.0)
        if self.window is not None:
            i = np.arange(t)
            return float(np.minimum(i + 1, self.window + 1).sum())
        return t * s * (0.5 if self.causal and t == s else 1.0)

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        depth = self.depth + (self.value_depth or self.depth)
        return 2 * self.batch * self.heads * self.pairs * depth


NAMED: dict[str, tuple[Case, ...]] = {
    "d256": (Case(256, 4096, 4, 8), Case(256, 4096, 4, 8, causal=True), Case(256, 16384, 1, 8, causal=True)),
    "gqa": (Case(128, 4096, 4, 32, 4, causal=True), Case(128, 16384, 1, 32, 4, causal=True)),
    "window": (Case(128, 16384, 1, 16, causal=True, window=1024),),
    "d96": (Case(96, 4096, 4, 21, causal=True),),
    "d192v128": (Case(192, 4096, 4, 16, value_depth=128), Case(192, 4096, 4, 16, value_depth=128, causal=True)),
    "segments": (Case(128, 16384, 1, 16, causal=True, packed="segments"),),
    "varlen": (
        Case(128, 16384, 1, 16, causal=True, packed="varlen"),
        Case(128, 16384, 1, 16, packed="varlen"),
        Case(64, 16384, 1, 32, causal=True, packed="varlen"),
    ),
    "deterministic": (
        *(Case(d, n, 16384 // n, 2048 // d, causal=c) for d in (64, 128) for n in (4096, 8192) for c in (False, True)),
        Case(256, 4096, 4, 8),
        Case(256, 4096, 4, 8, causal=True),
        Case(128, 4096, 4, 32, 4, causal=True),
        Case(128, 8192, 2, 32, 4, causal=True),
    ),
    "short": (Case(128, 2048, 1, 8, causal=True),),
    "decode": (
        Case(128, 16384, 16, 32, 4, queries=1),
        Case(128, 16384, 1, 32, queries=1),
        Case(128, 16384, 16, 32, 4, queries=4),
    ),
}
