"""`MultiHeadAttention` for nnx: Flax's arguments, parameters and cache, attention by jax_fa4, and a few extras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from

from jax_fa4.flax import contract, masks
from jax_fa4.flax.cache import append, poison
from jax_fa4.flax.masks import Mask

Array = Any


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention`, with attention by `jax_fa4.attention`.

    Flax's constructor and call arguments mean what they mean there; parameters (`query`, `key`, `value`, `out`,
    `query_ln`, `key_ln`), their initial values for the same rngs and the cache (`cached_key`, `cached_value`,
    `cache_index`) have Flax's names and shapes, so checkpoints load both ways. Inputs are [batch..., T, in_features]
    and [batch..., S, in_kv_features], the result is [batch..., T, out_features].

    `mask` takes lazy masks too (`jax_fa4.flax.causal()` and others). `decode=True` takes prompts and steps of any
    number of tokens: the new ones are appended to the cache and see what stands before them, with and without
    `is_causal`. Tokens that do not fit raise ValueError, or give NaN where the cache's index is traced.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, and every keyword of Flax's:
        see `flax.nnx.MultiHeadAttention`.
      attention_fn: `jax_fa4.flax.attention_fn(...)` by default. Another function gets what it names; what is in use and
        not named raises ValueError.
      is_causal: hides keys right of the diagonal, where the call does not say.
      local_window_size: keys seen on each side of the diagonal, an int or (left, right), None = unbounded.
      logits_soft_cap: c * tanh(scores / c).
      sinks: True for a parameter `sinks` [num_heads], one extra logit for each head, zero at first; or an initializer.
      deterministic_backward: bitwise reproducible gradients; None takes `jax_fa4.config.deterministic`. (Flax's
        `deterministic` means "no dropout".)

    >>> layer = jax_fa4.flax.nnx.MultiHeadAttention(16, 2048, num_kv_heads=4, is_causal=True, rngs=nnx.Rngs(0))
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        rngs: nnx.Rngs,
        dropout_rate: float = 0.0,
        attention_fn: Callable[..., Array] = contract.DEFAULT,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        sinks: bool | Callable[..., Array] = False,
        deterministic_backward: bool | None = None,
        **options: Any,
    ):
        features = in_features if qkv_features is None else qkv_features
        contract.check_heads(num_heads, num_kv_heads, features)
        contract.check_rate(dropout_rate)
        contract.check_extras(local_window_size, logits_soft_cap, deterministic_backward, is_causal)
        super().__init__(
            num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features,
            rngs=rngs, dropout_rate=dropout_rate, attention_fn=attention_fn, **options,
        )  # fmt: skip
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.deterministic_backward = deterministic_backward
        self.sinks: nnx.Param[Array] | None = nnx.data(None)
        if sinks is True:
            self.sinks = nnx.Param(jnp.zeros((num_heads,), self.param_dtype))
        elif sinks is not False:
            self.sinks = nnx.Param(sinks(rngs.params(), (num_heads,), self.param_dtype))

    def __call__(  # type: ignore[override]
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | Mask | None = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
    ) -> Array:
        """Flax's call; `mask` may be lazy, and `is_causal` falls back to the constructor's. `input_positions` go to an
        `attention_fn` that names them (Flax 0.12.12's rotary one); `jax_fa4.flax.attention_fn()` does not."""
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                "inputs_v is given without inputs_k; give the one array as inputs_k where both are the same"
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        for name, x, wanted in (
            ("inputs_q", inputs_q, self.in_features), ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):  # fmt: skip
            if x.shape[-1] != wanted:
                raise ValueError(f"{name} must have {wanted} features; it has {x.shape[-1]}")
        query, key, value = self._project(inputs_q, inputs_k, inputs_v, qkv_sharding)
        visible = masks.as_mask(mask)
        if self.local_window_size is not None:
            visible = masks.window(self.local_window_size) & visible
        is_causal = self.is_causal if is_causal is None else is_causal
        contract.check_flag("is_causal", is_causal)
        past_end = None
        if first_from(decode, self.decode, error_msg=_unset("decode")):
            t = query.shape[-3]
            if t != key.shape[-3]:
                raise ValueError(f"decoding needs as many queries as new keys; there are {t} and {key.shape[-3]}")
            key, value, filled, past_end = self._append(key, value)
            # The cache's own diagonal is causal, is_causal or not. Flax 0.12.8 puts a top-left triangle over the cache
            # when is_causal is True, which leaves the first key alone visible.
            visible, is_causal = masks.at_cache(visible, filled, t, key.shape[-3]), False
        deterministic, dropout_rng = self._dropout(deterministic, rngs)
        options = {
            "dropout_rng": dropout_rng, "dropout_rate": self.dropout_rate, "broadcast_dropout": self.broadcast_dropout,
            "deterministic": deterministic, "dtype": self.dtype, "precision": self.precision,
            "module": self if sow_weights else None,
        }  # fmt: skip
        extras = {
            "logits_soft_cap": self.logits_soft_cap, "sinks": None if self.sinks is None else self.sinks[...],
            "deterministic_backward": self.deterministic_backward, "input_positions": input_positions,
        }  # fmt: skip
        call = contract.Call(visible, bool(is_causal), options, extras)
        x = poison(call.run(self.attention_fn, query, key, value), past_end)
        return self.out(x, **({} if out_sharding is None else {"out_sharding": out_sharding}))

    def _project(self, inputs_q: Array, inputs_k: Array, inputs_v: Array, sharding: Any) -> tuple[Array, Array, Array]:
        """[batch..., length, heads, depth] of each; key and value have the key heads."""
        where = {} if sharding is None else {"out_sharding": sharding}
        query, key, value = self.query(inputs_q, **where), self.key(inputs_k, **where), self.value(inputs_v, **where)
        if self.normalize_qk:
            assert self.query_ln is not None and self.key_ln is not None
            query, key = self.query_ln(query), self.key_ln(key)
        return query, key, value

    def _append(self, key: Array, value: Array) -> Any:
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError("decoding needs a cache; call init_cache([batch..., max_length, in_features]) first")
        new = append(self.cached_key[...], self.cached_value[...], self.cache_index[...], key, value)
        self.cached_key[...], self.cached_value[...] = new.key, new.value
        self.cache_index[...] = new.filled.astype(self.cache_index.dtype)
        return new

    def _dropout(self, deterministic: bool | None, rngs: Any) -> tuple[bool, Array | None]:
        """Whether there is no dropout, and its key; as in Flax, without a rate nobody need say `deterministic`."""
        if not self.dropout_rate > 0:
            return True, None
        if first_from(deterministic, self.deterministic, error_msg=_unset("deterministic")):
            return True, None
        stream = self.rngs if rngs is None else rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        if stream is None:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs rngs: give them to the call, since the module was made with"
                " keep_rngs=False"
            )
        return False, stream()

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """For `nnx.view`: switches dropout and decoding; with a batch size and a length it makes the cache too."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if not decode or (batch_size is None and max_length is None):
            return
        if batch_size is None or max_length is None:
            raise TypeError(f"a cache needs batch_size and max_length; they are {batch_size} and {max_length}")
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        self.init_cache((*batch, max_length, self.in_features), self.dtype or jnp.float32)


def _unset(name: str) -> str:
    return f"MultiHeadAttention was given no `{name}`, neither in the call nor in the constructor nor by nnx.view"
