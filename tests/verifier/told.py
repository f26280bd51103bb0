"""Values that the verifier has no channel for, written into the PTX: tickets, turns, and which tiles segments share.

Lines keep their numbers. Loads stay, so that their order is still judged; only what is done with the value changes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from jax_fa4.ffi.buffers import VALUES


def told_turns(ptx: str) -> str:
    """Of a backward with turns: a ticket is the CTA's number (of a lone pair: 0), and the turn has come.

    What gives turns up, additions or names, is left out: sentryward 0.1.1 has no words for it. Nor has it any for plain
    bulk stores, which the first in turn does: they stand as bulk additions, which read the same bytes of shared memory,
    and as what these stand as in stores.py.
    That nobody else writes where they store is the turns' doing, which is the emulator's to judge.
    """
    ptx, stored = re.subn(
        r"cp\.async\.bulk\.global\.shared::cta\.bulk_group ([^;]+;)",
        r"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 \1",
        ptx,
    )
    assert stored, "nobody who is first in turn stores"
    drawn = re.search(r"atom\S+\s+(%r\d+), .*?st\.shared\.b32\s+\S+ \1;", ptx, re.S)
    assert drawn, "no ticket is drawn in the text"
    at = drawn.end()
    # of a pair, whose CTAs meet before they read the leader's; between both lies a parameter's name, 300 letters long
    read = re.compile(r"(ld\.shared::cluster\.s32 (%r\d+), \[%r\d+\];)")
    if read.search(ptx, at):
        tail = read.sub(r"\1 mov.b32 \2, 0;", ptx[at:], count=1)
    else:
        at = ptx.index("bar.sync", at)
        # read beside the address of tensor memory, which lies in front of it
        read = re.compile(r"ld\.shared\.v2\.b32\s+\{(%r\d+), (%r\d+)\}, (\[[^\]]+\]);")
        tail = read.sub(r"ld.shared.b32 \1, \3; mov.u32 \2, %ctaid.x;", ptx[at:], count=1)
    assert tail != ptx[at:], f"no ticket is read in {tail[:400]}"
    ptx = re.sub(r"atom\S+\s+(%r\d+), [^;]+;", r"mov.u32 \1, %ctaid.x;", ptx[:at] + tail)
    ptx, given = re.subn(r"(?:red\.release\.gpu\.global\.add\.s32|st\.release\.gpu\.global\.b32)[^;]+;", "", ptx)
    assert given, "no turn is given up in the text"
    return re.sub(r"ld\.acquire\.gpu\.global\.b32\s+(%r\d+), \[[^\]]+\];", r"mov.b32 \1, 0;", ptx)


# The last reads of kernels/common/segments.narrow: the lowest and highest row of the other side that a CTA has to meet.
_FOUND = re.compile(
    r"(ld\.shared\.v4\.b32\s+\{[^}]*\}, \[[^\]]+\];\s*"
    r"min\.s32 [^;]*;\s*max\.s32 [^;]*;\s*)min\.s32\s+(%r\d+), [^;]*;(\s*)max\.s32\s+(%r\d+), [^;]*;"
    r"(?=\s*setp\.lt\.s32\s+%p\d+, \4, 0;)"
)


def told_tiles(ptx: str, *met: tuple[int, int]) -> str:
    """Of kernels that leave out tiles of other segments: the first and last row of the other side that each meets."""
    found = list(_FOUND.finditer(ptx))
    assert len(found) == len(met), f"{len(found)} places look like the end of `narrow`, {len(met)} were expected"
    for place, (first, last) in reversed(list(zip(found, met, strict=True))):
        told = place.expand(rf"\1mov.b32 \2, {first};\3mov.b32 \4, {last};")
        ptx = ptx[: place.start()] + told + ptx[place.end() :]
    return ptx


def told_ranges(ptx: str, entry: str, parameter: int, met: tuple[int, int]) -> str:
    """Of a main kernel with turns by name: what it reads from its parameter number `parameter`, the query tiles that
    each key tile visits, is [first, last) = met. Loads stay; each is followed by its registers' values."""
    start = ptx.index(f".entry {entry}(")
    end = ptx.find(".entry ", start + 1) % (len(ptx) + 1)
    body = ptx[start:end]
    from_it = set(re.findall(rf"ld\.param\.b64\s+(%rd\d+), \[{entry}_param_{parameter}\];", body))
    for _ in range(4):
        from_it |= {to for to, at in re.findall(r"add\.s64\s+(%rd\d+), (%rd\d+), %rd\d+;", body) if at in from_it}
    load = r"ld\.global\.v2\.b32\s+\{(%r\d+), (%r\d+)\}, \[(%rd\d+)(?:\+\d+)?\];"

    def told(match: re.Match) -> str:
        if match[3] not in from_it:
            return match[0]
        return match[0] + "".join(f" mov.b32 {match[n + 1]}, {met[n]};" for n in range(2))

    made = re.sub(load, told, body)
    assert made != body, f"{entry} reads nothing from its parameter {parameter}"
    return ptx[:start] + made + ptx[end:]


