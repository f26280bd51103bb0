"""Buffer: the single operand order, used by compile, call and kernel; and the two run-time value operands."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

Extent = int | str


class Buffer(NamedTuple):
    """One operand or result of a call: row-major, 16-byte aligned. Strings in `shape` are run-time extents.

    Symbols: B batch, T queries, S keys, N query heads, K key heads, and whatever a plan's `extents` adds.
    """

    name: str
    dtype: str  # numpy's name
    shape: tuple[Extent, ...]
    role: str = "in"  # in | out | scratch (a result that the caller drops)

    def sized(self, extents: dict[str, int]) -> tuple[int, ...]:
        """The concrete shape of one call."""
        return tuple(extents[s] if isinstance(s, str) else s for s in self.shape)

    def elements(self, extents: dict[str, int]) -> int:
        return prod(self.sized(extents))


# The int32 value operand: [left, right] and then three numbers an example. The float32 one: scale, soft cap.
INTS_HEAD = 2
INTS_PER_EXAMPLE = 3  # q_len, kv_len, offset
FLOATS = 2


@dataclass(frozen=True)
class Values:
    """Where each run-time value stands in the two value operands. Kernels and callers both read this."""

    left: int = 0
    right: int = 1
    q_len: int = 0  # of an example's three
    kv_len: int = 1
    offset: int = 2
    scale: int = 0  # of the floats
    soft_cap: int = 1

    @staticmethod
    def example(batch: Any) -> Any:
        """Index of the first of an example's three numbers."""
        return INTS_HEAD + INTS_PER_EXAMPLE * batch


VALUES = Values()
INTS = Buffer("ints", "int32", ("I",))  # I = INTS_HEAD + INTS_PER_EXAMPLE * B
FLOATS_BUFFER = Buffer("floats", "float32", (FLOATS,))


def value_extents(batch: int) -> dict[str, int]:
    """The extents that the value operands add to a call's."""
    return {"I": INTS_HEAD + INTS_PER_EXAMPLE * batch}
