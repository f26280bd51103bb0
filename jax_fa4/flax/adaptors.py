"""Attention in the shapes that MaxText, Levanter and AXLearn call; none of them is imported or needed.

Interfaces as published in July 2026: MaxText's `cudnn_jax_flash_attention` (AI-Hypercomputer/maxtext, attention_op.py),
Levanter's array-level `attention(q, k, v, mask)` (marin-community/marin, grug/attention.py), AXLearn's
`BaseFlashAttention` (apple/axlearn, flash_attention/common.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from jax_fa4 import spec
from jax_fa4.api import attention
from jax_fa4.api import is_supported as kernels_support

Array = Any

_log = logging.getLogger(__name__)


# ---- MaxText and Levanter ------------------------------------------------------------------------------------------


def fused_attention(
    query: Array,
    key: Array,
    value: Array,
    decoder_segment_ids: Array | None = None,
    model_mode: str = "train",
    *,
    scale: float = 1.0,
    sliding_window_size: int | None = None,
    attn_logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """MaxText's call: causal attention of a packed batch, or one step against a cache.

    Args:
      query: [B, T, N, D], already scaled, as MaxText's projections leave it (so `scale` is 1).
      key, value: [B, S, K, D].
      decoder_segment_ids: int [B, T] in "train" and "prefill", attend where equal. In "autoregressive" int [B, S], 1
        where a place of the cache is in use.
      model_mode: "train", "prefill" or "autoregressive"; the first two are causal.
      sliding_window_size: keys seen by a query, itself included, MaxText's way of counting.
      attn_logits_soft_cap, sinks, options: as in `jax_fa4.attention`.

    Returns:
      (out [B, T, N, D], lse float32 [B, N, T]), the pair that MaxText merges two caches' results by.
    """
    window = _counting_itself("sliding_window_size", sliding_window_size)
    if model_mode in ("train", "prefill"):
        ids = (decoder_segment_ids, decoder_segment_ids)
        if decoder_segment_ids is not None and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"decoder_segment_ids need as many queries as keys in mode {model_mode!r}; there are {query.shape[1]}"
                f" and {key.shape[1]}"
            )
    elif model_mode == "autoregressive":
        if window is not None:
            raise ValueError(
                f"sliding_window_size={sliding_window_size} is not offered in mode 'autoregressive': where a query"
                " stands in the cache is not part of this call; hide old places in decoder_segment_ids"
            )
        used = None if decoder_segment_ids is None else (jnp.asarray(decoder_segment_ids) == 1).astype(jnp.int32)
        ids = (None, None) if used is None else (jnp.ones(query.shape[:2], jnp.int32), used)
    else:
        raise ValueError(f"model_mode must be 'train', 'prefill' or 'autoregressive'; it is {model_mode!r}")
    out, lse = attention(
        query, key, value, scale=scale, is_causal=model_mode != "autoregressive", local_window_size=window,
        query_segment_ids=ids[0], key_value_segment_ids=ids[1], logits_soft_cap=attn_logits_soft_cap, sinks=sinks,
        return_residual=True, **options,
    )  # fmt: skip
    return out, jnp.swapaxes(lse, 1, 2)


def levanter_attention(query: Array, key: Array, value: Array, mask: Any = None, **options: Any) -> Array:
    """Levanter's array-level call.

    Args:
      query: [B, Q, N, D]. key, value: [B, K, heads, D].
      mask: None; an object with `is_causal`, `sliding_window` (keys seen, the query's own included, counted to the
        left) and `segment_ids` (None or a pair, [Q] and [K] or [B, Q] and [B, K]); or an array [Q, K] or [B, Q, K],
        boolean (True = attend) or floating (added to the scores).
      options: as in `jax_fa4.attention`.

    Returns:
      [B, Q, N, D] in the values' dtype.
    """
    if mask is None:
        return attention(query, key, value, **options)
    if hasattr(mask, "dtype"):
        if mask.ndim not in (2, 3):
            raise ValueError(f"a dense mask must have shape [Q, K] or [B, Q, K]; it has {mask.shape}")
        mask = mask if mask.ndim == 2 else mask[:, None]
        where = {"mask": mask} if mask.dtype == jnp.bool_ else {"bias": mask}
        return attention(query, key, value, **where, **options)
    left = _counting_itself("sliding_window", mask.sliding_window)
    ids: tuple[Array, Array] = (None, None)
    if mask.segment_ids is not None:
        q_ids, k_ids = mask.segment_ids
        ids = tuple(jnp.broadcast_to(x, (query.shape[0], x.shape[-1])) for x in (q_ids, k_ids))  # type: ignore[assignment]
    return attention(
        query, key, value, is_causal=bool(mask.is_causal), local_window_size=left, query_segment_ids=ids[0],
        key_value_segment_ids=ids[1], **options,
    )  # fmt: skip


def _counting_itself(name: str, size: int | None) -> tuple[int, None] | None:
    """A window of `size` keys that ends with the query's own, as (left, right)."""
    if size is None:
        return None
    if size < 1:
        raise ValueError(f"{name} counts the query's own key, so it must be at least 1; it is {size}")
    return size - 1, None


