"""Attention over a sequence that is sharded: all-gather of K and V, a ring of K and V, or sequence-to-heads all-to-all.

The three functions run inside `jax.shard_map`, on the local shards [B, T / P, N, D] of an axis of P devices, and give
what the unsharded call gives, forward and backward. `attention` wraps them for global arrays. JAX's own collectives do
the moving. Everything rests on two facts:

  * A block of keys that starts at `k_start`, seen from queries that start at `q_start`, is the same attention with
    the diagonal shifted by `q_start - k_start`, which is a run-time value of the kernels (mask.Band.offset).
  * Partial results merge exactly by their log-sum-exp,  lse = log(sum_p exp(lse_p)),
    out = sum_p exp(lse_p - lse) out_p,  and the backward of a block needs only the merged out and lse.

Layouts of the sequence over the P devices: "contiguous", device r holds the r-th part; "zigzag", device r holds the
parts r and 2P-1-r of 2P, which balances causal work (`to_zigzag`, `from_zigzag` reorder global arrays).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_fa4 import api, primitives, sharding, spec
from jax_fa4.primitives import How
from jax_fa4.reference import Operands

MODES = ("all_gather", "ring", "all_to_all")
LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Placement:
    """How the sequence lies on the axis."""

    axis: str
    size: int
    layout: str

    @property
    def parts(self) -> int:
        """Contiguous parts that one device holds."""
        return 2 if self.layout == "zigzag" else 1

    def starts(self, rank: Any, local: int) -> list[Any]:
        """First global position of each part of device `rank`, whose shard is `local` long."""
        if self.layout == "contiguous":
            return [rank * local]
        half = local // 2
        return [rank * half, (2 * self.size - 1 - rank) * half]

    def order(self) -> list[int]:
        """Which part of the global sequence stands where once all shards are concatenated in rank order."""
        if self.layout == "contiguous":
            return list(range(self.size))
        return [part for r in range(self.size) for part in (r, 2 * self.size - 1 - r)]


def _reordered(x: Any, order: list[int], axis: int) -> Any:
    """`x` cut into equal parts along `axis`, part `order[i]` put at place i."""
    shape = x.shape
    if shape[axis] % len(order):
        raise ValueError(f"a length of {shape[axis]} cannot be cut into {len(order)} equal parts")
    parts = x.reshape(*shape[:axis], len(order), shape[axis] // len(order), *shape[axis + 1 :])
    return jnp.take(parts, np.asarray(order), axis=axis).reshape(shape)


def to_zigzag(x: Any, devices: int, axis: int = 1) -> Any:
    """A global array in zigzag order along `axis`: device r's shard then holds the parts r and 2P-1-r of 2P."""
    return _reordered(x, Placement("", devices, "zigzag").order(), axis)


def from_zigzag(x: Any, devices: int, axis: int = 1) -> Any:
    """The inverse of `to_zigzag`."""
    return _reordered(x, list(np.argsort(Placement("", devices, "zigzag").order())), axis)


# ---- the local problem ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Static:
    """What the ring's differentiation rule needs besides arrays."""

    how: How
    place: Placement
    scale_traced: bool


def _prepare(
    q: Any, k: Any, v: Any, axis_name: str, layout: str, o: api.Options
) -> tuple[Operands, How, Placement, bool]:
    """Checks, and operands whose lengths and offset are those of the whole sequence."""
    q, k, v = (api._as_array(name, x) for name, x in (("query", q), ("key", k), ("value", v)))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [B, T / P, N, D] inside shard_map; it has {x.shape}")
    api._check(q, k, v)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}; it is {layout!r}")
    size = lax.axis_size(axis_name)
    place = Placement(axis_name, size, layout)
    t, s = q.shape[1], k.shape[1]
    if t % place.parts or s % place.parts:
        raise ValueError(f"the zigzag layout needs shards of even length; they have {t} queries and {s} keys")
    how = api._how(o, api._flags(o, None, None))
    given = o.query_seq_lengths, o.key_value_seq_lengths
    ops, traced = api._operands(q, k, v, None, None, replace(o, query_seq_lengths=None, key_value_seq_lengths=None))
    batch = q.shape[:1]
    q_len = api._lengths("query_seq_lengths", given[0], batch, t * size)
    kv_len = api._lengths("key_value_seq_lengths", given[1], batch, s * size)
    bottom = spec.check_alignment(o.causal_alignment)
    ops = ops._replace(q_len=q_len, kv_len=kv_len, offset=kv_len - q_len if bottom else jnp.zeros_like(q_len))
    return Operands(*api._varied(ops)), how, place, traced


