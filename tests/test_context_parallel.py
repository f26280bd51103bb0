"""Context parallelism on virtual CPU devices equals the unsharded call: every mode and layout, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import context_parallel as cp

DEVICES = 4
pytestmark = pytest.mark.skipif(
    jax.device_count() < DEVICES, reason=f"needs {DEVICES} devices (XLA_FLAGS=--xla_force_host_platform_device_count=8)"
)
B, T, N, K, D = 2, 64, 8, 4, 16
keys = jax.random.split(jax.random.key(0), 8)


def normal(n: int, *shape: int) -> Any:
    return jax.random.normal(keys[n], shape)


IDS = jnp.cumsum(jax.random.bernoulli(keys[6], 0.1, (B, T)), axis=1).astype(jnp.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True, "scale": 0.4},
    "window": {"local_window_size": (10, 3)},
    "segments": {"is_causal": True, "query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "lengths": {
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "query_seq_lengths": jnp.array([50, 64]),
        "key_value_seq_lengths": jnp.array([64, 20]),
    },
    "sinks": {"is_causal": True, "sinks": normal(5, N), "query_seq_lengths": jnp.array([50, 33])},
    "cap": {"logits_soft_cap": 2.0, "is_causal": True},
}


def mesh_of(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((DEVICES,), ("s",), axis_types=(kind,), devices=jax.devices()[:DEVICES])


def sharded(mode: str, layout: str, mesh: Any = None) -> Any:
    """`attention` of global arrays in natural order, by way of the given layout."""

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        move = cp.to_zigzag if layout == "zigzag" else (lambda x, _: x)
        back = cp.from_zigzag if layout == "zigzag" else (lambda x, _: x)
        q, k, v = (move(x, DEVICES) for x in (q, k, v))
        options = {n: move(x, DEVICES) if "segment" in n else x for n, x in options.items()}
        results = cp.attention(q, k, v, mesh=mesh or mesh_of(), axis="s", mode=mode, layout=layout, **options)
        return tuple(back(x, DEVICES) for x in results)

    return call


def values_and_grads(call: Any, options: dict[str, Any], kv_heads: int = K) -> Any:
    """(out, lse) and all gradients for non-uniform cotangents of both."""
    q, k, v = normal(0, B, T, N, D), normal(1, B, T, kv_heads, D), normal(2, B, T, kv_heads, D)
    w, wl = normal(3, B, T, N, D), normal(4, B, T, N)
    learned = {n: options[n] for n in ("sinks",) if n in options}

    def loss(q: Any, k: Any, v: Any, learned: Any) -> Any:
        out, lse = call(q, k, v, return_residual=True, **options | learned)
        return (out * w).sum() + jnp.where(jnp.isneginf(lse), 0, lse * wl).sum(), (out, lse)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, learned)


@functools.cache
def wanted(name: str, kv_heads: int = K) -> Any:
    return values_and_grads(jax_fa4.attention, OPTIONS[name], kv_heads)


def assert_close(got: Any, want: Any) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


# The ring has its own differentiation rule, so it gets every option in both layouts; the others are plain JAX around
# the unsharded call.
COMBINATIONS = [(name, "ring", layout) for name in OPTIONS for layout in cp.LAYOUTS] + [
    (name, mode, layout)
    for mode in ("all_gather", "all_to_all")
    for name, layout in (
        ("window", "zigzag"),
        ("segments", "contiguous"),
        ("lengths", "zigzag"),
        ("sinks", "contiguous"),
    )
]


@pytest.mark.parametrize(("name", "mode", "layout"), COMBINATIONS)
def test_equals_the_unsharded_call(name: str, mode: str, layout: str) -> None:
    assert_close(values_and_grads(sharded(mode, layout), OPTIONS[name]), wanted(name))


def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("layout", cp.LAYOUTS)
def test_ring_in_bfloat16(layout: str) -> None:
    """Blocks share the merged out and lse: a delta of the block's own keys would be off by a tenth here."""
    q, k, v, w = (normal(i, B, T, n, D).astype(jnp.bfloat16) for i, n in ((0, N), (1, K), (2, K), (3, N)))

    def grads(call: Any, *x: Any) -> Any:
        return jax.jit(lambda q, k, v: jax.vjp(call, q, k, v)[1](w.astype(q.dtype)))(*x)

    def call(q: Any, k: Any, v: Any) -> Any:
        return sharded("ring", layout)(q, k, v, is_causal=True, return_residual=True)[0]

    want = grads(functools.partial(jax_fa4.attention, is_causal=True), *(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(grads(call, q, k, v), want, strict=True):
        assert relative(a, b) < 1.5e-2


@pytest.mark.parametrize("mode", cp.MODES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_few_and_many_key_heads(mode: str, kv_heads: int) -> None:
    assert_close(values_and_grads(sharded(mode, "contiguous"), OPTIONS["causal"], kv_heads), wanted("causal", kv_heads))


@pytest.mark.parametrize("mode", cp.MODES)
def test_explicit_mesh(mode: str) -> None:
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        place = jax.sharding.NamedSharding(mesh, P(None, "s"))
        q, k, v = (jax.device_put(normal(n, B, T, h, D), place) for n, h in ((0, N), (1, K), (2, K)))
        out = jax.jit(lambda q, k, v: cp.attention(q, k, v, axis="s", mode=mode, is_causal=True))(q, k, v)
    want = jax_fa4.attention(normal(0, B, T, N, D), normal(1, B, T, K, D), normal(2, B, T, K, D), is_causal=True)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", cp.MODES)
def test_inside_a_callers_shard_map_without_vma(mode: str) -> None:
    run = {"ring": cp.ring, "all_gather": cp.all_gather, "all_to_all": cp.all_to_all}[mode]
    spec = P(None, "s")
    local = functools.partial(run, axis_name="s", is_causal=True)
    mapped = jax.shard_map(local, mesh=mesh_of(), in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    q, k, v, w = normal(0, B, T, N, D), normal(1, B, T, K, D), normal(2, B, T, K, D), normal(3, B, T, N, D)

    def grads(call: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (call(*x) * w).sum(), argnums=(0, 1, 2)))(q, k, v)

    assert_close(grads(mapped), grads(functools.partial(jax_fa4.attention, is_causal=True)))


def test_two_axes() -> None:
    """Batch on one axis, sequence on another."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("b", "s"), axis_types=(AxisType.Auto,) * 2)

    def call(q: Any, k: Any, v: Any, **o: Any) -> Any:
        return cp.attention(q, k, v, mesh=mesh, axis="s", batch_axis="b", mode="ring", **o)

    for name in ("causal", "lengths", "segments"):
        assert_close(values_and_grads(call, OPTIONS[name]), wanted(name))


def test_traced_scale_gets_its_gradient() -> None:
    q, k, v, w = normal(0, B, T, N, D), normal(1, B, T, K, D), normal(2, B, T, K, D), normal(3, B, T, N, D)

    def grad(call: Any) -> Any:
        return jax.jit(jax.grad(lambda s: (call(q, k, v, scale=s, is_causal=True) * w).sum()))(jnp.float32(0.3))

    want = grad(jax_fa4.attention)
    for mode in cp.MODES:
        got = grad(functools.partial(cp.attention, mesh=mesh_of(), axis="s", mode=mode))
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_ring_moves_blocks_and_gathers_nothing() -> None:
    q, k, v = normal(0, B, T, N, D), normal(1, B, T, K, D), normal(2, B, T, K, D)
    call = functools.partial(cp.attention, mesh=mesh_of(), axis="s", mode="ring", is_causal=True)
    text = jax.jit(call).lower(q, k, v).compile().as_text()
    assert "collective-permute" in text and "all-gather" not in text and "all-to-all" not in text


def test_zigzag_is_a_permutation_and_balances() -> None:
    x = jnp.arange(64)[None, :, None]
    there = cp.to_zigzag(x, 4)
    assert (cp.from_zigzag(there, 4) == x).all()
    first = there[0, :16, 0]  # device 0: parts 0 and 7 of 8
    assert (first == jnp.concatenate([jnp.arange(8), jnp.arange(56, 64)])).all()
    work = [int(there[0, 16 * r : 16 * (r + 1), 0].sum()) for r in range(4)]
    assert len(set(work)) == 1  # causal work grows with the position


def test_choice_and_refusals() -> None:
    assert cp.choose_mode((1, 4096, 32, 128), (1, 4096, 8, 128), 8) == "all_to_all"
    assert cp.choose_mode((1, 4096, 12, 128), (1, 4096, 1, 128), 8) == "all_gather"
    assert cp.choose_mode((1, 4096, 12, 128), (1, 4096, 12, 128), 8) == "ring"
    q, k = normal(0, B, T, 6, D), normal(1, B, T, 6, D)
    with pytest.raises(ValueError, match=r"multiple of the 4 devices.* 6 and 6"):
        cp.attention(q, k, k, mesh=mesh_of(), axis="s", mode="all_to_all")
    with pytest.raises(ValueError, match="no axis 'x'"):
        cp.attention(q, k, k, mesh=mesh_of(), axis="x")
    with pytest.raises(ValueError, match="mode must be one of"):
        cp.attention(q, k, k, mesh=mesh_of(), axis="s", mode="tree")
    with pytest.raises(TypeError, match="bias"):
        cp.attention(q, k, k, mesh=mesh_of(), axis="s", mode="ring", bias=jnp.zeros((1, 1, T, T)))
