"""Exact attention in plain XLA, in tiles: memory linear in the sequence, forward and backward as formulas.

Symbols: b batch, t queries, s keys, n query heads, k key heads, g = n / k query heads of one key head, d depth of
queries and keys, v depth of values. Arithmetic inside is float32 (float64 for float64 inputs), written `acc`.

Forward, with cap(x) = c tanh(x / c), x_ij = cap(scale * q_i . k_j + bias_ij) where i sees j, -inf elsewhere:

    lse_i = log(sum_j exp(x_ij) + exp(sink))        out_i = sum_j exp(x_ij - lse_i) v_j

Backward, with P_ij = exp(x_ij - lse_i), recomputed:

    delta_i = dout_i . out_i - dlse_i               dx_ij = P_ij (dout_i . v_j - delta_i) (1 - tanh(.)^2)
    dq_i = scale sum_j dx_ij k_j                    dk_j = scale sum_i dx_ij q_i
    dv_j = sum_i P_ij dout_i                        dbias = dx summed over the axes along which bias is broadcast

A row that sees no key has out = 0, lse = -inf (its sink where there is one), zero gradients, and adds to none.
What lies at or past a length is selected away before every product that it could poison (0 * nan is nan).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fa4 import mask as masks
from jax_fa4.spec import AttentionSpec

Array = Any  # a jax array or a tracer

# Elements of one tile of scores over all batches and heads (float32: 16 MiB), and the sides it may have.
TILE_ELEMENTS = 1 << 22
TILE_MIN, TILE_MAX = 128, 1024
# At or below this many scores the whole problem is one tile: no loop, the code of a dense implementation.
WHOLE_ELEMENTS = 1 << 24


class Operands(NamedTuple):
    """What one call reads. A field whose flag in the spec is off is ignored; the last five may then be None."""

    query: Array  # [b, t, n, d]
    key: Array  # [b, s, k, d]
    value: Array  # [b, s, k, v]
    window: Array  # int32 [2]: left and right side of the band, mask.UNBOUNDED = no limit      (spec.band)
    offset: Array  # int32 [b]: the diagonal is j = i + offset                                  (spec.band)
    q_len: Array  # int32 [b]                                                                   (spec.lengths)
    kv_len: Array  # int32 [b]                                                                  (spec.lengths)
    scale: Array  # acc []
    soft_cap: Array  # acc []                                                                   (spec.soft_cap)
    q_segments: Array = None  # int32 [b, t]                                             (spec.segments)
    kv_segments: Array = None  # int32 [b, s]                                            (spec.segments)
    sinks: Array = None  # acc [n]                                                       (spec.sinks)
    bias: Array = None  # [b | 1, n | 1, t | 1, s | 1], any float dtype                  (spec.bias)
    mask: Array = None  # bool, shaped like bias; True = visible                         (spec.mask)


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype of logits, sums and lse: float64 for float64, float32 for all others."""
    return jnp.dtype("float64") if jnp.dtype(dtype) == jnp.dtype("float64") else jnp.dtype("float32")