def _part(x: Any, n: int, parts: int) -> Any:
    """The n-th of `parts` equal parts along the sequence."""
    if x is None or parts == 1:
        return x
    size = x.shape[1] // parts
    return lax.slice_in_dim(x, n * size, (n + 1) * size, axis=1)


def _block(ops: Operands, kv: Any, starts: tuple[Any, Any]) -> Operands:
    """Operands of one block: queries `ops` from starts[0] on, keys `kv` = (k, v, segments) from starts[1] on."""
    q_start, k_start = starts
    k, v, segments = kv
    shift = q_start - k_start
    return ops._replace(
        key=k,
        value=v,
        kv_segments=segments,
        offset=ops.offset + shift,
        q_len=jnp.clip(ops.q_len - q_start, 0, ops.query.shape[1]),
        kv_len=jnp.clip(ops.kv_len - k_start, 0, k.shape[1]),
    )


def _any_visible(block: Operands, how: How) -> Any:
    """Whether some pair of the block may see each other, by band and lengths alone (segments are not looked at)."""
    seen = (block.kv_len > 0) & (block.q_len > 0)
    if how.spec.band:
        nearest = -block.offset - (block.q_len - 1)  # j - i - offset of key 0 and the last query: the smallest
        farthest = block.kv_len - 1 - block.offset
        seen &= (nearest <= block.window[1]) & (farthest >= -block.window[0])
    return jnp.any(seen)


def _of_a_block(how: How) -> How:
    """A block ends where the lengths say, leaves the sink to the merge, and is part of a larger attention."""
    return replace(how, spec=replace(how.spec, lengths=True, sinks=False, partial=True))


# ---- all-gather ----------------------------------------------------------------------------------------------------


def _options(options: dict[str, Any]) -> api.Options:
    unknown = sorted(set(options) - set(api.Options.__dataclass_fields__))
    if unknown:
        raise TypeError(
            f"context parallelism does not take {unknown[0]!r}; it takes {sorted(api.Options.__dataclass_fields__)}"
        )
    return api.Options(**options)


def _natural(x: Any, place: Placement) -> Any:
    """Gathered shards [B, P * local, ...] in the order of the global sequence."""
    if x is None or place.layout == "contiguous":
        return x
    return _reordered(x, list(np.argsort(place.order())), 1)


