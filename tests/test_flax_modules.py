"""Our linen and nnx modules against Flax's own: parameters, initial values, results, options, errors."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_fa4 import flax as fa
from jax_fa4.flax import contract

B, T, S, E, HEADS = 2, 5, 7, 16, 4
rng = np.random.default_rng(1)
X = jnp.asarray(rng.normal(size=(B, T, E)), jnp.float32)
Y = jnp.asarray(rng.normal(size=(B, S, E)), jnp.float32)
Z = jnp.asarray(rng.normal(size=(B, S, E)), jnp.float32)
X4 = jnp.asarray(rng.normal(size=(2, 1, 3, T, E)), jnp.float32)  # three batch axes
MASK = rng.random((B, 1, T, T)) < 0.7
MASK[..., 0] = True  # every query sees a key: for one that sees none Flax gives the mean, we give 0
CROSS = rng.random((B, HEADS, T, S)) < 0.7
CROSS[..., 0] = True

# Constructor options of both libraries, and of one.
OPTIONS = {
    "plain": {},
    "sizes": {"qkv_features": 32, "out_features": 6},
    "no bias": {"use_bias": False},
    "norms": {"normalize_qk": True},
    "initializers": {
        "kernel_init": nn.initializers.normal(0.3), "out_kernel_init": nn.initializers.ones,
        "bias_init": nn.initializers.normal(0.1), "out_bias_init": nn.initializers.ones,
    },
    "precision": {"precision": jax.lax.Precision.HIGHEST},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16},
    "dropout off": {"dropout_rate": 0.3, "deterministic": True},
    "dropout on": {"dropout_rate": 0.3, "deterministic": False},
    "dropout on, not broadcast": {"dropout_rate": 0.3, "deterministic": False, "broadcast_dropout": False},
}  # fmt: skip
LINEN = {"softmax in float32": {"force_fp32_for_softmax": True}}
NNX = {"key heads": {"num_kv_heads": 2}, "key inputs": {"in_kv_features": E}}

CALLS = {
    "self": ((X,), {}),
    "self, masked": ((X,), {"mask": jnp.asarray(MASK)}),
    "self, float mask of fewer axes": ((X,), {"mask": jnp.asarray(MASK[0, 0], jnp.float32)}),
    "cross": ((X, Y), {"mask": jnp.asarray(CROSS)}),
    "cross with values": ((X, Y, Z), {}),
    "three batch axes": ((X4,), {}),
}
# Every option with one call, every call with one option: each of both axes is seen, their product would take minutes.
TABLE = [(o, "self, masked") for o in OPTIONS] + [("plain", c) for c in CALLS if c != "self, masked"]


def close(ours, flaxs, dtype=jnp.float32):
    # Two roundings of the result and of the probabilities in bfloat16: 2^-8 each, results are of size 1.
    tolerance = {"atol": 2e-6, "rtol": 2e-6} if dtype == jnp.float32 else {"atol": 3e-2, "rtol": 1e-2}
    assert ours.dtype == flaxs.dtype and ours.shape == flaxs.shape
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(flaxs, np.float32), **tolerance)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64)), a, b)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="jax_fa4: Flax's own attention runs")
        warnings.filterwarnings("ignore", message="Using 'Module.sow\\(\\)' outside")
        yield


# ---- equality with Flax's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "call"), [*TABLE, *((o, "self, masked") for o in LINEN)])
def test_linen_equals_flax(option, call):
    options = (OPTIONS | LINEN)[option]
    args, kwargs = CALLS[call]
    ours, flaxs = fa.linen.MultiHeadAttention(HEADS, **options), nn.MultiHeadAttention(HEADS, **options)
    rngs = {"params": jax.random.key(3), "dropout": jax.random.key(4)}
    a, b = ours.init(rngs, *args, **kwargs), flaxs.init(rngs, *args, **kwargs)
    same(a, b)
    rngs = {"dropout": jax.random.key(5)}
    ours, flaxs = (m.apply(b, *args, **kwargs, rngs=rngs) for m in (ours, flaxs))
    close(ours, flaxs, options.get("dtype", jnp.float32))


@pytest.mark.parametrize(("option", "call"), [*TABLE, *((o, "self, masked") for o in NNX)])
def test_nnx_equals_flax(option, call):
    options = {"decode": False} | (OPTIONS | NNX)[option]
    args, kwargs = CALLS[call]
    ours = fa.nnx.MultiHeadAttention(HEADS, E, **options, rngs=nnx.Rngs(3, dropout=4))
    flaxs = nnx.MultiHeadAttention(HEADS, E, **options, rngs=nnx.Rngs(3, dropout=4))
    same(nnx.to_pure_dict(nnx.state(ours, nnx.Param)), nnx.to_pure_dict(nnx.state(flaxs, nnx.Param)))
    ours, flaxs = (m(*args, **kwargs) for m in (ours, flaxs))
    close(ours, flaxs, options.get("dtype", jnp.float32))


def test_parameters_load_both_ways():
    ours = fa.nnx.MultiHeadAttention(HEADS, E, normalize_qk=True, decode=False, rngs=nnx.Rngs(1))
    flaxs = nnx.MultiHeadAttention(HEADS, E, normalize_qk=True, decode=False, rngs=nnx.Rngs(2))
    nnx.update(ours, nnx.state(flaxs))
    close(ours(X), flaxs(X))
    ours = fa.nnx.MultiHeadAttention(HEADS, E, normalize_qk=True, decode=False, rngs=nnx.Rngs(3))
    assert np.abs(ours(X) - flaxs(X)).max() > 1e-2
    nnx.update(flaxs, nnx.state(ours))
    close(ours(X), flaxs(X))


def test_nnx_is_causal_is_flaxs():
    ours = fa.nnx.MultiHeadAttention(HEADS, E, decode=False, rngs=nnx.Rngs(3))
    flaxs = nnx.MultiHeadAttention(HEADS, E, decode=False, rngs=nnx.Rngs(3))
    for args in ((X,), (X, Y), (Y, X)):
        close(ours(*args, is_causal=True), flaxs(*args, is_causal=True))
    close(
        ours(X, is_causal=True, mask=fa.padding(MASK[:, 0, 0])),
        flaxs(X, is_causal=True, mask=jnp.asarray(MASK[:, :, :1])),
    )
    always = fa.nnx.MultiHeadAttention(HEADS, E, decode=False, is_causal=True, rngs=nnx.Rngs(3))
    close(always(X), flaxs(X, is_causal=True))
    close(always(X, is_causal=False), flaxs(X))


def test_gradients_equal_flaxs():
    ours, flaxs = fa.linen.MultiHeadAttention(HEADS), nn.MultiHeadAttention(HEADS)
    variables = flaxs.init(jax.random.key(0), X)

    def gradients(layer, mask):
        return jax.jit(jax.grad(lambda v, x: (layer.apply(v, x, mask=mask) ** 2).sum(), (0, 1)))(variables, X)

    causal = nn.make_causal_mask(X[..., 0])
    for lazy in (causal, fa.causal()):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5),
            gradients(ours, lazy), gradients(flaxs, causal),
        )  # fmt: skip


class Block(nn.Module):
    """A user's model, unchanged but for the class of its attention."""

    attention: type

    @nn.compact
    def __call__(self, x):
        return self.attention(num_heads=HEADS)(x) + self.attention(num_heads=HEADS, name="named")(x)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "MultiHeadDotProductAttention"])
