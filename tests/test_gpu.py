"""Kernels on a CUDA GPU against dense float32 attention, by the project's error rule. Skipped where there is no GPU.

Needs objects: either the CuTe DSL, or a store that was filled elsewhere (JAX_FA4_STORE) and the runtime library.
"""

from __future__ import annotations

import functools
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason=f"needs a CUDA GPU; the backend is {jax.default_backend()}"
    ),
]

FLOOR = {"bfloat16": 4e-3, "float16": 6e-4}  # relative L2 of one rounding of the result, with room for P's


def problem(case: str) -> tuple[Any, ...]:
    """'B,T,S,N,K,D[,V]' -> q, k, v, dout, dlse, of normal values with a per-channel offset and outlier channels."""
    b, t, s, n, k, d, *rest = (int(x) for x in case.split(","))
    v = rest[0] if rest else d
    rng = np.random.default_rng(sum(map(ord, case)))
    made = []
    for shape in ((b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)):
        x = rng.standard_normal(shape)
        x[..., :: max(1, shape[-1] // 3)] += 0.5
        made.append(x)
    return (*made, rng.standard_normal((b, t, n)) / 4)


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-12))


def rule(name: str, got: Any, want: Any, plain: Any, dtype: str) -> None:
    """At most twice the error of the unfused computation in the same dtype, plus one rounding."""
    assert np.isfinite(np.asarray(got, np.float32)).all(), f"{name}: not finite"
    ours, theirs = error(got, want), error(plain, want)
    small = float(np.linalg.norm(np.asarray(want, np.float64))) < 1e-6 * np.sqrt(np.asarray(want).size)
    if small:  # nothing to compare with: gradients that vanish identically
        assert np.abs(np.asarray(got, np.float64)).max() < 2e-2, f"{name}: should vanish"
        return
    assert ours <= 2 * theirs + FLOOR[dtype], f"{name}: {ours:.2e}, unfused {dtype} {theirs:.2e}"


def lse_rule(lse: Any, want: Any) -> None:
    lse, want = np.asarray(lse), np.swapaxes(np.asarray(want), 1, 2)
    assert (np.isneginf(lse) == np.isneginf(want)).all()
    live = ~np.isneginf(want)
    assert np.abs(lse[live] - want[live]).max(initial=0) < 2e-3


def poisoned(case: str, options: dict[str, Any], dtype: str) -> tuple[list[Any], Any, Any]:
    """Inputs of the kernels' dtype with NaN past every length; dout, dlse likewise."""
    q, k, v, dout, dlse = problem(case)
    q_len, kv_len = options.get("query_seq_lengths"), options.get("key_value_seq_lengths")
    for b in range(q.shape[0]):
        if q_len is not None:
            for x in (q, dout, dlse):
                x[b, int(q_len[b]) :] = np.nan
        if kv_len is not None:
            for x in (k, v):
                x[b, int(kv_len[b]) :] = np.nan
    return [jnp.asarray(x, dtype) for x in (q, k, v)], jnp.asarray(dout, dtype), jnp.asarray(dlse, jnp.float32)


@functools.cache
def poison() -> None:
    """Fills freed device memory with NaN, so that a result that nobody writes shows."""
    blocks = [jnp.full((1 << 28,), jnp.nan, jnp.float32) for _ in range(4)]
    jax.block_until_ready(blocks)
    for x in blocks:
        x.delete()


def check_forward(case: str, options: dict[str, Any], dtype: str) -> None:
    poison()
    (q, k, v), _, _ = poisoned(case, options, dtype)
    run = jax.jit(functools.partial(jax_fa4.attention, implementation="fa4", return_residual=True, **options))
    out, lse = run(q, k, v)
    want, want_lse = dense.attention(q, k, v, options, jnp.float32)
    plain, _ = dense.attention(q, k, v, options, jnp.dtype(dtype))
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    rule("out", out, want, plain, dtype)
    lse_rule(lse, want_lse)
    dead = np.isneginf(np.asarray(lse))
    assert (np.asarray(out, np.float32)[dead] == 0).all(), "rows without keys must be 0"


