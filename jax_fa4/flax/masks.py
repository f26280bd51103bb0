"""Lazy masks: frozen descriptions of which keys a query sees, handed to the kernels without ever being made dense.

A `Mask` goes wherever Flax takes a mask array: into `jax_fa4.flax` modules, and through Flax's own modules into
`attention_fn`. Parts are joined by `&`, and a dense array may be one of the parts:

>>> mask = causal() & lengths(jnp.array([512, 300]))          # keys past 512 and past 300 do not exist
>>> mask = window((1023, 0)) & segments(ids) & padding(ids > 0)

Nothing is read from array values, so a mask may be built under `jit` and passed through it (it is a pytree).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import mask as arithmetic
from jax_fa4 import spec
from jax_fa4.api import within

Array = Any
Window = Any  # int | (left, right) with None for unbounded, as in `attention`


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query_lengths", "key_value_lengths", "query_valid", "key_value_valid", "query_segments", "key_value_segments",
        "dense",
    ],
    meta_fields=["is_causal", "left", "right", "alignment"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Key `j` is visible to query `i` when every part that is present says so. Make one with the functions below.

    Attributes:
      is_causal, left, right: the band around the diagonal, as in `jax_fa4.attention`; a side that is None is unbounded.
      alignment: where the band's diagonal starts, "top_left" or "bottom_right"; None where there is no band.
      query_lengths, key_value_lengths: int [batch...]; positions at or past them do not exist.
      query_valid, key_value_valid: bool [batch..., T] and [batch..., S].
      query_segments, key_value_segments: int [batch..., T] and [batch..., S]; attend where equal.
      dense: an array that broadcasts to [batch..., heads, T, S], nonzero = attend.
    """

    is_causal: bool = False
    left: int | None = None
    right: int | None = None
    alignment: str | None = None
    query_lengths: Array = None
    key_value_lengths: Array = None
    query_valid: Array = None
    key_value_valid: Array = None
    query_segments: Array = None
    key_value_segments: Array = None
    dense: Array = None

    __array_ufunc__ = None  # so that `numpy_array & mask` comes to __rand__

    @property
    def has_band(self) -> bool:
        """Whether causality or a window limits what is seen."""
        return self.is_causal or self.left is not None or self.right is not None

    @property
    def is_lazy(self) -> bool:
        """Whether there is any part besides a dense one."""
        parts = (
            self.query_lengths, self.key_value_lengths, self.query_valid, self.key_value_valid, self.query_segments
        )  # fmt: skip
        return self.has_band or any(x is not None for x in parts)

    def __and__(self, other: Any) -> Mask:
        other = as_mask(other)
        if other is None:
            return self
        joined = Mask(
            is_causal=self.is_causal or other.is_causal,
            left=_nearer(self.left, other.left),
            right=_nearer(self.right, other.right),
            alignment=_one_alignment(self, other),
            query_lengths=_joined(jnp.minimum, self.query_lengths, other.query_lengths),
            key_value_lengths=_joined(jnp.minimum, self.key_value_lengths, other.key_value_lengths),
            query_valid=_joined(jnp.logical_and, self.query_valid, other.query_valid),
            key_value_valid=_joined(jnp.logical_and, self.key_value_valid, other.key_value_valid),
            dense=_joined(jnp.logical_and, self.dense, other.dense),
        )
        ids = _joined_segments(_segments_of(self), _segments_of(other))
        return joined if ids is None else _with_validity(joined, ids)

    __rand__ = __and__

    @property
    def ndim(self) -> int:
        # Flax's combine_masks asks for this first; the text then says what to do instead.
        raise AttributeError(
            "a lazy jax_fa4 mask has no axes: it is not an array. Combine masks with & or jax_fa4.flax.combine_masks,"
            " and decode with the modules of jax_fa4.flax (Flax's own decoding combines masks as arrays)"
        )

    def to_dense(self, query_shape: tuple[int, ...], key_shape: tuple[int, ...], positions: Array = None) -> Array:
        """The mask as a bool array that broadcasts to [batch..., heads, T, S], for code that can take no other.

        Args:
          query_shape: [batch..., T, heads, depth]. key_shape: [batch..., S, key heads, depth].
          positions: int scalar, where the first query stands on the key axis; it overrides the alignment.
        """
        batch, t, s = query_shape[:-3], query_shape[-3], key_shape[-3]
        i, j = jnp.arange(t, dtype=jnp.int32)[:, None], jnp.arange(s, dtype=jnp.int32)[None, :]
        q_len = _per_example("query lengths", self.query_lengths, batch, t)
        kv_len = _per_example("key and value lengths", self.key_value_lengths, batch, s)
        sides = spec.band_sides(self.is_causal, (self.left, self.right)) or (arithmetic.UNBOUNDED,) * 2
        offset = kv_len - q_len if self.alignment == "bottom_right" else jnp.zeros_like(kv_len)
        offset = offset if positions is None else jnp.broadcast_to(positions, offset.shape)
        band = arithmetic.Band(*sides, *(x[..., None, None] for x in (offset, q_len, kv_len)))
        seen = arithmetic.visible(i, j, band)
        for q_part, k_part, meet in (
            (self.query_valid, None, None),
            (None, self.key_value_valid, None),
            (self.query_segments, self.key_value_segments, jnp.equal),
        ):
            rows = None if q_part is None else _positions("the query side", q_part, batch, t)[..., :, None]
            columns = None if k_part is None else _positions("the key side", k_part, batch, s)[..., None, :]
            part = columns if rows is None else rows if columns is None else meet(rows, columns)  # type: ignore[misc]
            seen = seen if part is None else seen & part
        seen = seen[..., None, :, :]
        return seen if self.dense is None else seen & (jnp.asarray(self.dense) != 0)


