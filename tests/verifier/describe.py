"""Launch -> the verifier's input, and the binding of a reference function to the call's buffers."""

from __future__ import annotations

import re
import struct
from typing import Any

from launch import ITEM_BYTES, Launch, TensorMap

MINUS_INFINITY = "-8388608"  # its bits, as PTX writes them in a selection
HIDDEN = "0fFF800000"  # the same as a float
ELEMENT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32"}


def normal(ptx: str) -> str:
    """The same program in the words that the verifier takes; line numbers stay.

    `collector` is a reuse hint. min.relu is the larger of 0 and the minimum. A shift by 32 or more gives 0, as one by
    32 does; it refuses large counts. A selection between floats is written as one, the bits being the same. Addresses
    that are rounded up to 16 bytes, of rows that are multiples of them, are what they were: it loses track of them.
    "x = 0 selects a, else b" becomes "x != 0 selects b, else a": of a sum of exponentials the prover knows that it is
    not 0, and concludes nothing from that about "= 0". Its values are reals, so `ne` where PTX has `neu`.
    Descriptors are unsigned: the swizzle of 64 bytes sets the highest bit, and it takes them for negative. abs x is the
    larger of x and -x: it has no words for abs in the bounds of a loop.
    """
    ptx = ptx.rstrip("\0").replace(".collector::a::discard", "")
    ptx = re.sub(r"min\.relu\.s32\s+(%r\d+), ([^;]+);", r"min.s32 \1, \2; max.s32 \1, \1, 0;", ptx)
    shift = r"shl\.b32\s+(%r\d+), (-?\d+), (?!\1;)(%r\d+);"
    ptx = re.sub(shift, r"min.u32 \1, \3, 32; shl.b32 \1, \2, \1;", ptx)
    ptx = re.sub(r"add\.s64(\s+)(%rd\d+), (%rd\d+), (\d+);(\s*)and\.b64(\s+%rd\d+), \2, -16;", _rounded, ptx)
    ptx = re.sub(r"(or\.b64\s+%rd\d+, %rd\d+, )(-\d+);", lambda m: f"{m[1]}{int(m[2]) & (1 << 64) - 1};", ptx)
    ptx = re.sub(r"add\.s64 ([ab]), ", r"add.u64 \1, ", ptx)
    ptx = re.sub(r"abs\.s32(\s+)(%r\d+), (?!\2;)(%r\d+);", r"sub.s32\1\2, 0, \3; max.s32 \2, \2, \3;", ptx)
    return "".join(_floats(part) for part in re.split(r"(?=\.entry )", ptx))


def _floats(ptx: str) -> str:
    """Of one kernel, as register names are its own: what `normal` does to selections between floats."""
    floats = set()
    for line in ptx.splitlines():
        op = line.split(None, 1)
        if len(op) == 2 and re.search(r"\.f32(x2)?$", op[0]) and not op[0].startswith("mov"):
            floats |= set(re.findall(r"%rd?\d+", op[1]))
    for low, high, pair in re.findall(r"mov\.b64\s+\{(%r\d+), (%r\d+)\}, (%rd\d+);", ptx):
        floats |= {low, high} if pair in floats else set()

    def select(match: re.Match) -> str:
        to, values, p = match[1], [x.strip() for x in match[2].split(",")], match[3]
        if not ({to, *values} & floats or MINUS_INFINITY in values):
            return match[0]
        floats.add(to)
        values = [x if x.startswith("%") else f"0f{int(x) & 0xFFFFFFFF:08X}" for x in values]
        return f"selp.f32 {to}, {values[0]}, {values[1]}, {p};"

    return _by_difference(re.sub(r"selp\.b32\s+(%r\d+), ([^;]+), (%p\d+);", select, ptx))


def one_by_one(ptx: str) -> str:
    """Selections of floats by "a or b" as one by a, then one by b: the prover has no words for the disjunction."""

    def each(match: re.Match) -> str:
        either, a, b = match[1], match[2], match[3]
        chosen = rf"selp\.f32(\s+)(%r\d+), ([^,]+), ([^,;]+), {either};"
        return match[4] + re.sub(chosen, rf"selp.f32\1\2, \3, \4, {a}; selp.f32 \2, \3, \2, {b};", match[5])

    either = r"or\.pred\s+(%p\d+), (%p\d+), (%p\d+);(\s*)((?:selp\.f32\s+%r\d+, [^,]+, [^,;]+, \1;\s*)+)"
    return re.sub(either, each, ptx)