def test_linen_layers_are_named_alike(name):
    ours, flaxs = Block(getattr(fa.linen, name)), Block(getattr(nn, name))
    variables = flaxs.init(jax.random.key(0), X)
    same(ours.init(jax.random.key(0), X), variables)
    assert set(variables["params"]) == {f"{name}_0", "named"}
    close(ours.apply(variables, X), flaxs.apply(variables, X))


def test_signatures_hold_flaxs():
    for ours, flaxs in (
        (fa.linen.MultiHeadAttention, nn.MultiHeadAttention),
        (fa.linen.MultiHeadAttention.__call__, nn.MultiHeadAttention.__call__),
        (fa.nnx.MultiHeadAttention.__call__, nnx.MultiHeadAttention.__call__),
        (fa.nnx.MultiHeadAttention.init_cache, nnx.MultiHeadAttention.init_cache),
        (fa.nnx.MultiHeadAttention.set_view, nnx.MultiHeadAttention.set_view),
        (fa.AttentionFn.__call__, nn.dot_product_attention),
        (fa.AttentionFn.__call__, nnx.dot_product_attention),
    ):
        mine, theirs = (inspect.signature(f).parameters for f in (ours, flaxs))
        assert [n for n in theirs if n not in mine] == []
        positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD and n not in mine]
        assert positional == []
    before = list(inspect.signature(nn.dot_product_attention).parameters)[:12]
    assert list(inspect.signature(fa.attention_fn()).parameters)[:12] == before


