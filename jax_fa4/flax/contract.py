"""Flax's contract for an `attention_fn`: every argument of linen's and nnx's is named, then honoured or refused.

Measured on Flax 0.12.8: linen passes a function only the arguments that its signature *names*, so a `**kwargs` function
silently loses the mask; nnx passes nine of them, `is_causal` included, to whatever it is given.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jax_fa4 import spec
from jax_fa4.api import attention
from jax_fa4.config import config
from jax_fa4.flax import masks
from jax_fa4.flax.masks import Mask
from jax_fa4.spec import Unsupported

Array = Any


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionFn:
    """Attention with the signature that Flax's modules call. Made by `attention_fn`, which documents the settings.

    Two of them are equal, and hash alike, when their settings are equal (sinks: the same array), so that a module
    which holds one stays a good key of jit's cache.
    """

    is_causal: bool = False
    local_window_size: Any = None
    causal_alignment: str = "top_left"
    scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: Any = None
    deterministic_backward: bool | None = None
    implementation: Any = None
    checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        window = spec.check_window(self.local_window_size)
        object.__setattr__(self, "local_window_size", None if window == (None, None) else window)
        if isinstance(self.implementation, list):
            object.__setattr__(self, "implementation", tuple(self.implementation))
        spec.check_alignment(self.causal_alignment)
        spec.check_soft_cap(self.logits_soft_cap)
        spec.check_implementation(self.implementation)
        if self.scale is not None:
            spec.check_scale(self.scale)
        for name in ("is_causal", "deterministic_backward"):
            check_flag(name, getattr(self, name), optional=name == "deterministic_backward")

    def _identity(self) -> tuple[Any, ...]:
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return tuple(id(v) if f.name == "sinks" else v for f, v in zip(dataclasses.fields(self), values, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionFn) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Array] | None = None,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        logits_soft_cap: float | None = None,
        sinks: Array | None = None,
        deterministic_backward: bool | None = None,
    ) -> Array:
        """softmax(cap(scale * q k^T + bias)) v, with the meaning of `jax_fa4.attention`.

        Args:
          query: [batch..., T, N, D]. key: [batch..., S, K, D]; K divides N. value: [batch..., S, K, V].
          bias: added to the scores, broadcastable to [batch..., N, T, S].
          mask: lazy, or an array broadcastable to [batch..., N, T, S], nonzero = attend.
          broadcast_dropout, dropout_rng, dropout_rate, deterministic: Flax's dropout; `deterministic` means none.
          dtype: of the computation; inferred from query, key and value where it is None.
          precision: the least that is asked of products. 16-bit inputs are multiplied exactly and summed in float32,
            wider ones are computed at the highest precision, so there is nothing left to raise.
          module: sows the attention weights into it.
          force_fp32_for_softmax: the softmax is always computed in float32, or wider.
          einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: replacements of Flax's products.
          promote_dtype: nnx's promotion, called as promote_dtype((query, key, value), dtype=dtype).
          is_causal: hides keys right of the diagonal (top-left alignment, as in Flax).
          logits_soft_cap, sinks, deterministic_backward: as in the factory, for this call; the modules pass these.

        Returns:
          [batch..., T, N, V] in the computation's dtype. A query that sees no key gives 0.

        Dropout, sown weights and replaced products run Flax's own function instead, in the S x S memory that it takes,
        with one warning that names the cause; its rule for a query without keys (the mean of the values) holds there.
        """
        query, key, value = _promoted(query, key, value, dtype, promote_dtype)
        spec.check_shapes(query.shape, key.shape, value.shape)
        full = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        _check_dense(mask, full)
        visible = self._band(is_causal) & mask
        extras = {
            "logits_soft_cap": _one_of("logits_soft_cap", self.logits_soft_cap, logits_soft_cap),
            "sinks": _one_of("sinks", self.sinks, sinks),
            "deterministic": _one_of("deterministic_backward", self.deterministic_backward, deterministic_backward),
        }
        rate = check_rate(dropout_rate)
        drops = rate > 0 and not deterministic
        cause = _cause(drops, rate, module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
        if cause is None:
            return attention(
                query, key, value, bias, scale=self.scale, implementation=self.implementation,
                checkpoint_name=self.checkpoint_name, **extras, **masks.arguments(visible, query.shape, key.shape),
            )  # fmt: skip
        self._check_fallback(cause, drops, dropout_rng, extras)
        dense = visible.to_dense(query.shape, key.shape) if visible.is_lazy else visible.dense
        if self.scale is not None:
            query = query * jnp.asarray(self.scale * math.sqrt(query.shape[-1]), query.dtype)
        shared = {
            "broadcast_dropout": broadcast_dropout, "dropout_rng": dropout_rng, "dropout_rate": rate,
            "deterministic": not drops, "dtype": query.dtype, "precision": precision, "module": module,
        }  # fmt: skip
        if isinstance(module, nnx.Module) and einsum_dot_general is qk_attn_weights_einsum is None:
            return nnx.dot_product_attention(query, key, value, bias, dense, **shared)
        group = query.shape[-2] // key.shape[-2]
        key, value = (x if group == 1 else jnp.repeat(x, group, axis=-2) for x in (key, value))
        return linen.dot_product_attention(
            query, key, value, bias, dense, **shared, force_fp32_for_softmax=force_fp32_for_softmax,
            einsum_dot_general=einsum_dot_general, qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )  # fmt: skip

    def _band(self, is_causal: bool) -> Mask:
        """What the settings hide, and the call's `is_causal`."""
        check_flag("is_causal", is_causal)
        own = Mask()
        if self.is_causal:
            own = own & masks.causal(self.causal_alignment)
        if self.local_window_size is not None:
            own = own & masks.window(self.local_window_size, self.causal_alignment)
        # With the same diagonal already given, Flax's is_causal follows it.
        return own & masks.causal(self.causal_alignment) if is_causal else own

    def _check_fallback(self, cause: str, drops: bool, dropout_rng: Array, extras: dict[str, Any]) -> None:
        """What Flax's own function cannot do is refused; the rest is warned of."""
        unable = [n for n in ("logits_soft_cap", "sinks") if extras[n] is not None and not _is_zero_cap(n, extras[n])]
        if unable:
            raise ValueError(f"{unable[0]} cannot be had together with {cause}, which takes Flax's own attention")
        if extras["deterministic"]:
            raise ValueError(
                f"deterministic_backward=True is not promised together with {cause}: Flax's own attention runs"
            )
        names = spec.check_implementation(config.implementation if self.implementation is None else self.implementation)
        if "xla" not in names:
            raise Unsupported(f"implementation={names}: there is no kernel for {cause}; add 'xla' or leave it out")
        if drops and dropout_rng is None:
            raise ValueError(f"{cause} needs a dropout_rng; it is None")
        warn_once(f"jax_fa4: Flax's own attention runs, because of {cause}; it takes memory of T x S for each head")