def forward(ops: Operands, spec: AttentionSpec) -> tuple[Array, Array]:
    """(out [b, t, n, v] in the query's dtype, lse [b, n, t] in acc, natural log)."""
    call = _Call(ops, spec)
    b, t, n, v = call.b, call.t, call.n, call.v
    if 0 in (b, t, n):
        return jnp.zeros((b, t, n, v), call.dtype), jnp.zeros((b, n, t), call.acc)
    if call.s == 0:
        lse = jnp.full((b, n, t), -jnp.inf, call.acc)
        if spec.sinks:
            lse = jnp.broadcast_to(ops.sinks[None, :, None].astype(call.acc), (b, n, t))
        return jnp.zeros((b, t, n, v), call.dtype), lse

    def rows(qc: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = _finish(call, _softmax_rows(call, qc))
        size = out.shape[3]
        out = out.transpose(0, 3, 1, 2, 4).reshape(b, size, n, v).astype(call.dtype)
        return call.queries.put(results[0], out, qc, 1), call.queries.put(results[1], lse.reshape(b, n, size), qc, 2)

    start = call.zeros("btnv", (b, t, n, v), call.dtype), call.zeros("bnt", (b, n, t))
    return _loop(call.queries, rows, start)


def backward(
    ops: Operands, spec: AttentionSpec, out: Array, lse: Array, dout: Array, dlse: Array
) -> tuple[Array, Array, Array, Array | None]:
    """(dq, dk, dv, dbias or None), each of its primal's shape and dtype. `dlse` is ignored where `lse` is -inf."""
    call = _Call(ops, spec, (out, lse, dout, dlse))
    primals = (ops.query, ops.key, ops.value, *((ops.bias,) if spec.bias else ()))
    if 0 in (call.b, call.t, call.n, call.s):
        grads = tuple(jnp.zeros(x.shape, x.dtype) for x in primals)
        return grads if spec.bias else (*grads, None)  # type: ignore[return-value]

    def rows(qc: Array, sums: _Sums) -> _Sums:
        row = _backward_rows(call, qc, out, lse, dout, dlse)
        begin, end = call.keys_seen(qc)
        dq = call.zeros("btkgd", row.query.shape)
        dq, dk, dv, dbias = _loop(
            call.keys, lambda kc, x: _backward_tile(call, row, qc, kc, x), (dq, *sums[1:]), begin, end
        )
        dq = (dq * call.scale).reshape(call.b, -1, call.n, call.d).astype(call.dtype)
        # Added, not put: rows that are not fresh have 0 here and their gradient there.
        return _Sums(call.queries.add(sums.dq, dq, qc, 1), dk, dv, dbias)

    sums = _Sums(
        call.zeros("btnd", ops.query.shape, call.dtype),
        call.zeros("bksd", (call.b, call.k, call.s, call.d)),
        call.zeros("bksv", (call.b, call.k, call.s, call.v)),
        call.zero_dbias() if spec.bias else None,
    )
    sums = _loop(call.queries, rows, sums)
    dk = (sums.dk * call.scale).transpose(0, 2, 1, 3).astype(ops.key.dtype)
    dv = sums.dv.transpose(0, 2, 1, 3).astype(ops.value.dtype)
    return sums.dq, dk, dv, sums.dbias.astype(ops.bias.dtype) if spec.bias else None


# --- tiles of one axis ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiles:
    """An axis cut into `count` tiles of one `size`. The last one is moved back to end with the axis, so nothing is
    padded; what it shares with the tile before is then not `fresh`."""

    length: int
    size: int
    count: int

    @staticmethod
    def cut(length: int, size: int) -> _Tiles:
        count = max(1, -(-length // size))
        return _Tiles(length, -(-length // count), count)

    def start(self, c: Array) -> Array:
        return 0 if self.count == 1 else jnp.minimum(c * self.size, self.length - self.size)

    def positions(self, c: Array) -> Array:
        """int32 [size]: positions on the axis."""
        return self.start(c) + jnp.arange(self.size, dtype=jnp.int32)

    def fresh(self, c: Array) -> Array | None:
        """bool [size]: positions that belong to no earlier tile. None = all of them."""
        return None if self.count * self.size == self.length else self.positions(c) >= c * self.size

    def take(self, x: Array, c: Array, axis: int) -> Array:
        return x if self.count == 1 else lax.dynamic_slice_in_dim(x, self.start(c), self.size, axis)

    def put(self, x: Array, part: Array, c: Array, axis: int) -> Array:
        return part if self.count == 1 else lax.dynamic_update_slice_in_dim(x, part, self.start(c), axis)

    def add(self, x: Array, part: Array, c: Array, axis: int) -> Array:
        return self.put(x, self.take(x, c, axis) + part, c, axis)


def _loop(tiles: _Tiles, body: Callable, init: Any, begin: Array = 0, end: Array | None = None) -> Any:
    """body(c, state) for the tiles c in [begin, end); straight code where there is one tile."""
    if tiles.count == 1:
        return body(0, init)
    end = tiles.count if end is None else end
    return lax.fori_loop(begin, end, lambda c, x: body(jnp.asarray(c, jnp.int32), x), init)


def tile_sides(heads: int, t: int, s: int) -> tuple[int, int]:
    """Sides (queries, keys) of a tile of scores, given batch times heads."""
    if heads * t * s <= WHOLE_ELEMENTS and max(t, s) <= TILE_MAX:
        return max(t, 1), max(s, 1)
    side = 1 << int(math.log2(max(TILE_ELEMENTS / max(heads, 1), 1)) / 2)
    side = min(max(side, TILE_MIN), TILE_MAX)
    return side, side


# --- one call ---------------------------------------------------------------------------------------------------------


class _Call:
    """Shapes, tiles and readers of the operands of one call. Scores have the axes [b, k, g, t, s]."""

    def __init__(self, ops: Operands, spec: AttentionSpec, others: tuple[Array, ...] = ()):
        self.ops, self.spec = ops, spec
        self.b, self.t, self.n, self.d = ops.query.shape
        self.s, self.k, self.v = ops.key.shape[1], ops.key.shape[2], ops.value.shape[3]
        self.g = self.n // self.k if self.k else 1
        self.dtype = ops.query.dtype
        self.acc = accumulation_dtype(self.dtype)
        self.scale = ops.scale.astype(self.acc)
        # TF32 would cost float32 users 13 bits on a GPU; half precision inputs are exact in any mode.
        wide = self.dtype in (jnp.dtype("float32"), jnp.dtype("float64"))
        self.precision = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
        side_q, side_k = tile_sides(self.b * self.n, self.t, self.s)
        self.queries, self.keys = _Tiles.cut(self.t, side_q), _Tiles.cut(self.s, side_k)
        self._zero = _zero_of(ops.query, (*self._used(), *others), self.acc)

    def _used(self) -> list[Array]:
        """The operands that the spec says matter."""
        o, f = self.ops, self.spec
        used = [o.query, o.key, o.value, o.scale]
        used += [o.window, o.offset] if f.band else []
        used += [o.q_len, o.kv_len] if f.lengths else []
        used += [o.q_segments, o.kv_segments] if f.segments else []
        for flag, x in ((f.soft_cap, o.soft_cap), (f.sinks, o.sinks), (f.bias, o.bias), (f.mask, o.mask)):
            used += [x] if flag else []
        return used

    def zeros(self, axes: str, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Zeros typed as a loop's carry must be: varying over the mesh axes over which any operand varies, and, on a
        mesh with explicit axes, sharded as the query is in batch and heads. `axes` names the axes, b n k g among them.
        """
        zero = self._zero
        if "n" not in axes:
            zero = zero.reshape(self.b, self.k, self.g)
            zero = zero if "g" in axes else jnp.sum(zero[:, :, :0], axis=2)
        zero = jnp.expand_dims(zero, [a for a, name in enumerate(axes) if name not in "bnkg"])
        return jnp.zeros(shape, dtype or self.acc) + zero.astype(dtype or self.acc)

    def zero_dbias(self) -> Array:
        """What dbias starts from, typed likewise. Each element gets one tile's sum unless bias is broadcast along t or
        s: then it is kept in bias's own dtype, so that the caller's S x S buffer is not doubled; else in acc."""
        bias = self.ops.bias
        dtype = self.acc if 1 in bias.shape[2:] else bias.dtype
        own = jnp.sum(bias[:, :, :0, :0], axis=(2, 3), keepdims=True)
        zero = own.astype(self.acc) + jnp.sum(self._zero[:0])
        return jnp.zeros(bias.shape, dtype) + zero.astype(dtype)

    @property
    def hides(self) -> bool:
        """Whether a row may see no key (a bias of -inf hides too)."""
        f = self.spec
        return f.band or f.lengths or f.segments or f.mask or f.bias

    def dot(self, equation: str, x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, precision=self.precision, preferred_element_type=self.acc)

    def heads(self, x: Array) -> Array:
        """[b, t, n, d] -> [b, t, k, g, d]."""
        return x.reshape(*x.shape[:2], self.k, self.g, x.shape[3])

    def rows(self, x: Array, qc: Array) -> Array:
        """[b, n, t] -> the tile [b, k, g, t]."""
        return self.queries.take(x, qc, 2).reshape(self.b, self.k, self.g, -1)

    def query(self, qc: Array) -> Array:
        return self.heads(self.queries.take(self.ops.query, qc, 1))

    def key(self, kc: Array, clean: bool = False) -> Array:
        return self._keys_of(self.ops.key, kc, clean)

    def value(self, kc: Array, clean: bool = False) -> Array:
        return self._keys_of(self.ops.value, kc, clean)

    def _keys_of(self, x: Array, kc: Array, clean: bool) -> Array:
        """A tile of key or value [b, s, k, :]; `clean` = what lies past the length is 0, whatever it was."""
        x = self.keys.take(x, kc, 1)
        if clean and self.spec.lengths:
            real = self.keys.positions(kc) < self.ops.kv_len[:, None]
            x = jnp.where(real[:, :, None, None], x, jnp.zeros((), x.dtype))
        return x

    def like_scores(self, x: Array, qc: Array, kc: Array) -> Array:
        """A tile of bias or mask, broadcastable to [b, k, g, t, s]."""
        x = x if x.shape[2] == 1 else self.queries.take(x, qc, 2)
        x = x if x.shape[3] == 1 else self.keys.take(x, kc, 3)
        heads = (1, 1) if x.shape[1] == 1 else (self.k, self.g)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def band(self) -> masks.Band:
        """The band with an axis [b, 1, 1] on what is per example; what the spec leaves out takes its neutral value."""
        o, f = self.ops, self.spec
        left, right = (o.window[0], o.window[1]) if f.band else (masks.UNBOUNDED, masks.UNBOUNDED)
        offset = o.offset[:, None, None] if f.band else 0
        lengths = (o.q_len[:, None, None], o.kv_len[:, None, None]) if f.lengths else (self.t, self.s)
        return masks.Band(left, right, offset, *lengths)

    def keys_seen(self, qc: Array) -> tuple[Array, Array]:
        """Range of key tiles that any query of the tile sees in any example."""
        if self.keys.count == 1 or not (self.spec.band or self.spec.lengths):
            return 0, self.keys.count
        band = self.band()
        # From where the tile lies: of a last one that was moved back, rows that are not fresh are written again too.
        first = jnp.asarray(self.queries.start(qc), jnp.int32)
        last = jnp.minimum(first + self.queries.size, band.q_len) - 1
        begin, end = masks.keys_seen(first, last, band, jnp.minimum, jnp.maximum)
        end = jnp.where(first <= last, jnp.minimum(end, self.s), 0)
        begin = jnp.where(begin < end, begin, self.s)
        size = self.keys.size
        return jnp.min(begin) // size, (jnp.max(end) + size - 1) // size

    def visible(self, qc: Array, kc: Array) -> Array | None:
        """bool, broadcastable to [b, k, g, t, s]. None = every pair is visible."""
        o, f = self.ops, self.spec
        i, j = self.queries.positions(qc)[:, None], self.keys.positions(kc)[None, :]
        terms: list[Array] = []  # each [b or 1, t or 1, s or 1]
        if f.band:
            terms.append(masks.visible(i, j, self.band()))
        elif f.lengths:  # the same, without the arithmetic of an unbounded band on every pair
            terms.append((i < o.q_len[:, None, None]) & (j < o.kv_len[:, None, None]))
        if f.segments:
            q_ids, k_ids = self.queries.take(o.q_segments, qc, 1), self.keys.take(o.kv_segments, kc, 1)
            terms.append(q_ids[:, :, None] == k_ids[:, None, :])
        fresh = self.keys.fresh(kc)
        terms += [] if fresh is None else [fresh[None, None, :]]
        terms = [x.reshape((1,) * (3 - x.ndim) + x.shape)[:, None, None] for x in terms]
        if f.mask:
            terms.append(self.like_scores(o.mask, qc, kc))
        seen = None
        for x in terms:
            seen = x if seen is None else seen & x
        return seen

    def scores(self, query: Array, key: Array, qc: Array, kc: Array) -> tuple[Array, Array | None]:
        """Logits of a tile before visibility, [b, k, g, t, s] in acc, and tanh(.) where they are capped."""
        x = self.dot("btkgd,bskd->bkgts", query, key) * self.scale
        if self.spec.bias:
            x = x + self.like_scores(self.ops.bias, qc, kc).astype(self.acc)
        if not self.spec.soft_cap:
            return x, None
        cap = self.ops.soft_cap.astype(self.acc)
        bent = jnp.tanh(x / cap)
        return cap * bent, bent


def _zero_of(query: Array, operands: tuple[Array, ...], dtype: Any) -> Array:
    """Zeros [b, n] of the query's sharding that vary over every mesh axis over which an operand varies: sums over
    empty slices, which XLA folds away and no nan can enter."""
    zero = jnp.sum(query[:, :0, :, :0].astype(dtype), axis=(1, 3))
    for x in operands:
        zero = zero + jnp.sum(x[..., None][..., :0].astype(dtype))
    return zero


# --- forward ----------------------------------------------------------------------------------------------------------


class _Partial(NamedTuple):
    """Softmax over some of the keys: sums are relative to exp(top)."""

    top: Array  # [b, k, g, t], -inf where no key was seen
    total: Array  # [b, k, g, t]
    mixed: Array  # [b, k, g, t, v]


def _finite(top: Array) -> Array:
    """The maximum to subtract: 0 where there is none, for -inf - -inf is nan."""
    return jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)


def _softmax_tile(call: _Call, query: Array, qc: Array, kc: Array) -> _Partial:
    x, _ = call.scores(query, call.key(kc), qc, kc)
    seen = call.visible(qc, kc)
    if seen is not None:
        x = jnp.where(seen, x, -jnp.inf)
    top = jnp.max(x, axis=-1)
    probs = jnp.exp(x - _finite(top)[..., None])
    total = jnp.sum(probs, axis=-1)
    mixed = call.dot("bkgts,bskv->bkgtv", probs.astype(call.dtype), call.value(kc, clean=True))
    return _Partial(top, total, mixed)


def _merge(x: _Partial, y: _Partial) -> _Partial:
    top = jnp.maximum(x.top, y.top)
    base = _finite(top)
    fx, fy = jnp.exp(x.top - base), jnp.exp(y.top - base)
    return _Partial(top, x.total * fx + y.total * fy, x.mixed * fx[..., None] + y.mixed * fy[..., None])


def _softmax_rows(call: _Call, qc: Array) -> _Partial:
    """All keys for one tile of queries."""
    query = call.query(qc)
    if call.keys.count == 1:
        return _softmax_tile(call, query, qc, 0)
    zero = call.zeros("bkgt", (call.b, call.k, call.g, call.queries.size))
    none = _Partial(zero - jnp.inf, zero, call.zeros("bkgtv", (*zero.shape, call.v)))
    begin, end = call.keys_seen(qc)
    return _loop(call.keys, lambda kc, x: _merge(x, _softmax_tile(call, query, qc, kc)), none, begin, end)


def _finish(call: _Call, rows: _Partial) -> tuple[Array, Array]:
    """(out [b, k, g, t, v], lse [b, k, g, t]) in acc. The sink is a key that has no value."""
    top, total, mixed = rows
    if call.spec.sinks:
        sink = call.ops.sinks.astype(call.acc).reshape(1, call.k, call.g, 1)
        top = jnp.maximum(rows.top, sink)
        factor = jnp.exp(rows.top - _finite(top))
        total = rows.total * factor + jnp.exp(sink - _finite(top))
        mixed = rows.mixed * factor[..., None]
    # A row that saw a key has total >= 1 (its own maximum), or nan, which passes through.
    total = jnp.where(total == 0, jnp.ones_like(total), total)
    return mixed / total[..., None], top + jnp.log(total)


# --- backward ---------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    dq: Array  # [b, t, n, d]
    dk: Array  # [b, k, s, d] in acc, without the scale
    dv: Array  # [b, k, s, v] in acc
    dbias: Array  # shaped like bias, or None


class _Row(NamedTuple):
    """What the backward needs of one tile of queries, with rows that see no key set to 0."""

    query: Array  # [b, t, k, g, d]
    dout: Array  # [b, t, k, g, v]
    lse: Array  # [b, k, g, t], finite
    delta: Array  # [b, k, g, t]


def _backward_rows(call: _Call, qc: Array, out: Array, lse: Array, dout: Array, dlse: Array) -> _Row:
    take = call.queries.take
    query, out, dout = call.query(qc), call.heads(take(out, qc, 1)), call.heads(take(dout, qc, 1))
    lse, dlse = call.rows(lse, qc), call.rows(dlse, qc)
    delta = jnp.sum(dout.astype(call.acc) * out.astype(call.acc), axis=-1).transpose(0, 2, 3, 1)
    alive = None
    if call.hides:
        alive = lse != -jnp.inf
        if call.spec.lengths:  # with a sink, a row past the length has a finite lse
            alive &= (call.queries.positions(qc) < call.ops.q_len[:, None])[:, None, None, :]
    fresh = call.queries.fresh(qc)
    if fresh is not None:
        alive = fresh if alive is None else alive & fresh
    if alive is not None:
        alive = jnp.broadcast_to(alive, lse.shape)
        cells = alive.transpose(0, 3, 1, 2)[..., None]
        query = jnp.where(cells, query, jnp.zeros((), query.dtype))
        dout = jnp.where(cells, dout, jnp.zeros((), dout.dtype))
        delta, dlse = (jnp.where(alive, x, jnp.zeros((), x.dtype)) for x in (delta, dlse))
    lse = _finite(lse)
    if fresh is not None:  # weight 0 for rows of another tile: exp(0 - lse) of a low lse overflows, and inf * 0 is nan
        lse = jnp.where(fresh, lse, jnp.inf)
    row = _Row(query, dout.astype(call.dtype), lse, delta)
    if call.dtype.itemsize == 2 and not call.spec.partial:  # these keys alone do not add up to out
        row = row._replace(delta=_exact_delta(call, row, qc))
    return row._replace(delta=row.delta - dlse)


def _exact_delta(call: _Call, row: _Row, qc: Array) -> Array:
    """sum_j P_ij (dout_i . v_j), which equals dout_i . out_i but for the rounding of out to half precision.

    That rounding moves every dx of a row by one amount, which keys with a common offset then multiply: dq of keys with
    channel means of 3 was 3.7 times as far from float64 as an unfused computation (CPU, bfloat16, 2026-11-29). With
    one tile of keys XLA shares the products with _backward_tile; with more it costs two of them again.
    """

    def tile(kc: Array, total: Array) -> Array:
        probs, dprobs, _ = _probs_tile(call, row, qc, kc)
        return total + jnp.sum(probs * dprobs, axis=-1)

    return _loop(call.keys, tile, call.zeros("bkgt", row.delta.shape), *call.keys_seen(qc))


def _probs_tile(call: _Call, row: _Row, qc: Array, kc: Array) -> tuple[Array, Array, Array | None]:
    """(probs, their cotangent, tanh(.) or None) of one tile, [b, k, g, t, s] in acc; 0 where not visible."""
    x, bent = call.scores(row.query, call.key(kc, clean=True), qc, kc)
    seen = call.visible(qc, kc)
    probs = jnp.exp(x - row.lse[..., None])
    dprobs = call.dot("btkgv,bskv->bkgts", row.dout, call.value(kc))
    if seen is not None:
        probs, dprobs = (jnp.where(seen, y, jnp.zeros((), y.dtype)) for y in (probs, dprobs))
        bent = None if bent is None else jnp.where(seen, bent, jnp.zeros((), bent.dtype))
    return probs, dprobs, bent


def _backward_tile(call: _Call, row: _Row, qc: Array, kc: Array, sums: tuple) -> tuple:
    """Adds the tile's share to (dq of this tile of queries [b, t, k, g, d] without the scale, dk, dv, dbias)."""
    dq, dk, dv, dbias = sums
    probs, dprobs, bent = _probs_tile(call, row, qc, kc)
    dx = probs * (dprobs - row.delta[..., None])
    if bent is not None:
        dx = dx * ((1 - bent) * (1 + bent))
    if call.spec.bias:
        dbias = _add_dbias(call, dbias, dx, qc, kc)
    dx = dx.astype(call.dtype)
    dv = call.keys.add(dv, call.dot("bkgts,btkgv->bksv", probs.astype(call.dtype), row.dout), kc, 2)
    dk = call.keys.add(dk, call.dot("bkgts,btkgd->bksd", dx, row.query), kc, 2)
    dq = dq + call.dot("bkgts,bskd->btkgd", dx, call.key(kc, clean=True))
    return dq, dk, dv, dbias


def _add_dbias(call: _Call, dbias: Array, dx: Array, qc: Array, kc: Array) -> Array:
    """Adds dx [b, k, g, t, s], summed over the axes along which bias is broadcast."""
    dx = dx.reshape(call.b, call.n, *dx.shape[3:])
    shape = call.ops.bias.shape
    summed = tuple(a for a in range(4) if shape[a] == 1 and dx.shape[a] != 1)
    part = jnp.sum(dx, axis=summed, keepdims=True).astype(dbias.dtype)
    rows, cols = (
        tiles.start(c) * (n != 1) for tiles, c, n in ((call.queries, qc, shape[2]), (call.keys, kc, shape[3]))
    )
    starts = tuple(jnp.asarray(x, jnp.int32) for x in (0, 0, rows, cols))
    return lax.dynamic_update_slice(dbias, lax.dynamic_slice(dbias, starts, part.shape) + part, starts)