LENGTHS = [1, 63, 64, 65, 127, 128, 129, 1000]
SHAPES = (
    [f"2,{n},{n},2,2,128" for n in LENGTHS]
    + [f"2,{n},{n},2,2,64" for n in LENGTHS]
    + ["1,1,1000,4,4,128", "3,77,1000,8,1,128", "2,1000,64,4,2,128", "2,200,333,4,4,64", "1,333,129,7,1,128"]
    + ["1,128,128,4,1,64", "1,300,700,8,1,64", "2,257,511,16,2,128", "2,255,1,7,7,64", "5,128,257,4,2,64"]
    + ["1,2048,2048,4,4,128", "1,1025,2049,8,4,64", "1,64,4096,8,2,128", "8,65,127,2,1,128"]
)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (50, 20)},
    "left": {"is_causal": True, "local_window_size": (100, 0), "causal_alignment": "bottom_right"},
}


def lengths(case: str) -> dict[str, Any]:
    b, t, s = (int(x) for x in case.split(",")[:3])
    rng = np.random.default_rng(b + t + s)
    return {
        "query_seq_lengths": jnp.asarray(rng.integers(0, t + 1, b)),
        "key_value_seq_lengths": jnp.asarray(rng.integers(0, s + 1, b)),
    }


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("case", SHAPES)
def test_forward_shapes(case: str, kind: str) -> None:
    check_forward(case, KINDS[kind], "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["2,300,700,4,2,128", "2,700,300,4,2,64", "3,257,257,2,2,128"])
def test_forward_kinds(case: str, kind: str, dtype: str) -> None:
    check_forward(case, KINDS[kind], dtype)
    check_forward(case, KINDS[kind] | lengths(case), dtype)
    check_forward(case, KINDS[kind] | {"scale": 0.3}, dtype)


def extra(kind: str, case: str) -> dict[str, Any]:
    """Soft cap, sinks and segment ids, alone and together."""
    b, t, s, n = (int(x) for x in case.split(",")[:4])
    rng = np.random.default_rng(7)
    ids = [jnp.asarray(np.cumsum(rng.random((b, length)) < 0.02, axis=1), jnp.int32) for length in (t, s)]
    parts = {
        "cap": {"logits_soft_cap": 5.0},
        "sinks": {"sinks": jnp.asarray(rng.standard_normal(n), jnp.float32)},
        "segments": {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]},
    }
    return {key: x for name in kind.split("+") for key, x in parts[name].items()}


EXTRAS = ["cap", "sinks", "segments", "cap+sinks", "cap+sinks+segments"]


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("more", EXTRAS)
@pytest.mark.parametrize("case", ["2,300,700,4,2,128", "2,200,133,4,4,64"])
def test_forward_extras(case: str, more: str, kind: str) -> None:
    check_forward(case, KINDS[kind] | extra(more, case), "bfloat16")
    check_forward(case, KINDS[kind] | extra(more, case) | lengths(case), "bfloat16")


DEPTHS = [
    "64",
    "96",
    "128",
    "192,128",
    "192",
    "256",
    "8",
    "40",
    "72",
    "120",
    "160",
    "200",
    "248",
    "64,128",
    "128,64",
    "256,8",
]


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_forward_depths(depth: str, kind: str) -> None:
    check_forward(f"2,200,333,4,2,{depth}", KINDS[kind], "bfloat16")


@pytest.mark.parametrize("case", ["2,300,700,4,2,128", "2,200,200,4,4,64"])
def test_one_object_for_every_value_batch_and_length(case: str) -> None:
    """Changes of length, batch, scale and window build nothing, and the results are right each time."""
    from jax_fa4.ffi import store

    check_forward(case, KINDS["causal"], "bfloat16")
    store.reset_counters()
    for other in (case, "1,64,64,2,1," + case.split(",")[5], "4,129,300,8,8," + case.split(",")[5]):
        for options in (KINDS["causal"], KINDS["window"], KINDS["left"], KINDS["causal"] | {"scale": 0.05}):
            check_forward(other, options, "bfloat16")
    counted = store.counters()
    assert counted["builds"] == 0 and counted["disk_hits"] == 0, counted


def test_values_may_be_traced() -> None:
    """One executable for every scale and length."""
    (q, k, v), _, _ = poisoned("2,256,256,4,4,128", {}, "bfloat16")
    run = jax.jit(
        lambda q, k, v, scale, n: jax_fa4.attention(
            q, k, v, scale=scale, key_value_seq_lengths=n, is_causal=True, implementation="fa4"
        )
    )
    for scale, n in ((0.1, (256, 256)), (0.3, (17, 200)), (1.0, (1, 0))):
        options = {"is_causal": True, "scale": scale, "key_value_seq_lengths": jnp.array(n)}
        want, _ = dense.attention(q, k, v, options, jnp.float32)
        plain, _ = dense.attention(q, k, v, options, jnp.bfloat16)
        rule("out", run(q, k, v, jnp.float32(scale), jnp.array(n)), want, plain, "bfloat16")
    assert run._cache_size() == 1


