"""Mutants of known-good PTX: one fault each, planted at a synchronisation or addressing instruction.

The kill rate of the tiers (emulator, verifier, lint) over these says what they would miss.
"""

import re
from dataclasses import dataclass

WAIT = re.compile(r"mbarrier\.try_wait\.parity\.\S+\s+(\w+|%p\d+), (\[[^\]]+\]), ([^,;]+)(?:, \d+)?")


@dataclass(frozen=True)
class Mutant:
    """`kind` of fault, 1-based `line`, and the whole module's `text` with it."""

    kind: str
    line: int
    text: str


def _delete(op):
    return lambda code: "" if op in code else None


def _edit(pattern, replace):
    expression = re.compile(pattern)

    def run(code):
        changed, n = expression.subn(replace, code, count=1)
        return changed if n else None

    return run


def _plus(amount):
    """Add to the last group of a match (a literal)."""
    return lambda m: m.group(0)[: m.start(m.lastindex) - m.start(0)] + str(int(m.group(m.lastindex)) + amount)


def _no_wait(code):
    """The wait's predicate is true at once."""
    found = WAIT.search(code)
    return code[: found.start()] + f"setp.eq.u32 {found.group(1)}, 0, 0" + code[found.end() :] if found else None


def _other_parity(code):
    found = WAIT.search(code)
    if not found or not found.group(3).strip().isdigit():
        return None
    start, end = found.span(3)
    return code[:start] + str(1 - int(found.group(3))) + code[end:]


def _twice(code):
    """An arrival made twice."""
    return f"{code};\n{code}" if "mbarrier.arrive" in code and "expect_tx" not in code else None


def _count_off(code):
    """mbarrier.init with a count one higher."""
    found = re.match(r"(\s*)mbarrier\.init\.shared\.b64\s+(\[[^\]]+\]), (%r\d+)", code)
    if not found:
        return None
    space, at, count = found.groups()
    return f"{space}{{ .reg .b32 more; add.s32 more, {count}, 1; mbarrier.init.shared.b64 {at}, more; }}"


def _other_barrier(found):
    number = int(found.group(1))
    return found.group(0).replace(f"{number},", f"{(number + 1) % 16},", 1)


def _narrower(found):
    """The instruction descriptor with N lower by 64."""
    return f"{found.group(1)}{int(found.group(2)) - (8 << 17)}{found.group(3)}"


def _next_column(found):
    return f"{found.group(1) or found.group(2)}+1]"


def _next_step(found):
    return f"{found.group(1)}{(int(found.group(2)) + 2) % 10}{found.group(3)}"


def _more_bytes(code):
    """expect_tx of 16 bytes more than arrive."""
    found = re.match(r"(\s*)(mbarrier\.\S*expect_tx\S*\s+.*), (%r\d+)", code)
    return f"{found[1]}{{ .reg .b32 more; add.s32 more, {found[3]}, 16; {found[2]}, more; }}" if found else None


def _all_lanes(code):
    """elect.sync that elects everybody."""
    found = re.match(r"(\s*)elect\.sync\s+\S+\|(%p\d+)", code)
    return f"{found[1]}setp.eq.u32 {found[2]}, 0, 0" if found else None


def _literal(match, change):
    """The match with its last group, a decimal, changed."""
    start, end = (at - match.start(0) for at in match.span(match.lastindex))
    return match[0][:start] + str(change(int(match[match.lastindex]))) + match[0][end:]


def _changed(pattern, change):
    """Edit of the last group of `pattern`, a decimal."""
    return _edit(pattern, lambda match: _literal(match, change))


def _doubled(match):
    """A float constant twice as large; infinities and zero stay, as that is no fault."""
    word = int(match[1], 16)
    exponent = word >> 23 & 255
    return match[0] if exponent in (0, 254, 255) else f"0f{word + (1 << 23):08X}"


def _turned(match):
    """A branch taken where it was not. Loops of waits (inline assembly) are left out."""
    return f"@{'' if match[1] else '!'}{match[2]} bra"