def test_input_positions_reach_a_function_that_names_them():
    """Flax 0.12.12 has them; attention by positions that are all alike ignores them, turned ones do not."""
    seen = []

    def turning(query, key, value, input_positions=None, **rest):
        seen.append(input_positions)
        turned = query * jnp.cos(input_positions)[..., None, None]
        return fa.attention_fn()(turned, key, value, **rest)

    layer = fa.nnx.MultiHeadAttention(4, E, rngs=nnx.Rngs(0), decode=False, attention_fn=turning)
    plain = fa.nnx.MultiHeadAttention(4, E, rngs=nnx.Rngs(0), decode=False)
    places = jnp.broadcast_to(jnp.arange(X.shape[-2], dtype=jnp.float32), X.shape[:-1])
    close(layer(X, input_positions=0 * places), plain(X))
    assert np.abs(layer(X, input_positions=places) - plain(X)).max() > 1e-3
    assert seen[-1] is places
    with pytest.raises(ValueError, match=r"input_positions of shape \(.*would not reach"):
        plain(X, input_positions=places)


# ---- attention_fn in Flax's own modules -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_attention_fn_in_flaxs_linen(call):
    args, kwargs = CALLS[call]
    own, with_ours = (
        nn.MultiHeadDotProductAttention(HEADS),
        nn.MultiHeadDotProductAttention(HEADS, attention_fn=fa.attention_fn()),
    )
    variables = own.init(jax.random.key(0), *args)
    close(with_ours.apply(variables, *args, **kwargs), own.apply(variables, *args, **kwargs))


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_attention_fn_in_flaxs_nnx(kv_heads):
    own, with_ours = (
        nnx.MultiHeadAttention(HEADS, E, num_kv_heads=kv_heads, decode=False, rngs=nnx.Rngs(0), **fn)
        for fn in ({}, {"attention_fn": fa.attention_fn()})
    )
    for kwargs in (
        {},
        {"is_causal": True},
        {"mask": jnp.asarray(MASK)},
        {"mask": jnp.asarray(MASK), "is_causal": True},
    ):
        close(with_ours(X, **kwargs), own(X, **kwargs))
    close(with_ours(X, mask=fa.causal()), own(X, is_causal=True))


