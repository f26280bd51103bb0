"""The call under jax's transformations: vmap of anything, jacrev, scan, remat, x64, donation; and clear refusals."""

from __future__ import annotations

import contextlib
import io
import itertools
from functools import partial
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.extend.core import jaxprs_in_params

import jax_fa4
from jax_fa4 import api, primitives

B, T, S, N, K, D, V = 2, 9, 11, 4, 2, 8, 6
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}
causal = partial(jax_fa4.attention, is_causal=True)


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def inputs(
    *lead: int, t: int = T, s: int = S, n: int = N, k: int = K, d: int = D, v: int = V, dtype: Any = jnp.float32
) -> Any:
    """(q, k, v, dO)."""
    shapes = [(t, n, d), (s, k, d), (s, k, v), (t, n, v)]
    return [draw(i, *lead, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def close(got: Any, wanted: Any, **tolerance: Any) -> None:
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), **(tolerance or CLOSE))


def pullback(q: Any, k: Any, v: Any, dout: Any, *more: Any, f: Any = causal) -> Any:
    """Output and lse, and gradients of everything for dO and a dLSE that is not uniform."""
    (out, lse), pull = jax.vjp(lambda *x: f(*x, return_residual=True), q, k, v, *more)
    return out, lse, pull((dout.astype(out.dtype), jnp.sin(lse)))


