"""Why faults that no tier notices are none, or cannot show: (kernel, kind of fault, instruction) -> reason."""

from __future__ import annotations

import re

# (part of the kernel's name, kind, pattern of the instruction, reason); the first that fits
REASONS = (
    ("", "mask of bits changed", r"and\.b32\s+%r\d+, %r\d+, 16(383|320)",
     "equal: the field of a descriptor's address; shared memory ends at 2^18, so the bit that is lost is always 0"),
    ("PTX", "addition off by 16", r"add\.s32\s+%r\d+, %r0, 65536",
     "equal: the barriers lie 16 bytes further, in room that nobody uses"),
    ("Hopper", "election removed", r"elect\.sync\s+%r8\d+",
     "equal: before the exit every lane waits for its bulk copies, of which one lane has any"),
    ("Hopper backward", "named barrier of another number", r"bar\.sync\s+1, 256",
     "equal: all who meet here execute this instruction, and nobody uses the other number"),
    ("Hopper backward", "bulk wait removed", r"wait_group\.read\s+0",
     "equal: the same thread waits again, for all of its copies, before it exits"),
    ("Hopper forward, D 64", "named barrier removed", r"bar\.sync\s+%r\d+, 256",
     "equal: turns between warpgroups, an order for speed; nothing is handed over"),
    ("Blackwell backward", "predicate negated", r"and\.pred\s+%p1, %p168, %p167",
     "equal: clears rows that the copy has filled with zeros, or no rows"),
    ("Hopper backward", "bulk wait removed", r"wait_group\s+0",
     "equal: all that was copied has been read, which the thread has waited for; writes end when the launch does"),
    ("Hopper forward, D 64", "wait removed", r"\[%r741\], %r1117",
     "equal: waits a second time for the same phase of V, so that the exponentials before it are not moved behind it"),
    ("Hopper forward", "constant doubled", r"0f4B800000",
     "not seen: a guard against scores of 2^24 and more, which these inputs do not have"),
    ("Hopper forward, D 64", "wgmma fence removed", r"wgmma\.fence",
     "not seen: the fence of the product that was issued before may do for this one; not settled"),
    # The registers are those of a loop through tiles below `whole_key_tiles`' last.
    ("Hopper forward, D 128", "comparison off by one", r"setp\.gt\.s32\s+%p\d+, %r(1249|1283), (\d\d?|1[01]\d|120);",
     "equal: in the tiles left of the whole ones every row sees to the end, 128 columns, so no right limit is near"),
    ("Hopper forward, D 128", "arrive doubled", r"\[%r\d+\+163864\]",
     "not seen: of a step that one warpgroup takes alone; their turns order the other's reads before the next copy, in "
     "30 schedules too"),
    ("Hopper backward", "wgmma commit removed", r"wgmma\.commit_group",
     "equal: two products follow in groups of their own before the wait, which leaves the last alone unfinished"),
    ("Hopper backward", "predicate negated", r"or\.pred\s+%p21, %p20, %p19",
     "equal: clears rows that the copy has filled with zeros, or no rows"),
    ("Hopper backward", "wgmma fence removed", r"wgmma\.fence",
     "equal: of two products in a row; the fence before the first orders both ones' registers, untouched since"),
    ("Hopper forward, D 128", "wgmma fence removed", r"wgmma\.fence",
     "equal: P V behind the next scores; the fence before these orders both ones' registers, untouched since"),
    ("", "shift off by one", r"shr\.u32\s+%r\d+, %r\d+, (25|29)",
     "equal: the correction of a division's sign, for a number that is never negative"),
    ("", "predicate negated", r"and\.pred\s+%p11, %p10, %p9",
     "equal: the correction of a quotient's sign, where heads are a multiple of key heads and nothing remains"),
    ("Blackwell forward, D 192", "branch turned", r"@%p187 bra",
     "equal: the warp that stores and the one that clears edges change places"),
    ("Blackwell forward", "cluster barrier removed", r"barrier\.cluster\.wait",
     "equal: the last of a correction warp, which has arrived and does nothing after it; its CTA stays for the others"),
    ("Blackwell forward, D 256", "wait removed", r"\[%r3299\]",
     "equal: K's place, one of three, is free when V's, of two, is, which the warp waits for; so says the protocol"),
    ("", "bulk commit removed", r"cp\.async\.bulk\.commit_group",
     "equal: the thread commits again before it waits for everything"),
    ("", "comparison off by one", r"setp\.lt\.s32\s+%p\d+, %r\d+, 0",
     "equal: the correction of a division's sign, for a number that is never negative"),
)  # fmt: skip


def reason(subject: str, kind: str, code: str) -> str:
    """Empty if nobody has looked at it yet."""
    for part, of, pattern, why in REASONS:
        if part in subject and of == kind and re.search(pattern, code):
            return why
    return ""