def without_additions(ptx: str) -> str:
    """Of a backward: nothing is added to the workspace of dQ. The prover has no value for a bulk addition."""
    ptx, gone = re.subn(r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32[^;]+;", "", ptx)
    assert gone, "no bulk addition is in the text"
    return ptx


def told_values(ptx: str, entry: str, parameter: int, values: Sequence[int | float]) -> str:
    """Of one kernel: what it reads from its value operand number `parameter` is these constants, example 0's for all.

    The prover has no channel for single elements of an operand. Loads stay; each is followed by its registers' values.
    """
    start = ptx.index(f".entry {entry}(")
    end = ptx.find(".entry ", start + 1) % (len(ptx) + 1)
    body = ptx[start:end]
    head = re.findall(rf"ld\.param\.b64\s+(%rd\d+), \[{entry}_param_{parameter}\];", body)
    assert len(head) == 1, f"parameter {parameter} of {entry} is read {len(head)} times"
    # of the second half, the numbers of an example, the address is computed
    mine = {m[1] for m in re.finditer(rf"add\.s64\s+(%rd\d+), {head[0]}, %rd\d+;", body)}
    first = {head[0]: 0} | dict.fromkeys(mine, VALUES.example(0))
    load = rf"ld\.global(?:\.v\d)?\.[bf]32\s+(?:\{{([^}}]+)\}}|(%r\d+)), \[({'|'.join(first)})(?:\+(\d+))?\];"

    def told(match: re.Match) -> str:
        registers = re.findall(r"%r\d+", match[1] or match[2])
        at = first[match[3]] + int(match[4] or 0) // 4
        return match[0] + "".join(f" mov.b32 {r}, {_literal(values[at + i])};" for i, r in enumerate(registers))

    made, count = re.subn(load, told, body)
    uses = sum(len(re.findall(rf"{r}\b", body)) for r in first) - 1 - 2 * len(mine)
    assert count and count == uses, f"{count} loads of the value operand were found, it is used {uses} times"
    return ptx[:start] + made + ptx[end:]


def _literal(x: int | float) -> str:
    """A 32-bit number as PTX writes it."""
    return str(x) if isinstance(x, int) else f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def without_lse(ptx: str, entry: str) -> str:
    """Of one forward or combining kernel: the log-sum-exp is not stored, so that the output alone is asked."""
    start = ptx.index(f".entry {entry}(")
    end = ptx.find(".entry ", start + 1) % (len(ptx) + 1)
    made, gone = re.subn(r"st\.global\.[bf]32\s+\[%rd\d+(?:\+\d+)?\], %r\d+;", "", ptx[start:end])
    assert gone, f"{entry} stores no single float"
    return ptx[:start] + made + ptx[end:]