def test_attention_fn_settings(monkeypatch):
    """Settings of the factory reach the call, and are as good a key of jit's cache as any."""
    seen = {}
    monkeypatch.setattr(contract, "attention", lambda query, *_, **kwargs: seen.update(kwargs))
    q = jnp.ones((1, 4, 2, 8))
    for name, x, *others in (
        ("is_causal", True),
        ("local_window_size", (2, 1)),
        ("scale", 0.7),
        ("logits_soft_cap", 0.5),
        ("sinks", jnp.array([0.0, 1.0])),
        ("implementation", "xla"),
        ("checkpoint_name", "attention"),
        ("causal_alignment", "bottom_right", ("is_causal", True)),
    ):
        settings = {name: x, **dict(others)}
        fn = fa.attention_fn(**settings)
        seen.clear()
        fn(q, q, q)
        assert all(seen[n] is x or seen[n] == x for n, x in settings.items()), (settings, seen)
        assert fn == fa.attention_fn(**settings) and hash(fn) == hash(fa.attention_fn(**settings))
        assert fn != fa.attention_fn()
    fa.attention_fn(deterministic_backward=True)(q, q, q)
    assert seen["deterministic"] is True
    assert hash(fa.attention_fn(implementation=["xla"])) and fa.attention_fn(local_window_size=2).local_window_size == (
        2,
        2,
    )


def test_attention_fn_obeys_implementation():
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match="float32"):
        fa.attention_fn(implementation="fa4")(q, q, q)


# ---- no option is lost -----------------------------------------------------------------------------------------------


class Spy:
    """An attention_fn that names all of Flax's arguments and of ours, and remembers what came."""

    def __init__(self):
        self.seen = {}

    def __call__(
        self, query, key, value, bias=None, mask=None, broadcast_dropout=True, dropout_rng=None, dropout_rate=0.0,
        deterministic=False, dtype=None, precision=None, module=None, force_fp32_for_softmax=False,
        qk_attn_weights_einsum=None, attn_weights_value_einsum=None, is_causal=False, logits_soft_cap=None, sinks=None,
        deterministic_backward=None,
    ):  # fmt: skip
        self.seen = {k: v for k, v in locals().items() if k != "self"}
        return jnp.zeros(query.shape, query.dtype)


def einsum():
    return jnp.einsum


OPTION_REACHES = {
    "mask": ({}, {"mask": jnp.asarray(MASK)}, lambda s: np.array_equal(s["mask"], MASK)),
    "dropout_rate": ({"dropout_rate": 0.25, "deterministic": False}, {}, lambda s: s["dropout_rate"] == 0.25),
    "dropout_rng": ({"dropout_rate": 0.25, "deterministic": False}, {}, lambda s: s["dropout_rng"] is not None),
    "deterministic": ({"dropout_rate": 0.25, "deterministic": False}, {}, lambda s: s["deterministic"] is False),
    "deterministic, called": ({"dropout_rate": 0.25}, {"deterministic": True}, lambda s: s["deterministic"] is True),
    "broadcast_dropout": ({"broadcast_dropout": False}, {}, lambda s: s["broadcast_dropout"] is False),
    "dtype": ({"dtype": jnp.bfloat16}, {}, lambda s: s["dtype"] == jnp.bfloat16 == s["query"].dtype),
    "precision": ({"precision": "high"}, {}, lambda s: s["precision"] == "high"),
    "normalize_qk": (
        {"normalize_qk": True}, {},
        lambda s: np.allclose(s["query"].std(-1), 1, atol=1e-2) and np.allclose(s["key"].mean(-1), 0, atol=1e-4),
    ),
    "sow_weights": ({}, {"sow_weights": True}, lambda s: s["module"] is not None),
    "is_causal": ({"is_causal": True}, {}, lambda s: s["is_causal"] is True),
    "local_window_size": (
        {"local_window_size": (1, 0)}, {},
        lambda s: np.array_equal(s["mask"][0, 0], np.tri(T) - np.tri(T, k=-2)),
    ),
    "num_kv_heads": ({"num_kv_heads": 2}, {}, lambda s: s["key"].shape == (B, T, 2, 4) == s["value"].shape),
    "logits_soft_cap": ({"logits_soft_cap": 3.0}, {}, lambda s: s["logits_soft_cap"] == 3.0),
    "sinks": ({"sinks": True}, {}, lambda s: np.array_equal(s["sinks"], np.zeros(HEADS))),
    "deterministic_backward": ({"deterministic_backward": True}, {}, lambda s: s["deterministic_backward"] is True),
}  # fmt: skip
LINEN_REACHES = {
    "force_fp32_for_softmax": ({"force_fp32_for_softmax": True}, {}, lambda s: s["force_fp32_for_softmax"] is True),
    "einsums": (
        {"qk_attn_weights_einsum_cls": einsum, "attn_weights_value_einsum_cls": einsum}, {},
        lambda s: s["qk_attn_weights_einsum"] is jnp.einsum is s["attn_weights_value_einsum"],
    ),
}  # fmt: skip