# ---- AXLearn -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AxlearnFlashAttention:
    """AXLearn's flash attention: `is_supported(input_batch, kv_cache_type)` first, then the call with `input_batch`.

    `input_batch` holds `query` [B, T, N, D], `key` and `value` [B, S, K, D], `bias`, and maybe `logit_sink` [N] and
    `prng_key`. The bias is None, a float array [B or 1, N or 1, T, S], or one of AXLearn's bias objects, told apart by
    the names of their classes: causal ones, sliding windows and segment ids reach the kernels as such; others are asked
    for their `value()`, or their `bool_value()` where they have one.

    Attributes:
      softmax_scale: factor of the scores; AXLearn scales its queries itself, hence 1.
      dropout_rate: must be 0; AXLearn then falls back to its own implementations.
      implementation: None: supported is what kernels serve here; "xla": everything that `jax_fa4.attention` takes.
    """

    softmax_scale: float = 1.0
    dropout_rate: float = 0.0
    implementation: Any = None

    _causal: ClassVar[str] = "CausalAttentionBias"
    _window: ClassVar[str] = "SlidingWindowAttentionBias"
    _segments: ClassVar[str] = "SegmentIdAttentionBias"

    def name(self) -> str:
        return type(self).__name__

    def is_supported(self, input_batch: Mapping[str, Any], kv_cache_type: Any = None) -> bool:
        """Whether the call with this batch would run; the reason against is logged.

        Raises:
          ValueError, TypeError: a batch that makes no sense for any attention.
        """
        query, key, value = self._validated(input_batch)
        if self.dropout_rate:
            return self._unsupported(f"dropout_rate={self.dropout_rate}; there is no dropout in the kernels")
        if kv_cache_type is not None:
            return self._unsupported(f"kv_cache_type={getattr(kv_cache_type, '__name__', kv_cache_type)}")
        dtypes = {jnp.dtype(x.dtype).name for x in (query, key, value)}
        if len(dtypes) > 1:
            return self._unsupported(f"query, key and value have several dtypes, {sorted(dtypes)}")
        if self.implementation == "xla":
            return True
        ok, reason = kernels_support(
            query, key, value, implementation=self.implementation, **self._options(input_batch)
        )
        return ok or self._unsupported(reason)

    def __call__(self, input_batch: Mapping[str, Any]) -> Array:
        """[B, T, N, D] in the query's dtype."""
        query, key, value = self._validated(input_batch)
        if self.dropout_rate:
            raise ValueError(f"dropout_rate={self.dropout_rate} is not offered; is_supported says so")
        return attention(query, key, value, implementation=self.implementation, **self._options(input_batch))

    def _unsupported(self, reason: str) -> bool:
        _log.warning("Not using %s because %s", self.name(), reason)
        return False

    def _validated(self, batch: Mapping[str, Any]) -> tuple[Array, Array, Array]:
        missing = [n for n in ("query", "key", "value", "bias") if n not in batch]
        if missing:
            raise ValueError(f"input_batch lacks {missing[0]!r}; it holds {sorted(batch)}")
        query, key, value = batch["query"], batch["key"], batch["value"]
        if key.shape != value.shape:
            raise ValueError(f"key and value must have one shape; they have {key.shape} and {value.shape}")
        spec.check_shapes(query.shape, key.shape, value.shape)
        sink = batch.get("logit_sink")
        if sink is not None and sink.shape != (query.shape[2],):
            raise ValueError(f"logit_sink must have shape ({query.shape[2]},), one for each head; it has {sink.shape}")
        return query, key, value

    def _options(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `attention` that say what the bias says."""
        options: dict[str, Any] = {"scale": self.softmax_scale, "sinks": batch.get("logit_sink")}
        left: list[int] = []
        for bias in _parts(batch["bias"]):
            kinds = {c.__name__ for c in type(bias).__mro__}
            # A bias that knows where its queries stand belongs to a step of decoding: another diagonal than ours.
            placed = getattr(bias, "target_positions", None) is not None
            if self._causal in kinds and not placed:
                options["is_causal"] = True
            elif self._window in kinds and not placed:
                options["is_causal"] = True
                left.append(int(bias.sliding_window_size))
            elif self._segments in kinds and "query_segment_ids" not in options:
                options["query_segment_ids"] = options["key_value_segment_ids"] = bias.segment_ids
            elif hasattr(bias, "bool_value"):
                seen = bias.bool_value()
                before = options.get("mask")
                options["mask"] = seen if before is None else before if seen is None else seen & before
            else:
                added = bias if hasattr(bias, "dtype") and hasattr(bias, "shape") else bias.value()
                before = options.get("bias")
                options["bias"] = added if before is None else before if added is None else added + before
        if left:
            options["local_window_size"] = (min(left), None)
        return options


def _parts(bias: Any) -> list[Any]:
    """A composite bias taken apart, to any depth; what has no value is left out."""
    if bias is None:
        return []
    if hasattr(bias, "biases"):
        return [part for one in bias.biases for part in _parts(one)]
    if hasattr(bias, "has_value") and not bias.has_value():
        return []
    return [bias]
