"""Kernels that shapes choose, on a CUDA GPU: few queries, few tiles, shared keys, CTAs with many tiles; forward.

By the rules of test_gpu.py. Skipped where there is no GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import KINDS, check_forward, error, extra, lengths, poisoned
from test_gpu_backward import check_backward

import jax_fa4
from jax_fa4 import kernels, primitives
from jax_fa4.spec import AttentionSpec, Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason=f"needs a CUDA GPU; the backend is {jax.default_backend()}"
    ),
]


def form(case: str, kind: str) -> Any:
    """The plan of a case on this GPU."""
    b, t, s, n, k, d, *rest = (int(x) for x in case.split(","))
    spec = AttentionSpec(band=kind != "full")
    return kernels.select(Problem(spec, b, t, s, n, k, d, rest[0] if rest else d), primitives.device_arch())


def on_hopper(holds: bool, what: str) -> None:
    assert holds or primitives.device_arch() != "sm_90a", f"this case is here for {what}: another plan has it now"


DECODE = ["2,1,600,8,2,128", "3,1,1000,7,1,64", "1,1,16384,4,4,128", "2,5,700,14,2,128", "1,64,5000,8,1,64"]
DECODE += ["2,3,513,6,3,72", "1,2,900,4,2,256", "2,1,777,8,2,192,128", "2,8,600,4,4,96", "1,1,600,100,1,128"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", DECODE)
def test_few_queries(case: str, kind: str) -> None:
    on_hopper(getattr(form(case, kind), "packed", False), "few queries")
    check_forward(case, KINDS[kind], "bfloat16")
    check_forward(case, KINDS[kind] | lengths(case), "float16")


@pytest.mark.parametrize("more", ["cap", "sinks", "cap+sinks"])
@pytest.mark.parametrize("case", DECODE)
def test_few_queries_extras(case: str, more: str) -> None:
    check_forward(case, KINDS["bottom_right"] | extra(more, case) | lengths(case), "bfloat16")


@pytest.mark.parametrize("case", ["2,1,600,8,2,128", "2,5,700,14,2,64"])
def test_gradients_of_few_queries(case: str) -> None:
    check_backward(case, KINDS["bottom_right"] | lengths(case), "bfloat16")
    check_backward(case, extra("sinks", case), "bfloat16")


def test_a_batch_of_decoding_is_its_examples() -> None:
    """The keys are cut into other parts, in float32: only roundings differ."""
    (q, k, v), _, _ = poisoned("16,1,5000,8,2,128", {}, "bfloat16")
    run = jax.jit(functools.partial(jax_fa4.attention, implementation="fa4"))
    whole = run(q, k, v)
    for b in (0, 15):
        assert error(whole[b : b + 1], run(q[b : b + 1], k[b : b + 1], v[b : b + 1])) < 4e-3


def test_decoding_follows_a_growing_cache() -> None:
    """One executable; the length is a value, and what lies past it is NaN."""
    (q, k, v), _, _ = poisoned("2,1,2048,8,2,128", {}, "bfloat16")
    step = jax.jit(
        lambda n, q, k, v: jax_fa4.attention(
            q, k, v, key_value_seq_lengths=n, is_causal=True, causal_alignment="bottom_right", implementation="fa4"
        )
    )
    for n in (1, 2, 79, 80, 81, 640, 1000, 2047, 2048):
        past = (jnp.arange(2048) >= n)[None, :, None, None]
        got = step(jnp.array([n, n]), q, jnp.where(past, jnp.nan, k), jnp.where(past, jnp.nan, v))
        want = jax_fa4.attention(*(x[:, :n].astype(jnp.float32) for x in (q[:, :1], k, v)), implementation="xla")
        assert np.isfinite(np.asarray(got, np.float32)).all() and error(got, want) < 6e-3, n
    assert step._cache_size() == 1


FEW = ["1,2048,2048,8,8,128", "1,4096,4096,2,2,128", "1,8192,8192,1,1,64", "1,4200,4500,2,1,96", "1,4096,5000,2,2,256"]


@pytest.mark.parametrize("kind", ["full", "causal", "bottom_right", "window"])
@pytest.mark.parametrize("case", FEW)
def test_few_tiles(case: str, kind: str) -> None:
    plan = form(case, kind)
    shared = not case.startswith("1,2048") and not case.endswith(",256")
    on_hopper(getattr(plan, "splits", None) == shared, "shared keys" if shared else "few tiles")
    check_forward(case, KINDS[kind], "bfloat16")
    check_forward(case, KINDS[kind] | lengths(case) | extra("sinks", case), "float16")


MANY = ["16,1024,1024,16,16,128", "4,4096,4096,16,4,128", "16,1024,1024,32,32,64", "4,4096,4096,32,32,64"]
MANY += ["8,2048,2048,21,21,96", "4,2000,2100,20,5,256", "5,1999,2049,64,2,64"]


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
@pytest.mark.parametrize("case", MANY)
def test_many_tiles(case: str, kind: str) -> None:
    check_forward(case, KINDS[kind], "bfloat16")
    check_forward(case, KINDS[kind] | lengths(case), "bfloat16")