def test_transposed_operand_and_result() -> None:
    """A transpose that XLA might fold into the operand's layout must not reach the kernel unseen."""
    (q, k, v), _, _ = poisoned("2,96,64,4,4,64", {}, "bfloat16")
    call = functools.partial(jax_fa4.attention, implementation="fa4")
    swapped = jnp.swapaxes(q, 1, 2)
    run = jax.jit(lambda x: jnp.swapaxes(call(jnp.swapaxes(x, 1, 2), k, v), 1, 2))
    assert error(run(swapped), jnp.swapaxes(call(q, k, v), 1, 2)) == 0


def test_repeats_scan_and_first_call_inside_jit() -> None:
    (q, k, v), _, _ = poisoned("2,300,300,4,4,128", {}, "bfloat16")
    call = functools.partial(jax_fa4.attention, is_causal=True, implementation="fa4")
    first = np.asarray(call(q, k, v), np.float32)
    for _ in range(20):
        assert (np.asarray(call(q, k, v), np.float32) == first).all()
    layers = jax.jit(lambda x: jax.lax.scan(lambda c, _: (call(c, k, v), None), x, length=8)[0])
    unrolled = q
    for _ in range(8):
        unrolled = call(unrolled, k, v)
    assert error(layers(q), unrolled) == 0


def test_constant_and_extreme_inputs() -> None:
    """Rows whose logits lie far below 0, a constant input, one key: known values."""
    q = jnp.full((1, 88, 14, 128), 4.0, jnp.bfloat16)
    k = jnp.full((1, 448, 2, 128), -4.0, jnp.bfloat16)
    v = jax.random.normal(jax.random.key(0), (1, 448, 2, 128), jnp.bfloat16)
    out, lse = jax_fa4.attention(
        q, k, v, is_causal=True, causal_alignment="bottom_right", implementation="fa4", return_residual=True
    )
    i = np.arange(88)
    want = -16 * np.sqrt(128) + np.log(i + 361)
    assert np.abs(np.asarray(lse)[0] - want[:, None]).max() < 2e-2
    mean = np.stack([np.asarray(v, np.float64)[0, : n + 361].mean(0) for n in i])  # [T, K, D]
    assert error(out[0], np.repeat(mean, 7, axis=1)) < 1e-2
    one = jnp.full((1, 1, 1, 64), 133120.0, jnp.bfloat16)
    assert (np.asarray(jax_fa4.attention(one, one, one, implementation="fa4"), np.float32) == 133120.0).all()


def test_refusals_name_the_way_out() -> None:
    x = jnp.ones((1, 8, 1, 64), jnp.float32)
    with pytest.raises(jax_fa4.Unsupported, match="float32"):
        jax_fa4.attention(x, x, x, implementation="fa4")
    with pytest.warns(RuntimeWarning, match="bias"):
        half = x.astype(jnp.bfloat16)
        jax_fa4.attention(half, half, half, bias=jnp.zeros((1, 1, 8, 8)))


def test_dispatch_costs_no_more_than_xla_plus_a_few_microseconds() -> None:
    """A small call against XLA's own op with the same operands and results; the numbers are in docs/measured."""
    import time

    q = jax.random.normal(jax.random.key(0), (1, 128, 1, 128), jnp.bfloat16)
    ours = jax.jit(lambda q: jax_fa4.attention(q, q, q, implementation="fa4", return_residual=True))
    xla = jax.jit(lambda q: (q + q, q[..., 0].astype(jnp.float32)))

    def microseconds(fn: Any) -> float:
        best = []
        for _ in range(7):
            jax.block_until_ready(fn(q))
            start = time.perf_counter()
            for _ in range(300):
                out = fn(q)
            jax.block_until_ready(out)
            best.append((time.perf_counter() - start) / 300 * 1e6)
        return sorted(best)[3]

    a, b = microseconds(ours), microseconds(xla)
    print(f"dispatch: ours {a:.1f} us, XLA {b:.1f} us")
    assert a < b + 40
