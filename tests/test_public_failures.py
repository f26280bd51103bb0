"""Failures that users of other attention libraries reported, as tests of the public call on the XLA path.

The number in each name is the row of our list of public reports; rows that need a GPU are in test_gpu*.py, rows about
transforms and sharding in test_transforms.py and test_sharding.py, rows about Flax in test_flax_*.py. The last test
holds the list against the names.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4

attention = jax_fa4.attention
bottom_right = {"is_causal": True, "causal_alignment": "bottom_right"}


def inputs(b: int, t: int, s: int, n: int, k: int, d: int, dtype: Any = jnp.float32, seed: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (b, t, n, d), (b, s, k, d), (b, s, k, d), (b, t, n, d)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def grads(call: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    """(out, dq, dk, dv)."""

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(call, q, k, v)
        return (out, *back(dout))

    return jax.jit(run)(q, k, v, dout)


def exact(options: dict[str, Any]) -> Any:
    return lambda q, k, v: dense.attention(q, k, v, options, jnp.float32)[0]


def assert_right(options: dict[str, Any], q: Any, k: Any, v: Any, dout: Any, tol: float = 2e-5) -> None:
    """Output and gradients against dense float32 attention differentiated by JAX."""
    got = grads(functools.partial(attention, **options), q, k, v, dout)
    want = grads(exact(options), *(x.astype(jnp.float32) for x in (q, k, v, dout)))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        assert np.linalg.norm(a - b) <= tol * max(np.linalg.norm(b), 0.1 * np.sqrt(b.size)), (
            name
        )  # floor: float32 rounding


def test_1_logits_far_below_zero() -> None:
    q = jnp.full((1, 88, 14, 128), 4.0, jnp.bfloat16)
    k = jnp.full((1, 448, 2, 128), -4.0, jnp.bfloat16)
    v = jax.random.normal(jax.random.key(0), (1, 448, 2, 128), jnp.bfloat16)
    out, lse = attention(q, k, v, return_residual=True, **bottom_right)
    i = np.arange(88)
    np.testing.assert_allclose(lse[0, :, 3], -16 * np.sqrt(128) + np.log(i + 361), rtol=1e-6)
    mean = np.stack([np.asarray(v, np.float64)[0, : n + 361].mean(0) for n in i])
    np.testing.assert_allclose(np.asarray(out, np.float64)[0], np.repeat(mean, 7, axis=1), atol=2e-3)
    q, k = jnp.full((1, 64, 1, 64), 64.0, jnp.bfloat16), jnp.full((1, 64, 1, 64), -64.0, jnp.bfloat16)
    out, lse = attention(q, k, v[:, :64, :1, :64], return_residual=True)
    np.testing.assert_allclose(lse, -32768 + np.log(64), rtol=1e-6)
    assert (np.abs(np.asarray(out, np.float32)).max(axis=(1, 2, 3)) > 0).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_2_one_key(dtype: Any) -> None:
    q, k, v, dout = (3 * x for x in inputs(1, 1, 1, 1, 1, 16, dtype))
    out, dq, dk, dv = grads(attention, q, k, v, jnp.ones_like(dout))
    assert (out == v).all() and (dv == 1).all()
    assert (
        np.abs(np.asarray(dq, np.float32)).max() <= 1e-3 * 16 and np.abs(np.asarray(dk, np.float32)).max() <= 1e-3 * 16
    )
    if dtype != jnp.float16:
        huge = jnp.full((1, 1, 1, 64), 133120.0, dtype)
        assert (attention(huge, huge, huge) == huge).all()


def test_3_soft_cap_is_bounded_and_differentiated() -> None:
    q, k = jnp.full((1, 4, 1, 64), 1.875, jnp.bfloat16), jnp.full((1, 8, 1, 64), 2.0, jnp.bfloat16)
    _, lse = attention(q, k, k, logits_soft_cap=15.0, return_residual=True)
    np.testing.assert_allclose(lse, 15 * np.tanh(2) + np.log(8), rtol=1e-5)
    assert_right({"logits_soft_cap": 15.0}, *inputs(2, 100, 100, 4, 2, 64))
    q, k, v, _ = inputs(1, 9, 9, 1, 1, 8)
    assert (attention(q, k, v, logits_soft_cap=0) == attention(q, k, v)).all()


def test_4_lse_is_natural_and_merges() -> None:
    q, k, v, _ = inputs(1, 4, 8, 1, 1, 64)
    out, lse = attention(0 * q, k, v, return_residual=True)
    np.testing.assert_allclose(lse, np.log(8), rtol=1e-6)
    assert lse.dtype == jnp.float32
    out, lse = attention(q, k, v, return_residual=True)
    parts = [attention(q, k[:, cut], v[:, cut], return_residual=True) for cut in (slice(0, 3), slice(3, 8))]
    whole = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(jnp.exp(part_lse - whole)[..., None] * part for part, part_lse in parts)
    np.testing.assert_allclose(whole, lse, rtol=1e-6)
    np.testing.assert_allclose(merged, out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_8_zero_cotangent(dtype: Any, is_causal: bool) -> None:
    q, k, v, dout = inputs(2, 130, 130, 4, 2, 64, dtype)
    for g in grads(functools.partial(attention, is_causal=is_causal), q, k, v, 0 * dout)[1:]:
        assert (np.asarray(g, np.float32) == 0).all()


def test_10_every_spelling_of_unbounded() -> None:
    q, k, v, _ = inputs(2, 96, 96, 2, 2, 16)
    causal = attention(q, k, v, is_causal=True)
    for window in (None, (None, None), (None, 0)):
        assert (attention(q, k, v, is_causal=True, local_window_size=window) == causal).all()
    for window in ((-1, -1), (-1, 0), (-1, None), -1):
        with pytest.raises(ValueError, match="-1"):
            attention(q, k, v, is_causal=True, local_window_size=window)


def test_11_more_queries_than_keys_bottom_right() -> None:
    q, k, v, dout = inputs(1, 8, 4, 1, 1, 64)
    out, lse = attention(q, k, v, return_residual=True, **bottom_right)
    assert (out[0, :4] == 0).all() and jnp.isneginf(lse[0, :4]).all()
    np.testing.assert_allclose(out[0, 4], v[0, 0], rtol=1e-6)
    assert_right(bottom_right, q, k, v, dout)
    assert_right(bottom_right, *inputs(1, 300, 150, 2, 2, 32))


@pytest.mark.parametrize("t", [76, 34, 146])
def test_12_one_key_many_queries(t: int) -> None:
    q, k, v, dout = (3 * x for x in inputs(1, t, 1, 1, 1, 32, jnp.float16))
    out, dq, dk, dv = grads(functools.partial(attention, **bottom_right), q, k, v, dout)
    assert (out[0, :-1] == 0).all() and (dq[0, :-1] == 0).all()
    bound = 1e-3 * np.linalg.norm(np.asarray(dout, np.float32)[0, -1]) * np.linalg.norm(np.asarray(k, np.float32))
    assert np.abs(np.asarray(dq, np.float32)).max() <= bound and np.abs(np.asarray(dk, np.float32)).max() <= bound
    np.testing.assert_allclose(np.asarray(dv, np.float32)[0, 0], np.asarray(dout, np.float32)[0, -1], rtol=1e-3)
    assert_right(bottom_right, *(3 * x for x in inputs(1, 256, 3, 1, 1, 32, jnp.float16)), tol=2e-3)


def test_14_window_edges() -> None:
    q, k, v, _ = inputs(1, 256, 256, 2, 2, 16)
    causal = attention(q, k, v, is_causal=True)
    for left in (256, 255):
        np.testing.assert_allclose(attention(q, k, v, local_window_size=(left, 0)), causal, rtol=1e-5, atol=1e-6)
    short = attention(q, k, v, local_window_size=(254, 0))
    differs = np.abs(np.asarray(short - causal)).max(axis=(0, 2, 3)) > 1e-6
    assert differs[255] and not differs[:255].any()
    np.testing.assert_allclose(attention(q, k, v, local_window_size=(0, 0)), v, rtol=1e-6)
    for left in (127, 128, 129):
        options = {"local_window_size": (left, 0)}
        np.testing.assert_allclose(attention(q, k, v, **options), exact(options)(q, k, v), rtol=2e-5, atol=2e-6)


ONLY = {
    "window": {"local_window_size": (0, 31)},
    "no window": {"local_window_size": (0, 0)},
    "cap": {"logits_soft_cap": 3.0},
    "scale": {"scale": 0.7},
    "q lengths": {"query_seq_lengths": jnp.array([7, 64])},
    "kv lengths": {"key_value_seq_lengths": jnp.array([7, 64])},
    "segments": {
        "query_segment_ids": jnp.arange(128).reshape(2, 64) // 9,
        "key_value_segment_ids": jnp.arange(160).reshape(2, 80) // 9,
    },
    "sinks": {"sinks": jnp.array([0.5, 2.0])},
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY)
def test_15_an_option_that_is_set_alone(name: str) -> None:
    q, k, v, dout = inputs(2, 64, 80, 2, 2, 16)
    assert_right(ONLY[name], q, k, v, dout)
    assert not np.allclose(attention(q, k, v, **ONLY[name]), attention(q, k, v), atol=1e-3)


@pytest.mark.parametrize("junk", [1e4, np.nan])
def test_17_what_lies_past_a_length(junk: float) -> None:
    lens = jnp.array([24, 125, 1, 0])
    q, k, v, dout = inputs(4, 128, 128, 2, 2, 16)
    past = (jnp.arange(128) >= lens[:, None])[..., None, None]
    k, v = jnp.where(past, junk, k), jnp.where(past, junk, v)

    def call(lens: Any, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, key_value_seq_lengths=lens)

    run = jax.jit(lambda lens, *x: grads(functools.partial(call, lens), *x))
    out, dq, dk, dv = run(lens, q, k, v, dout)
    assert (jnp.where(past, dk, 0) == 0).all() and (jnp.where(past, dv, 0) == 0).all()
    for b, n in enumerate(lens):
        one = grads(attention, q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], dout[b : b + 1])
        for a, w in zip((out, dq, dk[:, :n], dv[:, :n]), one, strict=True):
            np.testing.assert_allclose(a[b], w[0], rtol=2e-5, atol=2e-5)
    q, dout = jnp.where(past, junk, q), jnp.where(past, junk, dout)
    clean = functools.partial(attention, query_seq_lengths=lens)
    _, k, v, _ = inputs(4, 128, 128, 2, 2, 16)
    out, dq, dk, dv = grads(clean, q, k, v, dout)
    assert (jnp.where(past, out, 0) == 0).all() and (jnp.where(past, dq, 0) == 0).all()
    assert all(np.isfinite(x).all() for x in (dk, dv))


@pytest.mark.parametrize("shape", [(4, 1, 1, 32), (1, 1, 32, 32), (4, 4, 32, 32), (1, 1, 1, 32), (32, 32)])
def test_18_masks_that_broadcast(shape: tuple[int, ...]) -> None:
    q, k, v, _ = inputs(4, 32, 32, 4, 4, 16)
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, shape)
    full = jnp.broadcast_to(mask, (4, 4, 32, 32))
    np.testing.assert_allclose(attention(q, k, v, mask=mask), attention(q, k, v, mask=full), rtol=1e-6, atol=1e-6)
    some = full.any(-1)
    want = jax.nn.dot_product_attention(q, k, v, mask=full)
    live = jnp.moveaxis(some, 1, 2)[..., None]
    np.testing.assert_allclose(attention(q, k, v, mask=mask), jnp.where(live, want, 0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("s", [1, 8, 63, 64, 65, 129])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_20_lengths_beside_the_tile(s: int, more: int) -> None:
    q, k = jnp.ones((2, s + more, 2, 16)), jnp.ones((2, s, 2, 16))
    out, dq, dk, dv = grads(attention, q, k, k, jnp.ones_like(q))
    np.testing.assert_allclose(out, 1, rtol=1e-5)
    np.testing.assert_allclose(dv, (s + more) / s, rtol=1e-5)
    assert np.abs(dq).max() < 1e-4 and np.abs(dk).max() < 1e-4


@pytest.mark.parametrize("v", [96, 80, 8, 128])
def test_21_value_depth_of_its_own(v: int) -> None:
    q, k, _, _ = inputs(1, 64, 64, 2, 2, 128)
    value, dout = (
        jax.random.normal(jax.random.key(5), (1, 64, 2, v)),
        jax.random.normal(jax.random.key(6), (1, 64, 2, v)),
    )
    assert_right({"is_causal": True}, q, k, value, dout)


def test_23_batching_is_concatenation() -> None:
    q, k, v, dout = inputs(2, 70, 70, 8, 2, 64)
    outlier = jnp.where(jnp.arange(64) % 21 == 3, 20.0, 1.0)
    q, k = (q + jnp.linspace(-2, 2, 64)) * outlier / 8, (k - 1) * outlier
    whole = grads(functools.partial(attention, is_causal=True), q, k, v, dout)
    for b in range(2):
        one = grads(functools.partial(attention, is_causal=True), *(x[b : b + 1] for x in (q, k, v, dout)))
        for a, w in zip(whole, one, strict=True):
            np.testing.assert_allclose(a[b], w[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(2, 0, 40, 4, 4), (0, 6, 40, 4, 4), (2, 6, 0, 4, 4), (2, 0, 0, 4, 4), (2, 6, 40, 0, 0)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_24_empty_shapes(shape: tuple[int, ...], is_causal: bool) -> None:
    b, t, s, n, k = shape
    q, key, v, dout = (jnp.ones((x, y, z, 16)) for x, y, z in ((b, t, n), (b, s, k), (b, s, k), (b, t, n)))
    call = functools.partial(attention, is_causal=is_causal)
    out, dq, dk, dv = grads(call, q, key, v, dout)
    assert out.shape == q.shape and dq.shape == q.shape and dk.shape == key.shape and dv.shape == v.shape
    assert all((x == 0).all() for x in (out, dq, dk, dv))
    _, lse = jax.jit(functools.partial(call, return_residual=True))(q, key, v)
    assert lse.shape == (b, t, n) and jnp.isneginf(lse).all()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_26_key_gradients_sum_over_the_group(group: int) -> None:
    q, k, v, dout = inputs(1, 24, 48, 2 * group, 2, 16)
    *_, dv = grads(attention, 0 * q, k, v, jnp.ones_like(dout))
    np.testing.assert_allclose(dv, group * 24 / 48, rtol=1e-5)
    assert_right({}, q, k, v, dout)


@pytest.mark.parametrize(
    ("q", "k", "v", "text"),
    [
        ((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8), r"3 is not of 2"),
        ((1, 4, 33, 8), (1, 4, 2, 8), (1, 4, 2, 8), r"33 is not of 2"),
        ((1, 4, 2, 8), (1, 4, 4, 8), (1, 4, 4, 8), r"2 is not of 4"),
        ((1, 4, 2, 8), (1, 4, 0, 8), (1, 4, 0, 8), r"2 is not of 0"),
        ((1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 8), r"query has 8 and key has 16"),
        ((1, 4, 2, 8), (1, 5, 2, 8), (1, 4, 2, 8), r"key has 5 and value has 4"),
        ((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8), r"\(2,\), \(1,\), \(1,\)"),
        ((4, 8), (4, 8), (4, 8), r"at least 3 axes"),
        ((1, 4, 2, 8), (4, 2, 8), (4, 2, 8), r"4, 3, 3"),
        ((1, 4, 2, 0), (1, 4, 2, 0), (1, 4, 2, 8), r"at least 1; it is 0"),
    ],
)
def test_56_shapes_that_do_not_fit(q: Any, k: Any, v: Any, text: str) -> None:
    for implementation in (None, "xla", "fa4"):
        with pytest.raises(ValueError, match=text):
            attention(jnp.ones(q), jnp.ones(k), jnp.ones(v), implementation=implementation)


def test_58_dtypes() -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match="float32, bfloat16, float32"):
        attention(x, x.astype(jnp.bfloat16), x)
    with pytest.raises(TypeError, match="int32 is not supported; supported are float16"):
        attention(*[x.astype(jnp.int32)] * 3)


@pytest.mark.parametrize("shape", [(1, 4, 24, 24), (2, 4, 24, 24), (24, 24), (2, 1, 1, 24), (4, 1, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_59_bias_gradient(shape: tuple[int, ...], dtype: Any) -> None:
    q, k, v, dout = inputs(2, 24, 24, 4, 2, 16)
    bias = jax.random.normal(jax.random.key(9), shape).astype(dtype)

    def theirs(bias: Any) -> Any:
        logits = jnp.einsum("btnd,bsnd->bnts", q, jnp.repeat(k, 2, 2)) / 4 + bias.astype(jnp.float32)
        seen = jnp.tril(jnp.ones((24, 24), bool))
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), -1)
        return (jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(v, 2, 2)) * dout).sum()

    ours = jax.grad(lambda b: (attention(q, k, v, bias=b, is_causal=True) * dout).sum())(bias)
    assert ours.dtype == dtype and ours.shape == bias.shape
    tol = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(jax.grad(theirs)(bias), np.float32), atol=tol, rtol=tol
    )


def temporary(call: Any, s: int) -> int:
    x = jax.ShapeDtypeStruct((1, s, 1, 64), jnp.float32)
    stats = jax.jit(call).lower(x, x, x).compile().memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_63_memory_grows_with_the_length_not_its_square(backward: bool) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        ids = jnp.arange(q.shape[1])[None] // 1000
        options = {"query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": True}
        return attention(q, k, v, key_value_seq_lengths=jnp.array([q.shape[1] - 5]), **options)

    fn = jax.grad(lambda *x: call(*x).sum(), argnums=(0, 1, 2)) if backward else call
    sizes = [temporary(fn, s) for s in (4096, 8192, 16384)]
    assert sizes[1] <= 2.2 * sizes[0] and sizes[2] <= 2.2 * sizes[1], sizes
    assert sizes[2] < 16384 * 16384, sizes


# Rows of the list by where they have to hold: through XLA; through kernels, on a GPU.
THROUGH_XLA = (
    1,
    2,
    3,
    4,
    8,
    10,
    11,
    12,
    14,
    15,
    17,
    18,
    20,
    21,
    23,
    24,
    26,
    28,
    30,
    31,
    32,
    34,
    36,
    37,
    38,
    39,
    42,
    56,
)
THROUGH_XLA += (58, 59, 63)
ON_A_GPU = (
    1,
    2,
    3,
    4,
    6,
    8,
    10,
    11,
    12,
    14,
    15,
    17,
    20,
    21,
    23,
    24,
    26,
    28,
    30,
    37,
    39,
    49,
    51,
    52,
    53,
    55,
    58,
    59,
    61,
    63,
)


def test_every_row_has_a_test() -> None:
    folder = Path(__file__).parent
    text = {path.name: path.read_text() for path in folder.glob("test_*.py")}

    def rows(files: list[str]) -> set[int]:
        names = [name for file in files for name in re.findall(r"^def test_(?:row)?([0-9_]+)_", text[file], re.M)]
        return {int(n) for name in names for n in name.split("_") if n}

    on_gpu = [name for name in text if name.startswith("test_gpu")]
    elsewhere = ["test_public_failures.py", "test_transforms.py", "test_sharding.py"]
    assert len(on_gpu) >= 5
    assert set(THROUGH_XLA) - rows(elsewhere) == set() == set(ON_A_GPU) - rows(on_gpu)