def loop(f: Any, axes: Any, *args: Any) -> Any:
    """vmap by hand."""
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
    f = jax.jit(f)
    rows = [
        f(*(x if a is None else jnp.take(x, i, axis=a) for x, a in zip(args, axes, strict=True))) for i in range(size)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


def calls(f: Any, *args: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(primitive, shape of its query) of every attention in the jaxpr of f, however deep."""
    found = []

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive in (primitives.fwd_p, primitives.bwd_p):
                found.append((eqn.primitive.name, eqn.invars[0].aval.shape))
                continue
            for inner in jaxprs_in_params(eqn.params):
                walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(f)(*args).jaxpr)
    return found


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Most of the time of this file is LLVM's; what is tested here does not depend on it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# ---- vmap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [m for m in itertools.product((None, 0), repeat=4) if m.count(0) in (1, 3, 4)])
def test_vmap_of_any_operand_and_cotangent(axes):
    args = [x if a is None else jnp.stack([x, x * 0.5, x + 0.1]) for x, a in zip(inputs(B), axes, strict=True)]
    mapped = jax.vmap(pullback, axes)
    close(jax.jit(mapped)(*args), loop(pullback, axes, *args))
    assert [name for name, _ in calls(mapped, *args)] == ["fa4_fwd", "fa4_bwd"]  # one call of each, no loop


def test_vmap_of_an_inner_axis_and_of_an_unbatched_call():
    q, k, v, dout = inputs()
    args = (jnp.stack([q, -q], 2), k, jnp.stack([v, v * 3], 3), dout)
    close(jax.jit(jax.vmap(pullback, (2, None, 3, None)))(*args), loop(pullback, (2, None, 3, None), *args))


def test_row30_nested_vmap_of_different_operands_is_one_call():
    q, k, v, _ = inputs(2, t=33, s=33, d=64, v=64)
    q, k, v = jnp.stack([q, q * 2, -q]), jnp.stack([k * i for i in range(5)]), jnp.stack([v + i for i in range(5)])
    nested = jax.vmap(jax.vmap(causal, (None, 0, 0)), (0, None, None))
    wanted = jnp.stack([jnp.stack([causal(q[i], k[j], v[j]) for j in range(5)]) for i in range(3)])
    close(nested(q, k, v), wanted)
    assert wanted.shape == (3, 5, 2, 33, 4, 64)
    assert calls(nested, q, k, v) == [("fa4_fwd", (3, 5, 2, 33, 4, 64))]
    lowered = jax.jit(nested).lower(q, k, v).as_text()
    assert "30x33x" in lowered.replace("tensor<", "") or "tensor<30x" in lowered  # folded into one batch of 3 * 5 * 2


def test_row36_lengths_given_or_left_out_under_vmap():
    args = [jnp.stack([x, x * 0.5, x + 0.1]) for x in inputs(2)]
    q_len, kv_len = jnp.array([[9, 4], [1, 0], [5, 9]]), jnp.array([[11, 3], [0, 7], [2, 11]])
    for named in ({"key_value_seq_lengths": kv_len}, {"query_seq_lengths": q_len}):
        ((name, lengths),) = named.items()

        def f(q: Any, k: Any, v: Any, dout: Any, n: Any, name: str = name) -> Any:
            return pullback(q, k, v, dout, f=partial(causal, **{name: n}, causal_alignment="bottom_right"))

        for i, n in enumerate(lengths):  # the loop itself against the dense formula
            options = {"is_causal": True, "causal_alignment": "bottom_right", name: n}
            q, k, v, dout = (x[i] for x in args)
            close(f(q, k, v, dout, n)[0], dense.attention(q, k, v, options, jnp.float32)[0])
        close(jax.jit(jax.vmap(f))(*args, lengths), loop(f, (0,) * 5, *args, lengths))
        close(
            jax.jit(jax.vmap(f, (0, 0, 0, 0, None)))(*args, lengths[0]), loop(f, (0, 0, 0, 0, None), *args, lengths[0])
        )
        one = [x[0] for x in args]
        close(jax.jit(jax.vmap(f, (None,) * 4 + (0,)))(*one, lengths), loop(f, (None,) * 4 + (0,), *one, lengths))


@pytest.mark.parametrize("axes", [(0, None, 0), (None, 0, None), (0, 0, 0)])
def test_row59_bias_gradient_with_bias_mapped_and_mask_not(axes):
    def f(q: Any, bias: Any, mask: Any) -> Any:
        _, k, v, dout = inputs(B)
        out, pull = jax.vjp(lambda q, bias: jax_fa4.attention(q, k, v, bias, mask), q, bias)
        return out, pull(dout)

    q = draw(5, B, T, N, D)
    for shape in ((1, N, T, S), (B, 1, 1, S)):
        mask = jax.random.bernoulli(jax.random.key(6), 0.7, (B, 1, T, S))
        plain = (q, draw(7, *shape), mask)
        args = [x if a is None else jnp.stack([x, jnp.flip(x, 0)]) for x, a in zip(plain, axes, strict=True)]
        close(jax.jit(jax.vmap(f, axes))(*args), loop(f, axes, *args))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 16, 16), (2, 4, 16, 16)])
def test_row59_bias_gradient_is_that_of_the_dense_formula(shape, dtype):
    q, k, v, dout = inputs(2, t=16, s=16, k=4, dtype=jnp.bfloat16)
    bias = draw(8, *shape, dtype=dtype)

    def plain(bias: Any) -> Any:
        x = [a.astype(jnp.float32) for a in (q, k, v)]
        scores = jnp.einsum("btnd,bsnd->bnts", *x[:2]) / D**0.5 + bias.astype(jnp.float32)
        return jnp.sum(jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores), x[2]) * dout.astype(jnp.float32))

    got = jax.grad(lambda bias: jnp.sum(jax_fa4.attention(q, k, v, bias) * dout, dtype=jnp.float32))(bias)
    wanted = jax.grad(plain)(bias.astype(jnp.float32))
    assert got.dtype == dtype and got.shape == shape and jnp.isfinite(got).all()
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=0.03 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("name", ["sinks", "scale", "query_segment_ids"])
def test_vmap_of_sinks_scale_and_segments(name):
    args = inputs(B)
    ids = jax.random.randint(jax.random.key(9), (3, B, T), 0, 3)
    fixed = {"key_value_segment_ids": jnp.arange(S) * jnp.ones((B, 1), int) // 4} if name == "query_segment_ids" else {}
    mapped = {"sinks": draw(4, 3, N), "scale": jnp.array([0.1, 0.5, 1.0]), "query_segment_ids": ids}[name]

    def f(x: Any) -> Any:
        q, k, v, dout = args
        if jnp.issubdtype(x.dtype, jnp.floating):
            return pullback(q, k, v, dout, x, f=lambda q, k, v, x, **kw: causal(q, k, v, **{name: x}, **kw))
        return pullback(q, k, v, dout, f=partial(causal, **{name: x}, **fixed))

    close(jax.jit(jax.vmap(f))(mapped), loop(f, (0,), mapped))


def test_vmap_over_an_axis_of_size_0():
    args = [x[None][:0] for x in inputs(B)]
    out, lse, (dq, dk, dv) = jax.vmap(pullback)(*args)
    assert (out.shape, lse.shape) == ((0, B, T, N, V), (0, B, T, N))
    assert (dq.shape, dk.shape, dv.shape) == tuple(x.shape for x in args[:3])
    assert jax.jit(jax.vmap(causal))(*args[:3]).shape == (0, B, T, N, V)


def test_row28_jacrev_and_vmap_of_the_cotangent_alone():
    q, k, v, _ = inputs(2, t=4, s=4, n=3, k=3, d=16, v=16)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return dense.attention(q, k, v, {"is_causal": True}, jnp.float32)[0]

    got, wanted = jax.jacrev(causal, (0, 1, 2))(q, k, v), jax.jacrev(plain, (0, 1, 2))(q, k, v)
    assert [x.shape for x in got] == [(2, 4, 3, 16, *x.shape) for x in (q, k, v)]
    close(got, wanted)
    half = [x.astype(jnp.float16) for x in (q, k, v)]
    for a, b in zip(jax.jacrev(causal, (0, 1, 2))(*half), wanted, strict=True):
        assert a.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=5e-3)
    _, pull = jax.vjp(causal, q, k, v)
    dout = draw(3, 5, 2, 4, 3, 16)
    close(jax.vmap(pull)(dout), loop(pull, (0,), dout))


# ---- differentiation -----------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_residual": True},
    "lengths": {"query_seq_lengths": jnp.array([9, 3]), "key_value_seq_lengths": jnp.array([4, 11])},
    "segments": {
        "query_segment_ids": jnp.zeros((B, T), int),
        "key_value_segment_ids": jnp.arange(B * S).reshape(B, S) % 2,
    },
    "sinks": {"sinks": jnp.arange(4.0), "return_residual": True},
    "cap": {"logits_soft_cap": 5.0, "local_window_size": (3, 1)},
    "named": {"checkpoint_name": "x"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_row31_the_forward_rule_returns_what_the_call_returns(options):
    q, k, v, _ = inputs(B)
    f = partial(jax_fa4.attention, **options)
    primal = jax.eval_shape(f, q, k, v)
    ruled, pull = jax.eval_shape(lambda *x: jax.vjp(f, *x), q, k, v)
    assert primal == ruled
    assert jax.tree.map(jnp.shape, jax.eval_shape(lambda p, c: p(c), pull, ruled)) == (q.shape, k.shape, v.shape)

    def loss(*x: Any) -> Any:
        return sum(jnp.sum(jnp.where(jnp.isfinite(y), y, 0) ** 2) for y in jax.tree.leaves(f(*x)))

    eager = jax.grad(loss, (0, 1, 2))(q, k, v)
    close(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), eager)
    stacked = [jnp.stack([x, x]) for x in (q, k, v)]
    close([x[1] for x in jax.vmap(jax.grad(loss, (0, 1, 2)))(*stacked)], eager)


def test_row32_forward_mode_and_second_derivatives_are_refused_in_words():
    q, k, v, _ = (x.astype(jnp.float32) for x in inputs(1, t=8, s=8, n=1, k=1, d=64, v=64))
    loss = lambda q: jnp.sum(causal(q, k, v) ** 2)  # noqa: E731
    with pytest.raises(TypeError, match=r"forward-mode|jvp"):
        jax.jvp(loss, (q,), (q,))
    with pytest.raises(TypeError, match=r"forward-mode|jvp"):
        jax.jacfwd(loss)(q)
    for second in (jax.hessian(loss), jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2))):
        with pytest.raises(TypeError, match=r"forward-mode|jvp|second derivative"):
            second(q)
    with pytest.raises(TypeError, match=r"second derivative.*not offered"):
        jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2))(q)
    out, pull = jax.vjp(causal, q, k, v)
    with pytest.raises(TypeError, match=r"jax_fa4: a second derivative.*not offered"):  # by the cotangent alone
        jax.grad(lambda dout: jnp.sum(pull(dout)[0] ** 2))(out)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_row34_cotangents_have_the_dtype_of_their_primals(dtype):
    x = draw(0, 2, 8, 2, 64, dtype=dtype)

    def loss(x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda c, _: (causal(c, c, c), None), x, length=2)[0].astype(jnp.float32) ** 2)

    assert jax.grad(loss)(x).dtype == dtype
    sinks = jnp.ones(2)
    _, pull = jax.vjp(lambda q, k, v, sinks: jax_fa4.attention(q, k, v, sinks=sinks), x, x, x, sinks)
    assert [g.dtype for g in pull(x)] == [dtype] * 3 + [jnp.float32]
    through = jax.grad(lambda x: jnp.sum(causal(causal(x, x, x), x, x).astype(jnp.float32) ** 2))
    scanned = jax.grad(
        lambda x: jnp.sum(jax.lax.scan(lambda c, _: (causal(c, x, x), None), x, length=2)[0].astype(jnp.float32) ** 2)
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(np.asarray(scanned(x), np.float32), np.asarray(through(x), np.float32), atol=tolerance)


def test_a_traced_scale_has_its_gradient():
    q, k, v, dout = inputs(B)
    loss = lambda scale: jnp.sum(causal(q, k, v, scale=scale) * dout)  # noqa: E731
    got = jax.jit(jax.grad(loss))(0.3)
    step = 1e-2
    np.testing.assert_allclose(got, (loss(0.3 + step) - loss(0.3 - step)) / (2 * step), rtol=2e-3)
    assert abs(float(got)) > 0.1


def test_traced_lengths_and_segments_need_one_trace():
    args, traces = inputs(B), []

    @jax.jit
    def f(lengths: Any, ids: Any) -> Any:
        traces.append(0)
        options = {"key_value_seq_lengths": lengths, "query_segment_ids": ids[:, :T], "key_value_segment_ids": ids}
        return pullback(*args, f=partial(causal, **options))

    def plain(lengths: Any, ids: Any) -> Any:
        options = {
            "is_causal": True,
            "key_value_seq_lengths": lengths,
            "query_segment_ids": ids[:, :T],
            "key_value_segment_ids": ids,
        }
        return dense.attention(*args[:3], options, jnp.float32)[0]

    for seed, lengths in enumerate(([11, 2], [0, 7])):
        ids = jax.random.randint(jax.random.key(seed), (B, S), 0, 2)
        close(f(jnp.array(lengths), ids)[0], plain(jnp.array(lengths), ids))
    assert len(traces) == 1


# ---- remat, scan, eager, donation, leaks ---------------------------------------------------------------------------


def test_remat_policies_on_our_names_avoid_the_second_forward():
    q, k, v, dout = inputs(B)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(causal(jnp.cos(q), k, v, checkpoint_name="x"))

    policies = jax.checkpoint_policies
    saved, forwards, grads = {}, {}, {}
    for name, policy in (
        ("none", policies.nothing_saveable),
        ("ours", policies.save_only_these_names("x.out", "x.lse")),
    ):
        block = jax.checkpoint(layer, policy=policy)
        gradient = jax.grad(lambda *x, block=block: jnp.sum(block(*x) * dout), (0, 1, 2))
        forwards[name] = sum(c == "fa4_fwd" for c, _ in calls(gradient, q, k, v))
        grads[name] = jax.jit(gradient)(q, k, v)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_saved_residuals(block, q, k, v)
        saved[name] = text.getvalue()
    assert forwards == {"none": 2, "ours": 1}
    # jax 0.10.0 says "output of reduce_precision" of the first, which it wraps so
    kept = {name: sum("x." in r or "reduce_precision" in r for r in text.splitlines()) for name, text in saved.items()}
    assert kept == {"none": 0, "ours": 2} and "x.lse" in saved["ours"]
    close(grads["ours"], grads["none"])
    close(grads["none"], jax.grad(lambda *x: jnp.sum(layer(*x) * dout), (0, 1, 2))(q, k, v))


def test_scan_over_layers_with_remat_equals_unrolled():
    x = draw(0, 2, 8, 2, 16)
    weights = draw(1, 3, 16, 16) / 16

    def layer(x: Any, w: Any) -> Any:
        return x + causal(x @ w, x, x), None

    def scanned(weights: Any) -> Any:
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    def unrolled(weights: Any) -> Any:
        y = x
        for w in weights:
            y, _ = layer(y, w)
        return jnp.sum(y**2)

    wanted = jax.grad(unrolled)(weights)
    close(jax.jit(jax.grad(scanned))(weights), wanted, rtol=1e-4, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_eager_calls_trace_once(monkeypatch):
    args, traced = inputs(B, t=10), []
    original = primitives._fwd_here
    monkeypatch.setattr(
        primitives.reference, "forward", lambda *x, f=primitives.reference.forward: (traced.append(0), f(*x))[1]
    )
    assert original is primitives._fwd_here
    for i in range(3):
        causal(args[0] + i, *args[1:3])
    assert len(traced) == 1
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        for i in range(3):
            jax.grad(lambda q: jnp.sum(causal(q, *args[1:3]) ** 2))(args[0] + i)
            if i == 0:
                compiled.clear()
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "backend_compile" in name]


def test_donated_operands():
    q, k, v, _ = inputs(B, v=D)
    wanted = causal(q, k, v)
    got = jax.jit(causal, donate_argnums=0)(q + 0, k, v)
    close(got, wanted)
    step = jax.jit(jax.grad(lambda q: jnp.sum(causal(q, k, v) ** 2)), donate_argnums=0)
    close(step(q + 0), jax.grad(lambda q: jnp.sum(causal(q, k, v) ** 2))(q))


def test_no_tracer_leaks():
    q, k, v, dout = inputs(B, t=12)
    with jax.checking_leaks():
        jax.jit(jax.vmap(pullback, (0, 0, 0, 0)))(*(x[None] for x in (q, k, v, dout)))
        jax.jit(jax.grad(lambda q: jnp.sum(jax.checkpoint(causal)(q, k, v))))(q)


# ---- x64 -----------------------------------------------------------------------------------------------------------


def test_row58_x64_changes_no_bits_of_bfloat16():
    q, k, v, dout = inputs(2, t=49, s=49, n=8, k=8, d=64, v=64, dtype=jnp.bfloat16)
    lengths = np.array([49, 17])
    plain = partial(
        causal, scale=0.125, key_value_seq_lengths=jnp.asarray(lengths, jnp.int32), local_window_size=(20, 0)
    )
    wanted = jax.jit(partial(pullback, f=plain))(q, k, v, dout)
    with jax.enable_x64(True):
        for scale in (0.125, np.float64(0.125), jnp.asarray(0.125)):
            window = (np.int64(20), np.int32(0))
            f = partial(
                causal, scale=scale, key_value_seq_lengths=jnp.asarray(lengths, jnp.int64), local_window_size=window
            )
            got = jax.jit(partial(pullback, f=f))(q, k, v, dout)
            assert got[1].dtype == jnp.float32
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                assert a.dtype == b.dtype and np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        wide = [x.astype(jnp.float64) for x in (q, k, v)]
        out = jax.jit(causal)(*wide)
        exact = dense.attention(*wide, {"is_causal": True}, jnp.float64)[0]
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, exact, rtol=1e-12, atol=1e-12)
        with pytest.raises(TypeError, match=r"one dtype.*bfloat16, float64"):
            causal(q, wide[1], v)


def test_settings_are_part_of_what_jit_remembers():
    q, k, v, _ = inputs(B)
    f = jax.jit(lambda q: causal(q, k, v))
    f(q)
    with jax_fa4.config(implementation="fa4"), pytest.raises(jax_fa4.Unsupported):
        f(q)
    assert api.config.implementation is None
