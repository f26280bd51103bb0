"""How a call is placed: each device computes its own examples and heads; sequence and depth stay whole.

One description, `Split`, says which mesh axes cut the leading axes, the query heads and the key heads. It comes from
the types on meshes with explicit axes (the call is then lowered as a `shard_map`), and from the partitioner on meshes
with automatic axes (`custom_partitioning`, with a Shardy rule, and callbacks for GSPMD). What runs on a
device is the same in both: `local`.

Query head `h` reads key head `h // (N / K)`. The mesh axes of the query heads are therefore split in two, major to
minor: those whose product divides K cut the key heads as well; along the others a key head is shared, so K and V are
repeated there, each device takes the key heads that its query heads read, and dK, dV are summed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_fa4.operands import AXES, BROADCAST, lead_of, names_in, names_out, result_shapes
from jax_fa4.reference import Operands
from jax_fa4.spec import AttentionSpec

Axes = tuple[str, ...]


# ---- varying over manual axes --------------------------------------------------------------------------------------


def varying(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which `x` varies (inside shard_map with check_vma)."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def vary(xs: Sequence[Any]) -> list[Any]:
    """Marks every operand as varying over the axes of any of them: a primitive wants them alike.

    Done outside custom_vjp it also makes autodiff sum the gradient of an operand that was replicated.
    """
    axes: frozenset[Any] = frozenset().union(*(varying(x) for x in xs))
    out = []
    for x in xs:
        missing = tuple(sorted(axes - varying(x), key=str))
        out.append(jax.lax.pcast(x, missing, to="varying") if missing else x)
    return out


def result_avals(named: dict[str, Any], returned: Sequence[Any]) -> list[Any]:
    """Abstract values of the results (name, shape, dtype), given those of the operands by name: they vary over the
    operands' manual axes, and on a mesh with explicit axes they are placed like the query."""
    query = named["query"]
    mesh = explicit_mesh([query, named["key"], named["value"]])
    out = []
    split = None if mesh is None else explicit_split(query, named["key"], named["value"], mesh)
    for name, shape, dtype in returned:
        spec = PartitionSpec(*[None] * len(shape)) if split is None else split.spec(name, shape)
        where = query.sharding.update(spec=spec) if mesh is None else NamedSharding(mesh, spec)
        out.append(query.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=where))
    return out


# ---- who computes what ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Mesh axes, major to minor, that cut each leading axis, the key heads, and the query heads of one key head."""

    lead: tuple[Axes, ...]
    key_heads: Axes
    shared: Axes  # the key heads are repeated along these

    @property
    def heads(self) -> Axes:
        return self.key_heads + self.shared

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Where the operand or result `name` of global shape `shape` lies."""
        own = lead_of(name, shape)
        lead = self.lead[: len(own)]
        heads = {"n": self.heads, "k": self.key_heads}
        cuts = [*lead, *(heads.get(letter, ()) for letter in AXES[name].replace("B", ""))]
        broadcast = name in BROADCAST
        return PartitionSpec(
            *(None if broadcast and n == 1 else axes or None for n, axes in zip(shape, cuts, strict=True))
        )


def split_heads(factors: Sequence[tuple[int, Any]], key_heads: int) -> tuple[list[Any], list[Any]]:
    """Cuts (size, axis) of the query heads, major to minor, into those that cut the key heads too, and the others."""
    left, cut = key_heads, 0
    for size, _ in factors:
        if left % size:
            break
        left, cut = left // size, cut + 1
    return [a for _, a in factors[:cut]], [a for _, a in factors[cut:]]


def local(body: Callable[..., Sequence[Any]], spec: AttentionSpec, direction: str, split: Split, group: int) -> Any:
    """`body` on one device's share of the operands, inside a manual region; `group` = N / K of the whole call."""
    called, returned = names_in(spec, direction), names_out(spec, direction)

    def run(*flat: Any) -> list[Any]:
        named = dict(zip(called, flat, strict=True))
        n, k = named["query"].shape[-2], named["key"].shape[-2]
        pick = _key_heads_read(split.shared, n, k, group) if split.shared and k > 1 else None
        if pick is not None:
            named |= {name: jnp.take(named[name], pick, axis=-2) for name in ("key", "value")}
        results = dict(zip(returned, body(*named.values()), strict=True))
        if direction == "bwd" and split.shared:
            for name in ("dkey", "dvalue"):
                results[name] = _sum_heads(results[name], pick, k, split.shared)
        if "dbias" in results:
            shape = named["bias"].shape
            axes = [*itertools.chain(*(a for a, size in zip(split.lead, shape, strict=False) if size == 1))]
            axes += split.heads if shape[-3] == 1 else ()
            results["dbias"] = _sum(results["dbias"], tuple(axes))
        return list(results.values())

    return run