def run_linen(options, call, fn):
    layer = fa.linen.MultiHeadAttention(HEADS, attention_fn=fn, **options)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return layer.init_with_output(rngs, X, **call, mutable=["params", "intermediates"])[0]


def run_nnx(options, call, fn):
    return fa.nnx.MultiHeadAttention(HEADS, E, attention_fn=fn, decode=False, rngs=nnx.Rngs(0), **options)(X, **call)


@pytest.mark.parametrize("name", OPTION_REACHES | LINEN_REACHES)
def test_every_option_reaches_the_function(name):
    options, call, check = (OPTION_REACHES | LINEN_REACHES)[name]
    for run in (run_linen, run_nnx) if name in OPTION_REACHES else (run_linen,):
        spy = Spy()
        run(options, call, spy)
        assert check(spy.seen), f"{name} did not reach the function of {run.__name__}: {spy.seen}"


@pytest.mark.parametrize("name", OPTION_REACHES | LINEN_REACHES)
def test_every_option_reaches_attention(name, monkeypatch):
    """The same, one level down: our function gets the option from the module, and honours or refuses it."""
    options, call, _ = (OPTION_REACHES | LINEN_REACHES)[name]
    seen = {}

    def record(query, key, value, bias=None, mask=None, **kwargs):
        seen.update(kwargs, mask=mask, bias=bias, key=key, query=query)
        return jnp.zeros(query.shape, query.dtype)

    monkeypatch.setattr(contract, "attention", record)
    for run in (run_linen, run_nnx) if name in OPTION_REACHES else (run_linen,):
        seen.clear()
        out = run(options, call, fa.attention_fn())
        own_path = name in ("dropout_rate", "dropout_rng", "deterministic", "sow_weights", "einsums")
        assert bool(seen) is not own_path, f"{name}: {'Flax' if own_path else 'jax_fa4'}'s attention should run"
        if own_path:
            assert np.isfinite(out).all() and np.abs(out).max() > 0
            continue
        wanted = {
            "mask": lambda: np.array_equal(seen["mask"], MASK),
            "is_causal": lambda: seen["is_causal"] is True,
            "local_window_size": lambda: seen["local_window_size"] == (1, 0) and seen["mask"] is None,
            "num_kv_heads": lambda: seen["key"].shape[-2] == 2,
            "logits_soft_cap": lambda: seen["logits_soft_cap"] == 3.0,
            "sinks": lambda: seen["sinks"].shape == (HEADS,),
            "deterministic_backward": lambda: seen["deterministic"] is True,
            "dtype": lambda: seen["query"].dtype == jnp.bfloat16,
        }.get(name)
        assert wanted is None or wanted(), f"{name}: {seen}"