def attention_fn(
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str = "top_left",
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    deterministic_backward: bool | None = None,
    implementation: Any = None,
    checkpoint_name: str | None = None,
) -> AttentionFn:
    """A function for `attention_fn=` of Flax's linen and nnx attention modules; unchanged models work with it.

    Args:
      is_causal, local_window_size, causal_alignment: the band, as in `jax_fa4.attention`, on top of the call's mask.
      scale: factor of the scores; 1/sqrt(depth) by default.
      logits_soft_cap, sinks, implementation, checkpoint_name: as in `jax_fa4.attention`.
      deterministic_backward: `deterministic` of `jax_fa4.attention`. Flax's `deterministic` means "no dropout".

    Returns:
      A callable that names every argument of both contracts, and takes lazy masks.

    >>> layer = flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_fa4.flax.attention_fn())
    >>> layer = flax.nnx.MultiHeadAttention(8, 512, attention_fn=jax_fa4.flax.attention_fn(), rngs=flax.nnx.Rngs(0))
    """
    return AttentionFn(
        is_causal, local_window_size, causal_alignment, scale, logits_soft_cap, sinks, deterministic_backward,
        implementation, checkpoint_name,
    )  # fmt: skip


# ---- calling any attention_fn ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an attention function by a module of ours: what is visible, and the rest by Flax's names."""

    mask: Mask | None  # the caller's mask, the module's window, the cache
    is_causal: bool  # apart, because Flax's functions have an argument for it
    options: dict[str, Any]  # Flax's arguments; None or a default where they are off
    extras: dict[str, Any]  # logits_soft_cap, sinks, deterministic_backward, input_positions; None where they are off

    def run(self, fn: Callable[..., Array], query: Array, key: Array, value: Array) -> Array:
        """Calls `fn` with what it names. What is in use and has no name there is folded into the mask or refused."""
        options = {**self.options, **{k: v for k, v in self.extras.items() if v is not None}}
        if isinstance(fn, AttentionFn):
            if "input_positions" in options:
                raise ValueError(
                    f"input_positions of shape {jnp.shape(options['input_positions'])} would not reach jax_fa4.flax."
                    "attention_fn(), which knows no positions; give an attention_fn that rotates query and key by them"
                    " and then calls it"
                )
            return fn(query, key, value, mask=self.mask, is_causal=self.is_causal, **options)
        names, takes_all = _named(fn)
        passed: dict[str, Any] = {}
        for name, x in options.items():
            if takes_all or name in names:
                passed[name] = x
            elif name in self.extras or _in_use(name, x, options):
                said = "sow_weights=True" if name == "module" else f"{name}={x!r}"
                raise ValueError(
                    f"{said} would not reach the attention_fn {_label(fn)}, which has no argument {name!r}; leave it"
                    " out, or use jax_fa4.flax.attention_fn()"
                )
        mask, is_causal = self.mask, self.is_causal
        if is_causal and not (takes_all or "is_causal" in names):
            mask, is_causal = masks.causal() & mask, False
        if is_causal:
            passed["is_causal"] = True
        if mask is not None:
            if not (takes_all or "mask" in names):
                raise ValueError(f"a mask would not reach the attention_fn {_label(fn)}, which has no argument `mask`")
            passed["mask"] = mask.to_dense(query.shape, key.shape) if mask.is_lazy else mask.dense
        group = query.shape[-2] // key.shape[-2]
        if fn is linen.dot_product_attention and group > 1:  # linen's knows no groups; nnx's and jax.nn's do
            key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
        return fn(query, key, value, **passed)


