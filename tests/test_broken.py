"""Regressions: calls that once gave wrong numbers, or an error that did not name the argument, found by trying to."""

from __future__ import annotations

from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
import jax_fa4.flax
from jax_fa4 import reference

attention = jax_fa4.attention


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


# ---- a last tile of queries that was moved back --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"local_window_size": (0, 0)},
        {"local_window_size": (0, None)},
        {"local_window_size": (0, 1), "causal_alignment": "bottom_right"},
        {"query_seq_lengths": jnp.array([20])},
        {"query_seq_lengths": jnp.array([19]), "key_value_seq_lengths": jnp.array([25]), "is_causal": True},
    ],
    ids=lambda o: "-".join(o),
)
def test_rows_that_two_tiles_of_queries_share(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 queries in tiles of 10: the last one lies at 18 and holds the rows 18 and 19 of the one before again. They
    once came out without the keys that only they see (a window), or as 0 (lengths that end between)."""
    monkeypatch.setattr(reference, "tile_sides", lambda heads, t, s: (10, 10))
    q, k, v = normal(1, 28, 1, 8), normal(1, 28, 1, 8, seed=1), normal(1, 28, 1, 8, seed=2)
    jax.clear_caches()
    out, lse = attention(q, k, v, return_residual=True, **options)
    jax.clear_caches()
    want_out, want_lse = dense.attention(q, k, v, options, jnp.float32)
    np.testing.assert_allclose(out, want_out, atol=2e-6)
    np.testing.assert_allclose(lse, jnp.swapaxes(want_lse, 1, 2), atol=2e-6)


# ---- lengths of any integer type -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("traced", [False, True])
def test_lengths_of_any_integer_type(dtype: type, traced: bool) -> None:
    """The bound of 300 keys was once rounded to the lengths' own type: in uint8 it is 44, and 100 keys became 44."""
    q, k = normal(2, 3, 1, 8), normal(2, 300, 1, 8, seed=1)

    def call(lengths: Any) -> Any:
        return attention(q, k, k, key_value_seq_lengths=lengths)

    def masked(lengths: Any) -> Any:
        visible = jax_fa4.flax.lengths(lengths)
        return jax_fa4.flax.attention_fn()(q, k, k, mask=visible)

    lengths = np.array([100, 7], dtype)
    want = dense.attention(q, k, k, {"key_value_seq_lengths": np.array([100, 7])}, jnp.float32)[0]
    for one in (call, masked):
        np.testing.assert_allclose((jax.jit(one) if traced else one)(lengths), want, atol=2e-6)


@pytest.mark.parametrize("length", [2**31, 2**32 - 1, 2**40])
def test_a_length_past_int32_is_the_whole_sequence(length: int) -> None:
    """A numpy length of 2**40 once came to 0 keys, the low 32 bits, where 301 came to all 300."""
    q, k = normal(1, 3, 1, 8), normal(1, 300, 1, 8, seed=1)
    out = attention(q, k, k, key_value_seq_lengths=np.array([length]))
    np.testing.assert_array_equal(out, attention(q, k, k, key_value_seq_lengths=np.array([300])))
