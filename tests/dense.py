"""Dense attention in jnp, differentiated by JAX: the yardstick on a GPU, and unfused in any dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def visible(t: int, s: int, options: dict[str, Any]) -> Any:
    """bool [B or 1, 1, T, S] from the public options."""
    q_len = options.get("query_seq_lengths")
    kv_len = options.get("key_value_seq_lengths")
    q_len = jnp.array([t]) if q_len is None else jnp.asarray(q_len)
    kv_len = jnp.array([s]) if kv_len is None else jnp.asarray(kv_len)
    q_len, kv_len = jnp.broadcast_arrays(q_len, kv_len)
    i, j = jnp.arange(t)[None, :, None], jnp.arange(s)[None, None, :]
    seen = (i < q_len[:, None, None]) & (j < kv_len[:, None, None])
    bottom = options.get("causal_alignment", "top_left") == "bottom_right"
    d = j - i - jnp.where(bottom, kv_len - q_len, 0)[:, None, None]
    if options.get("is_causal"):
        seen &= d <= 0
    window = options.get("local_window_size")
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        seen &= True if left is None else d >= -left
        seen &= True if right is None else d <= right
    if options.get("query_segment_ids") is not None:
        seen &= options["query_segment_ids"][:, :, None] == options["key_value_segment_ids"][:, None, :]
    return seen[:, None]


def attention(q: Any, k: Any, v: Any, options: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    """(out [B,T,N,V], lse [B,N,T]) in `dtype` throughout; rows without keys give 0 and -inf (or the sink)."""
    t, s, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    seen = visible(t, s, options)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    kept = jnp.broadcast_to(seen.any(-2)[:, 0, :, None, None], v.shape)
    k, v = jnp.where(kept[..., :1], k, 0), jnp.where(kept, v, 0)  # what nobody sees may hold NaN
    live = seen.any(-1)[:, 0, :, None, None]
    q = jnp.where(live, q, 0)
    logits = jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") * jnp.asarray(scale, dtype)
    cap = options.get("logits_soft_cap")
    if cap:
        logits = jnp.asarray(cap, dtype) * jnp.tanh(logits / jnp.asarray(cap, dtype))
    low = jnp.finfo(dtype).min
    logits = jnp.where(seen, logits, low)
    sinks = options.get("sinks")
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    if sinks is not None:
        sink = jnp.asarray(sinks).astype(dtype)[None, :, None, None]
        peak = jnp.maximum(peak, jax.lax.stop_gradient(sink))
    weights = jnp.where(seen, jnp.exp(logits - peak), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - peak)
    some = total > 0
    safe = jnp.where(some, total, 1)
    out = jnp.einsum("bnts,bsnd->btnd", (weights / safe).astype(dtype), v, precision="highest")
    lse = jnp.where(some, jnp.log(safe) + peak, -jnp.inf)[..., 0]
    return out, lse
