"""Lint of our kernels' PTX for what the static verifier cannot see: fences, `wait::ld`, elections, register budgets.

Every rule is a forward data-flow analysis over the kernel's control flow, one thread's view; facts join at labels in
the direction that finds more. Rules and what breaks without them:

  wait-ld      registers of tcgen05.ld are used only after tcgen05.wait::ld (stale registers)
  wait-st      tcgen05.st is waited for before the thread signals anybody (stale tensor memory)
  before-sync  ... and fenced by tcgen05.fence::before_thread_sync before it signals
  after-sync   tensor memory is touched after a wait only behind tcgen05.fence::after_thread_sync
  free-fence   loads are fenced before the signal that lets tensor memory be freed
  proxy        generic stores to shared memory pass fence.proxy.async before the barrier that a bulk store waits for
  elect        bulk copies, products, commits and expect_tx are issued by one elected thread
  init-fence   barriers are initialised, then fenced, then the CTA synchronises
  dependent    a kernel that starts before the one ahead of it has ended waits before it touches global memory (`early`)
  registers    setmaxnreg values are those of the plan, in steps of 8, fit the register file, and go the way they say
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

REGISTER_FILE = 65536


class Finding(NamedTuple):
    rule: str
    line: int
    text: str


@dataclass
class Instruction:
    line: int
    text: str
    guard: str  # predicate register, "" without one
    negated: bool
    op: str
    written: tuple[str, ...]
    read: tuple[str, ...]
    target: str = ""  # of a branch


@dataclass
class Code:
    """Instructions in order, and where control may go from each."""

    instructions: list[Instruction] = field(default_factory=list)
    next: list[list[int]] = field(default_factory=list)


_STATEMENT = re.compile(r"^(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$")
_REGISTER = re.compile(r"%[a-z]+\d+|\b(?:P1|add|a|b|done|there)\b")
# Instructions without a register result: all their operands are read.
_NO_RESULT = re.compile(
    r"st\.|bar|barrier|tcgen05\.(st|mma|commit|wait|fence|dealloc|relinquish|alloc)|mbarrier\.init|bra"
)


def _split(operands: str) -> list[str]:
    """Top-level commas only."""
    parts, depth, now = [], 0, ""
    for c in operands:
        depth += (c in "[{") - (c in "]}")
        if c == "," and not depth:
            parts.append(now)
            now = ""
        else:
            now += c
    return [p.strip() for p in [*parts, now] if p.strip()]


def _instruction(number: int, text: str, scope: str) -> Instruction | None:
    match = _STATEMENT.match(text)
    if not match:
        return None
    negated, guard, op, rest = match[1] == "!", match[2] or "", match[3], match[4]

    def names(part: str) -> list[str]:
        return [r if r.startswith("%") else f"{r}@{scope}" for r in _REGISTER.findall(part)]

    parts = _split(rest)
    if op.startswith("bra"):
        target = parts[-1] if parts[-1].startswith("$") else f"{parts[-1]}@{scope}"
        return Instruction(number, text, names(guard)[0] if guard else "", negated, op, (), (), target)
    has_result = bool(parts) and not _NO_RESULT.match(op) and not parts[0].startswith("[")
    written = tuple(names(parts[0])) if has_result else ()
    read = tuple(n for p in (parts[1:] if has_result else parts) for n in names(p))
    return Instruction(number, text, names(guard)[0] if guard else "", negated, op, written, read)


def _bodies(ptx: str) -> list[tuple[int, str]]:
    """(where it starts, text) of each kernel's body. Inline assembly may close its own braces at a line's start."""
    found = []
    for entry in re.finditer(r"\.entry\b.*?^\{", ptx, re.S | re.M):
        depth, at = 1, entry.end()
        while depth:
            brace = re.compile(r"//[^\n]*|[{}]").search(ptx, at)
            assert brace, "a kernel's body does not end"
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            at = brace.end()
        found.append((entry.end(), ptx[entry.end() : at - 1]))
    return found


def parse(ptx: str) -> list[Code]:
    """The kernels of a module. Labels and registers of an inline-asm block are its own."""
    kernels: list[Code] = []
    for start, body in _bodies(ptx):
        first = ptx[:start].count("\n") + 1
        code, labels, scope = Code(), {}, "0"
        for offset, raw in enumerate(body.split("\n")):
            line = raw.split("//")[0].strip()
            for piece in re.split(r"(?<=[;])|(?<=^\{)|^(?=\})", line):
                piece = piece.strip()
                if piece.startswith("{"):
                    scope, piece = str(first + offset), piece[1:].strip()
                if piece.startswith("}"):
                    scope, piece = "0", piece[1:].strip()
                label = re.match(r"^(\$?\w+):\s*(.*)$", piece)
                if label:
                    labels[label[1] if label[1].startswith("$") else f"{label[1]}@{scope}"] = len(code.instructions)
                    piece = label[2]
                made = _instruction(first + offset, piece.rstrip(";").strip(), scope)
                if made:
                    code.instructions.append(made)
        for i, x in enumerate(code.instructions):
            after = [] if x.op in ("ret", "exit", "trap") and not x.guard else [i + 1]
            if x.target:
                after = [labels[x.target]] + ([i + 1] if x.guard else [])
            code.next.append([n for n in after if n < len(code.instructions)])
        kernels.append(code)
    return kernels


Step = Callable[[Instruction, Any], Any]


def flow(
    code: Code, start: Any, step: Callable[[int, Instruction, Any], dict[int, Any]], join: Callable[[Any, Any], Any]
):
    """State before each instruction (None = unreachable). step gives the state for each successor."""
    before: list[Any] = [None] * len(code.instructions)
    before[0] = start
    work = [0]
    while work:
        i = work.pop()
        for n, state in step(i, code.instructions[i], before[i]).items():
            joined = state if before[n] is None else join(before[n], state)
            if joined != before[n]:
                before[n] = joined
                work.append(n)
    return before


def _repeated(code: Code) -> dict[str, str]:
    """predicate -> comparison, where two branches depend on it: they go the same way."""
    compared: dict[str, list[str]] = {}
    for x in code.instructions:
        if x.op.startswith("setp.") and len(x.written) == 1 and not x.guard:
            compared.setdefault(f"{x.op} {_split(x.text.split(None, 1)[1])[1:]}", []).append(x.written[0])
    branching = [x.guard for x in code.instructions if x.target and x.guard]
    guarding = {text: sum(branching.count(p) for p in ps) for text, ps in compared.items()}
    return {p: text for text, ps in compared.items() if guarding[text] > 1 for p in ps}


def _flags(code: Code) -> dict[int, tuple[str, bool]]:
    """branch -> (the flag it asks, whether it goes if that is set): constants are moved to flags. A contrary that was
    made just before the branch asks the flag itself."""
    flags = {x.written[0] for x in code.instructions if _sets_flag(x)}
    asked = {}
    for i, x in enumerate(code.instructions):
        last = code.instructions[i - 1]
        if x.target and x.guard in flags:
            asked[i] = (x.guard, not x.negated)
        elif x.target and x.guard and last.op == "not.pred" and last.written == (x.guard,) and last.read[0] in flags:
            asked[i] = (last.read[0], x.negated)
    return asked


def _sets_flag(x: Instruction) -> bool:
    return x.op == "mov.pred" and not x.guard and not x.read


def _states(code: Code, start: Any, change: Step, join: Callable[[Any, Any], Any]) -> list[Any]:
    """The state before each instruction, over all paths that can be: a comparison made twice of registers that were
    not written since has one outcome, and a flag that was set to a constant has it. Inside: a state for each set of
    outcomes."""
    same, flags = _repeated(code), _flags(code)

    def step(i: int, x: Instruction, states: dict) -> dict[int, Any]:
        after: dict[frozenset, Any] = {}
        for known, state in states.items():
            if x.written:
                known = frozenset(k for k in known if not set(_REGISTER.findall(k[0])) & set(x.written))
            if _sets_flag(x):
                known |= {(x.written[0], not x.text.endswith(" 0"))}
            state = change(x, state)
            after[known] = join(after[known], state) if known in after else state
        text, goes_if = flags.get(i, (same.get(x.guard, ""), not x.negated))
        if not (x.target and x.guard and text):
            return dict.fromkeys(code.next[i], after)
        out: dict[int, Any] = {}
        for n, truth in zip(code.next[i], (goes_if, not goes_if), strict=False):
            kept: dict[frozenset, Any] = {}
            for known, state in after.items():
                if (text, not truth) not in known:
                    key = known | {(text, truth)}
                    kept[key] = join(kept[key], state) if key in kept else state
            out[n] = kept
        return out

    def merge(a: dict, b: dict) -> dict:
        return {k: join(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in a | b}

    def flat(states: dict | None) -> Any:
        found = None
        for state in (states or {}).values():
            found = state if found is None else join(found, state)
        return found

    return [flat(states) for states in flow(code, {frozenset(): start}, step, merge)]


def _union(a: frozenset, b: frozenset) -> frozenset:
    return a | b


def is_wait(x: Instruction) -> bool:
    return x.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait", "bar.sync", "barrier.sync", "barrier.cta.sync"))


def is_signal(x: Instruction) -> bool:
    """Tells others that something is done. expect_tx announces bytes of a copy, not this thread's own work."""
    named = x.op.startswith(("bar.", "barrier.")) and "warp" not in x.op
    return named or (x.op.startswith("mbarrier.arrive") and "expect_tx" not in x.op)


