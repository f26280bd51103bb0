"""Launch: a plan's bound kernels and their PTX as one neutral description, which verifier and emulator take as input.

Nothing about shapes is typed by hand and the host launcher is not involved: grid, block, shared memory, tensor maps and
parameter order come from `bind(plan, extents)`; the PTX says only what kind of thing each parameter is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map as the hardware has it: everything innermost first, strides in bytes."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of all dimensions but the innermost
    box: tuple[int, ...]
    swizzle: int  # bytes
    store: bool


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter. kind: map (value a TensorMap), pointer (a buffer's name), int32 (a number), extents (the
    size in bytes of a coordinate tensor's shape, which no instruction loads)."""

    index: int
    kind: str
    name: str
    value: Any = None


@dataclass(frozen=True)
class Launch:
    """One kernel of one call."""

    entry: str  # its name in the PTX
    ptx: str
    grid: tuple[int, int, int]
    block: int
    cluster: int
    smem: int
    parameters: tuple[Parameter, ...]
    buffers: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape, of every buffer of the call
    contents: dict[str, list[float]] = field(default_factory=dict)  # of the buffers whose values are known


def entries(ptx: str) -> list[tuple[str, list[str]]]:
    """(name, parameter declarations) of the kernels of a module, in order."""
    found = re.findall(r"\.entry\s+(\w+)\s*\((.*?)\n\)", ptx, re.S)
    return [(name, re.findall(r"\.param\s+([^\n,]+)", body)) for name, body in found]


def size_of(declaration: str) -> int:
    """Bytes of a structure; 0 for a number."""
    size = re.search(r"\.b8\s+\w+\[(\d+)\]", declaration)
    return int(size[1]) if size else 0


def kind_of(declaration: str) -> str:
    """What a `.param` declaration of ours can be."""
    size = size_of(declaration)
    if size == 128:
        return "map"
    if size in (4, 8, 12, 16, 20):  # int32 each, of the dimensions that are not static
        return "extents"
    if size:
        raise ValueError(f"a parameter of {size} bytes is neither a tensor map nor extents: {declaration}")
    if re.match(r"\.[us]64", declaration):
        return "pointer"
    if re.match(r"\.[us]32", declaration):
        return "int32"
    raise ValueError(f"parameter of unknown kind: {declaration}")


def tensor_map(descriptor: Any, dtype: str) -> TensorMap:
    """The map of a bound Descriptor: its stride-1 dimension innermost, its box cut to the width of the swizzle."""
    size = ITEM_BYTES[dtype]
    inner = descriptor.strides.index(1)
    order = [inner, *(i for i in range(len(descriptor.dims)) if i != inner)]
    box = [descriptor.box[i] if i < len(descriptor.box) else 1 for i in order]
    box[0] = min(box[0], descriptor.swizzle // size)
    return TensorMap(
        descriptor.tensor,
        dtype,
        tuple(int(descriptor.dims[i]) for i in order),
        tuple(size * int(descriptor.strides[i]) for i in order[1:]),
        tuple(box),
        descriptor.swizzle,
        descriptor.store,
    )


def _parameters(kernel: Any, declarations: list[str], e: dict[str, int], dtypes: dict[str, str]) -> list[Parameter]:
    sources = {
        "map": iter([(d.tensor, tensor_map(d, dtypes[d.tensor])) for d in kernel.descriptors]),
        "pointer": iter([(name, name) for name in kernel.pointers]),
        "int32": iter([(symbol, int(e[symbol])) for symbol in kernel.extents]),
    }
    made: list[Parameter] = []
    for index, declaration in enumerate(declarations):
        kind = kind_of(declaration)
        if kind == "extents":
            made.append(Parameter(index, kind, made[-1].name, size_of(declaration)))
            continue
        item = next(sources[kind], None)
        if item is None:
            raise ValueError(f"{kernel.name}: the PTX has one {kind} parameter more than the plan: {declaration}")
        made.append(Parameter(index, kind, *item))
    for kind, rest in sources.items():
        left = [name for name, _ in rest]
        if left:
            raise ValueError(f"{kernel.name}: the plan's {kind} parameters {left} are not in the PTX")
    return made


def launches(plan: Any, bind: Any, shapes: dict[str, int], ptx: str, contents: dict[str, list] | None = None):
    """The launches of one call, in order. shapes: B, T, S, N, K. contents: known values by buffer name."""
    e = plan.extents(shapes)
    buffers = {b.name: (b.dtype, b.sized(e)) for b in plan.inputs + plan.outputs}
    kernels, found = bind(plan, e), entries(ptx)
    if len(kernels) != len(found):
        raise ValueError(f"the plan launches {[k.name for k in kernels]}, the PTX has {[name for name, _ in found]}")
    for name, values in (contents or {}).items():
        size = 1
        for n in buffers[name][1]:
            size *= n
        if len(values) != size:
            raise ValueError(f"{name} has {size} elements for {shapes}; {len(values)} values were given")
    dtypes = {name: dtype for name, (dtype, _) in buffers.items()}
    made = []
    for kernel in kernels:
        name, declarations = next(x for x in found if f"_{kernel.name}_" in x[0] or len(found) == 1)
        parameters = tuple(_parameters(kernel, declarations, e, dtypes))
        grid = tuple(int(x) for x in kernel.grid)
        made.append(
            Launch(name, ptx, grid, kernel.block, kernel.cluster, kernel.smem, parameters, buffers, contents or {})
        )
    return made


def to_emulator(launch: Launch, roles: dict[str, tuple[int, ...]] | None = None):
    """The emulator's record of this launch. Buffers are given to its `run` by name, as arrays."""
    from emulator import Launch as Emulated
    from emulator import Opaque, Pointer, Scalar, Tma

    def of(p: Parameter):
        if p.kind == "map":
            m = p.value
            swizzle = f"{m.swizzle}B" if m.swizzle else "none"
            return Tma(m.tensor, m.dtype, m.shape, m.strides, m.box, swizzle)
        if p.kind == "extents":
            return Opaque(bytes(p.value))
        return Pointer(p.name) if p.kind == "pointer" else Scalar(p.value)

    return Emulated(
        tuple(of(p) for p in launch.parameters),
        launch.grid,
        (launch.block, 1, 1),
        (launch.cluster, 1, 1),
        launch.smem,
        launch.entry,
        roles or {},
    )
