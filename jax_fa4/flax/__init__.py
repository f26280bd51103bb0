"""Attention for Flax: `attention_fn` for Flax's own modules, drop-in modules for linen and nnx, lazy masks."""

try:
    import flax as _flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jax_fa4.flax needs Flax, which is not installed; it comes with the extra: pip install 'jax_fa4[flax]'"
    ) from error

from jax_fa4.flax import adaptors, linen, nnx
from jax_fa4.flax.contract import AttentionFn, attention_fn
from jax_fa4.flax.masks import Mask, causal, combine_masks, lengths, padding, segments, window

__all__ = [
    "AttentionFn",
    "Mask",
    "adaptors",
    "attention_fn",
    "causal",
    "combine_masks",
    "lengths",
    "linen",
    "nnx",
    "padding",
    "segments",
    "window",
]
