"""Exports, serialised executables and the persistent cache: one device, several platforms, shard_map over all axes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.extend.core import InconclusiveDimensionOperation
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4

flatbuffers = pytest.importorskip(
    "flatbuffers", reason="jax.export serialises with flatbuffers, which jax does not install"
)
needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason=f"needs 8 devices; there are {jax.device_count()}")
causal = partial(jax_fa4.attention, is_causal=True)


def inputs() -> list[Any]:
    shapes = [(8, 8, 4, 8), (8, 12, 2, 8), (8, 12, 2, 4)]
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def step(q: Any, k: Any, v: Any) -> Any:
    return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(causal(*x))), (0, 1, 2))(q, k, v)


def close(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def over_mesh(mesh: Any) -> Any:
    spec = P("d", None, "m")

    def share(*x: Any) -> Any:
        loss, grads = step(*x)
        return jax.lax.psum(loss, ("d", "m")), grads

    return jax.shard_map(share, mesh=mesh, in_specs=(spec,) * 3, out_specs=(P(), (spec,) * 3))


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("cuda", "cpu")], ids="+".join)
def test_export_of_one_device(platforms):
    args = inputs()
    exported = jax.export.export(jax.jit(step), platforms=platforms)(*args)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(*args), step(*args))
    assert again.platforms == platforms


def test_one_export_for_cpu_and_a_gpu_that_is_not_here():
    pytest.importorskip("cutlass", reason="the kernel is built here")
    q, k, v = (jnp.ones((2, 256, n, 64), jnp.bfloat16) * x for n, x in ((4, 1.0), (2, 1.0), (2, 3.0)))
    with jax_fa4.config(arch="sm_90a"):
        checks = jax_fa4.export_disabled_checks()
        exported = jax.export.export(jax.jit(causal), platforms=("cpu", "cuda"), disabled_checks=checks)(q, k, v)
    calls = re.findall(r"stablehlo.custom_call @(\w+)", exported.mlir_module())
    assert [name for name in calls if "Cutlass" in name] == ["CuteDSLRT_NvJaxCutlassCall_v2"]
    again = jax.export.deserialize(exported.serialize())
    assert set(again.platforms) == {"cpu", "cuda"}
    close(again.call(q, k, v), jnp.full((2, 256, 4, 64), 3.0))


def test_a_models_gradient_for_blackwell_is_lowered_on_a_cpu_machine_and_reloaded():
    """Two layers, causal and packed, gradients in fixed order: forward and backward of each are kernels for sm_100a.
    The same export runs here, where they are XLA's."""
    pytest.importorskip("cutlass", reason="the kernels are built here")
    weights = 0.05 * jax.random.normal(jax.random.key(0), (2, 4, 128, 128), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, 200, 128), jnp.bfloat16)
    ids = jnp.arange(200)[None] // 90

    def loss(weights: Any, x: Any) -> Any:
        for n in range(2):
            q, k, v = (jnp.reshape(x @ w, (1, 200, 2, 64)) for w in weights[n, :3])
            more = {"query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": True}
            out = jax_fa4.attention(q, k, v, deterministic=True, **more)
            x = x + jnp.reshape(out, x.shape) @ weights[n, 3]
        return jnp.square(x.astype(jnp.float32)).mean()

    grad = jax.jit(jax.grad(loss))
    with jax_fa4.config(arch="sm_100a"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that no such GPU has run them
        checks = jax_fa4.export_disabled_checks()
        exported = jax.export.export(grad, platforms=("cpu", "cuda"), disabled_checks=checks)(weights, x)
    calls = re.findall(r"stablehlo.custom_call @(\w+)", exported.mlir_module())
    assert [name for name in calls if "Cutlass" in name] == 4 * ["CuteDSLRT_NvJaxCutlassCall_v2"], calls
    again = jax.export.deserialize(exported.serialize())
    assert set(again.platforms) == {"cpu", "cuda"}
    got, wanted = again.call(weights, x), grad(weights, x)
    assert np.array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32)) and np.abs(got).max() > 0


def test_a_symbolic_batch_is_refused_by_jax_in_words():
    """Shapes decide tiles and plans, so they must be numbers; one export serves one shape."""
    (b,) = jax.export.symbolic_shape("b")
    symbolic = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in inputs()]
    with pytest.raises(InconclusiveDimensionOperation, match="Symbolic dimension comparison"):
        jax.export.export(jax.jit(causal))(*symbolic)


def test_fa4_alone_says_at_lowering_what_it_needs():
    args = [x.astype(jnp.bfloat16) for x in inputs()]
    with pytest.raises(jax_fa4.Unsupported):
        jax.export.export(jax.jit(partial(causal, implementation="fa4")), platforms=("cpu",))(*args)


@needs_8
@pytest.mark.parametrize("abstract", [False, True])
def test_export_of_a_shard_map_over_all_axes(abstract):
    args = inputs()
    real = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    mesh = AbstractMesh((4, 2), ("d", "m")) if abstract else real
    placed = [jax.device_put(x, NamedSharding(real, P("d", None, "m"))) for x in args]
    described = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("d", None, "m"))) for x in args]
    exported = jax.export.export(jax.jit(over_mesh(mesh)), platforms=("cpu",))(*described)
    again = jax.export.deserialize(exported.serialize())
    assert again.nr_devices == 8
    close(jax.jit(again.call)(*placed), step(*args))


@needs_8
def test_export_on_explicit_axes():
    args = inputs()
    mesh = jax.make_mesh((4, 2), ("d", "m"))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("d", None, "m"))) for x in args]
        again = jax.export.deserialize(jax.export.export(jax.jit(step))(*placed).serialize())
        close(jax.jit(again.call)(*placed), jax.jit(step)(*placed))


@needs_8
def test_export_of_automatic_axes_says_what_to_do():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    placed = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in inputs()]
    with pytest.raises(ValueError, match=r"cannot be exported.*jax.shard_map"):
        jax.export.export(jax.jit(step))(*placed)


@needs_8
@pytest.mark.parametrize("several", [False, True])
def test_aot_and_serialised_executables(several):
    args = inputs()
    wanted = step(*args)
    f = step
    if several:
        mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
        args = [jax.device_put(x, NamedSharding(mesh, P("d", None, "m"))) for x in args]
        f = over_mesh(mesh)
    compiled = jax.jit(f).lower(*args).compile()
    close(compiled(*args), wanted)
    devices = jax.devices() if several else jax.devices()[:1]
    again = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled), execution_devices=devices
    )
    close(again(*args), wanted)


CACHED = """
import collections, jax, sys
sys.path.insert(0, {tests!r})
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name]))
import test_export as t
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
import numpy as np
args = [np.full(s, 0.1, np.float32) for s in ((8, 8, 4, 8), (8, 12, 2, 8), (8, 12, 2, 4))]
jax.block_until_ready(jax.jit(t.step)(*args))
cut = NamedSharding(mesh, P("d", None, "m"))
jax.block_until_ready(jax.jit(t.over_mesh(mesh))(*[jax.device_put(x, cut) for x in args]))
print(counts["/jax/compilation_cache/cache_hits"], counts["/jax/compilation_cache/cache_misses"])
"""


@needs_8
def test_a_second_process_compiles_nothing(tmp_path):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    code = CACHED.format(tests=str(Path(__file__).parent))
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append(tuple(int(n) for n in done.stdout.split()[-2:]))
    assert counts[0][1] >= 2 and counts[1][1] == 0 and counts[1][0] >= 2, counts