def test_options_that_would_be_lost_are_refused():
    def bare(query, key, value):
        return query

    for options, call, name in (
        ({}, {"mask": jnp.asarray(MASK)}, "a mask"),
        ({"is_causal": True}, {}, "a mask"),
        ({"local_window_size": 1}, {}, "a mask"),
        ({"precision": "high"}, {}, "precision='high'"),
        ({"dropout_rate": 0.1, "deterministic": False}, {}, "dropout_rate=0.1"),
        ({}, {"sow_weights": True}, "sow_weights=True"),
        ({"logits_soft_cap": 1.0}, {}, "logits_soft_cap=1.0"),
        ({"deterministic_backward": True}, {}, "deterministic_backward=True"),
        ({"sinks": True}, {}, "sinks="),
    ):
        for run in (run_linen, run_nnx):
            with pytest.raises(ValueError, match=f"{name}.* would not reach the attention_fn .*bare"):
                run(options, call, bare)
    with pytest.raises(ValueError, match="force_fp32_for_softmax=True"):
        run_linen({"force_fp32_for_softmax": True}, {}, bare)
    run_linen({"dropout_rate": 0.1, "deterministic": True}, {}, bare)  # no dropout, nothing lost


def test_foreign_functions_get_the_window():
    """jax.nn's and Flax's functions know no lazy masks: they get the dense form, and causality by name."""
    variables = fa.linen.MultiHeadAttention(HEADS).init(jax.random.key(0), X)
    options = {"is_causal": True, "local_window_size": (2, 0)}
    results = [
        fa.linen.MultiHeadAttention(HEADS, **options, **fn).apply(variables, X, mask=fa.lengths(jnp.array([5, 4])))
        for fn in ({}, {"attention_fn": jax.nn.dot_product_attention}, {"attention_fn": nn.dot_product_attention})
    ]
    close(results[0], results[1])
    close(results[0], results[2])
    fewer = fa.linen.MultiHeadAttention(HEADS, num_kv_heads=2)
    variables = fewer.init(jax.random.key(0), X)
    close(fewer.clone(attention_fn=nn.dot_product_attention).apply(variables, X), fewer.apply(variables, X))


# ---- Flax's own path -------------------------------------------------------------------------------------------------


def test_sown_weights_equal_flaxs():
    ours, flaxs = fa.linen.MultiHeadAttention(HEADS, is_causal=True), nn.MultiHeadAttention(HEADS)
    variables = flaxs.init(jax.random.key(0), X)
    (a, kept), (b, kept_by_flax) = (
        m.apply(variables, X, sow_weights=True, mask=mask, mutable=["intermediates"])
        for m, mask in ((ours, None), (flaxs, nn.make_causal_mask(X[..., 0])))
    )
    close(a, b)
    same(kept, kept_by_flax)
    ours, flaxs = (
        c(HEADS, E, decode=False, rngs=nnx.Rngs(0)) for c in (fa.nnx.MultiHeadAttention, nnx.MultiHeadAttention)
    )
    close(ours(X, sow_weights=True, is_causal=True), flaxs(X, sow_weights=True, is_causal=True))
    close(ours.attention_weights.get_value()[0], flaxs.attention_weights.get_value()[0])


def test_own_path_warns_once_for_each_cause():
    contract.warn_once.cache_clear()
    q = jnp.ones((1, 3, 2, 4))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            fa.attention_fn()(q, q, q, dropout_rate=0.5, dropout_rng=jax.random.key(0))
            fa.attention_fn()(q, q, q, qk_attn_weights_einsum=jnp.einsum, attn_weights_value_einsum=jnp.einsum)
    texts = [str(w.message) for w in found if "Flax's own attention" in str(w.message)]
    assert len(texts) == 2 and "dropout_rate=0.5" in texts[0] and "qk_attn_weights_einsum" in texts[1]


