"""The key and value cache of decoding: append one or more tokens, and never go past the end unnoticed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


class Appended(NamedTuple):
    """A cache after new tokens went in."""

    key: Array  # [batch..., max_length, key heads, depth], in the cache's dtype
    value: Array
    filled: Array  # int32 scalar, tokens in the cache now
    past_end: Array | None  # bool scalar: the tokens did not fit; None where that is known not to be so


def append(cached_key: Array, cached_value: Array, index: Array, key: Array, value: Array) -> Appended:
    """Writes the tokens of `key` and `value` [batch..., T, key heads, depth] at `index` of the cache.

    Raises:
      ValueError: the shapes do not fit each other, or the tokens do not fit behind `index`. Where `index` is traced it
        cannot be looked at; `past_end` then tells at run time, and `poison` makes it heard.
    """
    *batch, max_length, heads, depth = cached_key.shape
    t = key.shape[-3]
    expected = (*batch, t, heads, depth)
    if key.shape != expected or value.shape[:-1] != expected[:-1]:
        raise ValueError(
            f"the new keys and values must have shape [batch..., tokens, heads, depth] = {expected} to go into a cache"
            f" of shape {cached_key.shape}; they have {key.shape} and {value.shape}"
        )
    concrete = not isinstance(index, jax.core.Tracer)
    if t > max_length or (concrete and int(index) + t > max_length):
        raise ValueError(
            f"decoding past the end of the cache: {int(index) if concrete else 'some'} tokens are in it and {t} more"
            f" are given; it holds {max_length}"
        )
    index = jnp.asarray(index, jnp.int32)  # under x64 too, and whatever width a checkpoint had
    zero = jnp.zeros((), jnp.int32)
    start = (*(zero for _ in batch), index, zero, zero)
    new_key = lax.dynamic_update_slice(cached_key, key.astype(cached_key.dtype), start)
    new_value = lax.dynamic_update_slice(cached_value, value.astype(cached_value.dtype), start)
    filled = index + t
    return Appended(new_key, new_value, filled, None if concrete else filled > max_length)


def poison(x: Array, past_end: Array | None) -> Array:
    """`x`, or NaN throughout where a traced step went past the cache's end.

    The cache's index keeps counting, so that every later step is NaN too, until the cache is made anew: a compiled
    program cannot raise, and clamping the write would give plausible wrong tokens.
    """
    return x if past_end is None else jnp.where(past_end, jnp.full((), jnp.nan, x.dtype), x)