def _wait_ld(code: Code) -> list[Finding]:
    """Packing moves are no uses: they name the same registers and cost no instruction; the packed name is as raw."""

    def change(x: Instruction, raw: frozenset) -> frozenset:
        if x.op.startswith("tcgen05.wait::ld"):
            return frozenset()
        if x.op.startswith("tcgen05.ld"):
            return raw | set(x.written)
        if x.op.startswith("mov") and set(x.read) & raw:
            return raw | set(x.written)
        return raw - set(x.written)

    found = []
    for x, raw in zip(code.instructions, _states(code, frozenset(), change, _union), strict=True):
        if raw and not x.op.startswith("mov"):
            used = sorted(raw & set(x.read))
            if used:
                found.append(Finding("wait-ld", x.line, f"{used[0]} is used before tcgen05.wait::ld: {x.text[:80]}"))
    return found


def _tensor_stores(code: Code) -> list[Finding]:
    """State: what of this thread's tensor-memory stores is still open: unwaited, unfenced."""

    def change(x: Instruction, state: frozenset) -> frozenset:
        if x.op.startswith("tcgen05.st."):
            return frozenset(("wait-st", "before-sync"))
        if x.op.startswith("tcgen05.wait::st"):
            return state - {"wait-st"}
        if "before_thread_sync" in x.op:
            return state - {"before-sync"}
        return state

    words = {"wait-st": "no tcgen05.wait::st", "before-sync": "no tcgen05.fence::before_thread_sync"}
    found = []
    for x, state in zip(code.instructions, _states(code, frozenset(), change, _union), strict=True):
        if state and is_signal(x):
            found += [Finding(rule, x.line, f"{words[rule]} after tcgen05.st before {x.text[:60]}") for rule in state]
    return found


