"""The example's transformer over bytes in Flax, once in linen and once in nnx, with attention from jax_fa4.flax.

Both have the verbs of `Text`, so that training and generating know neither library. Their weights are plain dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jax_fa4.flax


@dataclass(frozen=True)
class Size:
    """Shape of the model; two query heads share one key head, heads are width / heads deep, positions are learned."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 3
    heads: int = 2
    key_heads: int = 1
    hidden: int = 512
    length: int = 512  # the longest sequence


@dataclass(frozen=True)
class Text:
    """A model of text, whichever library it is written in.

    Attributes:
      init: key -> weights.
      apply: (weights, int [b, t]) -> float32 logits [b, t, vocabulary].
      cache: (weights, batch) -> an empty cache for size.length tokens.
      step: (weights, cache, int [b, t]) -> (cache, logits [b, t, vocabulary]); t tokens go behind those in the cache.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, jax.Array], jax.Array]
    cache: Callable[[Any, int], Any]
    step: Callable[[Any, Any, jax.Array], tuple[Any, jax.Array]]


def quiet(size: Size) -> Any:
    """Initial values of matrices that write to the residual stream: the less, the more layers do."""
    return nn.initializers.variance_scaling(0.5 / size.layers, "fan_in", "normal")


# ---- linen ---------------------------------------------------------------------------------------------------------


class LinenBlock(nn.Module):
    """Norm, causal attention, norm, two dense layers; both added to their input."""

    size: Size
    dtype: Any
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        attention = jax_fa4.flax.linen.MultiHeadAttention(
            size.heads, num_kv_heads=size.key_heads, is_causal=True, use_bias=False, dtype=dtype, decode=self.decode,
            out_kernel_init=quiet(size), name="attention",
        )  # fmt: skip
        x = x + attention(nn.RMSNorm(dtype=dtype, name="norm_attention")(x))
        hidden = nn.Dense(size.hidden, use_bias=False, dtype=dtype, name="up")(
            nn.RMSNorm(dtype=dtype, name="norm_hidden")(x)
        )
        return x + nn.Dense(size.width, use_bias=False, dtype=dtype, kernel_init=quiet(size), name="down")(
            nn.gelu(hidden)
        )


class LinenModel(nn.Module):
    """int [b, t] -> float32 logits [b, t, vocabulary]."""

    size: Size
    dtype: Any
    decode: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        started = self.has_variable("cache", "place")
        place = self.variable("cache", "place", lambda: jnp.zeros((), jnp.int32)) if self.decode else None
        start = 0 if place is None else place.value
        x = nn.Embed(size.vocabulary, size.width, dtype=dtype, name="tokens")(tokens)
        x = x + nn.Embed(size.length, size.width, dtype=dtype, name="places")(start + jnp.arange(tokens.shape[1]))
        if place is not None and started:
            place.value = place.value + tokens.shape[1]
        for i in range(size.layers):
            x = LinenBlock(size, dtype, self.decode, name=f"block_{i}")(x)
        x = nn.RMSNorm(dtype=dtype, name="norm")(x)
        zeros = nn.initializers.zeros_init()  # the first loss is log(vocabulary)
        return nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, kernel_init=zeros, name="readout")(x).astype(
            jnp.float32
        )


def linen(size: Size, dtype: Any) -> Text:
    """The model in linen."""
    model, decoder = LinenModel(size, dtype), LinenModel(size, dtype, decode=True)

    def cache(weights: Any, batch: int) -> Any:
        shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), jnp.zeros((batch, size.length), jnp.int32)))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["cache"])

    def step(weights: Any, cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        logits, new = decoder.apply({"params": weights, "cache": cache}, tokens, mutable=["cache"])
        return new["cache"], logits

    return Text(
        init=jax.jit(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]),
        apply=lambda weights, tokens: model.apply({"params": weights}, tokens),
        cache=cache,
        step=step,
    )


# ---- nnx -----------------------------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    """The same block."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs):
        norm = {"dtype": dtype, "rngs": rngs}
        dense = norm | {"use_bias": False}
        self.norm_attention = nnx.RMSNorm(size.width, **norm)
        self.attention = jax_fa4.flax.nnx.MultiHeadAttention(
            size.heads, size.width, num_kv_heads=size.key_heads, is_causal=True, decode=False,
            out_kernel_init=quiet(size), **dense,
        )  # fmt: skip
        self.norm_hidden = nnx.RMSNorm(size.width, **norm)
        self.up = nnx.Linear(size.width, size.hidden, **dense)
        self.down = nnx.Linear(size.hidden, size.width, kernel_init=quiet(size), **dense)

    def __call__(self, x: jax.Array, decode: bool) -> jax.Array:
        x = x + self.attention(self.norm_attention(x), decode=decode)
        return x + self.down(nnx.gelu(self.up(self.norm_hidden(x))))


class NnxModel(nnx.Module):
    """int [b, t] -> float32 logits [b, t, vocabulary]."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(size.vocabulary, size.width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(size.length, size.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.readout = nnx.Linear(
            size.width, size.vocabulary, use_bias=False, kernel_init=zeros, dtype=dtype, rngs=rngs
        )

    def __call__(self, tokens: jax.Array, decode: bool = False) -> jax.Array:
        start = self.blocks[0].attention.cache_index[...] if decode else 0
        x = self.tokens(tokens) + self.places(start + jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, decode)
        return self.readout(self.norm(x)).astype(jnp.float32)

    def make_cache(self, batch: int, size: Size, dtype: Any) -> None:
        for block in self.blocks:
            block.attention.init_cache((batch, size.length, size.width), dtype)


def nnx_text(size: Size, dtype: Any) -> Text:
    """The model in nnx, its variables kept as pure dicts outside."""
    abstract = nnx.eval_shape(lambda: NnxModel(size, dtype, nnx.Rngs(0)))
    graph, shapes = nnx.split(abstract)

    def with_cache(batch: int) -> NnxModel:
        model = NnxModel(size, dtype, nnx.Rngs(0))
        model.make_cache(batch, size, dtype)
        return model

    def filled(shapes: Any, weights: Any) -> Any:
        state = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(state, weights)
        return state

    def cache(weights: Any, batch: int) -> Any:
        held = nnx.state(nnx.eval_shape(lambda: with_cache(batch)), nnx.Cache)
        return nnx.to_pure_dict(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), held))

    def step(weights: Any, cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        graph, parameters, held = nnx.split(nnx.eval_shape(lambda: with_cache(tokens.shape[0])), nnx.Param, nnx.Cache)
        model = nnx.merge(graph, filled(parameters, weights), filled(held, cache))
        logits = model(tokens, decode=True)
        return nnx.to_pure_dict(nnx.state(model, nnx.Cache)), logits

    return Text(
        init=jax.jit(lambda key: nnx.to_pure_dict(nnx.state(NnxModel(size, dtype, nnx.Rngs(key)), nnx.Param))),
        apply=lambda weights, tokens: nnx.merge(graph, filled(shapes, weights))(tokens),
        cache=cache,
        step=step,
    )


def model(api: str, size: Size, dtype: Any) -> Text:
    """The model by the name of its library, "linen" or "nnx"."""
    makers = {"linen": linen, "nnx": nnx_text}
    if api not in makers:
        raise ValueError(f"api must be one of {sorted(makers)}; it is {api!r}")
    return makers[api](size, dtype)
