"""Failures that users of other attention libraries reported, as tests of the kernels on a CUDA GPU.

The number in each name is the row of our list of public reports, as in test_public_failures.py, which runs them through
XLA. Rows 6 (deterministic), 49, 53, 58 and 61 are in test_gpu_backward.py and test_gpu_machine.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import KINDS, check_forward, error, poison, poisoned
from test_gpu_backward import check_backward

import jax_fa4
from jax_fa4 import primitives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason=f"needs a CUDA GPU; the backend is {jax.default_backend()}"
    ),
]
fa4 = functools.partial(jax_fa4.attention, implementation="fa4")
BOTTOM = KINDS["bottom_right"]


def normal(case: str, dtype: str = "bfloat16") -> list[Any]:
    """q, k, v, dout of 'B,T,S,N,K,D[,V]'."""
    (q, k, v), dout, _ = poisoned(case, {}, dtype)
    return [q, k, v, dout]


def grads(call: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(call, q, k, v)
        return (out, *back(dout.astype(out.dtype)))

    return jax.jit(run)(q, k, v, dout)


def largest(x: Any) -> float:
    return float(np.abs(np.asarray(x, np.float32)).max(initial=0))


def test_1_logits_far_below_zero() -> None:
    q, k = jnp.full((1, 64, 1, 64), 64.0, jnp.bfloat16), jnp.full((1, 64, 1, 64), -64.0, jnp.bfloat16)
    v = normal("1,64,64,1,1,64")[2]
    out, lse = fa4(q, k, v, return_residual=True)
    assert np.abs(np.asarray(lse) - (-32768 + np.log(64))).max() < 1e-2
    mean = np.asarray(v, np.float64).mean(1, keepdims=True)
    assert error(out, np.repeat(mean, 64, axis=1)) < 4e-3
    *_, dv = grads(fa4, q, k, v, jnp.ones_like(v))
    assert error(dv, np.ones(v.shape)) < 4e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_2_one_key(dtype: str) -> None:
    q, k, v, dout = (3 * x for x in normal("1,1,1,1,1,16", dtype))
    out, dq, dk, dv = grads(fa4, q, k, v, jnp.ones_like(dout))
    assert (out == v).all() and (dv == 1).all()
    bound = 1e-3 * float(jnp.linalg.norm(k.astype(jnp.float32))) * 4
    assert largest(dq) <= bound and largest(dk) <= bound


def test_3_soft_cap() -> None:
    q, k = jnp.full((1, 4, 1, 64), 1.875, jnp.bfloat16), jnp.full((1, 8, 1, 64), 2.0, jnp.bfloat16)
    _, lse = fa4(q, k, k, logits_soft_cap=15.0, return_residual=True)
    np.testing.assert_allclose(lse, 15 * np.tanh(2) + np.log(8), rtol=1e-4)
    check_backward("2,200,200,4,2,64", {"logits_soft_cap": 15.0}, "bfloat16")
    q, k, v, _ = normal("1,200,200,2,2,64")
    assert (fa4(q, k, v, logits_soft_cap=0) == fa4(q, k, v)).all()


def test_4_lse_is_natural_and_merges() -> None:
    q, k, v, _ = normal("1,4,8,1,1,64")
    _, lse = fa4(0 * q, k, v, return_residual=True)
    np.testing.assert_allclose(lse, np.log(8), rtol=1e-5)
    assert lse.dtype == jnp.float32
    out, lse = fa4(q, k, v, return_residual=True)
    parts = [fa4(q, k[:, cut], v[:, cut], return_residual=True) for cut in (slice(0, 3), slice(3, 8))]
    whole = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(jnp.exp(one - whole)[..., None] * part.astype(jnp.float32) for part, one in parts)
    np.testing.assert_allclose(whole, lse, atol=1e-3)
    assert error(out, merged) < 8e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_8_zero_cotangent(dtype: str, is_causal: bool) -> None:
    poison()
    q, k, v, dout = normal("2,130,130,4,2,64", dtype)
    for g in grads(functools.partial(fa4, is_causal=is_causal), q, k, v, 0 * dout)[1:]:
        assert (np.asarray(g, np.float32) == 0).all()


def test_10_every_spelling_of_unbounded() -> None:
    q, k, v, _ = normal("2,1024,1024,8,8,128")
    causal = fa4(q, k, v, is_causal=True)
    for window in (None, (None, None), (None, 0)):
        assert (fa4(q, k, v, is_causal=True, local_window_size=window) == causal).all()
    for window in ((-1, -1), (-1, 0), (-1, None), -1):
        with pytest.raises(ValueError, match="-1"):
            fa4(q, k, v, is_causal=True, local_window_size=window)


def test_11_more_queries_than_keys_bottom_right() -> None:
    q, k, v, _ = normal("1,8,4,1,1,64")
    out, lse = fa4(q, k, v, return_residual=True, **BOTTOM)
    assert (out[0, :4] == 0).all() and jnp.isneginf(lse[0, :4]).all() and (out[0, 4] == v[0, 0]).all()
    for case in ("1,8,4,1,1,64", "1,300,150,2,2,64", "1,1024,300,2,2,128"):
        check_backward(case, BOTTOM, "bfloat16")


@pytest.mark.parametrize("t", [76, 34, 146])
def test_12_one_key_many_queries(t: int) -> None:
    q, k, v, dout = (3 * x for x in normal(f"1,{t},1,1,1,32", "float16"))
    out, dq, dk, dv = grads(functools.partial(fa4, **BOTTOM), q, k, v, dout)
    assert (out[0, :-1] == 0).all() and (dq[0, :-1] == 0).all()
    bound = 1e-3 * float(jnp.linalg.norm(dout[0, -1].astype(jnp.float32)) * jnp.linalg.norm(k.astype(jnp.float32)))
    assert largest(dq) <= bound and largest(dk) <= bound
    np.testing.assert_allclose(np.asarray(dv, np.float32)[0, 0], np.asarray(dout, np.float32)[0, -1], rtol=1e-3)
    check_backward("1,256,3,1,1,32", BOTTOM, "float16")


def test_14_window_edges() -> None:
    for case, bitwise in (("1,256,256,2,2,64", True), ("1,16384,16384,1,1,128", True)):
        s = int(case.split(",")[1])
        q, k, v, _ = normal(case, "float16")
        causal = fa4(q, k, v, is_causal=True)
        for left in (s, s - 1):
            assert ((fa4(q, k, v, local_window_size=(left, 0)) == causal).all()) == bitwise
        differs = np.asarray(fa4(q, k, v, local_window_size=(s - 2, 0)) != causal).any(axis=(0, 2, 3))
        assert not differs[: s - 1].any()
        assert (fa4(q, k, v, local_window_size=(0, 0)) == v).all()
    for left in (63, 64, 65, 127, 128, 129):
        check_backward("1,300,300,2,2,64", {"local_window_size": (left, 0)}, "float16")


ONLY: dict[str, dict[str, Any]] = {
    "window": {"local_window_size": (0, 31)},
    "no window": {"local_window_size": (0, 0)},
    "cap": {"logits_soft_cap": 3.0},
    "scale": {"scale": 0.7},
    "q lengths": {"query_seq_lengths": jnp.array([7, 256])},
    "kv lengths": {"key_value_seq_lengths": jnp.array([7, 256])},
}


@pytest.mark.parametrize("name", ONLY)
def test_15_an_option_that_is_set_alone(name: str) -> None:
    case = "2,256,288,2,2,64"
    q, k, v, _ = normal(case)
    assert error(fa4(q, k, v, **ONLY[name]), fa4(q, k, v)) > 1e-2
    check_backward(case, ONLY[name], "bfloat16")


def test_17_what_lies_past_a_length() -> None:
    """NaN there, in q, k, v and the cotangents; each example is the call on what there is of it."""
    options = {"key_value_seq_lengths": jnp.array([24, 125, 53, 28, 77, 96, 13, 114])}
    options["query_seq_lengths"] = jnp.array([128, 1, 0, 128, 64, 65, 127, 99])
    for kind in ("full", "causal", "bottom_right"):
        check_forward("8,128,128,4,4,64", KINDS[kind] | options, "bfloat16")
        check_backward("8,128,128,4,4,64", KINDS[kind] | options, "bfloat16")


@pytest.mark.parametrize("s", [1, 8, 16, 32, 63, 64, 65, 127, 128, 129, 191, 255, 257])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_20_lengths_beside_the_tile(s: int, more: int) -> None:
    poison()
    q, k = jnp.ones((2, s + more, 2, 64), jnp.bfloat16), jnp.ones((2, s, 2, 64), jnp.bfloat16)
    out, dq, dk, dv = grads(fa4, q, k, k, jnp.ones_like(q))
    assert error(out, np.ones(q.shape)) < 4e-3 and error(dv, np.full(k.shape, (s + more) / s)) < 4e-3
    assert largest(dq) < 1e-2 and largest(dk) < 1e-2


@pytest.mark.parametrize("v", [96, 80, 72, 48, 16, 8, 64, 128])
def test_21_value_depth_of_its_own(v: int) -> None:
    for kind in ("full", "causal"):
        check_backward(f"1,256,256,4,4,128,{v}", KINDS[kind], "bfloat16")


def test_23_batching_is_concatenation() -> None:
    q, k, v, dout = normal("2,512,512,16,2,256")
    outlier = jnp.where(jnp.arange(256) % 85 == 3, 20.0, 1.0).astype(jnp.bfloat16)
    q, k = (q + jnp.linspace(-2, 2, 256).astype(jnp.bfloat16)) * outlier / 8, (k - 1) * outlier / 8
    call = functools.partial(fa4, is_causal=True)
    whole = grads(call, q, k, v, dout)
    for b in range(2):
        one = grads(call, *(x[b : b + 1] for x in (q, k, v, dout)))
        for name, a, w in zip(("out", "dq", "dk", "dv"), whole, one, strict=True):
            assert error(a[b], w[0]) < 1e-2, name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 0, 4096, 4, 4), (0, 64, 4096, 4, 4), (2, 64, 0, 4, 4), (2, 0, 0, 4, 4), (2, 6, 40, 0, 0)]
)
def test_24_empty_shapes(shape: tuple[int, ...], is_causal: bool) -> None:
    b, t, s, n, k = shape
    q, key, v, dout = (
        jnp.ones((x, y, z, 64), jnp.bfloat16) for x, y, z in ((b, t, n), (b, s, k), (b, s, k), (b, t, n))
    )
    call = functools.partial(fa4, is_causal=is_causal)
    out, dq, dk, dv = grads(call, q, key, v, dout)
    assert out.shape == q.shape and dq.shape == q.shape and dk.shape == key.shape and dv.shape == v.shape
    assert all((x == 0).all() for x in (out, dq, dk, dv))
    _, lse = jax.jit(functools.partial(call, return_residual=True))(q, key, v)
    assert lse.shape == (b, t, n) and jnp.isneginf(lse).all()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_26_key_gradients_sum_over_the_group(group: int) -> None:
    q, k, v, dout = normal(f"1,24,48,{2 * group},2,64")
    *_, dv = grads(fa4, 0 * q, k, v, jnp.ones_like(dout))
    assert error(dv, np.full(v.shape, group * 24 / 48)) < 4e-3
    check_backward(f"1,24,48,{2 * group},2,64", {}, "bfloat16")


def test_28_jacobian_and_mapped_cotangent() -> None:
    q, k, v, _ = normal("1,4,4,2,2,64", "float16")
    jacobian = jax.jacrev(fa4)(q, k, v)
    assert jacobian.shape == (*q.shape, *q.shape)
    exact = jax.jacrev(functools.partial(jax_fa4.attention, implementation="xla"))(
        *(x.astype(jnp.float32) for x in (q, k, v))
    )
    assert error(jacobian, exact) < 4e-3


def test_30_nested_vmap_is_one_launch() -> None:
    q, k, v, _ = normal("2,33,33,4,2,64")
    qs = jnp.stack([q * (n + 1) / 3 for n in range(3)])
    ks, vs = (jnp.stack([x * (n + 1) / 5 for n in range(5)]) for x in (k, v))
    nested = jax.jit(jax.vmap(jax.vmap(fa4, (None, 0, 0)), (0, None, None)))
    out = nested(qs, ks, vs)
    for i in range(3):
        for j in range(5):
            assert error(out[i, j], fa4(qs[i], ks[j], vs[j])) < 4e-3
    text = nested.lower(qs, ks, vs).compile().as_text()
    assert text.count('custom_call_target="CuteDSLRT') == 1, "one launch for all fifteen"


def test_51_no_kernel_is_taken_for_another() -> None:
    """Everything a key could forget, forwards and backwards; the second time nothing is built."""
    from jax_fa4.ffi import store

    kinds = [{"logits_soft_cap": c} for c in (0, 15.0, 30.0)] + [{"scale": s} for s in (0.1, 0.2)]
    kinds += [{"local_window_size": w} for w in ((0, 0), (127, 0), (128, 0))] + [
        {"is_causal": c} for c in (True, False)
    ]
    runs = [(f"{b},200,300,4,2,64", x, dtype) for dtype in ("bfloat16", "float16") for b in (1, 3) for x in kinds]
    for run in runs:
        check_backward(*run)
    store.reset_counters()
    for run in reversed(runs):
        check_backward(*run)
    counted = store.counters()
    assert counted["builds"] == 0 and counted["disk_hits"] == 0, counted


@pytest.mark.parametrize("case", ["1,1,1,1,1,64", "1,129,129,1,1,64", "1,1,300,8,1,64", "3,1,1,1,1,64"])
def test_55_axes_of_size_1(case: str) -> None:
    check_forward(case, {}, "bfloat16")
    check_backward(case, {}, "bfloat16")


def test_59_bias_is_refused_by_name_or_runs_in_xla() -> None:
    q, k, v, dout = normal("2,64,64,4,2,64")
    bias = jax.random.normal(jax.random.key(0), (1, 4, 64, 64))
    with pytest.raises(jax_fa4.Unsupported, match="bias"):
        fa4(q, k, v, bias=bias)
    primitives.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="bias"):
        g = jax.grad(lambda b: (jax_fa4.attention(q, k, v, bias=b) * dout).astype(jnp.float32).sum())(bias)
    assert np.isfinite(np.asarray(g)).all() and largest(g) > 0


@pytest.mark.parametrize("backward", [False, True])
def test_63_memory_grows_with_the_length_not_its_square(backward: bool) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return fa4(q, k, v, is_causal=True, key_value_seq_lengths=jnp.array([q.shape[1] - 5]))

    fn = jax.grad(lambda *x: call(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)) if backward else call
    sizes = []
    for s in (4096, 8192, 16384):
        x = jax.ShapeDtypeStruct((1, s, 1, 64), jnp.bfloat16)
        sizes.append(jax.jit(fn).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[2] < 16384 * 64 * 4 * 40, sizes
    assert all(b <= 2.2 * a + (1 << 20) for a, b in itertools.pairwise(sizes)), sizes