def _key_heads_read(shared: Axes, n: int, k: int, group: int) -> Any:
    """Which of the k key heads here the n query heads here read: one for all of them, or one for each."""
    first = jax.lax.axis_index(shared) * n
    return (first // group)[None] if group % n == 0 else (first + jnp.arange(n)) // group


def _sum(x: Any, axes: Axes) -> Any:
    """Sum over devices, in float32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.psum(x.astype(wide), axes).astype(x.dtype) if axes else x


def _sum_heads(x: Any, pick: Any, k: int, shared: Axes) -> Any:
    """Gradients of the key heads `pick` -> of all k key heads, summed over the devices that share them."""
    if pick is None:
        return _sum(x, shared)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    zeros, x_wide = vary([jnp.zeros((*x.shape[:-2], k, x.shape[-1]), wide), x.astype(wide)])
    return jax.lax.psum(zeros.at[..., pick, :].add(x_wide), shared).astype(x.dtype)


def refuse_sequence(name: str, parts: int) -> ValueError:
    return ValueError(
        f"jax_fa4.attention: the sequence axis of {name} is sharded {parts} ways. Every device needs whole sequences"
        " here; shard the batch or the heads (jax.lax.with_sharding_constraint or jax.sharding.reshard), or use"
        " jax_fa4.context_parallel, which is made for sharded sequences. Nothing is gathered silently"
    )


# ---- meshes with explicit axes: from the types ---------------------------------------------------------------------


def explicit_axes(mesh: Any) -> Axes:
    """Axes of a mesh that are part of types."""
    return tuple(a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit)


def explicit_mesh(xs: Sequence[Any]) -> Any:
    """The mesh with explicit axes on which any of `xs` lies by its type, or None."""
    meshes = (_aval(x).sharding.mesh for x in xs)
    return next((m for m in meshes if not m.empty and explicit_axes(m)), None)


def _aval(x: Any) -> Any:
    return x if isinstance(x, core.AbstractValue) else jax.typeof(x)


def _entries(x: Any) -> list[Axes]:
    """Mesh axes of each axis of `x`, from its type."""
    aval = _aval(x)
    spec = [*aval.sharding.spec, *[None] * (aval.ndim - len(aval.sharding.spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def explicit_split(query: Any, key: Any, value: Any, mesh: Any) -> Split:
    """Placement from the types: that of the query, and where the query is whole, that of the key, then the value."""
    named = {"query": query, "key": key, "value": value}
    entries = {name: _entries(x) for name, x in named.items()}
    for name, e in entries.items():
        if e[-3]:
            raise refuse_sequence(name, math.prod(mesh.shape[a] for a in e[-3]))
    taken: set[str] = set()

    def first(axis: int, size: int) -> Axes:
        for e in entries.values():
            if e[axis] and not taken & set(e[axis]) and size % math.prod(mesh.shape[a] for a in e[axis]) == 0:
                taken.update(e[axis])
                return e[axis]
        return ()

    lead = tuple(first(i, query.shape[i]) for i in range(query.ndim - 3))
    heads = first(-2, query.shape[-2])
    own, shared = split_heads([(mesh.shape[a], a) for a in heads], key.shape[-2])
    return Split(lead, tuple(own), tuple(shared))


def aligned(ops: Operands) -> Operands:
    """Operands on a mesh with explicit axes brought to one placement; the gradients go back to their own."""
    mesh = explicit_mesh([x for x in ops if x is not None])
    if mesh is None:
        return ops
    split = explicit_split(ops.query, ops.key, ops.value, mesh)
    return Operands(*(None if x is None else _put(n, x, split, mesh) for n, x in zip(ops._fields, ops, strict=True)))


def _put(name: str, x: Any, split: Split, mesh: Any) -> Any:
    spec = split.spec(name, x.shape)
    if _entries(x) == _entries_of(spec, x.ndim) and not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _entries_of(spec: PartitionSpec, ndim: int) -> list[Axes]:
    return [
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in (*spec, *[None] * (ndim - len(spec)))
    ]


def over_explicit_mesh(bind: Any, avals: Sequence[Any], spec: AttentionSpec, direction: str) -> Any:
    """`bind` as a shard_map over the explicit axes of the mesh of `avals`; None where there are none."""
    called, returned = names_in(spec, direction), names_out(spec, direction)
    named = dict(zip(called, avals, strict=True))
    mesh = explicit_mesh([named["query"], named["key"], named["value"]])
    if mesh is None:
        return None
    split = explicit_split(named["query"], named["key"], named["value"], mesh)
    shapes = result_shapes({name: x.shape for name, x in named.items()}, spec, direction)
    group = named["query"].shape[-2] // named["key"].shape[-2]
    mapped = jax.shard_map(
        local(bind, spec, direction, split, group),
        mesh=mesh,
        in_specs=tuple(split.spec(name, x.shape) for name, x in named.items()),
        out_specs=[split.spec(name, shape) for name, shape in zip(returned, shapes, strict=True)],
        axis_names=set(explicit_axes(mesh)),
    )

    def run(*flat: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh):
            return list(mapped(*(_put(name, x, split, mesh) for name, x in zip(called, flat, strict=True))))

    return run


# ---- meshes with automatic axes: from the partitioner --------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """A partitioner's sharding as mixed radices: for each axis (size, stride between devices), major to minor."""

    axes: tuple[tuple[tuple[int, int], ...], ...]
    manual: tuple[tuple[int, int], ...]
    devices: int

    def parts(self, axis: int) -> int:
        return math.prod(size for size, _ in self.axes[axis])


def decode(sharding: Any, ndim: int) -> Tiles:
    """Reads the device order of a sharding that comes without axis names, or with names that do not matter here."""
    nothing: tuple[tuple[int, int], ...] = ()
    if sharding is None:
        return Tiles((nothing,) * ndim, nothing, 1)
    hlo = sharding._to_xla_hlo_sharding(ndim)
    if not hlo.is_tiled():
        return Tiles((nothing,) * ndim, nothing, sharding.num_devices)
    devices = np.asarray(hlo.tile_assignment_devices()).reshape(hlo.tile_assignment_dimensions())
    radices = []
    for axis in range(devices.ndim):
        line = np.moveaxis(devices, axis, 0).reshape(devices.shape[axis], -1)[:, 0]
        radices.append(_radices([int(x) for x in line]))
    kinds = [*hlo.subgroup_types()] or ["REPLICATED"] * hlo.replicate_on_last_tile_dim()
    manual = [r for r, kind in zip(radices[ndim:], kinds, strict=True) if "MANUAL" in str(kind)]
    return Tiles(tuple(radices[:ndim]), tuple(itertools.chain(*manual)), devices.size)


def _radices(line: list[int]) -> tuple[tuple[int, int], ...]:
    """Device numbers along one axis as (size, stride) pairs, major to minor."""
    found = []
    while len(line) > 1:
        stride = line[1] - line[0]
        size = next((i for i, x in enumerate(line) if x != line[0] + i * stride), len(line))
        if len(line) % size:
            raise ValueError(f"jax_fa4: device order {line} is not a mesh")
        found.append((size, stride))
        line = line[::size]
    return tuple(reversed(found))


def _mesh_of(radices: Sequence[tuple[int, int]], manual: Sequence[tuple[int, int]], devices: int) -> tuple[Any, Any]:
    """A mesh in the devices' own order with one axis for each radix, and the axis names by stride."""
    axes: list[tuple[int, int]] = []
    whole = devices
    for size, stride in sorted([*radices, *manual], key=lambda r: -r[1]):
        if whole % (size * stride):
            raise ValueError(f"jax_fa4: {devices} devices in strides {radices} are not a mesh")
        if whole > size * stride:  # what no radix has lies between; it is replicated
            axes.append((whole // (size * stride), size * stride))
        axes.append((size, stride))
        whole = stride
    if whole > 1:
        axes.append((whole, 1))
    names = {stride: f"axis{i}" for i, (_, stride) in enumerate(axes)}
    kinds = tuple(AxisType.Manual if axis in manual else AxisType.Auto for axis in axes)
    return AbstractMesh(tuple(size for size, _ in axes), tuple(names.values()), axis_types=kinds), names


def partitioner_split(query: Any, key_heads: int) -> tuple[Any, Split]:
    """Mesh and placement from the sharding that the partitioner suggests for the query, any rank [B, t, n, d]."""
    tiles = decode(query.sharding, len(query.shape))
    factors: list[tuple[int, int]] = []
    left = key_heads
    for size, stride in tiles.axes[-2]:  # a radix that only partly divides the key heads is cut in two
        both = math.gcd(left, size) if left else 1
        factors += [(n, s) for n, s in ((both, stride * (size // both)), (size // both, stride)) if n > 1]
        left = left // both if both == size else 0
    mesh, names = _mesh_of([*itertools.chain(*tiles.axes[:-3]), *factors], tiles.manual, tiles.devices)
    lead = tuple(tuple(names[stride] for _, stride in axis) for axis in tiles.axes[:-3])
    own, shared = split_heads([(size, names[stride]) for size, stride in factors], key_heads)
    return mesh, Split(lead, tuple(own), tuple(shared))


def partitioned(bind: Callable[..., Sequence[Any]], direction: str) -> Callable[..., Any]:
    """`bind(*operands, how=how)` as a computation that the partitioner cuts over devices by batch and heads."""

    def whole(how: Any, *flat: Any) -> list[Any]:
        return list(bind(*flat, how=how))

    def split_of(how: Any, args: Any) -> tuple[Any, Split, dict[str, Any]]:
        named = dict(zip(names_in(how.spec, direction), args, strict=True))
        return *partitioner_split(named["query"], named["key"].shape[-2]), named

    def placed(names: Sequence[str], like: Any, mesh: Any, split: Split) -> Any:
        leaves, tree = jax.tree.flatten(like)
        put = [NamedSharding(mesh, split.spec(n, x.shape)) for n, x in zip(names, leaves, strict=True)]
        return jax.tree.unflatten(tree, put)

    def partition(how: Any, _: Any, args: Any, results: Any) -> tuple[Any, Any, Any, Any]:
        mesh, split, named = split_of(how, args)
        for name in ("query", "key", "value"):
            parts = decode(named[name].sharding, len(named[name].shape)).parts(-3)
            if parts > 1:
                raise refuse_sequence(name, parts)
        group = named["query"].shape[-2] // named["key"].shape[-2]
        body = local(functools.partial(whole, how), how.spec, direction, split, group)
        given, returned = names_in(how.spec, direction), names_out(how.spec, direction)
        return mesh, body, placed(returned, results, mesh, split), placed(given, args, mesh, split)

    def infer(how: Any, _: Any, args: Any, results: Any) -> Any:
        mesh, split, _named = split_of(how, args)
        put = placed(names_out(how.spec, direction), results, mesh, split)
        if direction == "bwd" and split.shared:  # part of a mesh axis may cut the key heads; GSPMD cannot place
            whole = placed(names_out(how.spec, direction), results, mesh, replace(split, key_heads=()))
            put = [*put[:1], *whole[1:3], *put[3:]]  # a result of jit so
        return put

    def rule(how: Any, _: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        return shardy_rule(how.spec, direction, [tuple(x.shape) for x in (*operands, *results)])

    call = custom_partitioning(whole, static_argnums=(0,))
    call.def_partition(partition, infer, decode_shardings=False, sharding_rule=rule)
    return call


def shardy_rule(spec: AttentionSpec, direction: str, shapes: Sequence[tuple[int, ...]]) -> tuple[str, dict[str, Any]]:
    """The rule in Einsum-like notation and the sizes of its compound factors.

    Leading axes and heads are shared by all arrays; every sequence and depth axis is a factor of its own, so that no
    sharding of a sequence is carried from one array to another through this call.
    """
    called = names_in(spec, direction)
    names = (*called, *names_out(spec, direction))
    by_name = dict(zip(names, shapes, strict=True))
    n, k = by_name["query"][-2], by_name["key"][-2]
    heads = "g" if k == 1 else "k" if n == k else "(k g)"
    alone = (f"x{i}" for i in itertools.count())
    words = []
    for name, shape in zip(names, shapes, strict=True):
        lead = len(lead_of(name, shape))
        factors = [f"b{i}" for i in range(lead)]
        factors += [{"n": heads, "k": "k"}.get(a) or next(alone) for a in AXES[name].replace("B", "")]
        if name in BROADCAST:
            factors = [f if size > 1 else next(alone) for f, size in zip(factors, shape, strict=True)]
        words.append(" ".join(factors))
    sizes = {"g": n // k} if heads == "(k g)" else {}  # k is a whole axis of key and value
    return f"{', '.join(words[: len(called)])} -> {', '.join(words[len(called) :])}", sizes


# ---- several devices or one ----------------------------------------------------------------------------------------


def several_devices(ctx: Any) -> bool:
    """Whether the code being lowered still has to be cut over devices: not on one device, not where all is manual."""
    where = ctx.module_context.axis_context
    manual = getattr(where, "manual_axes", None)
    if manual is not None:
        # In a shard_map inside another, jax 0.10.0 names the axes of the inner one alone; the types name all.
        mesh = ctx.avals_in[0].sharding.mesh
        typed = {a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Manual}
        return any(size > 1 for axis, size in where.mesh.shape.items() if axis not in typed | set(manual))
    return getattr(where, "num_devices", 1) > 1


def refuse_export(ctx: Any) -> None:
    """Code that the partitioner has still to cut holds a pointer into this process; it cannot be exported."""
    if ctx.module_context.lowering_parameters.for_export:
        raise ValueError(
            "jax_fa4: a computation for several devices whose sharding the compiler chooses cannot be exported (it"
            " holds a callback of this process). Put the call inside jax.shard_map over all mesh axes, or use a mesh"
            " with explicit axes (jax.sharding.AxisType.Explicit); both can be exported"
        )


def placed_by_types(xs: Sequence[Any]) -> bool:
    """Whether the types say where everything lies: inside a shard_map over all axes, or all others are explicit."""
    mesh = explicit_mesh(xs) or jax.sharding.get_abstract_mesh()
    return not mesh.empty and AxisType.Auto not in mesh.axis_types


@functools.cache
def needs_devices() -> Any:
    """A jaxpr that holds a custom_partitioning. As a parameter of an equation it makes jit tell its devices to the
    lowering rule, which the partitioner's callbacks need (jax 0.10 and 0.11 look for that primitive, nested too)."""
    marker = custom_partitioning(lambda x: x)
    marker.def_partition(lambda mesh, args, result: None, lambda mesh, args, result: None, sharding_rule="i -> i")
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(marker)(jax.ShapeDtypeStruct((1,), jnp.float32))
