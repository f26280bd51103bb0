"""Lazy masks: what they mean, how they combine, and that attention with one equals attention with its dense form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import flax as fa
from jax_fa4.flax import masks

B, T, S, N, D = 2, 6, 8, 2, 4
QUERY, KEY = (B, T, N, D), (B, S, N, D)

rng = np.random.default_rng(0)
Q_IDS, K_IDS = rng.integers(0, 3, (B, T)), rng.integers(0, 3, (B, S))
Q_MORE, K_MORE = rng.integers(-2, 1, (B, T)), rng.integers(-2, 1, (B, S))
Q_OK, K_OK = rng.random((B, T)) < 0.7, rng.random((B, S)) < 0.7
LENGTHS = np.array([5, 8])
DENSE = rng.random((B, N, T, S)) < 0.6
I, J = np.arange(T)[:, None], np.arange(S)[None, :]

# Each mask with its meaning in numpy, bool broadcastable to [B, N, T, S].
CASES = {
    "causal": (lambda: fa.causal(), J <= I),
    "causal, bottom right": (lambda: fa.causal("bottom_right"), J <= I + S - T),
    "window": (lambda: fa.window((2, 1)), (J >= I - 2) & (J <= I + 1)),
    "window of an int": (lambda: fa.window(1), abs(I - J) <= 1),
    "window to the left": (lambda: fa.window((2, None)), J >= I - 2),
    "causal window": (lambda: fa.causal() & fa.window((2, 3)), (J >= I - 2) & (J <= I)),
    "two windows": (lambda: fa.window((1, 4)) & fa.window((3, 1)), (J >= I - 1) & (J <= I + 1)),
    "two windows, turned": (lambda: fa.window((3, 1)) & fa.window((1, 4)), (J >= I - 1) & (J <= I + 1)),
    "lengths": (lambda: fa.lengths(LENGTHS), (J < LENGTHS[:, None, None])[:, None]),
    "one length for all": (lambda: fa.lengths(3), J < 3),
    "lengths of both": (
        lambda: fa.lengths(LENGTHS, np.array([4, 2])),
        ((J < LENGTHS[:, None, None]) & (I < np.array([4, 2])[:, None, None]))[:, None],
    ),
    "the shorter of two lengths": (
        lambda: fa.lengths(LENGTHS) & fa.lengths(6), (J < np.minimum(LENGTHS, 6)[:, None, None])[:, None],
    ),
    "causal to a length": (
        lambda: fa.causal("bottom_right") & fa.lengths(LENGTHS),
        ((J < LENGTHS[:, None, None]) & (J <= I + LENGTHS[:, None, None] - T))[:, None],
    ),
    "padding": (lambda: fa.padding(K_OK), K_OK[:, None, None, :] & (I >= 0)),
    "padding of both": (lambda: fa.padding(K_OK, Q_OK), K_OK[:, None, None, :] & Q_OK[:, None, :, None]),
    "segments": (lambda: fa.segments(Q_IDS, K_IDS), (Q_IDS[:, :, None] == K_IDS[:, None, :])[:, None]),
    "segments twice": (
        lambda: fa.segments(Q_IDS, K_IDS) & fa.segments(Q_MORE, K_MORE),
        ((Q_IDS[:, :, None] == K_IDS[:, None, :]) & (Q_MORE[:, :, None] == K_MORE[:, None, :]))[:, None],
    ),
    "segments and padding": (
        lambda: fa.padding(K_OK) & fa.segments(Q_IDS, K_IDS) & fa.padding(None, Q_OK),
        ((Q_IDS[:, :, None] == K_IDS[:, None, :]) & K_OK[:, None, :] & Q_OK[:, :, None])[:, None],
    ),
    "segments and padding of both": (
        lambda: fa.padding(K_OK, Q_OK) & fa.segments(Q_IDS * 0, K_IDS * 0),
        K_OK[:, None, None, :] & Q_OK[:, None, :, None],
    ),
    "dense and causal": (lambda: fa.causal() & DENSE, DENSE & (J <= I)),
    "causal and dense": (lambda: DENSE & fa.causal(), DENSE & (J <= I)),
    "jax array and causal": (lambda: jnp.asarray(DENSE) & fa.causal(), DENSE & (J <= I)),
    "float mask": (lambda: fa.causal() & DENSE.astype(np.float32), DENSE & (J <= I)),
    "all at once": (
        lambda: fa.causal() & fa.window((4, 4)) & fa.lengths(LENGTHS)
        & fa.segments(Q_IDS, K_IDS) & fa.padding(K_OK) & DENSE,
        DENSE & (J <= I) & (J >= I - 4) & (J < LENGTHS[:, None, None])[:, None]
        & (Q_IDS[:, :, None] == K_IDS[:, None, :])[:, None] & K_OK[:, None, None, :],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def qkv():
    q, k, v = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((QUERY, KEY, KEY)))
    return q, k, v


@pytest.mark.parametrize("name", CASES)
def test_meaning(name):
    make, wanted = CASES[name]
    dense = np.broadcast_to(make().to_dense(QUERY, KEY), (B, N, T, S))
    np.testing.assert_array_equal(dense, np.broadcast_to(wanted, dense.shape))


@pytest.mark.parametrize("name", CASES)
def test_attention_sees_what_the_dense_mask_says(name, qkv):
    make, wanted = CASES[name]
    q, k, v = qkv
    arguments = masks.arguments(make(), QUERY, KEY)
    if "dense" not in name and "mask" not in name and name not in ("all at once", "jax array and causal"):
        assert "mask" not in arguments, "a lazy mask was made dense"
    lazy = jax_fa4.attention(q, k, v, **arguments)
    dense = jax_fa4.attention(q, k, v, mask=jnp.asarray(np.broadcast_to(wanted, (B, N, T, S))))
    np.testing.assert_allclose(lazy, dense, atol=2e-6)


def test_extreme_ids_are_kept_apart():
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    ids = jnp.array([[low, high, high - 1, low + 1, 0, -1]])
    both = fa.segments(ids) & fa.segments(jnp.zeros_like(ids)) & fa.padding(jnp.array([[True] * 5 + [False]]))
    seen = both.to_dense((1, 6, 1, 4), (1, 6, 1, 4))[0, 0]
    np.testing.assert_array_equal(seen, np.diag([True] * 5 + [False]))


def test_masks_pass_through_transformations(qkv):
    q, k, v = qkv
    run = jax.jit(lambda q, m: fa.attention_fn()(q, k, v, mask=m & fa.causal()))
    mask = fa.lengths(LENGTHS) & fa.segments(Q_IDS, K_IDS)
    np.testing.assert_allclose(run(q, mask), fa.attention_fn()(q, k, v, mask=mask & fa.causal()), atol=1e-6)
    one_each = jax.vmap(lambda q, k, v, m: fa.attention_fn()(q, k, v, mask=m))(q, k, v, fa.lengths(LENGTHS))
    np.testing.assert_allclose(one_each, fa.attention_fn()(q, k, v, mask=fa.lengths(LENGTHS)), atol=1e-6)


def test_no_square_buffer():
    """Memory of a lazy causal mask with lengths and segments, long enough that T x S would show."""
    t = 4096
    x = jax.ShapeDtypeStruct((1, t, 1, 64), jnp.float32)
    ids, lengths = jax.ShapeDtypeStruct((1, t), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(x, ids, lengths):
        return fa.attention_fn()(x, x, x, mask=fa.causal() & fa.lengths(lengths) & fa.segments(ids))

    text = str(jax.make_jaxpr(run)(x, ids, lengths))
    assert f"{t},{t}" not in text
    temporary = jax.jit(run).lower(x, ids, lengths).compile().memory_analysis().temp_size_in_bytes
    assert temporary < t * t, f"{temporary} bytes; one bool for each pair would be {t * t}"


def test_combine_masks():
    assert fa.combine_masks(None, None) is None
    dense = fa.combine_masks(DENSE, None, DENSE[:, :1], dtype=jnp.float32)
    assert dense.dtype == jnp.float32
    np.testing.assert_array_equal(dense, DENSE & DENSE[:, :1])
    lazy = fa.combine_masks(None, DENSE, fa.causal())
    np.testing.assert_array_equal(lazy.to_dense(QUERY, KEY), DENSE & (J <= I))


def test_errors():
    with pytest.raises(ValueError, match="different alignments"):
        fa.causal() & fa.window(3, "bottom_right")
    with pytest.raises(ValueError, match="-1; negatives are refused"):
        fa.window((-1, 0))
    with pytest.raises(TypeError, match=r"key_value must be boolean .* int64"):
        fa.padding(np.array([1, 0]))
    with pytest.raises(TypeError, match="query must be integers; its dtype is float64"):
        fa.segments(np.array([1.0]))
    with pytest.raises(TypeError, match="it is list"):
        fa.causal() & [True]
    with pytest.raises(ValueError, match=r"key segments or validity .* broadcast to \(2, 8\); it has shape \(2, 7\)"):
        masks.arguments(fa.segments(Q_IDS, K_IDS[:, :7]), QUERY, KEY)
    with pytest.raises(AttributeError, match="lazy jax_fa4 mask has no axes"):
        _ = fa.causal().ndim
    with pytest.raises(ValueError, match="causal_alignment must be one of"):
        fa.causal("middle")


def test_flax_decoding_refuses_a_lazy_mask_in_words():
    from flax import nnx

    layer = nnx.MultiHeadAttention(2, 8, decode=True, attention_fn=fa.attention_fn(), rngs=nnx.Rngs(0))
    layer.init_cache((1, 4, 8))
    with pytest.raises(AttributeError, match=r"decode with the modules of jax_fa4\.flax"):
        layer(jnp.ones((1, 1, 8)), mask=fa.causal())
