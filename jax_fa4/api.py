"""The public calls: attention, attention_varlen, is_supported. Canonicalise, choose, differentiate."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name as name_residual

from jax_fa4 import kernels, primitives, sharding, spec
from jax_fa4.config import config
from jax_fa4.mask import UNBOUNDED
from jax_fa4.operands import within
from jax_fa4.primitives import How
from jax_fa4.reference import Operands
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

Array = jax.Array


@dataclass(frozen=True)
class Static:
    """What the differentiation rule needs besides `How`."""

    how: How
    scale_traced: bool  # a gradient of the scale may be asked for
    name: str | None  # of the residuals


# ---- differentiation -----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, ops: Operands) -> tuple[Array, Array]:
    return primitives.forward(ops, static.how)


def _attend_fwd(static: Static, ops: Operands) -> tuple[Any, Any]:
    out, lse = primitives.forward(ops, static.how)
    if static.name is not None:
        out, lse = name_residual(out, f"{static.name}.out"), name_residual(lse, f"{static.name}.lse")
    return (out, lse), (ops, out, lse)


def _attend_bwd(static: Static, saved: Any, cotangents: Any) -> tuple[Operands]:
    ops, out, lse = saved
    dout, dlse = cotangents
    how = static.how
    dq, dk, dv, dbias = primitives.backward(ops, how, (out, lse), (dout, dlse))
    dscale = _scale_gradient(ops, dq) if static.scale_traced else jnp.zeros_like(ops.scale)
    dsinks = _sinks_gradient(ops, how.spec, out, lse, dout, dlse) if how.spec.sinks else None
    nothing = Operands(*[None] * len(Operands._fields))
    grads = nothing._replace(query=dq, key=dk, value=dv, scale=dscale, sinks=dsinks, bias=dbias)
    return (grads._replace(soft_cap=jnp.zeros_like(ops.soft_cap)),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _scale_gradient(ops: Operands, dq: Array) -> Array:
    """d/dscale = sum(dQ * Q) / scale, since the logits depend on scale * q alone. Rows past a length have dQ = 0."""
    acc = ops.scale.dtype
    product = jnp.where(dq == 0, 0, dq.astype(acc) * ops.query.astype(acc))
    return jnp.sum(product) / ops.scale


def _sinks_gradient(ops: Operands, spec: AttentionSpec, out: Array, lse: Array, dout: Array, dlse: Array) -> Array:
    """A sink is a logit without a value: d/dsink = -p * delta, p = exp(sink - lse), delta = rowsum(dO * O) - dLSE."""
    assert ops.sinks is not None
    acc = lse.dtype
    delta = jnp.einsum("...tnv,...tnv->...nt", dout, out, preferred_element_type=acc) - dlse
    weight = jnp.exp(ops.sinks.astype(acc)[:, None] - lse)
    terms = jnp.where(jnp.isneginf(lse), 0, -weight * delta)  # a sink of -inf on a row without keys
    if spec.lengths:
        rows = jnp.arange(ops.query.shape[-3]) < ops.q_len[..., None, None]
        terms = jnp.where(rows, terms, 0)
    return jnp.sum(terms, axis=(*range(lse.ndim - 2), lse.ndim - 1)).astype(ops.sinks.dtype)


# ---- canonicalisation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `attention` that are not arrays of the size of q, k, v."""

    scale: Any = None
    is_causal: bool = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    implementation: Any = None
    causal_alignment: str = "top_left"
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    deterministic: bool | None = None


def _dtype_name(x: Any) -> str:
    return jnp.dtype(x.dtype).name


def _as_array(name: str, x: Any) -> Any:
    if x is None or isinstance(x, (list, tuple, str)):
        raise TypeError(f"{name} must be an array; it is {type(x).__name__}")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _how(o: Options, flags: AttentionSpec) -> How:
    names = spec.check_implementation(config.implementation if o.implementation is None else o.implementation)
    return How(flags, names, config.arch)


