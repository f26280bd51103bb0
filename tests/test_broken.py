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


# ---- packed sequences: traced cu_seqlens that are wrong ------------------------------------------------------------


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "longest"),
    [
        ([1, 3, 8], [0, 5, 10], 8),  # queries before the first sequence were given its first row
        ([0, 3, 8], [2, 5, 10], 8),
        ([0, 3, 8], [0, 6, 4], 8),  # descending: its keys were taken to be none
        ([0, 3, 8], [0, 5, 11], 8),  # past the 10 keys: the last key was repeated
        ([0, 3, 11], [0, 5, 10], 8),
        ([0, 3, 8], [0, 5, 10], 0),  # longer than no row at all: rows were 0
    ],
)
def test_traced_sequences_that_make_no_sense_are_nan(cu_q: list[int], cu_k: list[int], longest: int) -> None:
    q, k = normal(8, 2, 4), normal(10, 2, 4, seed=1)

    def call(cu_q: Any, cu_k: Any) -> Any:
        return jax_fa4.attention_varlen(
            q, k, k, cu_q, cu_k, max_seqlen_q=longest, max_seqlen_k=8, sinks=jnp.zeros(2), return_residual=True
        )

    out, lse = jax.jit(call)(jnp.array(cu_q), jnp.array(cu_k))
    assert jnp.isnan(out).all() and jnp.isnan(lse).all()
    with pytest.raises(ValueError, match=r"must ascend from 0|longer than the maximum"):
        call(cu_q, cu_k)


# ---- arguments that were taken for something else ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scale": 1e-50}, ValueError, r"scale .* float32; 1e-50 becomes 0.0"),  # all scores were 0
        ({"scale": 1e300}, ValueError, r"scale .* becomes inf"),  # all was NaN
        ({"scale": "0.5"}, TypeError, r"scale must be a real number or None; it is '0.5'"),
        ({"scale": True}, TypeError, r"scale must be a real number or None; it is True"),
        ({"scale": 1j}, TypeError, r"scale must be a real number or None; it is 1j"),
        ({"logits_soft_cap": 1e300}, ValueError, r"logits_soft_cap .* becomes inf"),
        ({"logits_soft_cap": 1e-50}, ValueError, r"logits_soft_cap .* becomes 0.0"),
        ({"logits_soft_cap": "3"}, TypeError, r"logits_soft_cap must be a concrete number or None; it is str"),
        ({"implementation": 5}, ValueError, r"implementation must be .* it is 5"),
        ({"implementation": {"xla"}}, ValueError, r"implementation must be .* it is \{'xla'\}"),
    ],
)
def test_arguments_that_mean_nothing(options: dict, error: type, text: str) -> None:
    q = normal(1, 3, 1, 8)
    with pytest.raises(error, match=text):
        attention(q, q, q, **options)


def test_a_traced_complex_scale_is_refused() -> None:
    """Its imaginary part was dropped."""
    q = normal(1, 3, 1, 8)
    with pytest.raises(TypeError, match="scale must be a real number; its dtype is complex64"):
        jax.jit(lambda scale: attention(q, q, q, scale=scale))(2j)


def test_a_small_scale_is_fine_in_float64() -> None:
    with jax.enable_x64(True):
        q = normal(1, 3, 1, 8).astype(jnp.float64)
        assert jnp.isfinite(attention(q, q, q, scale=1e-50, logits_soft_cap=1e50)).all()


def test_values_without_depth_are_refused() -> None:
    """Their log-sum-exp came out as -inf."""
    q = normal(1, 3, 1, 8)
    with pytest.raises(ValueError, match="the depth of value must be at least 1; it is 0"):
        attention(q, q, q[..., :0], return_residual=True)