def _after_sync(code: Code) -> list[Finding]:
    """State: a wait was passed and no fence yet."""

    def change(x: Instruction, state: bool) -> bool:
        if "after_thread_sync" in x.op:
            return False
        return True if is_wait(x) else state

    found = []
    for x, open_ in zip(code.instructions, _states(code, False, change, lambda a, b: a or b), strict=True):
        touches = x.op.startswith(("tcgen05.ld", "tcgen05.st.", "tcgen05.cp"))
        touches |= x.op.startswith("tcgen05.mma") and "], [" in x.text  # A in tensor memory
        if open_ and touches:
            text = f"no tcgen05.fence::after_thread_sync between a wait and {x.text[:60]}"
            found.append(Finding("after-sync", x.line, text))
    return found


def _free_fence(code: Code) -> list[Finding]:
    """The named barrier in front of tcgen05.dealloc: whoever arrives there has fenced its loads."""
    ids = set()
    for i, x in enumerate(code.instructions):
        if x.op.startswith("tcgen05.dealloc"):
            syncs = [y for y in code.instructions[:i] if y.op.startswith("bar.sync")]
            ids |= {_barrier_id(syncs[-1])} if syncs else set()

    def change(x: Instruction, state: bool) -> bool:
        if x.op.startswith("tcgen05.ld"):
            return True
        return False if "before_thread_sync" in x.op else state

    found = []
    for x, open_ in zip(code.instructions, _states(code, False, change, lambda a, b: a or b), strict=True):
        if open_ and x.op.startswith("bar.") and _barrier_id(x) in ids:
            text = (
                f"no tcgen05.fence::before_thread_sync between tcgen05.ld and {x.text[:40]}, which frees tensor memory"
            )
            found.append(Finding("free-fence", x.line, text))
    return found