def _flags(o: Options, bias: Any, mask: Any) -> AttentionSpec:
    """Which kinds of thing are used; checks everything that needs no shapes."""
    deterministic = config.deterministic if o.deterministic is None else o.deterministic
    if not isinstance(deterministic, (bool, np.bool_)):
        raise TypeError(f"deterministic must be True, False or None; it is {deterministic!r}")
    if not isinstance(o.is_causal, (bool, np.bool_)):
        raise TypeError(f"is_causal must be True or False; it is {o.is_causal!r}")
    if (o.query_segment_ids is None) != (o.key_value_segment_ids is None):
        given, missing = ("query", "key_value") if o.key_value_segment_ids is None else ("key_value", "query")
        raise ValueError(f"{given}_segment_ids is given without {missing}_segment_ids; both are needed")
    spec.check_alignment(o.causal_alignment)
    sides = spec.band_sides(bool(o.is_causal), o.local_window_size)
    return AttentionSpec(
        band=sides is not None,
        lengths=o.query_seq_lengths is not None or o.key_value_seq_lengths is not None,
        segments=o.query_segment_ids is not None,
        soft_cap=spec.check_soft_cap(o.logits_soft_cap) is not None,
        sinks=o.sinks is not None,
        bias=bias is not None,
        mask=mask is not None,
        deterministic=bool(deterministic),
    )


def _scale(value: Any, depth: int, acc: Any) -> tuple[Any, bool]:
    """The scale as an array of the accumulation dtype, and whether it is traced."""
    if depth < 1:
        raise ValueError(f"the depth of query and key must be at least 1; it is {depth}")
    if value is None:
        return jnp.asarray(1 / math.sqrt(depth), acc), False
    if np.ndim(value):
        raise ValueError(f"scale must be a scalar; it has shape {np.shape(value)}")
    if isinstance(value, jax.core.Tracer):
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise TypeError(f"scale must be a real number; its dtype is {value.dtype.name}")
        return value.astype(acc), True
    return _rounded("scale", spec.check_scale(value), acc), False


def _rounded(name: str, value: float, acc: Any) -> Any:
    """A positive number in the accumulation dtype; one that becomes 0 or infinite there is refused."""
    with np.errstate(over="ignore", under="ignore"):
        short = np.asarray(value).astype(acc)
    if not (np.isfinite(short) and short > 0):
        raise ValueError(f"{name} must be finite and above 0 in {jnp.dtype(acc).name}; {value} becomes {short} there")
    return jnp.asarray(short)


def _lengths(name: str, lengths: Any, batch: tuple[int, ...], full: int) -> Any:
    """int32 [...], within [0, full]; the full length where none is given."""
    if lengths is None:
        return jnp.full(batch, full, jnp.int32)
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    spec.check_per_example(name, lengths.shape, lengths.dtype.kind, batch)
    return within(lengths, full)


def _segments(name: str, ids: Any, wanted: tuple[int, ...]) -> Any:
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    spec.check_segments(name, ids.shape, ids.dtype.kind, wanted)
    return ids.astype(jnp.int32)