def by_comparison(ptx: str) -> str:
    """Scores that a bit of a word of visible columns hides, as hidden by comparisons of their column with its bounds.

    The word is ~(-1 << end) & (-1 << begin) or the first half of it, with bounds that are not negative: bit j is set
    where begin <= j < end. Or it is -1 << end alone, the hidden columns' word. A selection by a bit is beyond the
    prover ("scalar projection crosses producer element boundaries"). Takes what `normal` gives; lines stay.
    """
    bounds, ends = _bounds_of_words(ptx)

    def either(match: re.Match, word: str, column: int, set_: bool) -> str:
        """set_: whether the first arm is chosen where the bit is set."""
        if word not in bounds and word not in ends:
            return match[0]
        shown = set_ == (word in bounds)
        to, *arms = re.fullmatch(r"selp\.f32\s+(%r\d+), ([^,]+), ([^,]+), %p\d+;", match["chosen"]).groups()
        value, hidden = arms if shown else arms[::-1]
        if hidden != HIDDEN:
            raise ValueError(f"{match['chosen']}: the arm of a hidden score is no {HIDDEN}")
        (begin, end), p = bounds.get(word) or (None, ends[word]), match["p"]
        made = [match["between"].strip()]
        if begin:
            made.append(f"setp.gt.s32 {p}, {begin}, {column}; selp.f32 {to}, {HIDDEN}, {value}, {p};")
            value = to
        made.append(f"setp.le.s32 {p}, {end}, {column}; selp.f32 {to}, {HIDDEN}, {value}, {p};")
        return " ".join(made) + "\n" * match[0].count("\n")

    def by_bit(match: re.Match) -> str:
        bit = int(match["bit"]) & 0xFFFFFFFF
        if bit & (bit - 1):
            return match[0]
        return either(match, match["word"], bit.bit_length() - 1, match["test"] == "ne")

    chosen = r"(?P<between>(?:\s*mov\.b64\s+[^;]*;)?)\s*(?P<chosen>selp\.f32\s+[^;]*, (?P=p);)"
    bit = r"and\.b32\s+(?P<t>%r\d+), (?P<word>%r\d+), (?P<bit>-?\d+);\s*"
    test = r"setp\.(?P<test>eq|ne)\.b32\s+(?P<p>%p\d+), (?P=t), 0;"
    ptx = re.sub(bit + test + chosen, by_bit, ptx)
    # the highest one is the sign
    sign = r"setp\.gt\.s32\s+(?P<p>%p\d+), (?P<word>%r\d+), -1;"
    return re.sub(sign + chosen, lambda m: either(m, m["word"], 31, False), ptx)


def _bounds_of_words(ptx: str) -> tuple[dict[str, tuple[str | None, str]], dict[str, str]]:
    """Register of a word of visible columns -> the registers (begin or None, end) that it was made from; and of words
    of all columns from one on -> that one."""
    from_ = {m[1]: m[2] for m in re.finditer(r"min\.u32 (%r\d+), (%r\d+), 32; shl\.b32 \1, -1, \1;", ptx)}
    before = {m[1]: from_[m[2]] for m in re.finditer(r"not\.b32\s+(%r\d+), (%r\d+);", ptx) if m[2] in from_}
    found: dict[str, tuple[str | None, str]] = {word: (None, end) for word, end in before.items()}
    for word, *both in re.findall(r"and\.b32\s+(%r\d+), (%r\d+), (%r\d+);", ptx):
        a, b = both if both[0] in from_ else both[::-1]
        if a in from_ and b in before:
            found[word] = (from_[a], before[b])
    return found, from_


def _by_difference(ptx: str) -> str:
    """Comparisons of floats with 0 that only selections use: by "not equal", with the selections' arms exchanged."""
    ptx = re.sub(r"setp\.neu(\.f32\s+%p\d+, %r\d+, 0f00000000;)", r"setp.ne\1", ptx)
    for test in re.findall(r"setp\.eq\.f32\s+(%p\d+), %r\d+, 0f00000000;", ptx):
        chosen = rf"(selp\.\w+\s+%\w+), ([^,;]+), ([^,;]+), {test};"
        if len(re.findall(rf"{test}\b", ptx)) == 1 + len(re.findall(chosen, ptx)):
            ptx = re.sub(rf"setp\.eq(\.f32\s+{test},)", r"setp.ne\1", ptx)
            ptx = re.sub(chosen, rf"\1, \3, \2, {test};", ptx)
    return ptx


# Of a cubic that the prover takes for 2^f itself, if every literal and the order of operands are these.
IDEAL_EXP2 = (0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)