def _barrier_id(x: Instruction) -> str:
    """The first operand of a named barrier; the cluster's has none."""
    parts = x.text.split(None, 1)
    return _split(parts[1])[0] if len(parts) == 2 else "of the cluster"


def _addresses(code: Code) -> dict[str, tuple[str, int]]:
    """register -> (root, constant) where it is a root plus a constant; assigned once, as NVVM does outside loops."""
    value: dict[str, tuple[str, int]] = {}
    for x in code.instructions:
        if len(x.written) != 1:
            continue
        made, parts = x.written[0], _split(x.text.split(None, 1)[1]) if " " in x.text or "\t" in x.text else []
        if x.op.startswith(("add.s32", "add.u32")) and re.fullmatch(r"-?\d+", parts[2]):
            root, constant = value.get(parts[1], (parts[1], 0))
            value[made] = (root, constant + int(parts[2]))
        elif x.op == "mov.b32" and len(x.read) == 1 and made not in value:
            value[made] = value.get(x.read[0], (x.read[0], 0))
    return value


def _place(x: Instruction, value: dict[str, tuple[str, int]]) -> tuple[str, int]:
    """(root, constant) of the address in brackets."""
    inside = re.search(r"\[([%\w]+)(?:\+(-?\d+))?\]", x.text)
    assert inside, x.text
    root, constant = value.get(inside[1], (inside[1], 0))
    return root, constant + int(inside[2] or 0)


def _key(x: Instruction, value: dict) -> tuple:
    return ("bar", _barrier_id(x)) if x.op.startswith("bar") else ("mbarrier", *_place(x, value))


def _proxy(code: Code) -> list[Finding]:
    """Which barriers does a bulk store wait for, and does anybody signal one with unfenced stores to shared memory?"""
    value = _addresses(code)

    def waited(x: Instruction, state: frozenset) -> frozenset:
        return state | {_key(x, value)} if is_wait(x) else state

    guards: set = set()
    for x, state in zip(code.instructions, _states(code, frozenset(), waited, _union), strict=True):
        if x.op.startswith(("cp.async.bulk", "cp.reduce.async.bulk")) and ".global.shared" in x.op:
            guards |= state or set()

    def change(x: Instruction, open_: bool) -> bool:
        if x.op.startswith("st.shared"):
            return True
        # Handed over: what the next signal means is the next rule's concern.
        return False if x.op.startswith("fence.proxy.async") or is_signal(x) else open_

    found = []
    for x, open_ in zip(code.instructions, _states(code, False, change, lambda a, b: a or b), strict=True):
        if open_ and is_signal(x) and _key(x, value) in guards and _key(x, value) != ("bar", "0"):
            text = f"no fence.proxy.async between st.shared and {x.text[:60]}, which a bulk store waits for"
            found.append(Finding("proxy", x.line, text))
        if open_ and is_signal(x) and _key(x, value) == ("bar", "0") and _stores_later(code, x):
            found.append(Finding("proxy", x.line, "no fence.proxy.async between st.shared and the CTA's barrier"))
    return found


