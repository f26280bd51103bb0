"""Kernels on the machine they run on: other processes, settings of XLA, other devices, sizes past 2^31, the sanitizer.

Skipped where there is no GPU; single tests say what else they need.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_child
import gpu_sanitized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import error, poison

import jax_fa4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason=f"needs a CUDA GPU; the backend is {jax.default_backend()}"
    ),
]
ROOT = Path(__file__).resolve().parents[1]
fa4 = functools.partial(jax_fa4.attention, implementation="fa4")


def child(
    *arguments: str, before: tuple[str, ...] = (), script: str = "gpu_child.py", **env: str
) -> subprocess.CompletedProcess[str]:
    """`script` beside this process, which may hold most of the memory."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XLA_FLAGS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": paths, **env}
    command = [*before, sys.executable, str(ROOT / "tests" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=900)


def result(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, (done.returncode, done.stdout[-1000:], done.stderr[-3000:])
    return json.loads(lines[0].removeprefix("RESULT "))


@functools.cache
def here() -> dict[str, str]:
    return gpu_child.work()


GRAPHS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "default": "",
    "every single op": "--xla_gpu_graph_min_graph_size=1",
    "custom calls too": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+CUSTOM_CALL",
}


@pytest.mark.parametrize("name", GRAPHS)
def test_53_command_buffers(name: str) -> None:
    """CUDA graphs: the same bits, no failed capture, the first call of a process inside jit."""
    assert result(child(XLA_FLAGS=GRAPHS[name])) == here()


def test_58_x64_changes_no_bits() -> None:
    assert result(child(JAX_ENABLE_X64="1")) == here()


needs_two = pytest.mark.skipif(
    jax.default_backend() == "gpu" and len(jax.devices()) < 2, reason="needs two GPUs; this machine shows one"
)


@needs_two
@pytest.mark.parametrize("flags", ["off", "custom calls too"])
def test_49_a_process_whose_first_call_is_on_device_1(flags: str) -> None:
    assert result(child("1", XLA_FLAGS=GRAPHS[flags])) == here()


@needs_two
def test_49_each_device_computes_its_own() -> None:
    ones = jax.device_put(jnp.ones((4, 16, 32, 64), jnp.bfloat16), jax.devices()[1])
    out = fa4(ones, ones, ones)
    assert out.devices() == {jax.devices()[1]} and (out == 1).all()
    args = gpu_child.arrays((2, 300, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64), (2, 300, 8, 64), seed=3)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    got = jax.jit(jax.shard_map(gpu_child.gradients, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4))(*args)
    # In another order in the whole call: how many heads go in reverse depends on how many there are.
    whole = jax.jit(gpu_child.gradients)(*args)
    for share in (0, 1):
        alone = jax.jit(gpu_child.gradients)(*(x[share : share + 1] for x in args))
        for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, alone, whole, strict=True):
            assert error(a[share : share + 1], b) == 0, (share, name)
            assert error(a[share : share + 1], c[share : share + 1]) < 1e-4, (share, name)