def _named(fn: Callable[..., Any]) -> tuple[set[str], bool]:
    """The arguments that a function names, and whether it takes any others."""
    parameters = inspect.signature(fn).parameters.values()
    return {p.name for p in parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _label(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _in_use(name: str, x: Any, options: dict[str, Any]) -> bool:
    """Whether leaving an argument out would change the result."""
    if name == "dropout_rate":
        return x > 0 and not options["deterministic"]
    # No dropout, no use for these; q, k, v have the dtype already; False is what functions do without the argument.
    if name in ("dropout_rng", "broadcast_dropout", "deterministic", "dtype"):
        return False
    return x is not None and x is not False


# ---- checks --------------------------------------------------------------------------------------------------------


def check_rate(rate: Any) -> float:
    """A dropout rate in [0, 1)."""
    value = float(rate)
    if not 0 <= value < 1:  # NaN too
        raise ValueError(f"dropout_rate must be at least 0 and below 1; it is {rate}")
    return value


def check_flag(name: str, x: Any, optional: bool = False) -> None:
    """True or False (or None), not something that is merely truthy."""
    if not (x is None and optional) and not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False{' or None' if optional else ''}; it is {x!r}")


def check_heads(num_heads: Any, num_kv_heads: Any, features: int | None = None) -> int:
    """The number of key heads, which divides that of query heads; the features divide into query heads."""
    kv = num_heads if num_kv_heads is None else num_kv_heads
    for name, n in (("num_heads", num_heads), ("num_kv_heads", kv)):
        if n < 1:
            raise ValueError(f"{name} must be at least 1; it is {n}")
    if num_heads % kv:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads; {num_heads} is not of {kv}")
    if features is not None and features % num_heads:
        raise ValueError(f"qkv_features must be a multiple of num_heads; {features} is not of {num_heads}")
    return kv


def check_extras(window: Any, soft_cap: Any, deterministic_backward: Any, is_causal: Any) -> None:
    """The modules' own constructor arguments."""
    spec.check_window(window)
    spec.check_soft_cap(soft_cap)
    check_flag("deterministic_backward", deterministic_backward, optional=True)
    check_flag("is_causal", is_causal)


def _check_dense(mask: Any, full: tuple[int, ...]) -> None:
    """A dense mask that does not fit is refused before it is combined with anything."""
    mask = masks.as_mask(mask)
    if mask is not None and mask.dense is not None:
        spec.check_scores_like("mask", mask.dense.shape, full)


def _one_of(name: str, own: Any, given: Any) -> Any:
    """The factory's setting or the call's; both only where they agree."""
    if own is not None and given is not None and own is not given and (name == "sinks" or own != given):
        raise ValueError(f"{name} is set both in attention_fn(...) and by the module, to different values")
    return own if given is None else given


def _is_zero_cap(name: str, x: Any) -> bool:
    return name == "logits_soft_cap" and spec.check_soft_cap(x) is None


def _promoted(query: Array, key: Array, value: Array, dtype: Any, promote_dtype: Any) -> tuple[Array, Array, Array]:
    if promote_dtype is not None:
        return tuple(promote_dtype((query, key, value), dtype=dtype))  # type: ignore[return-value]
    return linen.dtypes.promote_dtype(query, key, value, dtype=dtype)  # type: ignore[return-value]


def _cause(drops: bool, rate: float, module: Any, dot_general: Any, qk: Any, pv: Any) -> str | None:
    """In words, what sends a call to Flax's own function."""
    if drops:
        return f"dropout_rate={rate}"
    if module is not None:
        return "sow_weights=True"
    for name, x in (
        ("einsum_dot_general", dot_general), ("qk_attn_weights_einsum", qk), ("attn_weights_value_einsum", pv)
    ):  # fmt: skip
        if x is not None:
            return name
    return None


@functools.cache
def warn_once(text: str) -> None:
    """One warning in the life of the process for each text."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


# The function of the drop-in modules, one object for all.
DEFAULT = attention_fn()