def _stores_later(code: Code, x: Instruction) -> bool:
    """Whether a bulk store follows the CTA barrier `x` with no other CTA barrier between: then it waits for `x`."""
    for y in code.instructions[code.instructions.index(x) + 1 :]:
        if y.op.startswith(("bar.sync", "barrier")) and _barrier_id(y) == "0":
            return False
        if y.op.startswith(("cp.async.bulk", "cp.reduce.async.bulk")) and ".global.shared" in y.op:
            return True
    return False


_SINGLE = re.compile(
    r"cp\.(reduce\.)?async\.bulk\.(tensor|shared|global)|tcgen05\.(mma|commit|cp)|mbarrier\.\S*expect_tx"
)


def _lanes(code: Code) -> set[str]:
    """Registers that differ between the lanes of a warp: the thread's number, with its low five bits kept."""
    found: set[str] = set()
    for x in code.instructions:
        parts = _split(x.text.split(None, 1)[1]) if len(x.text.split(None, 1)) == 2 else []
        if x.op.startswith("mov") and parts[1] in ("%tid.x", "%laneid"):
            found.add(x.written[0])
        elif x.op.startswith(("add.s32", "sub.s32", "and.b32")) and x.read[:1] and x.read[0] in found:
            number = re.fullmatch(r"-?\d+", parts[2])
            if number and (x.op[:3] != "and" or int(parts[2]) & 31 == 31):
                found.add(x.written[0])
    return found


def _elect(code: Code) -> list[Finding]:
    """State: (whether this is one elected thread, predicates that say so, their negations). Comparing the thread's
    number with a constant elects too."""
    lanes = _lanes(code)

    def step(i: int, x: Instruction, state: tuple) -> dict[int, tuple]:
        alone, yes, no = state
        if x.op.startswith("elect"):
            yes, no = yes | {x.written[-1]}, no - {x.written[-1]}
        elif re.match(r"setp\.(eq|ne)\.[bsu]32", x.op) and len(x.read) == 1 and x.read[0] in lanes:
            same, other = ({x.written[0]}, set()) if x.op.startswith("setp.eq") else (set(), {x.written[0]})
            yes, no = yes - {x.written[0]} | same, no - {x.written[0]} | other
        elif x.op in ("or.pred", "and.pred"):
            both, made = set(x.read), {x.written[0]}
            one = bool(both & yes) if x.op == "and.pred" else both <= yes
            none = bool(both & no) if x.op == "or.pred" else both <= no
            yes, no = yes - made | (made if one else set()), no - made | (made if none else set())
        elif x.op.startswith("not.pred"):
            flipped = x.read[0]
            yes = yes | {x.written[0]} if flipped in no else yes - {x.written[0]}
            no = no | {x.written[0]} if flipped in yes else no - {x.written[0]}
        else:
            yes, no = yes - set(x.written), no - set(x.written)
        after = dict.fromkeys(code.next[i], (alone, yes, no))
        if x.target and x.guard:
            taken, through = code.next[i][0], i + 1
            positive = (x.guard in yes) if not x.negated else (x.guard in no)
            negative = (x.guard in no) if not x.negated else (x.guard in yes)
            if taken != through:
                after[taken] = (alone or positive, yes, no)
                after[through] = (alone or negative, yes, no)
        return after

    def join(a: tuple, b: tuple) -> tuple:
        return a[0] and b[0], a[1] & b[1], a[2] & b[2]

    found = []
    states = flow(code, (False, frozenset(), frozenset()), step, join)
    for x, state in zip(code.instructions, states, strict=True):
        if state is None or not _SINGLE.match(x.op):
            continue
        alone, yes, no = state
        guarded = x.guard and (x.guard in (no if x.negated else yes))
        if not (alone or guarded):
            found.append(Finding("elect", x.line, f"not under elect.sync: {x.text[:80]}"))
    return found


