"""Decoding with the cache: prompts and steps equal one full causal pass, and its end is never passed unheard."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_fa4 import flax as fa

B, LENGTH, E, HEADS = 2, 6, 16, 4
X = jax.random.normal(jax.random.key(9), (B, LENGTH, E))
STEPS = {"one by one": [1] * 6, "a prompt, then one by one": [4, 1, 1], "several": [3, 2, 1], "all": [6]}


def close(a, b, atol=2e-6):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-6)


class Linen:
    """The same three verbs for both libraries: the full pass, a fresh cache, a step."""

    def __init__(self, **options):
        self.full_layer = fa.linen.MultiHeadAttention(HEADS, **options)
        self.layer = self.full_layer.clone(decode=True)
        self.params = self.full_layer.init(jax.random.key(0), X)["params"]
        self.jitted = jax.jit(self._step)

    def full(self, x, mask=None):
        mask = fa.causal() if mask is None else mask
        return self.full_layer.apply({"params": self.params}, x, mask=mask)

    def fresh(self, x=X):
        return self.layer.init(jax.random.key(0), x)["cache"]

    def _step(self, cache, x, mask=None):
        y, new = self.layer.apply({"params": self.params, "cache": cache}, x, mask=mask, mutable=["cache"])
        return new["cache"], y

    def step(self, cache, x, mask=None, jit=True):
        return (self.jitted if jit else self._step)(cache, x, mask)


class Nnx:
    def __init__(self, **options):
        self.module = fa.nnx.MultiHeadAttention(HEADS, E, **options, decode=False, rngs=nnx.Rngs(0))
        self.graph, self.params = nnx.split(self.module)
        self.jitted = jax.jit(self._step)

    def full(self, x, mask=None):
        return self.module(x, mask=fa.causal() if mask is None else mask)

    def fresh(self, x=X):
        module = nnx.merge(self.graph, self.params)
        module.init_cache(x.shape, x.dtype)
        self.graph_cached, state = nnx.split(module)
        return state

    def _step(self, state, x, mask=None):
        module = nnx.merge(self.graph_cached, state)
        y = module(x, mask=mask, decode=True)
        return nnx.state(module), y

    def step(self, state, x, mask=None, jit=True):
        return (self.jitted if jit else self._step)(state, x, mask)


def decode(side, sizes, jit=True, mask=None, x=X):
    cache, outs, at = side.fresh(x), [], 0
    for n in sizes:
        cache, y = side.step(cache, x[:, at : at + n], mask, jit)
        outs.append(y)
        at += n
    return jnp.concatenate(outs, 1), cache


# ---- equality with one full pass -------------------------------------------------------------------------------------


@functools.cache
def made(side, **options):
    """One object for several tests, so that they share compiled steps."""
    return side(**options)


@pytest.mark.parametrize(
    ("is_causal", "steps"), [*((False, s) for s in STEPS), (True, "one by one"), (True, "a prompt, then one by one")]
)
@pytest.mark.parametrize("side", [Linen, Nnx])
def test_decode_equals_one_causal_pass(side, is_causal, steps):
    """Row 43 of the public failures: Flax 0.12.8 with is_causal=True shows the first key alone from step two on."""
    s = made(side, is_causal=is_causal, num_kv_heads=2)
    close(decode(s, STEPS[steps])[0], s.full(X))


@pytest.mark.parametrize("side", [Linen, Nnx])
def test_extras_hold_in_decoding(side):
    s = side(num_kv_heads=1, local_window_size=(2, None), logits_soft_cap=0.5, sinks=True, normalize_qk=True)
    close(decode(s, [3, 1, 2])[0], s.full(X))


def test_masks_in_decoding_count_places_of_the_cache():
    s = Linen()
    hidden = jnp.array([[True, False, True, True, True, True], [True, True, True, False, True, True]])
    ids = jnp.array([[0, 0, 0, 1, 1, 1], [0] * 6])
    cases = [
        (hidden[:, None, None, :], fa.padding(hidden)),
        (fa.lengths(jnp.array([6, 4])), fa.lengths(jnp.array([6, 4]))),
        (fa.window((2, 2)), fa.window((2, 0))),
        (fa.causal(), fa.causal()),
        (fa.causal("bottom_right"), fa.causal()),
    ]
    for mask, full in cases:
        close(decode(s, [3, 3], mask=mask)[0], s.full(X, full & fa.causal()))
    s = made(Nnx, is_causal=False, num_kv_heads=2)
    mask = fa.padding(hidden) & fa.window((3, 3))
    close(decode(s, [3, 3], mask=mask)[0], s.full(X, mask & fa.causal()))
    s = made(Linen, is_causal=False, num_kv_heads=2)
    cache, y = s.step(s.fresh(), X[:, :4], fa.segments(ids[:, :4], ids))
    _, z = s.step(cache, X[:, 4:], fa.segments(ids[:, 4:], ids))
    close(jnp.concatenate([y, z], 1), s.full(X, fa.segments(ids) & fa.causal()))


@pytest.mark.parametrize("side", [Linen, Nnx])
def test_decode_under_scan(side):
    s = made(side, is_causal=False, num_kv_heads=2)
    cache, y = s.step(s.fresh(), X[:, :2], jit=False)
    _, rest = jax.jit(lambda c: jax.lax.scan(lambda c, x: s._step(c, x[:, None]), c, X[:, 2:].swapaxes(0, 1)))(cache)
    close(jnp.concatenate([y, rest[:, :, 0].swapaxes(0, 1)], 1), s.full(X))


def test_flaxs_cache_goes_on_in_ours():
    """Names, shapes and dtypes are Flax's: a cache that Flax's module filled is continued by ours."""
    flaxs, s = nn.MultiHeadAttention(HEADS, decode=True), Linen()
    cache = flaxs.init(jax.random.key(0), X)["cache"]
    jax.tree.map(lambda a, b: (close(a, b), a.dtype == b.dtype or pytest.fail("dtype")), cache, s.fresh())
    assert jax.tree.structure(cache) == jax.tree.structure(s.fresh())
    outs = []
    for i in range(3):
        y, new = flaxs.apply({"params": s.params, "cache": cache}, X[:, i : i + 1], mutable=["cache"])
        cache = new["cache"]
        outs.append(y)
    _, y = s.step(cache, X[:, 3:])
    close(jnp.concatenate([*outs, y], 1), s.full(X))

    theirs = nnx.MultiHeadAttention(HEADS, E, decode=True, rngs=nnx.Rngs(0))
    ours = fa.nnx.MultiHeadAttention(HEADS, E, decode=True, rngs=nnx.Rngs(0))
    for m in (theirs, ours):
        m.init_cache(X.shape)
    y = [theirs(X[:, i : i + 1]) for i in range(3)]
    nnx.update(ours, nnx.state(theirs))
    close(jnp.concatenate([*y, ours(X[:, 3:])], 1), ours(X, decode=False, is_causal=True))


def test_cache_holds_key_heads():
    for side in (Linen, Nnx):
        cache = side(num_kv_heads=2).fresh()
        assert cache["cached_key"].shape == cache["cached_value"].shape == (B, LENGTH, 2, E // HEADS)
        assert cache["cache_index"].dtype == jnp.int32 and cache["cache_index"].shape == ()


def test_lower_precision_cache():
    """A bfloat16 cache under a float32 module: rounded keys and values, nothing worse."""
    module = fa.nnx.MultiHeadAttention(HEADS, E, decode=True, rngs=nnx.Rngs(0))
    module.init_cache(X.shape, jnp.bfloat16)
    out = jnp.concatenate([module(X[:, :4]), module(X[:, 4:])], 1)
    assert out.dtype == jnp.float32 and module.cached_key.dtype == jnp.bfloat16
    close(out, module(X, decode=False, is_causal=True), atol=2e-2)


def test_view_makes_a_cache():
    module = fa.nnx.MultiHeadAttention(HEADS, E, decode=False, rngs=nnx.Rngs(0))
    view = nnx.view(module, decode=True, batch_size=B, max_length=LENGTH)
    close(jnp.concatenate([view(X[:, :5]), view(X[:, 5:])], 1), module(X, is_causal=True))
    with pytest.raises(TypeError, match="batch_size and max_length; they are 2 and None"):
        nnx.view(module, decode=True, batch_size=2)


# ---- the end of the cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [Linen, Nnx])
def test_past_the_end(side):
    s = made(side, is_causal=False, num_kv_heads=2)
    _, cache = decode(s, [4, 1], jit=False)
    with pytest.raises(ValueError, match="5 tokens are in it and 2 more are given; it holds 6"):
        s.step(cache, X[:, :2], jit=False)
    with pytest.raises(ValueError, match="some tokens are in it and 7 more are given; it holds 6"):
        jax.eval_shape(s._step, s.fresh(), jnp.ones((B, 7, E)))
    # Traced, the index cannot be looked at: NaN throughout, then and ever after.
    cache, y = s.step(cache, X[:, :1])
    assert np.isfinite(y).all()
    for n in (1, 2):
        cache, y = s.step(cache, X[:, :n])
        assert np.isnan(y).all()
    # What was in the cache before tokens went over the end in part is not read again as if nothing had happened.
    _, cache = decode(s, [4])
    cache, y = s.step(cache, X[:, :3])
    assert np.isnan(y).all() and int(cache["cache_index"][...]) == 7


def test_errors():
    with pytest.raises(ValueError, match="call init_cache"):
        fa.nnx.MultiHeadAttention(HEADS, E, decode=True, rngs=nnx.Rngs(0))(X)
    module = fa.nnx.MultiHeadAttention(HEADS, E, decode=True, rngs=nnx.Rngs(0))
    module.init_cache(X.shape)
    with pytest.raises(ValueError, match=r"must have shape .* \(2, 1, 4, 4\) .* they have \(1, 1, 4, 4\)"):
        module(X[:1, :1])
    with pytest.raises(ValueError, match="as many queries as new keys; there are 1 and 2"):
        module(X[:, :1], X[:, :2])
    s = Linen()
    with pytest.raises(ValueError, match="as many queries as new keys; there are 1 and 2"):
        s.layer.apply({"params": s.params, "cache": s.fresh()}, X[:, :1], X[:, :2], mutable=["cache"])


# ---- x64 and sharding, in processes of their own ---------------------------------------------------------------------


def run(code, **env):
    code = "import sys; sys.path.insert(0, 'tests')\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"JAX_PLATFORMS": "cpu"} | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_x64():
    run(
        """
        import jax, jax.numpy as jnp, test_flax_decode as t
        s = t.Nnx(num_kv_heads=2)
        out, cache = t.decode(s, [4, 2])
        t.close(out, s.full(t.X))
        assert cache["cache_index"].dtype == jnp.int32
        x = t.X.astype(jnp.float64)
        s = t.Linen(dtype=jnp.float64, param_dtype=jnp.float64)
        out, cache = t.decode(s, [4, 2], x=x)
        assert out.dtype == jnp.float64
        t.close(out, s.full(x), atol=1e-13)
        cache = s.fresh(x) | {"cache_index": jnp.zeros((), jnp.int64)}  # of another library, or an old checkpoint
        cache, y = s.step(cache, x[:, :4])
        assert cache["cache_index"].dtype == jnp.int64
        t.close(jnp.concatenate([y, s.step(cache, x[:, 4:])[1]], 1), s.full(x), atol=1e-13)
        """,
        JAX_ENABLE_X64="1",
    )


def test_sharded_on_heads():
    """Two devices, each with half of the heads and of the cache: same results, and the cache is never gathered."""
    run(
        """
        import jax, jax.numpy as jnp, test_flax_decode as t
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        s = t.Linen(num_kv_heads=2)
        wanted = s.full(t.X)
        mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        heads = {"kernel": (None, "model"), "bias": ("model",)}
        heads = {"query": heads, "key": heads, "value": heads, "out": {"kernel": ("model",), "bias": ()}}
        s.params = {n: {k: put(x, *heads[n][k]) for k, x in w.items()} for n, w in s.params.items()}
        def fresh(cache):
            return {n: put(x) if n == "cache_index" else put(x, None, None, "model") for n, x in cache.items()}
        cache, outs = fresh(s.fresh()), []
        for part in (t.X[:, :5], t.X[:, 5:]):
            text = s.jitted.lower(cache, put(part)).compile().as_text()
            assert "all-gather" not in text and "all-to-all" not in text, text
            cache, y = s.step(cache, put(part))
            assert cache["cached_key"].sharding.spec == P(None, None, "model"), cache["cached_key"].sharding
            outs.append(y)
        t.close(jnp.concatenate(outs, 1), wanted)

        # Explicit axes, the default of make_mesh: the cache that init makes has the batch's sharding in its type.
        s = t.Linen(num_kv_heads=2)
        with jax.set_mesh(jax.make_mesh((2,), ("data",))):
            x = jax.device_put(t.X, P("data"))
            cache = s.fresh(x)
            assert jax.typeof(cache["cached_key"]).sharding.spec == P("data", None, None, None)
            cache, y = s.step(cache, x[:, :4])
            assert jax.typeof(y).sharding.spec == P("data", None, None)
            t.close(jnp.concatenate([y, s.step(cache, x[:, 4:])[1]], 1), wanted)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