def all_gather(
    query: Any, key: Any, value: Any, *, axis_name: str, layout: str = "contiguous", return_residual: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Every device gathers all keys and values and attends its own queries.

    Moves 2 K D S (1 - 1/P) elements to each device, before the compute and exposed, and holds all of K and V; the
    backward returns dK and dV by a reduce-scatter. Best for short sequences, few key heads, many queries.

    Args and returns as `jax_fa4.attention`, on local shards: query [B, T/P, N, D], key and value [B, S/P, K, D].
    Lengths are those of the whole sequence; segment ids are sharded like the sequence.
    """
    ops, how, place, traced = _prepare(query, key, value, axis_name, layout, _options(options))
    whole = [
        None if x is None else _natural(lax.all_gather(x, axis_name, axis=1, tiled=True), place)
        for x in (ops.key, ops.value, ops.kv_segments)
    ]
    rank = lax.axis_index(axis_name)
    starts = place.starts(rank, ops.query.shape[1])
    results = []
    for n, start in enumerate(starts):
        mine = ops._replace(query=_part(ops.query, n, place.parts), q_segments=_part(ops.q_segments, n, place.parts))
        block = Operands(*api._varied(_block(mine, whole, (start, 0))))
        static = api.Static(how, traced, None)
        results.append(api._attend(static, block))
    return _returned(_joined([r[0] for r in results], 1), _joined([r[1] for r in results], 2), return_residual)


def _joined(xs: list[Any], axis: int) -> Any:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=axis)


def _returned(out: Any, lse: Any, return_residual: bool) -> Any:
    return (out, jnp.swapaxes(lse, 1, 2).astype(jnp.float32)) if return_residual else out


# ---- all-to-all ----------------------------------------------------------------------------------------------------


def all_to_all(
    query: Any, key: Any, value: Any, *, axis_name: str, layout: str = "contiguous", return_residual: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Shards of the sequence become shards of the heads, each device attends whole sequences, and back.

    Moves (2 N + 2 K) D T / P elements from each device. Needs N to be a multiple of P, and K a multiple or a divisor of
    P (with K < P the key heads are gathered and each device takes the one it needs).
    """
    o = _options(options)
    ops, how, place, traced = _prepare(query, key, value, axis_name, layout, o)
    n, k, size = ops.query.shape[2], ops.key.shape[2], place.size
    if n % size or (k % size and size % k):
        raise ValueError(
            f"all_to_all needs query heads that are a multiple of the {size} devices and key heads that are a multiple"
            f" or a divisor of them; there are {n} and {k}. `ring` and `all_gather` take any"
        )
    swap = functools.partial(lax.all_to_all, axis_name=axis_name, split_axis=2, concat_axis=1, tiled=True)
    gather = functools.partial(lax.all_gather, axis_name=axis_name, axis=1, tiled=True)
    rank = lax.axis_index(axis_name)

    def keys(x: Any) -> Any:
        if k % size == 0:
            return _natural(swap(x), place)
        return lax.dynamic_slice_in_dim(_natural(gather(x), place), rank * k // size, 1, axis=2)

    sinks = ops.sinks
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, rank * (n // size), n // size)
    whole = ops._replace(
        query=_natural(swap(ops.query), place),
        key=keys(ops.key),
        value=keys(ops.value),
        sinks=sinks,
        q_segments=None if ops.q_segments is None else _natural(gather(ops.q_segments), place),
        kv_segments=None if ops.kv_segments is None else _natural(gather(ops.kv_segments), place),
    )
    out, lse = api._attend(api.Static(how, traced, None), Operands(*api._varied(whole)))
    if place.layout == "zigzag":
        out, lse = _reordered(out, place.order(), 1), _reordered(lse, place.order(), 2)
    out = lax.all_to_all(out, axis_name, split_axis=1, concat_axis=2, tiled=True)
    lse = lax.all_to_all(lse, axis_name, split_axis=2, concat_axis=1, tiled=True)
    return _returned(out, lse, return_residual)


# ---- ring ----------------------------------------------------------------------------------------------------------


def ring(
    query: Any, key: Any, value: Any, *, axis_name: str, layout: str = "contiguous", return_residual: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """K and V travel round the ring of devices while each attends the block at hand; blocks merge by their LSE.

    Moves 2 K D S / P elements a step, started before the block's compute so that XLA can hide them; holds two blocks.
    Blocks that a causal mask, a window or the lengths hide entirely are skipped. Use the zigzag layout for causal
    masks: with the contiguous one device 0 has one block to do and device P-1 has P.
    """
    ops, how, place, traced = _prepare(query, key, value, axis_name, layout, _options(options))
    out, lse = _ring(_Static(how, place, traced), ops)
    return _returned(out, lse, return_residual)


def _turn(xs: Any, place: Placement) -> Any:
    """What the previous device holds."""
    pairs = [(r, (r + 1) % place.size) for r in range(place.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, place.axis, pairs), xs)


def _merge(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two partial (out [B,T,N,V], lse [B,N,T]) into one; -inf has no weight."""
    lse = jnp.logaddexp(a[1], b[1])
    base = jnp.where(jnp.isneginf(lse), 0, lse)

    def weighted(out: Any, part: Any) -> Any:
        return out * jnp.swapaxes(jnp.exp(part - base), 1, 2)[..., None].astype(out.dtype)

    return weighted(a[0], a[1]) + weighted(b[0].astype(a[0].dtype), b[1]), lse


def _blocks(ops: Operands, kv: Any, static: _Static, owner: Any) -> list[tuple[int, int, Operands]]:
    """(query part, key part, operands) of every block between this device's queries and the keys of `owner`."""
    place = static.place
    rank = lax.axis_index(place.axis)
    q_starts = place.starts(rank, ops.query.shape[1])
    k_starts = place.starts(owner, kv[0].shape[1])
    made = []
    for i, q_start in enumerate(q_starts):
        mine = ops._replace(query=_part(ops.query, i, place.parts), q_segments=_part(ops.q_segments, i, place.parts))
        for j, k_start in enumerate(k_starts):
            made.append((i, j, _block(mine, [_part(x, j, place.parts) for x in kv], (q_start, k_start))))
    return made


def _zeros(shape: tuple[int, ...], dtype: Any, like: Any, fill: float = 0.0) -> Any:
    """A constant that varies over the same manual axes as `like`, as scan carries and cond branches must."""
    return sharding.vary([jnp.full(shape, fill, dtype), like])[0]


def _ring_forward(static: _Static, ops: Operands) -> tuple[Any, Any]:
    place, how = static.place, _of_a_block(static.how)
    b, t, n, _ = ops.query.shape
    acc = ops.scale.dtype
    half = t // place.parts
    rank = lax.axis_index(place.axis)
    empty = (
        _zeros((b, half, n, ops.value.shape[-1]), acc, ops.query),
        _zeros((b, n, half), acc, ops.query, -math.inf),
    )

    def attend(parts: Any, kv: Any, step: Any) -> Any:
        parts = list(parts)
        for i, _, block in _blocks(ops, kv, static, (rank - step) % place.size):
            parts[i] = lax.cond(
                _any_visible(block, how),
                lambda part, block: tuple(_merge(part, primitives.forward(block, how))),
                lambda part, block: part,
                parts[i],
                block,
            )
        return tuple(parts)

    def body(carry: Any, step: Any) -> Any:
        parts, kv = carry
        following = _turn(kv, place)  # started first: independent of the compute below
        return (attend(parts, kv, step), following), None

    kv = [ops.key, ops.value, ops.kv_segments]
    parts = tuple([empty] * place.parts)
    (parts, kv), _ = lax.scan(body, (parts, kv), jnp.arange(place.size - 1), unroll=_unroll(place))
    parts = attend(parts, kv, place.size - 1)
    out, lse = _joined([p[0] for p in parts], 1), _joined([p[1] for p in parts], 2)
    if ops.sinks is not None:
        total = jnp.logaddexp(lse, ops.sinks.astype(acc)[None, :, None])
        base = jnp.where(jnp.isneginf(total), 0, total)
        out, lse = out * jnp.swapaxes(jnp.exp(lse - base), 1, 2)[..., None], total
    return out.astype(ops.query.dtype), lse


def _unroll(place: Placement) -> int:
    """Small rings are unrolled, which lets XLA schedule transfers across steps."""
    return max(1, place.size - 1) if place.size <= 8 else 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: _Static, ops: Operands) -> tuple[Any, Any]:
    return _ring_forward(static, ops)


def _ring_fwd(static: _Static, ops: Operands) -> Any:
    out, lse = _ring_forward(static, ops)
    return (out, lse), (ops, out, lse)


def _ring_bwd(static: _Static, saved: Any, cotangents: Any) -> tuple[Operands]:
    ops, out, lse = saved
    dout, dlse = cotangents
    place, how = static.place, _of_a_block(static.how)
    acc = ops.scale.dtype
    rank = lax.axis_index(place.axis)
    p = place.parts

    def block_grads(i: int, block: Operands) -> Any:
        def run(block: Operands) -> Any:
            saved_part = (_part(out, i, p), _rows(lse, i, p))
            grads = primitives.backward(block, how, saved_part, (_part(dout, i, p), _rows(dlse, i, p)))[:3]
            return tuple(g.astype(acc) for g in grads)

        def nothing(block: Operands) -> Any:
            return tuple(_zeros(x.shape, acc, ops.query) for x in (block.query, block.key, block.value))

        return lax.cond(_any_visible(block, how), run, nothing, block)

    def add(dq: Any, kv: Any, dkv: Any, step: Any) -> Any:
        dq_parts = [_part(dq, i, p) for i in range(p)]
        dk_parts, dv_parts = ([_part(x, j, p) for j in range(p)] for x in dkv)
        for i, j, block in _blocks(ops, kv, static, (rank - step) % place.size):
            gq, gk, gv = block_grads(i, block)
            dq_parts[i], dk_parts[j], dv_parts[j] = dq_parts[i] + gq, dk_parts[j] + gk, dv_parts[j] + gv
        return _joined(dq_parts, 1), [_joined(dk_parts, 1), _joined(dv_parts, 1)]

    def body(carry: Any, step: Any) -> Any:
        dq, kv, dkv = carry
        following = _turn(kv, place)
        dq, dkv = add(dq, kv, dkv, step)
        return (dq, following, _turn(dkv, place)), None

    dq = _zeros(ops.query.shape, acc, ops.query)
    dkv = [_zeros(x.shape, acc, ops.query) for x in (ops.key, ops.value)]
    kv = [ops.key, ops.value, ops.kv_segments]
    (dq, kv, dkv), _ = lax.scan(body, (dq, kv, dkv), jnp.arange(place.size - 1), unroll=_unroll(place))
    dq, dkv = add(dq, kv, dkv, place.size - 1)
    dk, dv = _turn(dkv, place)  # the last step's owner is the next device: one more turn brings them home
    dq = dq.astype(ops.query.dtype)
    dscale = api._scale_gradient(ops, dq) if static.scale_traced else jnp.zeros_like(ops.scale)
    dsinks = None
    if ops.sinks is not None:
        dsinks = sum(
            api._sinks_gradient(
                mine, how.spec, _part(out, i, p), _rows(lse, i, p), _part(dout, i, p), _rows(dlse, i, p)
            )
            for i, mine in enumerate(_query_parts(ops, place))
        )
    grads = Operands(*[None] * len(Operands._fields))._replace(
        query=dq,
        key=dk.astype(ops.key.dtype),
        value=dv.astype(ops.value.dtype),
        scale=dscale,
        soft_cap=jnp.zeros_like(ops.soft_cap),
        sinks=dsinks,
    )
    return (grads,)


_ring.defvjp(_ring_fwd, _ring_bwd)


def _rows(x: Any, n: int, parts: int) -> Any:
    """The n-th part of [B, N, T]."""
    size = x.shape[2] // parts
    return lax.slice_in_dim(x, n * size, (n + 1) * size, axis=2)


def _query_parts(ops: Operands, place: Placement) -> list[Operands]:
    """The operands of each contiguous part of the local queries, its length counted from its own start."""
    size = ops.query.shape[1] // place.parts
    starts = place.starts(lax.axis_index(place.axis), ops.query.shape[1])
    return [
        ops._replace(query=_part(ops.query, i, place.parts), q_len=jnp.clip(ops.q_len - start, 0, size))
        for i, start in enumerate(starts)
    ]


# ---- global arrays -------------------------------------------------------------------------------------------------


def choose_mode(query: tuple[int, ...], key: tuple[int, ...], devices: int) -> str:
    """The mode for global shapes [B, T, N, D] and [B, S, K, D] on an axis of `devices`.

    all_to_all moves the fewest elements once there are enough heads; K and V of few key heads are cheap to gather
    when they are small beside the queries; the ring hides its transfers and bounds memory for the rest.
    """
    (_, t, n, d), (_, s, k, _) = query, key
    if n % devices == 0 and (k % devices == 0 or devices % k == 0):
        return "all_to_all"
    gathered = 2 * k * s * d
    return "all_gather" if gathered <= 2 * n * (t // devices) * d else "ring"


def attention(
    query: Any, key: Any, value: Any, *, mesh: Any = None, axis: str, mode: str | None = None,
    batch_axis: Any = None, head_axis: Any = None, layout: str = "contiguous", return_residual: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Context-parallel attention on global arrays: `shard_map` around one of the modes.

    Args:
      query, key, value: [B, T, N, D], [B, S, K, D], [B, S, K, V], sharded on the sequence over mesh axis `axis`.
      mesh: the mesh; the one in context by default. batch_axis, head_axis: its axes for batch and heads, if any.
      mode: "all_gather", "ring", "all_to_all"; `choose_mode` picks by default.
      layout: "contiguous" or "zigzag" (arrays are then in the order of `to_zigzag`).
      options: as `jax_fa4.attention`: lengths [B], segment ids [B, T], [B, S], scale, is_causal, windows, ...

    Returns:
      out, or (out, lse [B, T, N]), sharded like the query.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis!r}; it has {tuple(mesh.shape)}")
    mode = mode or choose_mode(query.shape, key.shape, mesh.shape[axis])
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES} or None; it is {mode!r}")
    run = {"all_gather": all_gather, "ring": ring, "all_to_all": all_to_all}[mode]
    P = PartitionSpec
    tensor = P(batch_axis, axis, head_axis, None)
    specs = {
        "query_seq_lengths": P(batch_axis),
        "key_value_seq_lengths": P(batch_axis),
        "query_segment_ids": P(batch_axis, axis),
        "key_value_segment_ids": P(batch_axis, axis),
        "sinks": P(head_axis),
        "scale": P(),
    }
    arrays = {
        name: jnp.asarray(options[name]) for name in specs if options.get(name) is not None and _is_array(options[name])
    }
    static = {name: x for name, x in options.items() if name not in arrays}

    def local(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
        return run(q, k, v, axis_name=axis, layout=layout, return_residual=return_residual, **given, **static)

    out_specs = (tensor, P(batch_axis, axis, head_axis)) if return_residual else tensor
    in_specs = (tensor, tensor, tensor, {name: specs[name] for name in arrays})
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(query, key, value, arrays)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, list, tuple))