def _scores_like(name: str, x: Any, full: tuple[int, ...]) -> Any:
    """Bias or mask with all leading axes, each full or 1: [..., N or 1, T or 1, S or 1]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    kind = x.dtype.kind if x.dtype != jnp.bfloat16 else "f"
    if name == "mask" and x.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean (True = attend); its dtype is {x.dtype.name}. Additive masks go to bias")
    if name == "bias" and kind != "f":
        raise TypeError(f"bias must be floating point; its dtype is {x.dtype.name}")
    return x.reshape(spec.check_scores_like(name, x.shape, full))


def _sinks(sinks: Any, heads: int, acc: Any) -> Any:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape [N] = ({heads},), one logit for each query head; it has {sinks.shape}")
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating point; its dtype is {sinks.dtype.name}")
    return sinks.astype(acc)


def _operands(query: Any, key: Any, value: Any, bias: Any, mask: Any, o: Options) -> tuple[Operands, bool]:
    """Everything checked, with all leading axes; and whether the scale is traced."""
    batch, (t, n, d), s = query.shape[:-3], query.shape[-3:], key.shape[-3]
    acc = jnp.promote_types(query.dtype, jnp.float32)
    full = (*batch, n, t, s)
    scale, traced = _scale(o.scale, d, acc)
    q_len = _lengths("query_seq_lengths", o.query_seq_lengths, batch, t)
    kv_len = _lengths("key_value_seq_lengths", o.key_value_seq_lengths, batch, s)
    left, right = spec.band_sides(bool(o.is_causal), o.local_window_size) or (UNBOUNDED, UNBOUNDED)
    cap = spec.check_soft_cap(o.logits_soft_cap)
    ops = Operands(
        query=query,
        key=key,
        value=value,
        window=jnp.asarray([left, right], jnp.int32),
        offset=kv_len - q_len if spec.check_alignment(o.causal_alignment) else jnp.zeros_like(q_len),
        q_len=q_len,
        kv_len=kv_len,
        scale=scale,
        soft_cap=jnp.zeros((), acc) if cap is None else _rounded("logits_soft_cap", cap, acc),
        q_segments=_segments("query_segment_ids", o.query_segment_ids, (*batch, t)),
        kv_segments=_segments("key_value_segment_ids", o.key_value_segment_ids, (*batch, s)),
        sinks=_sinks(o.sinks, n, acc),
        bias=_scores_like("bias", bias, full),
        mask=_scores_like("mask", mask, full),
    )
    return ops, traced


def _check(query: Any, key: Any, value: Any) -> None:
    spec.check_shapes(query.shape, key.shape, value.shape)
    spec.check_dtypes(_dtype_name(query), _dtype_name(key), _dtype_name(value))


def _empty(ops: Operands) -> tuple[Any, Any]:
    """Results where there is nothing to compute: zeros, and -inf or the sink."""
    *lead, t, n, _ = ops.query.shape
    out = jnp.zeros((*lead, t, n, ops.value.shape[-1]), ops.query.dtype)
    lse = jnp.full((*lead, n, t), -jnp.inf, ops.scale.dtype)
    if ops.sinks is None:
        return out, lse
    there = jnp.arange(t) < ops.q_len[..., None, None]  # past a length a cotangent must not reach the sink
    sinks = jnp.broadcast_to(ops.sinks[:, None], lse.shape)
    return out, jnp.where(there, sinks, jax.lax.stop_gradient(sinks))


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Any = None,
    return_residual: bool = False,
    causal_alignment: str = "top_left",
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    deterministic: bool | None = None,
    checkpoint_name: str | None = None,
) -> Any:
    r"""Exact scaled dot-product attention, by FlashAttention-4 kernels where there are some, by XLA elsewhere.

    With letters `b` batch (any number of leading axes), `t` queries, `s` keys, `h` query heads, `k` key heads, `d` and
    `v` depths; query head `h` reads key head `h // (N / K)`:

        logits[b,h,t,s] = cap(scale * sum_d q[b,t,h,d] k[b,s,h//g,d] + bias[b,h,t,s]),   cap(x) = c tanh(x / c)
        lse[b,t,h]      = log sum_{s visible} exp(logits[b,h,t,s])            (the sink is one more term)
        out[b,t,h,v]    = sum_{s visible} exp(logits[b,h,t,s] - lse[b,t,h]) value[b,s,h//g,v]

    Key `j` is visible to query `i` when both are inside their lengths, their segment ids are equal, `mask` is True,
    and, with `off = 0` (top_left) or `kv_len - q_len` (bottom_right), `i + off - left <= j <= i + off + right`
    (causal: right = 0). A query that sees no key gives `out = 0` and `lse = -inf` (or the sink), and takes no part in
    any gradient; `jax.nn.dot_product_attention` gives the mean of the values there. What lies past a length never
    matters, NaN included.

    Args:
      query: [..., T, N, D]. key: [..., S, K, D]; K divides N. value: [..., S, K, V]. One dtype: float16, bfloat16
        (kernels and XLA), float32, float64 (XLA).
      bias: added to the scaled scores, broadcastable to [..., N, T, S], differentiable. XLA only.
      mask: boolean, True = attend, broadcastable to [..., N, T, S]. XLA only.
      scale: factor of the scores, above 0; 1/sqrt(D) by default. May be traced, and is then differentiable.
      is_causal: hides keys right of the diagonal.
      query_seq_lengths, key_value_seq_lengths: integers of the batch's shape; positions at or past them do not exist.
      local_window_size: keys seen on each side of the diagonal, an int for both or (left, right); None = unbounded.
      implementation: None (kernels where they exist, XLA elsewhere), "fa4" (a kernel or `Unsupported`), "xla", or a
        sequence of these in order of preference.
      return_residual: also return the log-sum-exp, float32 [..., T, N], natural logarithm, differentiable.
      causal_alignment: where the diagonal starts, "top_left" or "bottom_right".
      query_segment_ids, key_value_segment_ids: integers [..., T] and [..., S]; attend where equal.
      logits_soft_cap: `c` above; None or 0 is off. A concrete number.
      sinks: [N], one extra logit for each query head, without a value; differentiable.
      deterministic: the backward pass is bitwise reproducible; None takes `jax_fa4.config.deterministic`.
      checkpoint_name: "x" names the residuals "x.out" and "x.lse" for `jax.checkpoint` policies.

    Returns:
      out [..., T, N, V] in the query's dtype, or (out, lse).

    Raises:
      ValueError, TypeError: arguments that do not fit each other; the text holds the numbers.
      Unsupported: implementation="fa4" and there is no kernel; the text says what would work.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), and FlashAttention-4.

    >>> out = jax_fa4.attention(q, k, v, is_causal=True)      # [8, 4096, 16, 128], [8, 4096, 4, 128] twice
    """
    options = Options(
        scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size, implementation, causal_alignment,
        query_segment_ids, key_value_segment_ids, logits_soft_cap, sinks, deterministic,
    )  # fmt: skip
    query, key, value = _as_array("query", query), _as_array("key", key), _as_array("value", value)
    _check(query, key, value)
    if checkpoint_name is not None and not isinstance(checkpoint_name, str):
        raise TypeError(f"checkpoint_name must be a string or None; it is {checkpoint_name!r}")
    how = _how(options, _flags(options, bias, mask))
    ops, scale_traced = _operands(query, key, value, bias, mask, options)
    if 0 in (*ops.query.shape, *ops.key.shape, *ops.value.shape):
        out, lse = _empty(ops)
    else:
        _refuse_early(ops, how)
        ops = Operands(*_varied(sharding.aligned(ops)))
        out, lse = _attend(Static(how, scale_traced, checkpoint_name), ops)
    return (out, jnp.swapaxes(lse, -1, -2).astype(jnp.float32)) if return_residual else out


def _varied(ops: Operands) -> list[Any]:
    """Operands that vary alike over manual mesh axes; outside the differentiation rule, so that autodiff sums back."""
    there = iter(sharding.vary([x for x in ops if x is not None]))
    return [None if x is None else next(there) for x in ops]


def _refuse_early(ops: Operands, how: How) -> None:
    """implementation="fa4": what the shapes decide is refused while tracing, for the arch known or for every arch."""
    if "xla" in how.implementation:
        return
    problem = primitives.problem_of(ops.query, ops.key, ops.value, how.spec, "fwd")
    arch = how.arch or primitives.device_arch()
    reasons = []
    for candidate in [arch] if arch else kernels.ARCHITECTURES:
        try:
            kernels.select(problem, candidate)
            return
        except Unsupported as reason:
            reasons.append(f"{candidate}: {reason}")
    raise Unsupported("; ".join(reasons))


# ---- packed sequences ----------------------------------------------------------------------------------------------


def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: Any = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Any = None,
    return_residual: bool = False,
    causal_alignment: str = "top_left",
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    deterministic: bool | None = None,
    checkpoint_name: str | None = None,
) -> Any:
    """Attention within each of several sequences that are packed one after the other.

    Sequence `i` has the queries [cu_seqlens_q[i], cu_seqlens_q[i+1]) and the keys [cu_seqlens_k[i], cu_seqlens_k[i+1]);
    causal masks and windows are counted inside each sequence. Rows that belong to no sequence give 0 (lse -inf).

    Args:
      query: [total_q, N, D]. key: [total_k, K, D]. value: [total_k, K, V].
      cu_seqlens_q, cu_seqlens_k: int [sequences + 1], ascending from 0 to at most the totals.
      max_seqlen_q, max_seqlen_k: Python ints, at least the longest sequence. A longer one is refused where the lengths
        are concrete; where they are traced its rows become NaN, so that nothing is cut off silently. Likewise traced
        cu_seqlens that do not ascend so make every row NaN.
      The others as in `attention`.

    Returns:
      out [total_q, N, V], or (out, lse float32 [total_q, N]).

    Where the sequences of queries and keys are the same (one array is given for both, or two that are equal and
    concrete), they are much shorter than their maximum on average, and kernels run, they stay packed: each sequence's
    tiles meet its own alone. Else they are spread to [sequences, max_seqlen, ...] and attended with lengths: work and
    memory follow sequences x max_seqlen, so mixed lengths pay for the longest.
    """
    query, key, value = _as_array("query", query), _as_array("key", key), _as_array("value", value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name} must have shape [total, heads, depth]; it has {x.shape}")
    _check(query, key, value)
    longest = {"q": _maximum("max_seqlen_q", max_seqlen_q), "k": _maximum("max_seqlen_k", max_seqlen_k)}
    cu_q = _cumulative("cu_seqlens_q", cu_seqlens_q, query.shape[0], longest["q"])
    cu_k = _cumulative("cu_seqlens_k", cu_seqlens_k, key.shape[0], longest["k"])
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one shape; they have {cu_q.shape} and {cu_k.shape}")
    options = {
        "scale": scale, "is_causal": is_causal, "local_window_size": local_window_size,
        "implementation": implementation, "causal_alignment": causal_alignment, "logits_soft_cap": logits_soft_cap,
        "sinks": sinks, "deterministic": deterministic,
    }  # fmt: skip
    if _stays_packed((query, key, value), (cu_seqlens_q, cu_seqlens_k), longest, options):
        out, lse = _attend_packed((query, key, value), cu_q, min(longest.values()), checkpoint_name, options)
        return (out, lse) if return_residual else out
    q, q_len = _spread(query, cu_q, longest["q"])
    (k, kv_len), (v, _) = _spread(key, cu_k, longest["k"]), _spread(value, cu_k, longest["k"])
    out, lse = attention(
        q, k, v, query_seq_lengths=q_len, key_value_seq_lengths=kv_len, return_residual=True,
        checkpoint_name=checkpoint_name, **options,
    )  # fmt: skip
    cut = (q_len > longest["q"]) | (kv_len > longest["k"])
    wrong = _out_of_order(cu_q, query.shape[0]) | _out_of_order(cu_k, key.shape[0])
    zero = jnp.where(wrong, jnp.nan, 0)
    nothing = zero + (-jnp.inf if sinks is None else jnp.asarray(sinks, jnp.float32))
    cut |= wrong
    out, lse = _pack(out, cu_q, query.shape[0], cut, zero), _pack(lse, cu_q, query.shape[0], cut, nothing)
    return (out, lse) if return_residual else out


def _stays_packed(arrays: tuple[Any, ...], cu: tuple[Any, Any], longest: dict[str, int], options: Any) -> bool:
    """Whether kernels take the sequences as segments of one example, and that saves work.

    Causal and windowed positions count inside each sequence: as segments they do so only where queries and keys have
    the same sequences. Work is then at most the total times the longest.
    """
    total, sequences = arrays[0].shape[0], cu[0].shape[0] - 1
    known = not any(isinstance(x, jax.core.Tracer) for x in cu)
    same = cu[0] is cu[1] or (known and np.array_equal(cu[0], cu[1]))
    if not same or arrays[1].shape[0] != total or 5 * total > 4 * sequences * min(longest.values()):
        return False
    query, key, value = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in arrays)
    lens, ids = jax.ShapeDtypeStruct((1,), np.int32), jax.ShapeDtypeStruct((1, total), np.int32)
    more: dict[str, Any] = {"query_seq_lengths": lens, "key_value_seq_lengths": lens}
    more |= {"query_segment_ids": ids, "key_value_segment_ids": ids, **options}
    first = spec.check_implementation(
        config.implementation if options["implementation"] is None else options["implementation"]
    )[0]
    return first == "fa4" and is_supported(query, key, value, **more)[0]


def _attend_packed(
    arrays: tuple[Any, ...], cu: Any, longest: int, checkpoint_name: str | None, options: dict[str, Any]
) -> tuple[Any, Any]:
    """(out, lse) with sequences as segments of one example; NaN in the rows of traced ones that make no sense."""
    total = arrays[0].shape[0]
    row = jnp.arange(total, dtype=jnp.int32)
    ids = jnp.searchsorted(cu, row, side="right").astype(jnp.int32)[None]
    out, lse = attention(
        *(x[None] for x in arrays), query_segment_ids=ids, key_value_segment_ids=ids, query_seq_lengths=cu[-1:],
        key_value_seq_lengths=cu[-1:], return_residual=True, checkpoint_name=checkpoint_name, **options,
    )  # fmt: skip
    owner = jnp.clip(ids[0] - 1, 0, cu.shape[0] - 2)
    cut = ((cu[1:] - cu[:-1] > longest)[owner] & (row < cu[-1])) | _out_of_order(cu, total)
    return jnp.where(cut[:, None, None], jnp.nan, out[0]), jnp.where(cut[:, None], jnp.nan, lse[0])


def _maximum(name: str, n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"{name} must be a Python int (it sets a shape); it is {n!r}")
    if n < 0:
        raise ValueError(f"{name} must not be negative; it is {n}")
    return int(n)


def _cumulative(name: str, cu: Any, total: int, longest: int) -> Any:
    concrete = not isinstance(cu, jax.core.Tracer)
    cu = np.asarray(cu) if concrete else cu
    if cu.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers; its dtype is {cu.dtype.name}")
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} must have shape [sequences + 1]; it has {cu.shape}")
    if concrete:
        lengths = np.diff(cu.astype(np.int64))
        if cu[0] != 0 or (lengths < 0).any() or cu[-1] > total:
            raise ValueError(f"{name} must ascend from 0 to at most {total}; it goes from {cu[0]} to {cu[-1]}")
        if lengths.size and lengths.max() > longest:
            raise ValueError(f"{name} holds a sequence of {lengths.max()}, longer than the maximum given, {longest}")
    return jnp.asarray(cu, jnp.int32)


def _out_of_order(cu: Any, total: int) -> Any:
    """Whether traced lengths do not ascend from 0 to at most the total: what belongs to whom is then not known."""
    return (cu[0] != 0) | (cu[1:] < cu[:-1]).any() | (cu[-1] > total)


def _spread(x: Any, cu: Any, longest: int) -> tuple[Any, Any]:
    """[total, ...] -> [sequences, longest, ...] and the lengths; places past a length hold 0."""
    lengths = cu[1:] - cu[:-1]
    place = jnp.arange(longest, dtype=jnp.int32)
    inside = place[None, :] < lengths[:, None]
    if x.shape[0] == 0:
        return jnp.zeros((lengths.shape[0], longest, *x.shape[1:]), x.dtype), lengths
    rows = jnp.where(inside, cu[:-1, None] + place[None, :], 0)
    return jnp.where(inside[..., None, None], x[rows], 0), lengths


def _pack(x: Any, cu: Any, total: int, cut: Any, nothing: Any) -> Any:
    """[sequences, longest, ...] -> [total, ...]; rows of cut sequences are NaN, rows of none hold `nothing`."""
    fill = jnp.broadcast_to(jnp.asarray(nothing, x.dtype), (total, *x.shape[2:]))
    if x.shape[0] == 0 or total == 0:
        return fill
    if x.shape[1] == 0:  # no sequence may have a row; one that does, traced, is cut
        x = jnp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype)
    row = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.clip(jnp.searchsorted(cu, row, side="right") - 1, 0, x.shape[0] - 1)
    place = jnp.clip(row - cu[owner], 0, x.shape[1] - 1)
    tail = (slice(None), *(None,) * (x.ndim - 2))
    packed = jnp.where(cut[owner][tail], jnp.nan, x[owner, place])
    return jnp.where((row < cu[-1])[tail], packed, fill)


# ---- asking --------------------------------------------------------------------------------------------------------


def is_supported(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    arch: str | None = None,
    differentiable: bool = True,
    **options: Any,
) -> tuple[bool, str]:
    """Whether kernels serve this call, and why not.

    Args:
      query, key, value, bias, mask: arrays or `jax.ShapeDtypeStruct`s. options: as in `attention`.
      arch: "sm_90a", "sm_100a", ...; this process's CUDA devices by default.
      differentiable: also ask for the backward pass.

    Returns:
      (True, "") or (False, reason). Arguments that `attention` would refuse raise as they do there.
    """
    options.pop("checkpoint_name", None)
    options.pop("return_residual", None)
    o = Options(**options)
    _check(query, key, value)
    how = _how(o, _flags(o, bias, mask))
    if 0 in (*query.shape, *key.shape, *value.shape):
        return True, ""
    arch = arch or how.arch or primitives.device_arch()
    if arch is None:
        return False, "there is no CUDA device in this process; XLA runs"
    problem = primitives.problem_of(query, key, value, how.spec, "fwd")
    passes: list[Problem] = [problem, replace(problem, direction="bwd")] if differentiable else [problem]
    for one in passes:
        try:
            kernels.select(one, arch)
        except Unsupported as reason:
            return False, f"{one.direction} on {arch}: {reason}"
    return True, ""


def implementation_used(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> str:
    """In words, what `attention` with these arguments runs on the default backend of this process."""
    if jax.default_backend() != "gpu":
        return f"xla (on {jax.default_backend()})"
    words = []
    for direction, differentiable in (("forward", False), ("backward", True)):
        ok, _ = is_supported(query, key, value, bias, mask, differentiable=differentiable, **options)
        words.append(f"{direction}: {'fa4 (' + str(primitives.device_arch()) + ' kernel)' if ok else 'xla'}")
    return ", ".join(words)
