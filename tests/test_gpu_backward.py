"""Gradients of the kernels on a CUDA GPU against dense float32 attention differentiated by JAX, by the error rule.

Forward and backward run as one call, as they do in a model. Skipped where there is no GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import KINDS, LENGTHS, extra, lengths, poison, poisoned, rule

import jax_fa4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason=f"needs a CUDA GPU; the backend is {jax.default_backend()}"
    ),
]

ARRAYS = ("q", "k", "v")


def alive(case: str, options: dict[str, Any]) -> Any:
    """bool [B, T]: queries inside their length."""
    b, t = (int(x) for x in case.split(",")[:2])
    q_len = options.get("query_seq_lengths")
    q_len = jnp.full(b, t) if q_len is None else jnp.asarray(q_len)
    return jnp.arange(t)[None] < q_len[:, None]


def gradients(run: Any, arrays: list[Any], cotangents: tuple[Any, Any]) -> list[Any]:
    """d(q, k, v[, sinks]) of run(*arrays) -> (out, lse)."""
    _, back = jax.vjp(run, *arrays)
    return list(back(cotangents))


def dense_gradients(arrays: list[Any], cotangents: Any, options: dict[str, Any], dtype: Any, seen: Any) -> list[Any]:
    """The yardstick: dense attention in `dtype`; rows that see nothing or lie past q_len give nothing."""
    dout, dlse = cotangents

    def run(*xs: Any) -> tuple[Any, Any]:
        more = {"sinks": xs[3]} if len(xs) == 4 else {}
        return dense.attention(*xs[:3], options | more, dtype)

    (out, lse), back = jax.vjp(run, *arrays)
    live = seen[:, :, None]
    dlse = jnp.where(jnp.isfinite(lse) & live.swapaxes(1, 2), jnp.where(live, dlse, 0).swapaxes(1, 2), 0)
    return list(back((jnp.where(live[..., None], dout, 0).astype(out.dtype), dlse.astype(lse.dtype))))


def check_backward(case: str, options: dict[str, Any], dtype: str) -> None:
    poison()
    arrays, dout, dlse = poisoned(case, options, dtype)
    options = dict(options)
    sinks = options.pop("sinks", None)
    if sinks is not None:
        arrays.append(sinks)

    def ours(*xs: Any) -> Any:
        more = {"sinks": xs[3]} if len(xs) == 4 else {}
        return jax_fa4.attention(*xs[:3], implementation="fa4", return_residual=True, **options, **more)

    seen = alive(case, options)
    got = jax.jit(lambda *xs: gradients(ours, list(xs[2:]), xs[:2]))(dout, dlse, *arrays)
    want = dense_gradients(arrays, (dout, dlse), options, jnp.float32, seen)
    plain = dense_gradients(arrays, (dout, dlse), options, jnp.dtype(dtype), seen)
    kv_len = options.get("key_value_seq_lengths")
    for name, x, a, b in zip(("dq", "dk", "dv", "dsinks"), got, want, plain, strict=False):
        a, b = (jnp.nan_to_num(y.astype(jnp.float32)) for y in (a, b))
        rule(name, x, a, b, dtype)
        x = np.asarray(x, np.float32)
        if name == "dq":
            assert (x[~np.asarray(seen)] == 0).all(), "dq past q_len must be 0"
        if name in ("dk", "dv") and kv_len is not None:
            for n, length in enumerate(np.asarray(kv_len)):
                assert (x[n, int(length) :] == 0).all(), f"{name} past kv_len must be 0"


SHAPES = (
    [f"2,{n},{n},2,2,128" for n in LENGTHS]
    + [f"2,{n},{n},2,2,64" for n in LENGTHS]
    + ["3,77,1000,8,1,128", "2,1000,64,4,2,128", "2,200,333,4,4,64", "1,333,129,7,1,128"]
    + ["1,128,128,4,1,64", "2,257,511,16,2,128", "2,255,1,7,7,64", "1,1,1000,4,4,128"]
    + ["1,2048,2048,4,4,128", "1,1025,2049,8,4,64", "8,65,127,2,1,128"]
)


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("case", SHAPES)
def test_backward_shapes(case: str, kind: str) -> None:
    check_backward(case, KINDS[kind], "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["2,300,700,4,2,128", "2,700,300,4,2,64", "3,257,257,2,2,128"])
def test_backward_kinds(case: str, kind: str, dtype: str) -> None:
    check_backward(case, KINDS[kind], dtype)
    check_backward(case, KINDS[kind] | lengths(case), dtype)
    check_backward(case, KINDS[kind] | {"scale": 0.3}, dtype)


EXTRAS = ["cap", "sinks", "segments", "cap+sinks", "cap+sinks+segments"]


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("more", EXTRAS)
@pytest.mark.parametrize("case", ["2,300,700,4,2,128", "2,200,133,4,4,64"])
def test_backward_extras(case: str, more: str, kind: str) -> None:
    check_backward(case, KINDS[kind] | extra(more, case), "bfloat16")
    check_backward(case, KINDS[kind] | extra(more, case) | lengths(case), "bfloat16")


DEPTHS = ["64", "96", "128", "192,128", "192", "256", "8", "40", "72", "136", "160", "200", "248"]
DEPTHS += ["64,128", "128,64", "256,8", "64,256", "192,64", "64,192"]


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_backward_depths(depth: str, kind: str) -> None:
    check_backward(f"2,200,333,4,2,{depth}", KINDS[kind], "bfloat16")


@pytest.mark.parametrize("depth", ["72", "192,128", "256"])
@pytest.mark.parametrize("more", ["cap", "segments", "cap+sinks+segments"])
def test_backward_depths_with_extras(depth: str, more: str) -> None:
    case = f"2,200,333,4,2,{depth}"
    check_backward(case, KINDS["causal"] | extra(more, case) | lengths(case), "float16")


def test_one_backward_object_for_every_value_batch_and_length() -> None:
    """Changes of length, batch, heads, scale and window build nothing, and the gradients are right each time.

    Heads that share keys have an object of their own."""
    from jax_fa4.ffi import store

    for kind in ("2,300,700,4,2,128", "2,300,700,4,4,128"):
        check_backward(kind, KINDS["causal"], "bfloat16")
    store.reset_counters()
    for other in ("1,64,64,2,1,128", "4,129,300,8,8,128"):
        for options in (KINDS["causal"], KINDS["window"], KINDS["left"], KINDS["causal"] | {"scale": 0.05}):
            check_backward(other, options, "bfloat16")
    counted = store.counters()
    assert counted["builds"] == 0 and counted["disk_hits"] == 0, counted


def test_no_cotangent_no_gradient() -> None:
    """dout = 0 and dlse = 0 give exactly 0 on a dirty workspace."""
    poison()
    (q, k, v), dout, _ = poisoned("2,300,300,4,2,128", {}, "bfloat16")
    call = functools.partial(jax_fa4.attention, implementation="fa4", is_causal=True)
    _, back = jax.vjp(call, q, k, v)
    for x in jax.jit(back)(jnp.zeros_like(dout)):
        assert (np.asarray(x, np.float32) == 0).all()


# ---- deterministic ---------------------------------------------------------------------------------------------------


def backward_of(case: str, options: dict[str, Any], deterministic: bool) -> tuple[Any, Any]:
    """(jitted dq, dk, dv of (q, k, v, dout), its arguments)."""
    (q, k, v), dout, _ = poisoned(case, options, "bfloat16")
    call = functools.partial(jax_fa4.attention, implementation="fa4", deterministic=deterministic, **options)

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        _, back = jax.vjp(call, q, k, v)
        return back(dout)

    return jax.jit(run), (q, k, v, dout)


def bits(results: Any) -> list[Any]:
    return [np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16)) for x in results]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", ["2,300,700,4,2,128", "2,300,700,8,2,128", "2,700,300,4,4,64", "2,300,333,4,2,192,128", "1,300,333,2,1,256"]
)
def test_deterministic_is_right_and_bitwise_equal(case: str, kind: str) -> None:
    options = KINDS[kind] | {"deterministic": True}
    check_deterministic(case, options)
    check_deterministic(case, options | lengths(case))


def check_deterministic(case: str, options: dict[str, Any]) -> None:
    options = {key: x for key, x in options.items() if key != "deterministic"}
    run, args = backward_of(case, options, True)
    first = bits(run(*args))
    for _ in range(10):
        for a, b in zip(bits(run(*args)), first, strict=True):
            assert (a == b).all()
    loose, _ = backward_of(case, options, False)
    for name, x, y in zip(("dq", "dk", "dv"), loose(*args), run(*args), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 4e-3 * max(np.linalg.norm(x), 1e-6), f"{name} differs from the unordered one"


@pytest.mark.parametrize("case", ["2,300,700,4,2,128", "2,300,700,8,2,128"])
@pytest.mark.parametrize("more", ["cap", "segments", "cap+sinks+segments"])
def test_deterministic_extras(more: str, case: str) -> None:
    check_deterministic(case, KINDS["causal"] | extra(more, case))


THOUSANDS = ["4,4096,4096,16,16,128", "1,16384,16384,16,16,128", "4,4096,4096,16,4,64", "4,4096,4096,32,4,128"]
THOUSANDS += ["4,4096,4096,8,8,256", "1,16384,16384,8,8,256", "4,4096,4096,8,4,192,128", "3,1100,4000,16,2,192"]


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("case", THOUSANDS)
def test_deterministic_with_thousands_of_ctas_and_many_queued_calls(case: str, kind: str) -> None:
    """The first ordered form of these kernels passed with 256 CTAs and hung at 2,048 with calls queued."""
    run, args = backward_of(case, KINDS[kind], True)
    results = [run(*args) for _ in range(24)]  # nothing is awaited in between
    jax.block_until_ready(results)
    first = bits(results[0])
    for other in results[1:]:
        for a, b in zip(bits(other), first, strict=True):
            assert (a == b).all()


def test_6_deterministic_100_repeats_jit_and_eager() -> None:
    run, args = backward_of("2,1024,1024,8,2,128", KINDS["causal"], True)
    first = bits(run(*args))
    q, k, v, dout = args
    call = functools.partial(jax_fa4.attention, implementation="fa4", deterministic=True, is_causal=True)
    for n in range(100):
        if n % 10 == 0:
            _, back = jax.vjp(call, q, k, v)
            again = bits(back(dout))
        else:
            again = bits(run(*args))
        assert all((a == b).all() for a, b in zip(again, first, strict=True)), n


SEGMENTS = {
    "rising": lambda rng, ids: ids,
    "falling": lambda rng, ids: ids[::-1],
    "in any order": lambda rng, ids: rng.permutation(ids.max() + 1)[ids],
    "mixed": lambda rng, ids: rng.integers(0, 4, ids.size),
}


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("order", SEGMENTS)
def test_deterministic_with_sixteen_sequences(order: str, kind: str) -> None:
    """Key tiles that share a segment with a query tile add in turn: bits equal over 20 queued calls, and right."""
    case, rng = "2,4096,4096,4,2,128", np.random.default_rng(16)
    cuts = np.sort(rng.choice(np.arange(1, 4096), 15, replace=False))
    packed = np.searchsorted(cuts, np.arange(4096), side="right")
    ids = jnp.asarray(np.stack([SEGMENTS[order](rng, packed) for _ in range(2)]), jnp.int32)
    options = KINDS[kind] | {"query_segment_ids": ids, "key_value_segment_ids": ids}
    run, args = backward_of(case, options, True)
    results = [run(*args) for _ in range(20)]
    jax.block_until_ready(results)
    first = bits(results[0])
    assert all((a == b).all() for other in results[1:] for a, b in zip(bits(other), first, strict=True))
    check_backward(case, options | {"deterministic": True}, "bfloat16")