RENAMED = "named barrier of another number"
FAULTS = {
    "wait removed": _no_wait,
    "wait on the other parity": _other_parity,
    "arrive removed": lambda code: "" if "mbarrier.arrive" in code and "expect_tx" not in code else None,
    "arrive doubled": _twice,
    "barrier count off by one": _count_off,
    "expect_tx removed": _delete("expect_tx"),
    "bulk copy removed": _edit(r"^\s*cp\.async\.bulk\.(tensor|shared|global).*", ""),
    "copy to a shifted place": _edit(r"(cp\.async\.bulk\.tensor\S+global\.tile\S* \[%r\d+)\]", r"\1+1024]"),
    "commit removed": _delete("tcgen05.commit"),
    "wgmma wait removed": _delete("wgmma.wait_group"),
    "wgmma wait one group late": _edit(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", _plus(1)),
    "wgmma commit removed": _delete("wgmma.commit_group"),
    "wgmma fence removed": _delete("wgmma.fence"),
    "wait::ld removed": _delete("tcgen05.wait::ld"),
    "wait::st removed": _delete("tcgen05.wait::st"),
    "proxy fence removed": _delete("fence.proxy.async"),
    "named barrier removed": lambda code: "" if re.search(r"\bbar\.(sync|arrive)", code) else None,
    RENAMED: _edit(r"bar\.(?:sync|arrive)\s+(\d+), \d+", _other_barrier),
    "bulk wait removed": _delete("cp.async.bulk.wait_group"),
    "bulk commit removed": _delete("cp.async.bulk.commit_group"),
    "dealloc removed": _delete("tcgen05.dealloc"),
    "first MMA adds": _edit(r"(setp\.ne\.b32 \w+, )0(, 0; tcgen05\.mma)", r"\g<1>1\2"),
    "MMA overwrites": _edit(r"(setp\.ne\.b32 \w+, )1(, 0; tcgen05\.mma)", r"\g<1>0\2"),
    "MMA removed": lambda code: "" if "tcgen05.mma" in code or "wgmma.mma_async" in code else None,
    "MMA of fewer columns": _edit(r"(tcgen05\.mma.*, )(\d{6,})(,)", _narrower),
    "tensor memory column off by one": _edit(
        r"(tcgen05\.(?:ld|st)\S+ .*\[%r\d+)\]|(tcgen05\.st\S+ \[%r\d+)\]", _next_column
    ),
    "shared store shifted": _edit(r"(st\.shared\.\S+\s+\[%r\d+)\]", r"\1+16]"),
    "shared load shifted": _edit(r"(ld\.shared\.\S+\s+.*\[%r\d+)\]", r"\1+16]"),
    "descriptor off by one k step": _edit(r"(add\.s64\s+%rd\d+, %rd\d+, 46117\d+?)(\d)(;|$)", _next_step),
    "expect_tx of other bytes": _more_bytes,
    "election removed": _all_lanes,
    "barrier fence removed": _delete("fence.mbarrier_init"),
    "tensor core fence removed": _delete("tcgen05.fence"),
    "cluster barrier removed": lambda code: "" if "barrier.cluster" in code else None,
    "MMA on the wrong k step": _changed(r"(add\.s64 [ab], %rd\d+, )(\d+)(?=;.*tcgen05\.mma)", lambda x: x + 2),
    "MMA of the other major": _changed(r"(tcgen05\.mma.*, )(\d{6,})(?=,)", lambda x: x ^ 1 << 15),
    "MMA of other rows": _changed(r"(tcgen05\.mma.*, )(\d{6,})(?=,)", lambda x: x ^ (12 << 24)),
    "lane quarter lost": _edit(r"(and\.b32\s+%r\d+, %r\d+, )6291456\b", r"\g<1>0"),
    "descriptor's stride changed": _changed(r"(mov\.b32\s+%r\d+, )(107375\d{4})\b", lambda x: x + 8),
    "descriptor's swizzle changed": _changed(r"(mov\.b32\s+%r\d+, )(107375\d{4})\b", lambda x: x ^ (6 << 29)),
    "branch turned": _edit(r"@(!?)(%p\d+) bra\b", _turned),
    "comparison off by one": _changed(r"(setp\.\w+\.[su]32\s+%p\d+, %r\d+, )(-?\d+)\b", lambda x: x + 1),
    "addition off by 16": _changed(r"(add\.s32\s+%r\d+, %r\d+, )(-?\d+)\b", lambda x: x + 16),
    "shift off by one": _changed(r"(sh[lr]\.\w+\s+%r\d+, %r\d+, )(\d+)\b", lambda x: x + 1),
    "mask of bits changed": _changed(r"(and\.b32\s+%r\d+, %r\d+, )(\d+)\b", lambda x: x >> 1),
    "selection turned": _edit(r"(selp\.\S+\s+%r\d+, )([^,]+), ([^,]+)(, %p\d+)", r"\g<1>\3, \2\4"),
    "constant doubled": _edit(r"\b0f([0-9A-F]{8})\b", _doubled),
    "maximum for minimum": _edit(r"\bmax\.(?=f32|s32)", "min."),
    "product for sum": _edit(r"\badd\.rn\.f32(x2)?\b|\badd\.f32(x2)?\b", lambda m: m[0].replace("add", "mul")),
    "operands of a difference swapped": _edit(r"(sub\.\S*f32\S*\s+%\w+, )(%\w+), (%\w+)", r"\1\3, \2"),
    "exponential removed": _edit(r"ex2\.approx\S*\s+(%\w+), (%\w+)", r"mov.b32 \1, \2"),
    "predicate negated": _edit(
        r"\b(not|or|and)\.pred\b", lambda m: {"not": "mov", "or": "and", "and": "or"}[m[1]] + ".pred"
    ),
}
# Control flow and arithmetic. The others are the faults of asynchronous code: waits, arrivals, counts, bytes, phases,
# commits, fences, elections, descriptors, places in shared and tensor memory.
ARITHMETIC = frozenset((
    "branch turned", "comparison off by one", "addition off by 16", "shift off by one", "mask of bits changed",
    "selection turned", "constant doubled", "maximum for minimum", "product for sum",
    "operands of a difference swapped", "exponential removed", "predicate negated",
))  # fmt: skip


def mutants(ptx):
    """Every mutant of a module, in order of lines."""
    lines = ptx.rstrip("\0").split("\n")
    alone = {n for n in range(16) if len(re.findall(rf"\bbar\.(?:sync|arrive)\s+{n},", ptx)) == 1}
    for number, line in enumerate(lines):
        code, _, _ = line.partition("//")
        for kind, fault in FAULTS.items():
            named = re.search(r"\bbar\.(?:sync|arrive)\s+(\d+),", code)
            if kind == RENAMED and named and int(named[1]) in alone:
                continue  # a barrier that one instruction mentions: another number for it is no fault
            for piece in _statements(code):
                changed = fault(piece)
                if changed is not None and changed != piece:
                    mutated = [*lines]
                    mutated[number] = code.replace(piece, changed, 1)
                    yield Mutant(kind, number + 1, "\n".join(mutated))
                    break


def _statements(code):
    """A line's statements; one that is in braces as a whole stays whole (inline assembly on one line)."""
    if "{ .reg" in code:
        return [code]
    return [piece for piece in code.split(";") if piece.strip()]
