"""Edits of PTX text, one fault each: for the self-tests of verifier and lint."""

from __future__ import annotations

import re
from collections.abc import Callable

Edit = Callable[[str], str]

# The DSL's wait: a spin loop in inline asm. {at} is the barrier's address, {parity} an operand.
WAIT = (
    r"\{{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 P1, \[{at}\], {parity}, 10000000;"
    r"\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;\s*DONE:\s*\}}"
)


def edit(pattern: str, replacement: str, which: int = 0) -> Edit:
    """Replaces match number `which` of `pattern` (negative from the end). The edit must change something."""

    def apply(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        if not -len(found) <= which < len(found):
            raise ValueError(f"{pattern!r} occurs {len(found)} times, number {which} was asked for")
        match = found[which]
        lines = "\n" * (match[0].count("\n") - match.expand(replacement).count("\n"))  # later lines keep their numbers
        made = ptx[: match.start()] + match.expand(replacement) + lines + ptx[match.end() :]
        if made == ptx:
            raise ValueError(f"{pattern!r} -> {replacement!r} changes nothing")
        return made

    return apply


def drop(pattern: str, which: int = 0) -> Edit:
    """Removes one match."""
    return edit(pattern, "", which)


def drop_wait(which: int) -> Edit:
    """Removes the mbarrier wait number `which` of the text."""
    return drop(WAIT.format(at=r"[^\]]+", parity=r"[%\w]+"), which)


def wait_parity(which: int, parity: str) -> Edit:
    """The wait number `which` with another parity operand."""
    pattern = WAIT.format(at=r"(?P<at>[^\]]+)", parity=r"(?P<parity>[%\w]+)")

    def apply(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        match = found[which]
        return ptx[: match.start("parity")] + parity + ptx[match.end("parity") :]

    return apply


def chain(*edits: Edit) -> Edit:
    def apply(ptx: str) -> str:
        for e in edits:
            ptx = e(ptx)
        return ptx

    return apply


# Of micro.gemm, whose waits are in this order in the text.
EMPTY, FULL, DONE = 0, 1, 2
GEMM_UNSAFE = {
    "load does not wait for a free stage": drop_wait(EMPTY),
    "products before their operands": drop_wait(FULL),
    "accumulator read before the products are done": drop_wait(DONE),
    "wrong first parity of the free stages": edit(
        r"mov\.b32 (\s*%r\d+), 1;(?=\s*mov\.b32 \s*%r\d+, 0;)", r"mov.b32 \1, 0;"
    ),
    "half the bytes expected": edit(r"mov\.b32 (\s*%r\d+), 32768;", r"mov.b32 \1, 16384;"),
    "twice the bytes expected": edit(r"mov\.b32 (\s*%r\d+), 32768;", r"mov.b32 \1, 65536;"),
    "barriers count two arrivals": edit(r"mov\.b32 (\s*%r\d+), 1;(?=\s*mbarrier\.init)", r"mov.b32 \1, 2;"),
    "stages never freed": drop(r"tcgen05\.commit[^\n]*", 0),
    "end never signalled": drop(r"tcgen05\.commit[^\n]*", 1),
    "stages freed before the last product": chain(
        drop(r"tcgen05\.commit[^\n]*", 0),
        edit(
            r"(setp\.ne\.b32 add, 1, 0; add\.s64 a, (%rd\d+), 6;)",
            r"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12+65552]; \1",
        ),
    ),
    "three stages in a ring of two": edit(r"setp\.eq\.b32 (\s*%p\d+, %r\d+), 2;", r"setp.eq.b32 \1, 3;", 0),
    "no CTA barrier after the set-up": drop(r"bar\.sync \s*0;"),
    "tensor memory freed while it is read": drop(r"bar\.sync \s*1, 160;"),
    "tensor memory never freed": drop(r"tcgen05\.dealloc[^\n]*"),
    "A into the other stage": edit(r"\[%r8\], \[", "[%r8+16384], [", 0),
    "a load past the allocated columns": edit(
        r"add\.s32 (\s*%r\d+, %r\d+), 96;(?=\s*tcgen05\.ld)", r"add.s32 \1, 112;"
    ),
}
GEMM_WRONG = {
    "the first product adds": edit(r"setp\.ne\.b32 add, %r\d+, 0", "setp.ne.b32 add, 1, 0"),
    "wrong K step": edit(r"add\.s64 b, (%rd\d+), 4;", r"add.s64 b, \1, 2;"),
    "wrong shape in the instruction descriptor": edit(r"136316048", "135267472"),
}
