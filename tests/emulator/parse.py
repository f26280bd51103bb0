"""PTX text -> kernels: parameters, shared symbols, registers, instructions with resolved registers and labels.

Traps that compiler output contains and this parser handles: inline-assembly scopes with local registers and repeated
labels, register names without `%`, `_` sinks, literal predicates, `[reg+imm]`, vector packs, `a|b` pairs, float
literals as bits. Anything it does not understand is a `PtxError` that names the line.
"""

import re
from dataclasses import dataclass, field

from .kinds import CLASS_OF_WIDTH


class PtxError(ValueError):
    """The text is not PTX that the emulator understands. The message names line and instruction."""


@dataclass(frozen=True)
class Reg:
    """A register: class (`p` `h` `r` `d`) and row in that class's file."""

    cls: str
    index: int


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`, kept as the name without `%`."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. `is_float` marks `0f`/`0d` spellings, whose `value` holds the bits."""

    value: int
    is_float: bool = False


@dataclass(frozen=True)
class Sym:
    """A parameter or a shared variable, with a byte offset."""

    name: str


@dataclass(frozen=True)
class Vec:
    """`{a, b, ...}`."""

    items: tuple


@dataclass(frozen=True)
class Mem:
    """`[base+offset]`, or `[base, {coordinates}]` of tensor copies."""

    base: object
    offset: int = 0
    coords: tuple | None = None


@dataclass(frozen=True)
class Pair:
    """`a|b`: two results of one instruction."""

    first: object
    second: object


@dataclass(frozen=True)
class Sink:
    """`_`: a result nobody wants."""


@dataclass
class Instruction:
    """One instruction. `guard` is (register, negated) or None; `target` the index that a branch goes to."""

    op: str
    args: tuple
    guard: tuple | None
    line: int
    text: str
    parts: tuple = ()
    target: int | None = None
    source: tuple | None = None  # (file number, line) of the latest .loc

    def error(self, why):
        """A hard error at this instruction."""
        return PtxError(f"line {self.line}: {why}: {self.text}")


@dataclass
class Param:
    """One kernel parameter: name, byte offset in the parameter block, size, alignment, PTX type."""

    name: str
    offset: int
    size: int
    align: int
    kind: str


@dataclass
class Kernel:
    """One `.entry`."""

    name: str
    params: list
    block: tuple | None
    registers: dict  # class -> number of rows
    instructions: list
    shared: dict  # symbol -> (alignment, size)
    dynamic: str | None
    target: str = ""
    labels: dict = field(default_factory=dict)

    @property
    def param_bytes(self):
        return max((p.offset + p.size for p in self.params), default=0)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"\s*([$\w]+)\s*:(?!:)")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w]+)(?:\s*\[\s*(\d*)\s*\])?")
_PARAM = re.compile(r"\.param\s+(.*?)([$\w]+)(?:\[(\d+)\])?\s*$", re.S)


def _blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def parse(text):
    """All kernels of a PTX module by name. Raises PtxError for anything not understood."""
    text = _COMMENT.sub(_blank, text.rstrip("\0"))
    target = re.search(r"\.target\s+(\w+)", text)
    module_shared, dynamic = {}, None
    kernels = {}
    entry = re.compile(r"\.entry\s+([$\w]+)\s*\(([^)]*)\)([^{]*)\{", re.S)
    head = text[: m.start()] if (m := entry.search(text)) else text
    for found in _SHARED.finditer(head):
        align, _, name, size = found.groups()
        if size in (None, ""):
            dynamic = name
        else:
            module_shared[name] = (int(align or 4), int(size))
    if re.search(r"\.func\b", text):
        raise PtxError("the module defines a .func: calls are not emulated")
    for found in entry.finditer(text):
        name, params, directives = found.groups()
        block = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        kernel = Kernel(
            name,
            _params(params),
            block and tuple(int(x or 1) for x in block.groups()),
            {},
            [],
            dict(module_shared),
            dynamic,
            target.group(1) if target else "",
        )
        _Body(text, found.end(), kernel).read()
        kernels[name] = kernel
    if not kernels:
        raise PtxError("no .entry in the module")
    return kernels


def _params(text):
    out, offset = [], 0
    for piece in filter(None, (p.strip() for p in text.split(","))):
        found = _PARAM.match(piece)
        if not found:
            raise PtxError(f"parameter not understood: {piece}")
        before, name, count = found.groups()
        kind = re.search(r"\.(b8|b16|b32|b64|u8|u16|u32|u64|s32|s64|f32|f64)\b", before).group(1)
        width = int(kind[1:]) // 8
        size = width * int(count) if count else width
        # `.align` belongs to the parameter itself for arrays; behind `.ptr` it speaks of the pointee.
        align = re.search(r"\.align\s+(\d+)", before)
        align = int(align.group(1)) if align and ".ptr" not in before else width
        offset = -(-offset // align) * align
        out.append(Param(name, offset, size, align, kind))
        offset += size
    return out


class _Body:
    """Reads one kernel body: scopes, registers, labels, statements."""

    def __init__(self, text, start, kernel):
        self.text, self.at, self.kernel = text, start, kernel
        self.scopes = [({}, {})]  # (registers, labels) innermost last
        self.rows = {"p": 0, "h": 0, "r": 0, "d": 0}
        self.open_branches = []  # (instruction, label, scope chain)
        self.line, self.line_at = text.count("\n", 0, start) + 1, start
        self.loc = None

    def read(self):
        depth = 1
        text, n = self.text, len(self.text)
        while True:
            while self.at < n and text[self.at] in " \t\r\n;":
                self.at += 1
            if self.at >= n:
                raise PtxError(f"kernel {self.kernel.name}: body does not end")
            c = text[self.at]
            if c == "{":
                depth += 1
                self.scopes.append(({}, {}))
                self.at += 1
            elif c == "}":
                depth -= 1
                self.at += 1
                if depth == 0:
                    break
                self.scopes.pop()
            elif found := _LABEL.match(text, self.at):
                self.scopes[-1][1][found.group(1)] = len(self.kernel.instructions)
                self.at = found.end()
            elif text.startswith((".loc ", ".loc\t", ".file"), self.at):
                end = text.index("\n", self.at)
                words = text[self.at : end].split()
                if words[0] == ".loc":
                    self.loc = (int(words[1]), int(words[2]))
                self.at = end
            else:
                end = text.find(";", self.at)
                self.statement(" ".join(text[self.at : end].split()), self.line_of(self.at))
                self.at = end + 1
        for instruction, label, scopes in self.open_branches:
            for _, labels in reversed(scopes):
                if label in labels:
                    instruction.target = labels[label]
                    break
            else:
                raise instruction.error(f"no label {label}")
        self.kernel.registers = dict(self.rows)

    def line_of(self, at):
        self.line += self.text.count("\n", self.line_at, at)
        self.line_at = at
        return self.line

    def statement(self, text, line):
        if text.startswith(".reg"):
            return self.declare(text, line)
        if text.startswith(".pragma"):
            return None
        if text.startswith(".shared"):
            align, kind, name, size = _SHARED.match(text).groups()
            width = int(re.sub(r"\D", "", kind)) // 8
            self.kernel.shared[name] = (int(align or width), width * int(size or 1))
            return None
        if text.startswith("."):
            raise PtxError(f"line {line}: directive not emulated: {text}")
        guard = None
        whole = text
        if found := re.match(r"@(!?)([%$\w]+)\s+", text):
            reg = self.register(found.group(2), line, whole)
            guard = (reg, bool(found.group(1)))
            text = text[found.end() :]
        op, _, rest = text.partition(" ")
        instruction = Instruction(op, (), guard, line, whole, tuple(op.split(".")), source=self.loc)
        if instruction.parts[0] == "bra":
            self.open_branches.append((instruction, rest.strip(), list(self.scopes)))
        else:
            instruction.args = tuple(self.operand(a, instruction) for a in split_operands(rest))
        self.kernel.instructions.append(instruction)
        return None

    def declare(self, text, line):
        found = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if not found or found.group(1) not in CLASS_OF_WIDTH:
            raise PtxError(f"line {line}: register declaration not understood: {text}")
        cls = CLASS_OF_WIDTH[found.group(1)]
        for name in (x.strip() for x in found.group(2).split(",")):
            ranged = re.match(r"([%$\w]+)<(\d+)>$", name)
            names = [f"{ranged.group(1)}{i}" for i in range(int(ranged.group(2)))] if ranged else [name]
            for one in names:
                self.scopes[-1][0][one] = Reg(cls, self.rows[cls])
                self.rows[cls] += 1

    def register(self, name, line, text):
        reg = self.find(name)
        if reg is None:
            raise PtxError(f"line {line}: unknown register {name}: {text}")
        return reg

    def find(self, name):
        for registers, _ in reversed(self.scopes):
            if name in registers:
                return registers[name]
        return None

    def operand(self, text, instruction):
        text = text.strip()
        if text.startswith("["):
            return self.memory(text[1:-1], instruction)
        if text.startswith("{"):
            return Vec(tuple(self.operand(a, instruction) for a in split_operands(text[1:-1])))
        if text == "_":
            return Sink()
        if "|" in text:
            a, b = text.split("|")
            return Pair(self.operand(a, instruction), self.operand(b, instruction))
        if (reg := self.find(text)) is not None:
            return reg
        if re.fullmatch(r"%[a-z_]\w*(\.[xyz])?", text):
            return Special(text[1:])
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return Imm(int(found.group(1) or found.group(2), 16), True)
        if re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Imm(int(text.rstrip("U"), 0))
        if text in ("true", "false"):
            return Imm(int(text == "true"))
        if re.fullmatch(r"[$A-Za-z_][$\w]*", text):
            if (
                text in self.kernel.shared
                or text == self.kernel.dynamic
                or any(p.name == text for p in self.kernel.params)
            ):
                return Sym(text)
        raise instruction.error(f"operand {text!r} not understood")

    def memory(self, text, instruction):
        pieces = split_operands(text)
        coords = None
        if len(pieces) == 2 and pieces[1].startswith("{"):
            coords = tuple(self.operand(a, instruction) for a in split_operands(pieces[1][1:-1]))
        elif len(pieces) != 1:
            raise instruction.error(f"address [{text}] not understood")
        found = re.fullmatch(r"\s*([%$\w.]+?)\s*(?:([+-])\s*(-?(?:0x)?[0-9a-fA-F]+))?\s*", pieces[0])
        if not found:
            raise instruction.error(f"address [{text}] not understood")
        name, sign, number = found.groups()
        offset = int(number, 0) if number else 0
        return Mem(self.operand(name, instruction), -offset if sign == "-" else offset, coords)


def split_operands(text):
    """Split at commas that are outside brackets and braces."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    if last or out:
        out.append(last)
    return out