def test_own_path_keeps_every_part_of_the_mask():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 5, n, 8)) for i, n in enumerate((4, 2, 2)))
    fn = fa.attention_fn(local_window_size=(2, 0), scale=0.6)
    mask = fa.lengths(jnp.array([5, 4])) & fa.segments(jnp.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]))
    override = {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
    # The row that sees no key follows Flax's rule there, the mean of the values; leave it out.
    own, ours = jax.jit(lambda: (fn(q, k, v, mask=mask, **override), fn(q, k, v, mask=mask)))()
    np.testing.assert_allclose(own[:, :4], ours[:, :4], atol=2e-6)


def test_own_path_refuses_what_it_cannot_do():
    q = jnp.ones((1, 3, 2, 4))
    drop = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    for settings, error, text in (
        ({"logits_soft_cap": 5.0}, ValueError, "logits_soft_cap cannot be had together with dropout_rate=0.5"),
        ({"sinks": jnp.zeros(2)}, ValueError, "sinks cannot be had"),
        ({"deterministic_backward": True}, ValueError, "deterministic_backward=True is not promised"),
        ({"implementation": "fa4"}, fa.contract.Unsupported, "no kernel for dropout_rate=0.5"),
    ):
        with pytest.raises(error, match=text):
            fa.attention_fn(**settings)(q, q, q, **drop)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 needs a dropout_rng"):
        fa.attention_fn()(q, q, q, dropout_rate=0.5)


# ---- extras, rules, errors -------------------------------------------------------------------------------------------


def test_extras_equal_dense_formulas():
    options = {"num_kv_heads": 2, "is_causal": True, "local_window_size": (2, None), "logits_soft_cap": 0.4}
    layer = fa.linen.MultiHeadAttention(HEADS, **options, sinks=nn.initializers.normal(1.0))
    variables = layer.init(jax.random.key(0), X)
    p = variables["params"]
    assert (
        p["sinks"].shape == (HEADS,)
        and p["key"]["kernel"].shape == (E, 2, 4)
        and p["query"]["kernel"].shape == (E, 4, 4)
    )
    q, k, v = (jnp.einsum("bte,enh->btnh", X, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key", "value"))
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = 0.4 * jnp.tanh(jnp.einsum("bqnh,bknh->bnqk", q, k) / 2 / 0.4)
    band = np.tri(T) * (1 - np.tri(T, k=-3))
    weights = jnp.where(band, jnp.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + jnp.exp(p["sinks"])[:, None, None]
    x = jnp.einsum("bnqk,bknh->bqnh", weights, v)
    close(layer.apply(variables, X), jnp.einsum("btnh,nhe->bte", x, p["out"]["kernel"]) + p["out"]["bias"])

    module = fa.nnx.MultiHeadAttention(
        HEADS, E, **options, sinks=nnx.initializers.normal(1.0), decode=False, rngs=nnx.Rngs(0)
    )
    nnx.update(
        module,
        nnx.State(
            {
                n: nnx.State({k: nnx.Param(v) for k, v in w.items()}) if n != "sinks" else nnx.Param(w)
                for n, w in p.items()
            }
        ),
    )
    close(module(X), layer.apply(variables, X))
    grads = nnx.grad(lambda m: (m(X) ** 2).sum())(module)
    assert np.abs(grads["sinks"][...]).min() > 0


def test_a_query_without_keys_gives_zero_in_every_dtype():
    """float16 too: a fill value must not overflow. Flax gives the mean of the values, jax_fa4 gives 0 everywhere."""
    mask = jnp.asarray(np.tri(T, dtype=bool)[::-1].copy()).at[2].set(False)
    kinds = (mask, fa.padding(jnp.array([[True] * 5, [True] * 3 + [False] * 2])), fa.lengths(jnp.array([5, 0])))
    for dtype in (jnp.float16, jnp.float32):
        layer = fa.linen.MultiHeadAttention(HEADS, dtype=dtype, use_bias=False)
        variables = layer.init(jax.random.key(0), X)

        @jax.jit
        def run(variables, layer=layer):
            outs = [layer.apply(variables, X, mask=m) for m in kinds]
            return sum(jnp.sum(x.astype(jnp.float32)) for x in outs), outs

        (total, outs), grads = jax.value_and_grad(run, has_aux=True)(variables)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((total, outs, grads)))
        assert np.abs(outs[0][:, 2]).max() == 0 and np.abs(outs[0][:, 1]).min() > 0
        assert np.abs(outs[2][1]).max() == 0 and np.abs(outs[2][0]).min() > 0


def test_softmax_is_float32_whatever_the_module_says():
    """Scores spread over 60 in bfloat16 keep the accuracy of a float32 softmax: row 45 of the public failures."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 64, 2, 32), jnp.bfloat16) for i in range(3))
    q = q * 10
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    scores = np.einsum("bqnh,bknh->bnqk", wide[0], wide[1]) / np.sqrt(32)
    assert scores.max() - scores.min() > 60
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bnqk,bknh->bqnh", weights / weights.sum(-1, keepdims=True), wide[2])
    for flag in (False, True):
        out = fa.attention_fn()(q, k, v, force_fp32_for_softmax=flag)
        np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=2**-8 * np.abs(exact).max())


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0, float("nan")])
def test_rates_that_mean_nothing(rate):
    q = jnp.ones((1, 3, 2, 4))
    for make in (
        lambda: fa.linen.MultiHeadAttention(HEADS, dropout_rate=rate),
        lambda: fa.nnx.MultiHeadAttention(HEADS, E, dropout_rate=rate, rngs=nnx.Rngs(0)),
        lambda: fa.attention_fn()(q, q, q, dropout_rate=rate),
    ):
        with pytest.raises(ValueError, match=f"dropout_rate must be at least 0 and below 1; it is {rate}"):
            make()


def test_errors_name_the_numbers():
    for make in (
        lambda **o: fa.linen.MultiHeadAttention(8, **o),
        lambda **o: fa.nnx.MultiHeadAttention(8, E, **o, decode=False, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match="8 is not of 3"):
            make(num_kv_heads=3)
        with pytest.raises(ValueError, match="num_kv_heads must be at least 1; it is 0"):
            make(num_kv_heads=0)
        with pytest.raises(ValueError, match="qkv_features must be a multiple of num_heads; 12 is not of 8"):
            make(qkv_features=12)
        with pytest.raises(ValueError, match="left side is -1"):
            make(local_window_size=-1)
        with pytest.raises(ValueError, match="logits_soft_cap must be finite"):
            make(logits_soft_cap=float("inf"))
        with pytest.raises(TypeError, match="is_causal must be True or False; it is 'yes'"):
            make(is_causal="yes")
    q, k = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 3, 3, 8))
    with pytest.raises(ValueError, match="4 is not of 3"):
        fa.attention_fn()(q, k, k)
    with pytest.raises(ValueError, match=r"mask must broadcast .* \(1, 4, 3, 3\); it has shape \(2, 3\)"):
        fa.attention_fn()(q, q, q, mask=jnp.ones((2, 3), bool))
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        fa.linen.MultiHeadAttention(HEADS).init(jax.random.key(0), X, None, X)
    with pytest.raises(ValueError, match="inputs_q must have 16 features; it has 8"):
        fa.nnx.MultiHeadAttention(HEADS, E, decode=False, rngs=nnx.Rngs(0))(X[..., :8])
    with pytest.raises(ValueError, match="logits_soft_cap is set both"):
        layer = fa.linen.MultiHeadAttention(
            HEADS, logits_soft_cap=1.0, attention_fn=fa.attention_fn(logits_soft_cap=2.0)
        )
        layer.init(jax.random.key(0), X)


def test_imports():
    """Importing jax_fa4 brings no Flax; without Flax, jax_fa4.flax names the extra."""
    code = (
        "import sys, jax_fa4; assert not [m for m in sys.modules if m.split('.')[0] == 'flax']\n"
        "sys.modules['flax'] = None\n"
        "try: import jax_fa4.flax\n"
        "except ImportError as e: assert \"pip install 'jax_fa4[flax]'\" in str(e), e\n"
        "else: raise AssertionError('imported without Flax')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
