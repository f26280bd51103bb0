"""The public names beyond attention itself: configuration, which implementation runs, packed sequences."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import primitives
from jax_fa4.spec import AttentionSpec, Problem

X = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)


def lowered(arch: str, **options: Any) -> tuple[str, list[str]]:
    """HLO text of a forward call lowered for a GPU that is not here, and the warnings of it."""
    primitives.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught, jax_fa4.config(arch=arch):
        warnings.simplefilter("always")
        call = jax.jit(lambda x: jax_fa4.attention(x, x, x, **options))
        text = call.trace(X).lower(lowering_platforms=("cuda",)).as_text()
    return text, [str(w.message) for w in caught]


def test_blackwell_kernels_say_that_they_never_ran() -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL compiles the kernel")
    text, told = lowered("sm_100a")
    assert "CuteDSLRT_NvJaxCutlassCall_v2" in text
    assert sum("never run on such a GPU" in t for t in told) == 1
    text, told = lowered("sm_90a")
    assert "CuteDSLRT_NvJaxCutlassCall_v2" in text
    assert not any("never run" in t for t in told)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gradients_with_sinks_lower_to_kernels(arch: str) -> None:
    """The backward kernels take no sinks (lse holds them); handing them over once failed on every GPU call."""
    pytest.importorskip("cutlass", reason="the CuTe DSL compiles the kernel")
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32)
    call = jax.jit(jax.grad(lambda x, sinks: jax_fa4.attention(x, x, x, sinks=sinks).sum().astype(jnp.float32), (0, 1)))
    with warnings.catch_warnings(), jax_fa4.config(arch=arch):
        warnings.simplefilter("ignore")
        text = call.trace(X, sinks).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@CuteDSLRT_NvJaxCutlassCall_v2") == 2


def test_what_kernels_do_not_take_runs_in_xla_and_says_so_once() -> None:
    text, told = lowered("sm_90a", bias=jnp.zeros((1, 1, 128, 128)))
    assert "CuteDSLRT" not in text
    assert any("bias" in t and "runs in XLA on this GPU" in t for t in told)
    text, told = lowered("sm_90a", implementation="xla")
    assert "CuteDSLRT" not in text and not told


@pytest.mark.parametrize("implementation", [None, "fa4"])
def test_without_compiler_and_object_xla_runs_or_fa4_is_refused(implementation: Any, monkeypatch: Any) -> None:
    from jax_fa4.ffi import call
    from jax_fa4.ffi import compile as compiler

    def nothing(plan: Any) -> Any:
        raise compiler.CompilerMissing("nvidia-cutlass-dsl is not installed; pip install this")

    monkeypatch.setattr(call, "compiled", nothing)
    if implementation is None:
        text, told = lowered("sm_90a", logits_soft_cap=7.0)
        assert "CuteDSLRT" not in text and any("runs in XLA" in t and "pip install this" in t for t in told)
        return
    with pytest.raises(jax_fa4.Unsupported, match="pip install this"):
        lowered("sm_90a", logits_soft_cap=7.0, implementation="fa4")


def test_a_store_without_the_fastest_kernel_still_serves(monkeypatch: Any) -> None:
    """Few queries have a kernel of their own; a machine without compiler that lacks it takes the one for any shape."""
    from jax_fa4 import kernels
    from jax_fa4.ffi import call

    problem = Problem(AttentionSpec(), 2, 1, 4096, 8, 2, 64, 64)
    fast, general = (kernels.select(problem, "sm_90a", any_shape=x) for x in (False, True))
    how = primitives.How(problem.spec)
    held = {fast, general}
    monkeypatch.setattr(call, "missing", lambda plan: None if plan in held else "no compiler")
    assert primitives.choose(problem, how, "sm_90a") == fast != general
    held.remove(fast)
    primitives.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="slower kernel runs the fwd pass.*1 queries, 4096 keys"):
        assert primitives.choose(problem, how, "sm_90a") == general
    held.clear()
    with pytest.raises(jax_fa4.Unsupported, match="no compiler"):
        primitives.choose(problem, primitives.How(problem.spec, ("fa4",)), "sm_90a")


# Causal, (batch, length, query heads, key heads) of a traced call, and of a device's part of it.
PARTS = {
    "heads that no longer share keys": ((8, 4096, 8, 4), (8, 4096, 1, 1), "bwd"),
    "and of one key head": ((8, 2048, 8, 1), (8, 2048, 1, 1), "bwd"),
    "few tiles": ((64, 1024, 16, 16), (8, 1024, 2, 2), "fwd"),
    "few tiles, longer": ((8, 2048, 32, 8), (1, 2048, 8, 2), "fwd"),
}


@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("name", PARTS)
def test_a_store_filled_for_a_call_serves_a_device_s_part_of_it(name: str, depth: int, monkeypatch: Any) -> None:
    """Fewer heads choose another plan, and so may another be the one for any shape; the store has neither."""
    from jax_fa4 import kernels
    from jax_fa4.ffi import call

    whole, part, direction = PARTS[name]
    problems = [
        Problem(AttentionSpec(band=True), b, s, s, n, k, depth, depth, direction=direction)
        for b, s, n, k in (whole, part)
    ]
    there, wanted = (kernels.select(one, "sm_90a") for one in problems)
    assert there not in (wanted, kernels.select(problems[1], "sm_90a", any_shape=True))
    monkeypatch.setattr(call, "missing", lambda plan: None if plan == there else "no compiler")
    primitives.warn_once.cache_clear()
    how = primitives.How(problems[1].spec, ("fa4",))
    with pytest.warns(RuntimeWarning, match=f"slower kernel runs the {direction} pass"):
        assert primitives.choose(problems[1], how, "sm_90a") == there


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_store_without_this_kind_serves_nothing(arch: str, monkeypatch: Any) -> None:
    """Another depth, dtype, mask or direction is another kind: no kernel of it may run."""
    from jax_fa4 import kernels
    from jax_fa4.ffi import call

    problem = Problem(AttentionSpec(band=True), 2, 4096, 4096, 8, 2, 128, 128)
    kinds = [replace(problem, d=64, v=64), replace(problem, dtype="float16"), problem.backward()]
    kinds += [replace(problem, spec=AttentionSpec(**{name: True})) for name in ("lengths", "sinks", "soft_cap")]
    kinds += [replace(problem, spec=AttentionSpec(band=True, segments=True))]
    held = {kernels.select(one, arch) for kind in kinds for one in kernels.of_every_shape(kind, arch)}
    monkeypatch.setattr(call, "missing", lambda plan: None if plan in held else "no compiler")
    with pytest.raises(jax_fa4.Unsupported, match="no compiler"):
        primitives.choose(problem, primitives.How(problem.spec, ("fa4",)), arch)


def test_configuration_is_part_of_the_cache_key() -> None:
    traces = []

    @jax.jit
    def call(x: Any) -> Any:
        traces.append(jax_fa4.config.deterministic)
        return jax_fa4.attention(x, x, x)

    x = jnp.ones((1, 4, 1, 8))
    call(x)
    with jax_fa4.config(deterministic=True):
        assert jax_fa4.config.deterministic
        call(x)
    call(x)
    assert traces == [False, True]
    jax_fa4.config.update(deterministic=True)
    try:
        call(x)
        assert jax_fa4.config.deterministic and traces == [False, True]
    finally:
        jax_fa4.config.update(deterministic=False)
    with pytest.raises(ValueError, match="unknown setting 'determinstic'"):
        jax_fa4.config.update(determinstic=True)
    with pytest.raises(ValueError, match="sm_80"):
        jax_fa4.config.update(arch="sm_80")
    with pytest.raises(TypeError, match="deterministic must be True or False"):
        jax_fa4.config.update(deterministic=1)


def test_is_supported_gives_the_reason() -> None:
    ask = jax_fa4.is_supported
    assert ask(X, X, X, arch="sm_90a") == (True, "")
    for options, text in (({"arch": "sm_80"}, "sm_80"), ({"arch": "sm_120a"}, "sm_120a"), ({}, "no CUDA device")):
        if not options and jax.default_backend() == "gpu":
            continue
        ok, why = ask(X, X, X, **options)
        assert not ok and text in why
    ok, why = ask(X, X, X, jnp.zeros((1, 1, 128, 128)), arch="sm_90a")
    assert not ok and "bias" in why
    single = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    ok, why = ask(single, single, single, arch="sm_90a")
    assert not ok and "float32" in why and "bfloat16" in why
    odd = jax.ShapeDtypeStruct((1, 128, 2, 63), jnp.bfloat16)
    ok, why = ask(odd, odd, odd, arch="sm_90a")
    assert not ok and "63" in why and "multiples of 8" in why
    with pytest.raises(ValueError, match="3 is not of 2"):
        ask(jax.ShapeDtypeStruct((1, 128, 3, 64), jnp.bfloat16), X, X, arch="sm_90a")


def test_fa4_alone_is_refused_where_there_is_no_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    x = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
    with pytest.raises(jax_fa4.Unsupported, match=r"cpu.*implementation=None or 'xla'"):
        jax_fa4.attention(x, x, x, implementation="fa4")
    with pytest.raises(ValueError, match="'fa5'"):
        jax_fa4.attention(x, x, x, implementation="fa5")
    assert jax_fa4.attention(x, x, x, implementation=("fa4", "xla")).shape == x.shape


LENGTHS = [(3, 5), (0, 4), (7, 0), (1, 1), (6, 9)]


def packed(seed: int = 0) -> tuple[Any, Any, Any, Any, Any, Any]:
    """q, k, v, dout with two rows of padding at the end, and the cumulative lengths."""
    cu_q = np.cumsum([0] + [t for t, _ in LENGTHS])
    cu_k = np.cumsum([0] + [s for _, s in LENGTHS])
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((cu_q[-1] + 2, 4, 8), (cu_k[-1] + 2, 2, 8), (cu_k[-1] + 2, 2, 6), (cu_q[-1] + 2, 4, 6))
    return (*(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)), cu_q, cu_k)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"local_window_size": (2, 1)},
        {"sinks": jnp.array([0.5, -1.0, 0.0, 2.0]), "logits_soft_cap": 2.0, "scale": 0.7},
    ],
    ids=["full", "causal", "bottom_right", "window", "sinks and cap"],
)
def test_varlen_equals_the_sequences_one_by_one(options: dict[str, Any]) -> None:
    q, k, v, dout, cu_q, cu_k = packed()

    def together(q: Any, k: Any, v: Any) -> Any:
        return jax_fa4.attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=7, max_seqlen_k=9, return_residual=True, **options
        )

    def apart(q: Any, k: Any, v: Any) -> Any:
        outs, lses = [], []
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            out, lse = jax_fa4.attention(q[None, a:b], k[None, c:d], v[None, c:d], return_residual=True, **options)
            outs.append(out[0])
            lses.append(lse[0])
        sink = options.get("sinks", jnp.full(4, -jnp.inf))
        outs.append(jnp.zeros((2, 4, 6)))
        lses.append(jnp.broadcast_to(sink, (2, 4)))
        return jnp.concatenate(outs), jnp.concatenate(lses)

    for got, want in zip(together(q, k, v), apart(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    grads = [jax.grad(lambda *x, f=f: (f(*x)[0] * dout).sum(), (0, 1, 2))(q, k, v) for f in (together, apart)]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["causal", "bottom_right", "window", "sinks and cap"])
def test_varlen_that_stays_packed_is_what_spread_sequences_are(name: str, monkeypatch: Any) -> None:
    """Through XLA, which is told to do what kernels do; NaN in the rows of no sequence."""
    from jax_fa4 import api

    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
        "window": {"local_window_size": (2, 1)},
        "sinks and cap": {"sinks": jnp.array([0.5, -1.0, 0.0, 2.0]), "logits_soft_cap": 2.0, "scale": 0.7},
    }[name]
    q, k, v, dout, cu, _ = packed()
    k, v = (x[: q.shape[0]].at[cu[-1] :].set(jnp.nan) for x in (k, v))

    def run(q: Any, k: Any, v: Any) -> Any:
        return jax_fa4.attention_varlen(
            q, k, v, cu, cu, max_seqlen_q=7, max_seqlen_k=7, return_residual=True, **options
        )

    want, want_grads = run(q, k, v), jax.grad(lambda *x: (run(*x)[0] * dout).sum(), (0, 1, 2))(q, k, v)
    monkeypatch.setattr(api, "_stays_packed", lambda *_: True)
    spread = []
    monkeypatch.setattr(api, "_spread", lambda *x: spread.append(x))
    for got, exact in zip(run(q, k, v), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-6)
    grads = jax.grad(lambda *x: (run(*x)[0] * dout).sum(), (0, 1, 2))(q, k, v)
    for got, exact in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-6)
    assert not spread
    call = jax.jit(lambda cu: jax_fa4.attention_varlen(q, k, v, cu, cu, max_seqlen_q=6, max_seqlen_k=6))
    out = np.asarray(call(jnp.asarray(cu)))
    assert np.isnan(out[3:10]).all() and np.isfinite(out[:3]).all() and np.isfinite(out[10:]).all()
    assert np.isnan(np.asarray(call(jnp.asarray(cu[::-1])))).all()


def test_varlen_stays_packed_where_that_saves_work_and_kernels_run() -> None:
    from jax_fa4 import api

    def stays(
        cu_q: Any, cu_k: Any, longest: int, dtype: Any = jnp.bfloat16, arch: str = "sm_90a", **options: Any
    ) -> bool:
        x = jax.ShapeDtypeStruct((1000, 2, 64), dtype)
        all_of = {"scale": None, "implementation": None, "is_causal": True} | options
        with jax_fa4.config(arch=arch):
            return api._stays_packed((x, x, x), (cu_q, cu_k), {"q": longest, "k": longest}, all_of)

    cu = np.array([0, 700, 800, 900, 1000])
    assert stays(cu, cu, 700) and stays(cu, cu.copy(), 700)
    assert not stays(cu, cu + np.array([0, 1, 1, 1, 0]), 700), "other keys: their diagonals differ"
    assert not stays(cu, cu, 250), "nothing is saved where all are as long as the longest"
    assert not stays(cu, cu, 700, dtype=jnp.float32), "no kernel"
    assert not stays(cu, cu, 700, implementation="xla")
    seen = []
    jax.jit(lambda a, b: seen.append((stays(a, a, 700), stays(a, b, 700))))(cu, cu)
    assert seen == [(True, False)], "traced ones are the same where they are one array"


def test_varlen_never_cuts_silently() -> None:
    q, k, v, _, cu_q, cu_k = packed()
    with pytest.raises(ValueError, match=r"sequence of 7.*given, 6"):
        jax_fa4.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=6, max_seqlen_k=9)
    call = jax.jit(lambda *x: jax_fa4.attention_varlen(q, k, v, *x, max_seqlen_q=6, max_seqlen_k=9))
    out = np.asarray(call(jnp.asarray(cu_q), jnp.asarray(cu_k)))
    assert np.isnan(out[3:10]).all() and np.isfinite(out[:3]).all() and np.isfinite(out[10:]).all()
    with pytest.raises(ValueError, match="must ascend"):
        jax_fa4.attention_varlen(q, k, v, cu_q[::-1], cu_k, max_seqlen_q=7, max_seqlen_k=9)
    with pytest.raises(TypeError, match="max_seqlen_q must be a Python int"):
        jax_fa4.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=jnp.int32(7), max_seqlen_k=9)
