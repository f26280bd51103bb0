"""Lint: no lane may wait at a barrier's phase that one lane of its own warp lets go by.

In a loop, all lanes of a warp wait on an mbarrier, one of them (by %laneid, %tid or elect) does the work and arrives,
and nothing holds the lanes together before the next wait. PTX promises no convergence, so that lane may run rounds
ahead; the others then miss a phase, wait for its parity to come again, and stand for ever. Seen on an H200:
docs/decisions/hopper_ordered_dq.md. Whatever is `.sync` (bar.warp.sync, elect.sync, shfl.sync, aligned forms) brings
them together; a role that one lane enters has no others.
"""

from __future__ import annotations

import re

from ptx_lint import Code, Finding, Instruction, flow, parse


def _indented(ptx: str) -> str:
    """Inline asm may have braces in the first column, where the parser looks for the end of a kernel."""
    blocks = re.split(r"(?m)^(\s*// (?:begin|end) inline asm)$", ptx)
    return "".join(re.sub(r"(?m)^(?=[{}])", "\t", b) if n % 4 == 2 else b for n, b in enumerate(blocks))


def _by_lane(code: Code) -> set[str]:
    """Registers and predicates that may differ between the lanes of a warp: ids, elections, what follows from them."""
    tainted: set[str] = set()
    while True:
        before = len(tainted)
        for x in code.instructions:
            if x.op.startswith(("shfl.sync", "ld.", "atom", "mbarrier.")):
                continue  # values of memory and barriers are not judged
            if x.op.startswith("elect") or "%laneid" in x.text or "%tid" in x.text or set(x.read) & tainted:
                tainted |= set(x.written)
        if len(tainted) == before:
            return tainted


def _few(code: Code) -> list[bool]:
    """Before each instruction: have some lanes jumped elsewhere on every way to here?"""
    tainted = _by_lane(code)

    def step(i: int, x: Instruction, now: bool) -> dict[int, bool]:
        after = dict.fromkeys(code.next[i], now)
        if x.target and x.guard in tainted and i + 1 in after:
            after[i + 1] = True  # the lanes that do not jump
        return after

    return [bool(x) for x in flow(code, False, step, lambda a, b: a and b)]


def _round(code: Code, few: list[bool], wait: int) -> bool:
    """Is there a way from the wait back to it on which one lane arrives somewhere, and nothing joins the lanes?"""
    seen: set[tuple[int, bool]] = set()
    work = [(n, False) for n in code.next[wait] if n != wait]
    while work:
        i, arrived = work.pop()
        if i == wait and arrived:
            return True
        if (i, arrived) in seen:
            continue
        seen.add((i, arrived))
        x = code.instructions[i]
        if ".sync" in x.op and not few[i]:
            continue
        arrived |= few[i] and x.op.startswith("mbarrier.arrive") and "expect_tx" not in x.op
        work += [(n, arrived) for n in code.next[i]]
    return False


def lanes(ptx: str) -> list[Finding]:
    """Waits of whole warps that one lane can pass again and again while the others stand there."""
    found = []
    for code in parse(_indented(ptx.rstrip("\0"))):
        few = _few(code)
        for i, x in enumerate(code.instructions):
            if x.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")) and not few[i] and _round(code, few, i):
                found.append(Finding("lanes", x.line, f"all lanes wait here, one may be rounds ahead: {x.text[:80]}"))
    return found