def _word(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def ideal_exponentials(ptx: str, degree: int) -> str:
    """Polynomial exponentials as exact ones: their coefficients become the ones that the prover takes for exact.

    Only where all of ours are there, so another constant, clamp, shift or order of operations is not forgiven. What the
    polynomial's own error is, `tools/fit_exp2.py` and its test say. A quartic loses its first step.
    """
    from jax_fa4.kernels.sm100.exp2 import COEFFICIENTS

    ours, theirs = [_word(x) for x in COEFFICIENTS[degree]], [_word(x) for x in IDEAL_EXP2]
    if any(len(re.findall(word, ptx)) != 1 for word in ours):
        raise ValueError(f"of the coefficients {ours} each must be there once: {[ptx.count(w) for w in ours]}")
    pairs = {}
    for word in ours:
        (scalar,) = re.findall(rf"mov\.b32\s+(%r\d+), {word};", ptx)
        (pairs[word],) = re.findall(rf"mov\.b64\s+(%rd\d+), \{{{scalar}, {scalar}\}};", ptx)
    if degree == 4:
        first = rf"fma\.rn\.f32x2(\s+%rd\d+), {pairs[ours[3]]}, %rd\d+, {pairs[ours[2]]};"
        ptx = re.sub(first, rf"mov.b64\1, {pairs[ours[3]]};", ptx)
        theirs.insert(2, theirs[2])
    for mine, known in zip(ours, theirs, strict=True):
        ptx = ptx.replace(mine, known)
    return ptx


def never_moved(ptx: str, lazy: float) -> str:
    """The path condition of an arm that skips every rescale: no row moved its reference maximum after its first block.

    There the old maximum is -inf, later it is finite. So "grown by no more than `lazy`" is written as "the factor of
    the old sum is not 0", which the prover decides in either.
    """
    found = re.findall(rf"setp\.ge\.f32\s+%p\d+, (%r\d+), {_word(-lazy)};", ptx)
    powers = re.findall(rf"ex2\.approx\.ftz\.f32\s+(%r\d+), {found[0]};", ptx) if found else []
    if len(found) != 1 or len(powers) != 1:
        raise ValueError(f"{len(found)} comparisons with {-lazy} and {len(powers)} powers of what is compared, not one")
    return re.sub(
        rf"setp\.ge(\.f32\s+%p\d+), {found[0]}, {_word(-lazy)};", rf"setp.ne\1, {powers[0]}, 0f00000000;", ptx
    )


def _rounded(match: re.Match) -> str:
    """(x + 16 n + r) & -16, r < 16, with x a multiple of 16."""
    blank, wide, base, count, gap, to = match.groups()
    return f"add.s64{blank}{wide}, {base}, {count};{gap}add.s64{to}, {base}, {int(count) // 16 * 16};"


def votes(ptx: str) -> list[int]:
    """1-based lines of the branches that depend on a warp vote: in the forward, whether O is rescaled."""
    lines = ptx.splitlines()
    at = [i for i, text in enumerate(lines) if "vote.sync" in text]
    return [next(j + 1 for j in range(i, len(lines)) if re.match(r"\s*@!?%p\d+ bra", lines[j])) for i in at]


def mixed_segments(ptx: str) -> list[int]:
    """1-based lines of the branches that depend on the lowest and highest segment id of a warp: is a tile masked?"""
    found, lines = [], ptx.splitlines()
    for i, text in enumerate(lines):
        if not (match := re.match(r"\s*redux\.sync\.max\.s32\s+(%r\d+)", text)):
            continue
        known = {match[1]}
        for j in range(i + 1, min(i + 8, len(lines))):
            if branch := re.match(r"\s*@!?(%p\d+) bra", lines[j]):
                found += [j + 1] * (branch[1] in known)
                break
            made = re.match(r"\s*(?:setp\.\S+|and\.pred|or\.pred|not\.pred)\s+(%p\d+), (.*)", lines[j])
            if made and known & set(re.findall(r"%[rp]\d+", made[2])):
                known.add(made[1])
    return found


def chosen_lines(launch: Launch) -> list[int]:
    """Of this launch's kernel, the branches that depend on data: which way they go has to be said."""
    start = launch.ptx.index(f".entry {launch.entry}(")
    end = launch.ptx.find(".entry ", start + 1)
    body = launch.ptx[start : end if end > 0 else None]
    before = launch.ptx[:start].count("\n")
    return [before + line for line in sorted(votes(body) + mixed_segments(body))]


def _tensor_map(index: int, m: TensorMap) -> dict[str, Any]:
    return {
        "parameter": index,
        "object": m.tensor,
        "element_type": ELEMENT[m.dtype],
        "rank": len(m.shape),
        "base_byte_offset": 0,
        "global_shape": list(m.shape),
        "global_strides_bytes": list(m.strides),
        "box_shape": list(m.box),
        "element_strides": [1] * len(m.shape),
        "swizzle": f"{m.swizzle}B" if m.swizzle else "none",
        "interleave": "none",
        "oob_fill": "zero",
    }


def kernel_input(launch: Launch, arm: bool | int | None = None) -> dict[str, Any]:
    """The input JSON. arm: what branches that depend on data do: True taken, False not, an int a seeded mixture over
    warps, None for kernels without any."""
    declarations: list[dict] = []
    arguments: list[dict] = []
    maps: list[dict] = []
    arrays: list[dict] = []
    for p in launch.parameters:
        if p.kind == "map":
            declarations.append({"parameter": p.index, "type": "tensor_map", "object": p.name})
            maps.append(_tensor_map(p.index, p.value))
        elif p.kind == "pointer":
            declarations.append({"parameter": p.index, "type": "pointer", "space": "global", "object": p.name})
            if launch.buffers[p.name][0] == "int32" and p.name in launch.contents:
                values = [int(x) for x in launch.contents[p.name]]
                if min(values) < 0:
                    raise ValueError(f"{p.name}: the verifier takes known values >= 0 only, there is {min(values)}")
                arrays.append({"parameter": p.index, "element_type": "s32", "shapes": [values]})
        elif p.kind == "int32":
            arguments.append({"parameter": p.index, "type": "u32", "value": p.value})
    how: dict[str, Any] = {
        "grid_dim": list(launch.grid),
        "block_dim": [launch.block, 1, 1],
        "dynamic_shared_bytes": launch.smem,
    }
    if launch.cluster > 1:
        how["cluster_dim"] = [launch.cluster, 1, 1]
    made: dict[str, Any] = {
        "schema": "spverify.kernel-input/v1",
        "entry": launch.entry,
        "launch": how,
        "declarations": declarations,
        "arguments": arguments,
        "tma_descriptors": maps,
        "shape_arrays": arrays,
    }
    lines = chosen_lines(launch)
    if lines and arm is None:
        raise ValueError(f"lines {lines} branch on data: an arm must be chosen")
    if lines:
        what = {"taken": arm} if isinstance(arm, bool) else {"taken": "random", "seed": arm}
        made["branch_decisions"] = [{"line": n, "note": "depends on data", **what} for n in lines]
    return made


def _place(launch: Launch, name: str) -> tuple[str, list[int], list[int], int]:
    """(allocation, shape, byte strides, element bytes) of a buffer."""
    dtype, shape = launch.buffers[name]
    strides, size = [], ITEM_BYTES[dtype]
    for n in reversed(shape):
        strides.insert(0, size)
        size *= n
    return f"6:global{len(name)}:{name}", list(shape), strides, ITEM_BYTES[dtype]


def _premise(launch: Launch, name: str) -> list[dict[str, Any]]:
    """Of an operand whose known elements are all the same: this value. Control flow has the known values from
    `shape_arrays`, but for what is selected by them the prover reads memory, and only takes a range of all elements."""
    values = {int(x) for x in launch.contents.get(name, ())} if launch.buffers[name][0] == "int32" else set()
    if len(values) != 1:
        return []
    (value,) = values
    rule = {"object": name, "region": "whole_object", "source": "the known contents, see shape_arrays"}
    return [rule | {"element_type": t, "min_inclusive": value, "max_inclusive": value} for t in ("s32", "u32")]


def binding(
    launch: Launch, inputs: list[str], outputs: list[str], constants: dict[str, float] | None = None
) -> dict[str, Any]:
    """Which buffers the reference's arguments and results are, and its arguments behind them, which are numbers."""
    side: dict[str, Any] = {"allocations": {}, "parameters": {}, "layouts": {}}
    arguments = []
    for name in inputs:
        at, shape, strides, size = _place(launch, name)
        side["allocations"][at] = name
        side["layouts"][at] = {
            "source_offset": 0,
            "target_offset": 0,
            "element_bytes": size,
            "shape": shape,
            "source_strides_bytes": strides,
            "target_strides_bytes": strides,
        }
        arguments.append({"name": name, "allocation": at, "dtype": launch.buffers[name][0]})
    tensors = []
    for name in outputs:
        at, shape, strides, size = _place(launch, name)
        both = {f"{s}_{k}": v for s in ("left", "right") for k, v in (("allocation", at), ("offset", 0))}
        both |= {f"{s}_strides_bytes": strides for s in ("left", "right")}
        tensors.append({**both, "element_bytes": size, "shape": shape})
    one = {"kind": "dense_tensor", **tensors[0]} if len(tensors) == 1 else None
    known = [rule for name in inputs for rule in _premise(launch, name)]
    context = {"checker_context": {"input_contract": known}} if known else {}
    return {
        **context,
        "schema": "spverify.equivalence-mapping.v1",
        "left_inputs": side,
        "right_inputs": side,
        "outputs": one or {"kind": "dense_tensors", "tensors": tensors},
        "output_value_semantics": "ideal_real",
        "reference": {"arguments": arguments + [{"name": n, "value": v} for n, v in (constants or {}).items()]},
    }
