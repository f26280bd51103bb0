"""`MultiHeadAttention` for linen: Flax's arguments, parameters and cache, attention by jax_fa4, and a few extras."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.module import merge_param

from jax_fa4.flax import contract, masks
from jax_fa4.flax.cache import append, poison
from jax_fa4.flax.masks import Mask

Array = Any


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """Flax's `MultiHeadDotProductAttention`, with attention by `jax_fa4.attention`.

    Flax's constructor and call arguments mean what they mean there; parameters (`query`, `key`, `value`, `out`,
    `query_ln`, `key_ln`), their initial values and the cache (`cached_key`, `cached_value`, `cache_index`) have Flax's
    names and shapes, so checkpoints load both ways. With letters of `jax_fa4.attention`: inputs_q [batch..., T, E],
    inputs_k and inputs_v [batch..., S, E], out [batch..., T, out_features].

    `mask` takes lazy masks too (`jax_fa4.flax.causal()` and others). `decode=True` takes prompts and steps of any
    number of tokens: the new ones are appended to the cache and see what stands before them. Tokens that do not fit
    raise ValueError, or give NaN where the cache's index is traced.

    Attributes beside Flax's:
      attention_fn: `jax_fa4.flax.attention_fn(...)` by default. Another function gets what it names; what is in use and
        not named raises ValueError.
      num_kv_heads: heads of keys and values; divides num_heads, which is the default.
      is_causal: hides keys right of the diagonal.
      local_window_size: keys seen on each side of the diagonal, an int or (left, right), None = unbounded.
      logits_soft_cap: c * tanh(scores / c).
      sinks: True for a parameter `sinks` [num_heads], one extra logit for each head, zero at first; or an initializer.
      deterministic_backward: bitwise reproducible gradients; None takes `jax_fa4.config.deterministic`. (Flax's
        `deterministic` means "no dropout".)

    >>> layer = jax_fa4.flax.linen.MultiHeadAttention(num_heads=16, num_kv_heads=4, is_causal=True)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 1024, 2048)))
    """

    attention_fn: Callable[..., Array] = contract.DEFAULT
    num_kv_heads: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    sinks: bool | Callable[..., Array] = False
    deterministic_backward: bool | None = None

    def __post_init__(self) -> None:
        contract.check_heads(self.num_heads, self.num_kv_heads, self.qkv_features)
        contract.check_rate(self.dropout_rate)
        contract.check_extras(self.local_window_size, self.logits_soft_cap, self.deterministic_backward, self.is_causal)
        super().__post_init__()

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Flax's call; `mask` may be lazy. Returns [batch..., T, out_features]."""
        inputs_k, inputs_v = _inputs(inputs_q, inputs_k, inputs_v, inputs_kv)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        visible = masks.as_mask(mask)
        if self.local_window_size is not None:
            visible = masks.window(self.local_window_size) & visible
        is_causal, past_end = self.is_causal, None
        if self.decode:
            t = query.shape[-3]
            key, value, filled, past_end = self._append(key, value)
            if filled is not None:
                if t != inputs_k.shape[-2]:
                    raise ValueError(
                        f"decoding needs as many queries as new keys; there are {t} and {inputs_k.shape[-2]}"
                    )
                visible, is_causal = masks.at_cache(visible, filled, t, key.shape[-3]), False
        deterministic, dropout_rng = self._dropout(deterministic, dropout_rng)
        options = {
            "dropout_rng": dropout_rng, "dropout_rate": self.dropout_rate, "broadcast_dropout": self.broadcast_dropout,
            "deterministic": deterministic, "dtype": self.dtype, "precision": self.precision,
            "force_fp32_for_softmax": self.force_fp32_for_softmax,
            "qk_attn_weights_einsum": _made(self.qk_attn_weights_einsum_cls),
            "attn_weights_value_einsum": _made(self.attn_weights_value_einsum_cls),
        }  # fmt: skip
        if sow_weights:
            options["module"] = self
        extras = {
            "logits_soft_cap": self.logits_soft_cap, "sinks": self._sinks(),
            "deterministic_backward": self.deterministic_backward,
        }  # fmt: skip
        x = contract.Call(visible, is_causal, options, extras).run(self.attention_fn, query, key, value)
        out = nn.DenseGeneral(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
            **self._dense_options(),
        )
        return out(poison(x, past_end))

    def _dense_options(self) -> dict[str, Any]:
        return {
            "use_bias": self.use_bias, "dtype": self.dtype, "param_dtype": self.param_dtype, "precision": self.precision
        }  # fmt: skip

    def _project(self, inputs_q: Array, inputs_k: Array, inputs_v: Array) -> tuple[Array, Array, Array]:
        """[batch..., length, heads, depth] of each; key and value have the key heads."""
        features = self.qkv_features or inputs_q.shape[-1]
        kv_heads = contract.check_heads(self.num_heads, self.num_kv_heads, features)
        depth = features // self.num_heads
        dense = functools.partial(
            nn.DenseGeneral,
            axis=-1,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
            **self._dense_options(),
        )
        query = dense(features=(self.num_heads, depth), name="query")(inputs_q)
        key = dense(features=(kv_heads, depth), name="key")(inputs_k)
        value = dense(features=(kv_heads, depth), name="value")(inputs_v)
        if self.normalize_qk:
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return query, key, value

    def _append(self, key: Array, value: Array) -> tuple[Array, Array, Array | None, Array | None]:
        """The cache with the new tokens; at initialisation it is made, of the input's length, and left empty."""
        started = self.has_variable("cache", "cached_key")
        # zeros_like: the cache is laid out over devices as the projections are.
        cached_key = self.variable("cache", "cached_key", jnp.zeros_like, key)
        cached_value = self.variable("cache", "cached_value", jnp.zeros_like, value)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
        if not started:
            return key, value, None, None
        new = append(cached_key.value, cached_value.value, index.value, key, value)
        cached_key.value, cached_value.value = new.key, new.value
        index.value = new.filled.astype(index.value.dtype)
        return new

    def _dropout(self, deterministic: bool | None, dropout_rng: Array | None) -> tuple[bool, Array | None]:
        """Whether there is no dropout, and its key; as in Flax, without a rate nobody need say `deterministic`."""
        if not self.dropout_rate > 0:
            return True, dropout_rng
        deterministic = merge_param("deterministic", self.deterministic, deterministic)
        if not deterministic and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        return bool(deterministic), dropout_rng

    def _sinks(self) -> Array | None:
        if self.sinks is False:
            return None
        init = nn.initializers.zeros_init() if self.sinks is True else self.sinks
        return self.param("sinks", init, (self.num_heads,), self.param_dtype)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under Flax's other name; layers without a name are called after it."""


def _made(cls: Callable[..., Any] | None) -> Any:
    return None if cls is None else cls()


def _inputs(q: Array, k: Array | None, v: Array | None, kv: Array | None) -> tuple[Array, Array]:
    """Keys' and values' inputs: those of the queries and of the keys where they are not given."""
    if kv is not None:
        if k is not None or v is not None:
            raise ValueError("inputs_kv cannot be given together with inputs_k or inputs_v")
        warnings.warn("inputs_kv will go from Flax; use inputs_k and inputs_v", DeprecationWarning, stacklevel=3)
        return kv, kv
    if k is None and v is not None:
        raise ValueError("inputs_v is given without inputs_k; give the one array as inputs_k where both are the same")
    k = q if k is None else k
    return k, k if v is None else v