@needs_two
@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["batch", "heads"])
def test_37_39_jit_with_shardings_computes_shares_and_gathers_nothing(spec: tuple[Any, ...]) -> None:
    """The cotangent comes from a random product, so that its placement shows; it lies whole on each device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = gpu_child.arrays((8, 128, 4, 64), (8, 128, 4, 64), (8, 128, 4, 64), (8, 128, 4, 64), seed=7)
    run = jax.jit(gpu_child.gradients, in_shardings=(placed,) * 3 + (whole,), out_shardings=(placed,) * 4)
    assert "all-gather" not in run.lower(*args).compile().as_text()
    for name, a, b in zip(("out", "dq", "dk", "dv"), run(*args), jax.jit(gpu_child.gradients)(*args), strict=True):
        assert error(a, b) == 0, name


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_52_transposed_cotangent_and_operands_in_gradients() -> None:
    """Transposes beside the call, which XLA might fold into a layout, in front of and behind both passes."""
    q, k, v, dout = gpu_child.arrays((2, 96, 4, 64), (2, 64, 4, 64), (2, 64, 4, 64), (2, 96, 4, 64), seed=5)
    want = gpu_child.gradients(q, k, v, dout)

    def turned(q: Any, k: Any, v: Any, dout: Any) -> Any:
        results = gpu_child.gradients(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v, dout)))
        return [jnp.swapaxes(x, 1, 2) for x in results]

    got = jax.jit(turned)(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v, dout)))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert error(jnp.swapaxes(a, 1, 2), b) == 0, name


# ---- offsets past 2^31 elements --------------------------------------------------------------------------------------

ROWS = (1 << 18) + 128  # of 64 heads of 128: 2^31 + 2^20 elements, 4.3 GB


def huge(seed: int) -> Any:
    """[1, ROWS, 64, 128], no two rows alike, from few random numbers."""
    keys = jax.random.split(jax.random.key(seed))
    far = jax.random.normal(keys[0], (ROWS // 128, 1, 64, 128), jnp.bfloat16)
    near = jax.random.normal(keys[1], (1, 128, 64, 128), jnp.bfloat16)
    return ((far + near) * 0.7).reshape(1, ROWS, 64, 128)


def pulled(q: Any, k: Any, v: Any, dout: Any) -> Any:
    out, back = jax.vjp(fa4, q, k, v)
    return out, *back(dout)


def test_61_queries_past_2_31_elements() -> None:
    """The last rows are those of a small call; dK and dV are the sums over chunks of the queries."""
    poison()
    q, dout = jax.jit(huge, static_argnums=0)(0), jax.jit(huge, static_argnums=0)(1)
    k, v = (jax.random.normal(key, (1, 128, 8, 128), jnp.bfloat16) for key in jax.random.split(jax.random.key(2)))
    run = jax.jit(pulled)
    out, dq, dk, dv = run(q, k, v, dout)
    small_out, small_dq, _, _ = run(q[:, -128:], k, v, dout[:, -128:])
    assert error(out[:, -128:], small_out) < 1e-3 and error(dq[:, -128:], small_dq) < 4e-3
    del out, dq
    sums = [jnp.zeros(k.shape, jnp.float32)] * 2
    for begin in range(0, ROWS, ROWS // 4):
        chunk = slice(begin, min(begin + ROWS // 4, ROWS))
        part = run(q[:, chunk], k, v, dout[:, chunk])[2:]
        sums = [a + b.astype(jnp.float32) for a, b in zip(sums, part, strict=True)]
    for name, a, b in zip(("dk", "dv"), (dk, dv), sums, strict=True):
        assert error(a, b) < 8e-3, name


@pytest.mark.parametrize("queries", [1, 200])
def test_61_keys_past_2_31_elements(queries: int) -> None:
    """Merged by their LSE, four calls on a quarter of the keys each give what one call gives; so do dK and dV."""
    poison()
    k, v = jax.jit(huge, static_argnums=0)(3), jax.jit(huge, static_argnums=0)(4)
    q, dout = (
        jax.random.normal(key, (1, queries, 64, 128), jnp.bfloat16) for key in jax.random.split(jax.random.key(5))
    )
    run = jax.jit(functools.partial(fa4, return_residual=True))
    out, lse = run(q, k, v)
    cuts = [slice(n * ROWS // 4, (n + 1) * ROWS // 4) for n in range(4)]
    parts = [run(q, k[:, cut], v[:, cut]) for cut in cuts]
    whole = functools.reduce(jnp.logaddexp, [one for _, one in parts])
    merged = sum(jnp.exp(one - whole)[..., None] * part.astype(jnp.float32) for part, one in parts)
    assert np.abs(np.asarray(lse - whole)).max() < 2e-3
    assert error(out, merged) < 8e-3
    _, _, dk, dv = jax.jit(pulled)(q, k, v, dout)
    last = slice(ROWS - 128, ROWS)
    p = jnp.exp(jnp.einsum("btnd,bsnd->bnts", *(x.astype(jnp.float32) for x in (q, k[:, last]))) / 128**0.5
                - jnp.swapaxes(lse, 1, 2)[..., None])  # fmt: skip
    assert error(dv[:, last], jnp.einsum("bnts,btnd->bsnd", p, dout.astype(jnp.float32))) < 1e-2
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    ds = p * (jnp.einsum("btnd,bsnd->bnts", dout.astype(jnp.float32), v[:, last].astype(jnp.float32))
              - jnp.swapaxes(delta, 1, 2)[..., None])  # fmt: skip
    assert error(dk[:, last], jnp.einsum("bnts,btnd->bsnd", ds, q.astype(jnp.float32)) / 128**0.5) < 2e-2


# ---- the sanitizer ---------------------------------------------------------------------------------------------------

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_sanitizer = pytest.mark.skipif(
    SANITIZER is None, reason="compute-sanitizer (of the CUDA toolkit) is not on this machine"
)
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")


@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    """Each form of kernel, forward and backward, ordered and not, by gpu_sanitized.py, which compares results too.

    Each buffer is an allocation of its own, or memory of the pool behind a tensor would hide a bad address. What the
    tool cannot follow is left out, and shown by the test below.
    """
    assert SANITIZER is not None
    options = ("--error-exitcode", "9", "--kernel-name", "kns=fa4", "--print-limit", "20")
    cases = gpu_sanitized.SHARED_CODE if tool == "synccheck" else gpu_sanitized.CASES
    done = child(
        *cases,
        before=(SANITIZER, "--tool", tool, *options),
        script="gpu_sanitized.py",
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",
    )
    text = done.stdout + done.stderr
    assert any(clean in text for clean in CLEAN), text[-6000:]
    assert "WHOLE" in done.stdout and done.returncode == 0, text[-6000:]


@needs_sanitizer
@pytest.mark.skipif(NVCC is None, reason="nvcc (of the CUDA toolkit) is not on this machine")
@pytest.mark.parametrize(
    "tool, program, clean",
    [
        ("synccheck", "two places", False),
        ("racecheck", "one lane", False),
        ("racecheck", "each lane", True),
        ("memcheck", "two places", True),
        ("memcheck", "one lane", True),
    ],
)
def test_what_the_sanitizer_cannot_follow(tool: str, program: str, clean: bool, tmp_path: Any) -> None:
    """Thirty lines of CUDA C++, right by PTX's rules, of which it says what it would of our kernels."""
    assert SANITIZER is not None and NVCC is not None
    built = tmp_path / "limits"
    target = ["-gencode", "arch=compute_90a,code=sm_90a"]
    subprocess.run([NVCC, *target, "-o", built, ROOT / "tests" / "sanitizer_limits.cu"], check=True)
    done = subprocess.run([SANITIZER, "--tool", tool, built, program], capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert any(found in text for found in CLEAN) == clean, text[-3000:]
    assert not clean or f"{program}: 0 wrong, no error" in text, text[-3000:]
