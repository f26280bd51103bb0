"""A small causal transformer over bytes, in plain JAX: a pytree of weights and a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jax_fa4

Weights = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

causal_attention: Attend = partial(jax_fa4.attention, is_causal=True)


@dataclass(frozen=True)
class Size:
    """Shape of the model. Heads are 64 deep, the smallest depth with kernels; two query heads share one key head."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 3
    heads: int = 2
    key_heads: int = 1
    depth: int = 64
    hidden: int = 512


def init(key: jax.Array, size: Size) -> Weights:
    """Float32 weights: matrices of variance 1 / rows, less for the two that write to the residual stream.

    The readout starts at zero, so the first loss is log(vocabulary).
    """

    def matrix(key: jax.Array, rows: int, columns: int, gain: float = 1.0) -> jax.Array:
        return jax.random.normal(key, (rows, columns)) * gain * rows**-0.5

    def layer(key: jax.Array) -> Weights:
        q, k, v, o, up, down = jax.random.split(key, 6)
        quiet = (2 * size.layers) ** -0.5
        return {
            "norm_attention": jnp.ones(size.width),
            "query": matrix(q, size.width, size.heads * size.depth),
            "key": matrix(k, size.width, size.key_heads * size.depth),
            "value": matrix(v, size.width, size.key_heads * size.depth),
            "out": matrix(o, size.heads * size.depth, size.width, quiet),
            "norm_hidden": jnp.ones(size.width),
            "up": matrix(up, size.width, size.hidden),
            "down": matrix(down, size.hidden, size.width, quiet),
        }

    embedding, *layers = jax.random.split(key, 1 + size.layers)
    return {
        "embedding": jax.random.normal(embedding, (size.vocabulary, size.width)),
        "layers": [layer(k) for k in layers],
        "norm": jnp.ones(size.width),
        "readout": jnp.zeros((size.width, size.vocabulary)),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """x / rms(x) * gain over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of [b, t, heads, depth] at int positions [t].

    Channels i and i + depth / 2 are turned as a pair by the angle t / 10000^(2i / depth).
    """
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention_block(w: Weights, x: jax.Array, size: Size, attend: Attend) -> jax.Array:
    """Grouped-query self-attention of [b, t, width] -> the same, in [b, t, heads, depth] layout throughout."""
    b, t, _ = x.shape
    q, k, v = (
        (x @ w[name]).reshape(b, t, heads, size.depth)
        for name, heads in (("query", size.heads), ("key", size.key_heads), ("value", size.key_heads))
    )
    positions = jnp.arange(t)
    out = attend(rotate(q, positions), rotate(k, positions), v)
    return out.reshape(b, t, -1) @ w["out"]


def apply(weights: Weights, tokens: jax.Array, size: Size, dtype: Any, attend: Attend = causal_attention) -> jax.Array:
    """Logits float32 [b, t, vocabulary] of the token after each of int [b, t]; products run in `dtype`."""
    w = jax.tree.map(lambda a: a.astype(dtype), weights)
    x = w["embedding"][tokens]
    for layer in w["layers"]:
        x = x + attention_block(layer, rms_norm(x, layer["norm_attention"]), size, attend)
        x = x + jax.nn.gelu(rms_norm(x, layer["norm_hidden"]) @ layer["up"]) @ layer["down"]
    return jnp.matmul(rms_norm(x, w["norm"]), w["readout"], preferred_element_type=jnp.float32)


def implementation(size: Size, dtype: Any, batch: int, length: int) -> str:
    """What `causal_attention` runs on at these sizes, as jax_fa4 names it."""
    q, k, v = (
        jax.ShapeDtypeStruct((batch, length, heads, size.depth), dtype)
        for heads in (size.heads, size.key_heads, size.key_heads)
    )
    return jax_fa4.implementation_used(q, k, v, is_causal=True)