def _init_fence(code: Code) -> list[Finding]:
    """State: barriers initialised and not yet fenced (1), fenced and not yet synchronised (2)."""

    def change(x: Instruction, state: frozenset) -> frozenset:
        if x.op.startswith("mbarrier.init"):
            return state | {"init"}
        if x.op.startswith("fence.mbarrier_init") or x.op.startswith("fence.acq_rel.cluster"):
            return state - {"init"}
        return state

    found = []
    for x, state in zip(code.instructions, _states(code, frozenset(), change, _union), strict=True):
        if state and x.op.startswith(("bar.sync", "barrier.cluster.arrive")):
            found.append(
                Finding("init-fence", x.line, f"no fence.mbarrier_init between mbarrier.init and {x.text[:40]}")
            )
    return found


_GLOBAL = re.compile(r"(ld|st|red|atom)\S*\.global|cp\.(reduce\.)?async\.bulk\.(tensor|shared|global)|cp\.async\.c[ag]")


def early(ptx: str, kernel: int) -> list[Finding]:
    """What kernel number `kernel` of the module may do to global memory on some path before `griddepcontrol.wait`."""

    def change(x: Instruction, waited: frozenset) -> frozenset:
        return frozenset({"wait"}) if x.op.startswith("griddepcontrol.wait") else waited

    code = parse(ptx.rstrip("\0"))[kernel]
    states = _states(code, frozenset(), change, lambda a, b: a & b)
    return [
        Finding("dependent", x.line, f"before griddepcontrol.wait: {x.text[:80]}")
        for x, state in zip(code.instructions, states, strict=True)
        if state is not None and not state and _GLOBAL.match(x.op)
    ]


RULES = (_wait_ld, _tensor_stores, _after_sync, _free_fence, _proxy, _elect, _init_fence)


def lint(ptx: str) -> list[Finding]:
    """All findings of every kernel of a module."""
    found = [f for code in parse(ptx.rstrip("\0")) for rule in RULES for f in rule(code)]
    found += _wrong_way(ptx)
    return sorted(set(found), key=lambda f: (f.line, f.rule))


def _wrong_way(ptx: str) -> list[Finding]:
    """Shares against what a thread has at the start: all that fits one CTA an SM, or the blocks that are asked for.

    To ask for fewer frees none: whoever waits for them waits for ever. Neither emulator nor verifier models that.
    """
    found = []
    for entry in re.finditer(r"\.entry\s.*?(?=\.entry\s|\Z)", ptx, re.S):
        threads = re.search(r"\.reqntid\s+(\d+)", entry[0])
        blocks = re.search(r"\.minnctapersm\s+(\d+)", entry[0])
        for m in re.finditer(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)", entry[0]) if threads else ():
            given = REGISTER_FILE // (int(threads[1]) * int(blocks[1] if blocks else 1)) // 8 * 8
            if (int(m[2]) < given) if m[1] == "inc" else (int(m[2]) > given):
                line = ptx[: entry.start() + m.start()].count("\n") + 1
                found.append(Finding("registers", line, f"setmaxnreg.{m[1]} to {m[2]}, a thread starts with {given}"))
    return found


def registers(ptx: str, shares: dict[int, int]) -> list[Finding]:
    """shares: registers of a thread -> how many warpgroups take them. Which branch is whose is the plan's word."""
    values = [
        (int(m[2]), ptx[: m.start()].count("\n") + 1) for m in re.finditer(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)", ptx)
    ]
    found = []
    if {v for v, _ in values} != set(shares):
        found.append(
            Finding("registers", 0, f"setmaxnreg {sorted({v for v, _ in values})}, the plan has {sorted(shares)}")
        )
    for value, line in values:
        if value % 8 or not 24 <= value <= 256:
            found.append(Finding("registers", line, f"setmaxnreg {value} is no multiple of 8 in [24, 256]"))
    used = 128 * sum(value * groups for value, groups in shares.items())
    if used > REGISTER_FILE:
        found.append(Finding("registers", 0, f"the warpgroups take {used} registers of {REGISTER_FILE}"))
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    if threads and int(threads[1]) != 128 * sum(shares.values()):
        found.append(Finding("registers", 0, f"{threads[1]} threads, {sum(shares.values())} warpgroups were named"))
    return found
