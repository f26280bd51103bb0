"""Segments -> Python functions: grouping of independent pure operations, and the two variants (all lanes, some
lanes).
"""

from itertools import pairwise

import numpy as np

from .kinds import BITS, CLASS_BITS
from .program import Micro, identity

GROUP = True


def resources(ref):
    """The 16-bit pieces of a register that an access of `ref` = (class, index, kind) touches."""
    cls, index, kind = ref
    if cls in "ph":
        return [(cls, index, 0)]
    units = CLASS_BITS[cls] // 16
    if kind.startswith(("lo", "hi")):
        half = units // 2
        start = half if kind.startswith("hi") else 0
        return [(cls, index, i) for i in range(start, start + half)]
    n = max(1, min(units, BITS[kind] // 16))
    return [(cls, index, i) for i in range(n)]


def whole(reg):
    return [(reg[0], reg[1], i) for i in range(max(1, CLASS_BITS[reg[0]] // 16))]


def schedule(items, effects):
    """Groups in execution order: lists of Micro with one signature, or effect numbers. Keeps all register dependences
    and effect order.
    """
    n = len(items)
    blockers, followers = [0] * n, [[] for _ in range(n)]
    writer, readers, last_effect = {}, {}, None

    def edge(a, b):
        if a is not None and a != b:
            followers[a].append(b)
            blockers[b] += 1

    for i, item in enumerate(items):
        if isinstance(item, Micro):
            uses = [r for s in item.srcs if not isinstance(s, np.ndarray) for r in resources(s)]
            makes = resources(item.dst)
        else:
            uses = makes = [r for reg in effects[item].registers for r in whole(reg)]
            edge(last_effect, i)
            last_effect = i
        for r in uses:
            edge(writer.get(r), i)
        for r in makes:
            edge(writer.get(r), i)
            for j in readers.get(r, ()):
                edge(j, i)
        for r in uses:
            readers.setdefault(r, []).append(i)
        for r in makes:
            writer[r] = i
            readers[r] = []
    remaining, ready, ready_effects = {}, {}, []
    signature = [item.signature() if isinstance(item, Micro) else None for item in items]
    for s in signature:
        if s is not None:
            remaining[s] = remaining.get(s, 0) + 1

    def release(i):
        if signature[i] is None:
            ready_effects.append(i)
        else:
            ready.setdefault(signature[i], []).append(i)

    for i in range(n):
        if blockers[i] == 0:
            release(i)
    out, done = [], 0
    while done < n:
        pick = [s for s in ready if len(ready[s]) == remaining[s]]
        if not pick and ready_effects:
            group = [ready_effects.pop(0)]
            out.append(items[group[0]])
        else:
            best = max(pick or ready, key=lambda s: len(ready[s]))
            group = ready.pop(best)
            remaining[best] -= len(group)
            out.append([items[i] for i in group])
        done += len(group)
        for i in group:
            for j in followers[i]:
                blockers[j] -= 1
                if blockers[j] == 0:
                    release(j)
    return out


class _Source:
    """Collects the lines and constants of one function."""

    def __init__(self, effects):
        self.effects = effects
        self.env = {"np": np, "copyto": np.copyto}
        self.names = {}
        self.views = {}
        self.lines = []

    def name(self, value, prefix="K"):
        key = id(value)
        if key not in self.names:
            self.names[key] = f"{prefix}{len(self.names)}"
            self.env[self.names[key]] = value
            self.env.setdefault("_keep", []).append(value)
        return self.names[key]

    def rows(self, cls, kind):
        key = f"{cls}_{kind}"
        self.views[key] = f"w.v[{(cls, kind)!r}]"
        return key

    def matrix(self, cls, kind):
        key = f"m_{cls}_{kind}"
        self.views[key] = f"w.m[{(cls, kind)!r}]"
        return key

    def operand(self, src):
        if isinstance(src, np.ndarray):
            if len(src) == 2:  # packed pair: tile over the lanes
                return f"{self.name(np.tile(src, 128))}[:2 * w.n]"
            return self.name(src)
        return f"{self.rows(src[0], src[2])}[{src[1]}]"

    def single(self, m, masked):
        args = ", ".join(self.operand(s) for s in m.srcs)
        dst = f"{self.rows(m.dst[0], m.dst[2])}[{m.dst[1]}]"
        value = args if m.fn is identity else f"{self.name(m.fn)}({args})"
        if masked:
            mask = "w.mask2" if m.dst[2] == "f32x2" else "w.mask"
            self.lines.append(f"copyto({dst}, {value}, where={mask})")
        elif isinstance(m.fn, np.ufunc) and same_type(m):
            self.lines.append(f"{self.name(m.fn)}({args}, out={dst})")
        else:
            self.lines.append(f"{dst}[:] = {value}")

    def group(self, ms):
        first = ms[0]
        args = []
        for k, s in enumerate(first.srcs):
            column = [m.srcs[k] for m in ms]
            if isinstance(s, np.ndarray):
                if len({c.tobytes() for c in column}) == 1:
                    args.append(self.operand(s))
                else:
                    args.append(self.name(np.stack(column)))
            else:
                args.append(self.pick(s[0], s[2], [c[1] for c in column]))
        dst = f"{self.matrix(first.dst[0], first.dst[2])}[{self.index([m.dst[1] for m in ms])}]"
        value = args[0] if first.fn is identity else f"{self.name(first.fn)}({', '.join(args)})"
        self.lines.append(f"{dst} = {value}")

    def pick(self, cls, kind, indices):
        if len(set(indices)) == 1:
            return f"{self.rows(cls, kind)}[{indices[0]}]"
        return f"{self.matrix(cls, kind)}[{self.index(indices)}]"

    def index(self, indices):
        step = indices[1] - indices[0]
        if step > 0 and all(b - a == step for a, b in pairwise(indices)):
            return f"{indices[0]}:{indices[-1] + 1}" + (f":{step}" if step > 1 else "")
        return self.name(np.array(indices))

    def function(self, name):
        body = [f"{key} = {text}" for key, text in self.views.items()] + (self.lines or ["pass"])
        text = f"def {name}(w):\n" + "\n".join("    " + line for line in body)
        exec(compile(text, f"<{name}>", "exec"), self.env)
        return self.env[name]


def same_type(m):
    """May the ufunc write straight into the destination row? Only if all operands have its type (comparisons write
    bool).
    """
    if m.dst[2] == "pred":
        return True
    kinds = {s.dtype if isinstance(s, np.ndarray) else s[2] for s in m.srcs}
    return all(not isinstance(k, str) or k == m.dst[2] for k in kinds)


def compile_segment(program, segment, masked):
    """The segment's function for all lanes (grouped) or some lanes (`w.mask`, in program order)."""
    src = _Source(program.effects)
    if masked or not GROUP:
        order = [[i] if isinstance(i, Micro) else i for i in segment.items]
    else:
        order = schedule(segment.items, program.effects)
    for item in order:
        if not isinstance(item, list):
            src.lines.append(f"{src.name(program.effects[item].run)}(w)")
        elif (
            masked
            or len(item) == 1
            or (item[0].dst[2] == "f32x2" and any(isinstance(s, np.ndarray) for m in item for s in m.srcs))
        ):
            for m in item:
                src.single(m, masked)
        else:
            src.group(item)
    return src.function(f"segment_{segment.index}{'_masked' if masked else ''}")