# ---- making masks --------------------------------------------------------------------------------------------------


def causal(alignment: str = "top_left") -> Mask:
    """Keys right of the diagonal are hidden: `j <= i + offset`, offset 0 (top_left) or kv length - q length."""
    spec.check_alignment(alignment)
    return Mask(is_causal=True, alignment=alignment)


def window(size: Window, alignment: str = "top_left") -> Mask:
    """Keys further than `size` from the diagonal are hidden: an int, or (left, right) with None for unbounded."""
    left, right = spec.check_window(size)
    spec.check_alignment(alignment)
    return Mask(left=left, right=right, alignment=None if left is right is None else alignment)


def lengths(key_value: Array = None, query: Array = None) -> Mask:
    """Keys (and queries) at or past a length do not exist: int [batch...] or a scalar for all examples.

    The cheapest mask for padding at the end: what lies past a length is not read. With "bottom_right" alignment the
    diagonal ends at the last existing key and query.
    """
    return Mask(query_lengths=_integers("query", query), key_value_lengths=_integers("key_value", key_value))


def padding(key_value: Array = None, query: Array = None) -> Mask:
    """Keys (and queries) that are False are hidden: bool [batch..., S] and [batch..., T], in any order of values."""
    return Mask(query_valid=_booleans("query", query), key_value_valid=_booleans("key_value", key_value))


def segments(query: Array, key_value: Array = None) -> Mask:
    """Attend where the segment ids are equal: int [batch..., T] and [batch..., S]; one array serves self-attention."""
    query = _integers("query", query)
    key_value = query if key_value is None else _integers("key_value", key_value)
    if query is None:
        raise TypeError("segments needs the ids of the queries; it was given None")
    return Mask(query_segments=query, key_value_segments=key_value)


