"""Regressions: calls that once gave wrong numbers, or an error that did not name the argument, found by trying to."""

from __future__ import annotations

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
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