def as_mask(mask: Any) -> Mask | None:
    """A Mask as it is, None as None, and an array as a Mask that holds it."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not hasattr(mask, "shape") or not hasattr(mask, "dtype"):
        raise TypeError(f"a mask must be an array or a jax_fa4.flax.Mask; it is {type(mask).__name__}")
    return Mask(dense=mask)


def combine_masks(*masks: Any, dtype: Any = jnp.bool_) -> Any:
    """Flax's `combine_masks` for lazy and dense masks: the logical and of those that are not None.

    Dense masks alone give a dense one of `dtype`; any lazy one makes the result lazy.
    """
    present = [m for m in masks if m is not None]
    if not present:
        return None
    if any(isinstance(m, Mask) for m in present):
        return functools.reduce(lambda a, b: a & b, [as_mask(m) for m in present])  # type: ignore[operator]
    return functools.reduce(jnp.logical_and, present).astype(dtype)


# ---- using masks ---------------------------------------------------------------------------------------------------


def arguments(mask: Mask, query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> dict[str, Any]:
    """The keyword arguments of `jax_fa4.attention` that say what the mask says. `dense` goes to `mask=`."""
    batch, t, s = query_shape[:-3], query_shape[-3], key_shape[-3]
    mask = _validity_as_segments(mask, t, s)
    out: dict[str, Any] = {"is_causal": mask.is_causal}
    if mask.has_band:
        out["causal_alignment"] = mask.alignment or "top_left"
        out["local_window_size"] = None if mask.left is mask.right is None else (mask.left, mask.right)
    if mask.query_lengths is not None:
        out["query_seq_lengths"] = _per_example("query lengths", mask.query_lengths, batch, t)
    if mask.key_value_lengths is not None:
        out["key_value_seq_lengths"] = _per_example("key and value lengths", mask.key_value_lengths, batch, s)
    if mask.query_segments is not None:
        out["query_segment_ids"] = _positions("query segments or validity", mask.query_segments, batch, t)
        out["key_value_segment_ids"] = _positions("key segments or validity", mask.key_value_segments, batch, s)
    if mask.dense is not None:
        dense = jnp.asarray(mask.dense)
        out["mask"] = dense if dense.dtype == jnp.bool_ else dense != 0  # Flax makes float masks, nonzero = attend
    return out


def at_cache(mask: Mask | None, filled: Array, t: int, s: int) -> Mask:
    """The mask of `t` new queries whose last one stands at key `filled - 1` of a cache of `s` places.

    Bands are counted in places of the cache, and so are the caller's lengths and segments; keys that are not there
    yet are hidden, later ones too. Lengths of the caller become validity, since the diagonal must end at `filled`.
    """
    here = Mask(is_causal=True, alignment="bottom_right", key_value_lengths=filled)
    if mask is None:
        return here
    q_valid = _as_validity(mask.query_lengths, t)
    kv_valid = _as_validity(mask.key_value_lengths, s)
    alignment = "bottom_right" if mask.has_band else None
    plain = dataclasses.replace(mask, query_lengths=None, key_value_lengths=None, alignment=alignment)
    return plain & Mask(query_valid=q_valid, key_value_valid=kv_valid) & here


# ---- parts ---------------------------------------------------------------------------------------------------------


def _nearer(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _one_alignment(a: Mask, b: Mask) -> str | None:
    found = {m.alignment for m in (a, b) if m.has_band}
    if len(found) > 1:
        raise ValueError(
            "masks with different alignments, top_left and bottom_right, cannot be combined: they have one diagonal."
            " Give causal() and window() the same alignment"
        )
    return found.pop() if found else None


def _joined(op: Any, a: Array, b: Array) -> Array:
    return a if b is None else b if a is None else op(a, b)


def _integers(name: str, x: Array) -> Array:
    if x is None:
        return None
    x = x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers; its dtype is {x.dtype.name}")
    return x


def _booleans(name: str, x: Array) -> Array:
    if x is None:
        return None
    x = x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x)
    if x.dtype != np.bool_:
        raise TypeError(
            f"{name} must be boolean (True = a real token); its dtype is {x.dtype.name}. Lengths go to lengths()"
        )
    return x


def _per_example(name: str, x: Array, batch: tuple[int, ...], full: int) -> Array:
    """int32 [batch...] within [0, full]; `full` where there is none."""
    if x is None:
        return jnp.full(batch, full, jnp.int32)
    return _broadcast(name, within(x, full), batch)


def _positions(name: str, x: Array, batch: tuple[int, ...], length: int) -> Array:
    return _broadcast(name, jnp.asarray(x), (*batch, length))


def _broadcast(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    fits = x.ndim <= len(shape) and all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} of a mask must broadcast to {shape}; it has shape {x.shape}")
    return jnp.broadcast_to(x, shape)


def _as_validity(length: Array, full: int) -> Array:
    return None if length is None else jnp.arange(full, dtype=jnp.int32) < jnp.asarray(length)[..., None]


def _segments_of(mask: Mask) -> tuple[Array, Array] | None:
    return None if mask.query_segments is None else (mask.query_segments, mask.key_value_segments)


def _joined_segments(a: tuple[Array, Array] | None, b: tuple[Array, Array] | None) -> tuple[Array, Array] | None:
    """Ids that are equal exactly where both pairs of ids are."""
    if a is None or b is None:
        return b if a is None else a
    if a[0] is b[0] and a[1] is b[1]:
        return a
    return _pair_ids(a, b)


def _with_validity(mask: Mask, ids: tuple[Array, Array]) -> Mask:
    """Segments and validity as segments alone."""
    q, kv = mask.query_valid, mask.key_value_valid
    if q is not None or kv is not None:
        # A hidden query (2) and a hidden key (0) are of classes that nobody else has.
        classes = (
            jnp.ones(ids[0].shape, jnp.int32) if q is None else jnp.where(q, 1, 2),
            jnp.ones(ids[1].shape, jnp.int32) if kv is None else jnp.where(kv, 1, 0),
        )
        ids = _pair_ids(ids, classes)
    return dataclasses.replace(
        mask, query_valid=None, key_value_valid=None, query_segments=ids[0], key_value_segments=ids[1]
    )


def _validity_as_segments(mask: Mask, t: int, s: int) -> Mask:
    if mask.query_valid is None and mask.key_value_valid is None:
        return mask
    if mask.query_segments is not None:  # a Mask that was built field by field
        return _with_validity(mask, (mask.query_segments, mask.key_value_segments))
    q = jnp.ones((t,), jnp.int32) if mask.query_valid is None else jnp.where(mask.query_valid, 1, 2)
    kv = jnp.ones((s,), jnp.int32) if mask.key_value_valid is None else jnp.where(mask.key_value_valid, 1, 0)
    return dataclasses.replace(mask, query_valid=None, key_value_valid=None, query_segments=q, key_value_segments=kv)


def _pair_ids(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Pairs of ids numbered: (a, b) of any values -> ids in [0, T + S), equal exactly where both are.

    A number is a pair's rank among the sorted pairs of queries and keys; arithmetic on the values could overflow.
    """
    t, s = a[0].shape[-1], a[1].shape[-1]
    sides = []
    for q, kv in (a, b):
        q, kv = jnp.asarray(q), jnp.asarray(kv)
        batch = jnp.broadcast_shapes(q.shape[:-1], kv.shape[:-1])
        sides.append(jnp.concatenate([jnp.broadcast_to(q, (*batch, t)), jnp.broadcast_to(kv, (*batch, s))], -1))
    first, second = jnp.broadcast_arrays(*sides)

    def ranks(x: Array, y: Array) -> Array:
        order = jnp.lexsort((y, x))
        x, y = x[order], y[order]
        new = jnp.concatenate([jnp.zeros((1,), jnp.int32), ((x[1:] != x[:-1]) | (y[1:] != y[:-1])).astype(jnp.int32)])
        return jnp.zeros((t + s,), jnp.int32).at[order].set(jnp.cumsum(new[: t + s], dtype=jnp.int32))

    flat = jnp.vectorize(ranks, signature="(n),(n)->(n)")(first, second)
    return flat[..., :t], flat[..., t:]
