"""Eight virtual devices give what one gives: automatic and explicit meshes, shard_map, vmap; nothing is gathered."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import operands, primitives, sharding
from jax_fa4.spec import AttentionSpec

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason=f"needs 8 devices; there are {jax.device_count()}")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
ROWS, BOTH = P("d"), P("d", None, "m")
causal = partial(jax_fa4.attention, is_causal=True)


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Half the time of this file is LLVM's; what is tested here does not depend on it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def mesh_of(kind: AxisType | tuple[AxisType, ...], shape: tuple[int, ...] = (2, 4)) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return jax.make_mesh(shape, ("d", "m")[: len(shape)], axis_types=kinds)


def inputs(b: int = 8, t: int = 8, s: int = 12, n: int = 8, k: int = 4, d: int = 8, v: int = 4) -> list[Any]:
    """(q, k, v, dO), none of them uniform."""
    shapes = [(b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)]
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def step(q: Any, k: Any, v: Any, dout: Any, f: Any = causal) -> Any:
    """Output and gradients of a loss of output and lse."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = f(q, k, v, return_residual=True)
        return jnp.sum(out * dout) + jnp.sum(jnp.sin(lse) * dout[..., 0]), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


def place(mesh: Any, args: Any, specs: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]


def collectives(compiled: Any) -> dict[str, int]:
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: n for name, n in counts.items() if n}


def close(got: Any, wanted: Any) -> None:
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


@pytest.fixture
def shares(monkeypatch):
    """Shapes of the query in what one device computes."""
    seen: list[tuple[int, ...]] = []
    for name in ("forward", "backward"):
        inner = getattr(primitives.reference, name)
        monkeypatch.setattr(
            primitives.reference, name, lambda ops, *x, inner=inner: (seen.append(ops.query.shape), inner(ops, *x))[1]
        )
    return seen


# ---- automatic axes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shardy", [True, False])
@pytest.mark.parametrize(
    "specs,sizes,share,moved",
    [
        pytest.param([P(("d", "m"))] * 4, {}, (1, 8, 8, 8), {}, id="batch"),
        pytest.param([BOTH] * 4, {}, (4, 8, 2, 8), {}, id="batch and heads"),
        pytest.param([BOTH, ROWS, ROWS, BOTH], {"k": 1}, (4, 8, 2, 8), {"all-reduce": 1}, id="mqa"),
        pytest.param([BOTH, ROWS, ROWS, BOTH], {"k": 2}, (4, 8, 2, 8), {"all-reduce": 1, "all-gather": 2}, id="gqa 2"),
        pytest.param(
            [P(None, None, ("m", "d"))] * 2 + [P()] * 2, {"n": 24, "k": 8}, (8, 8, 3, 8), None, id="m before d"
        ),
    ],
)
def test_automatic_axes(specs, sizes, share, moved, shardy, shares):
    args = inputs(**sizes)
    mesh = mesh_of(AxisType.Auto)
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        compiled = jax.jit(lambda *x: step(*x)).lower(*place(mesh, args, specs)).compile()
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert set(shares) == {share}
    # the two all-gathers of "gqa 2" are of dK and dV, which jit returns whole along m
    assert moved is None or collectives(compiled) == moved
    close(compiled(*place(mesh, args, specs)), jax.jit(lambda *x: step(*x))(*args))


@pytest.mark.parametrize("n,k,parts", [(12, 4, 6), (24, 12, 8), (12, 6, 4), (8, 2, 8), (6, 2, 6)])
def test_heads_that_do_not_fit_the_key_heads(n, k, parts):
    """12 heads on 6 devices with 4 key heads: a device's two heads may read one key head or two."""
    args = inputs(b=2, n=n, k=k)
    mesh = jax.make_mesh((parts,), ("m",), axis_types=(AxisType.Auto,), devices=jax.devices()[:parts])
    specs = [P(None, None, "m"), P(), P(), P(None, None, "m")]
    close(jax.jit(lambda *x: step(*x))(*place(mesh, args, specs)), jax.jit(lambda *x: step(*x))(*args))
    types = jax.make_mesh((parts,), ("m",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:parts])
    with jax.set_mesh(types):
        close(jax.jit(lambda *x: step(*x))(*place(types, args, specs)), jax.jit(lambda *x: step(*x))(*args))


@pytest.mark.parametrize("dout", [P(), P("m", "d"), P(None, "m")], ids=str)
def test_row37_the_cotangent_is_brought_to_the_querys_placement(dout, shares):
    mesh = mesh_of(AxisType.Auto)
    x = jax.random.normal(jax.random.key(5), (8, 8, 16))
    w = jax.random.normal(jax.random.key(6), (3, 16, 8, 8)) / 4
    target = jax.random.normal(jax.random.key(7), (8, 8, 8, 8))

    def grads(x: Any, w: Any, target: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            q, k, v = (jnp.einsum("btc,cnh->btnh", x, one) for one in w)
            return jnp.sum(causal(q, k, v) * target)

        return jax.grad(loss, (0, 1))(x, w)

    placed = place(mesh, (x, w, target), (ROWS, P(None, None, "m"), dout))
    home = (NamedSharding(mesh, ROWS), NamedSharding(mesh, P(None, None, "m")))
    compiled = jax.jit(grads, out_shardings=home).lower(*placed).compile()
    assert set(shares) == {(4, 8, 2, 8)}
    close(compiled(*placed), jax.jit(grads)(x, w, target))
    assert "all-gather" not in collectives(compiled)  # of q, k, v or anything else


def test_row39_jit_with_shardings_computes_shares_and_gathers_nothing(shares):
    q, k, v, _ = inputs(b=8, t=128, s=128, n=4, k=4, d=64, v=64)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, P("data"))
    compiled = jax.jit(causal, in_shardings=(rows,) * 3, out_shardings=rows).lower(q, k, v).compile()
    assert shares == [(2, 128, 4, 64)] and not collectives(compiled)
    close(compiled(*(jax.device_put(x, rows) for x in (q, k, v))), causal(q, k, v))
    for sharded in (0, 1):
        spec = [P(None, "data") if i == sharded else P() for i in range(3)]
        with pytest.raises(Exception, match=r"sequence axis of \w+ is sharded 4 ways[\s\S]*jax_fa4.context_parallel"):
            jax.jit(causal).lower(*place(mesh, (q, k, v), spec)).compile()


def test_what_depends_on_positions_heads_and_examples_goes_along(shares):
    q, k, v, dout = inputs()
    mesh = mesh_of(AxisType.Auto)
    ids = jnp.arange(8)[:, None] * 0 + jnp.arange(12) // 5
    extra = {
        "query_seq_lengths": jnp.arange(1, 9),
        "key_value_seq_lengths": jnp.arange(12, 4, -1),
        "query_segment_ids": ids[:, :8],
        "key_value_segment_ids": ids,
        "sinks": jnp.linspace(-1, 1, 8),
        "bias": jax.random.normal(jax.random.key(9), (1, 8, 8, 12)),
        "mask": jax.random.bernoulli(jax.random.key(10), 0.8, (8, 1, 8, 12)),
    }

    def f(q: Any, k: Any, v: Any, dout: Any, extra: Any) -> Any:
        def loss(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            return jnp.sum(causal(q, k, v, **extra | {"bias": bias, "sinks": sinks}) * dout)

        return jax.grad(loss, range(5))(q, k, v, extra["bias"], extra["sinks"])

    wanted = jax.jit(f)(q, k, v, dout, extra)
    close(jax.jit(f)(*place(mesh, (q, k, v, dout), [BOTH] * 4), extra), wanted)
    explicit = mesh_of(AxisType.Explicit)
    with jax.set_mesh(explicit):
        close(jax.jit(f)(*place(explicit, (q, k, v, dout), [BOTH] * 4), extra), wanted)
    assert (4, 8, 2, 8) in shares


# ---- explicit axes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [True, False])
def test_row42_explicit_axes_are_in_the_types_of_results(context, shares):
    args = inputs()
    mesh = jax.make_mesh((2, 4), ("d", "m"))
    placed = place(mesh, args, [BOTH] * 4)
    wanted = jax.jit(step)(*args)
    shares.clear()

    def look(*x: Any) -> Any:
        results = step(*x)
        for y in results:
            assert jax.typeof(y).sharding.spec == P("d", None, "m", None)
        return results

    with jax.set_mesh(mesh) if context else jax.checking_leaks():
        compiled = jax.jit(look).lower(*placed).compile()
        close(compiled(*placed), wanted)
        if context:
            close(step(*placed), wanted)  # eager
    assert not collectives(compiled) and set(shares) == {(4, 8, 2, 8)}
    small = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    with jax.set_mesh(small):
        rows = place(small, args, [P("x")] * 4)
        assert jax.typeof(causal(*rows[:3])).sharding.spec == P("x", None, None, None)


@pytest.mark.parametrize("specs", [[BOTH, P(), P(), P()], [BOTH, ROWS, ROWS, P("m")], [P(), BOTH, BOTH, ROWS]], ids=str)
def test_explicit_axes_brings_everything_to_one_placement(specs, shares):
    args = inputs()
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        _, *grads = got = jax.jit(step)(*place(mesh, args, [*specs[:3], BOTH]))
    assert set(shares) == {(4, 8, 2, 8)}
    for g, spec in zip(grads, specs, strict=False):
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, spec), g.ndim)  # a gradient lies where its operand does
    close(got, jax.jit(step)(*args))


def test_explicit_axes_refuse_a_sharded_sequence_while_tracing():
    mesh = mesh_of(AxisType.Explicit)
    q, k, v, _ = inputs()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"key is sharded 4 ways.*jax_fa4.context_parallel"):
        jax.eval_shape(causal, *place(mesh, (q, k, v), (ROWS, P("d", "m"), P("d", "m"))))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("m", "d"), P("d", None, None, "m"), P(None, "d", None, "m")], ids=str)
def test_vmap_keeps_every_leading_axis_where_it_lies(spec, kind, shares):
    args = [jnp.stack([x, x * 0.5, x + 0.1, -x]) for x in inputs(b=2)]
    mesh = mesh_of(kind)
    wanted = jax.jit(jax.vmap(step))(*args)
    shares.clear()
    with jax.set_mesh(mesh):
        placed = place(mesh, args, [spec] * 4)
        named = {} if kind == AxisType.Explicit or spec[0] is None else {"spmd_axis_name": spec[0]}
        compiled = jax.jit(jax.vmap(step, **named)).lower(*placed).compile()
        got = compiled(*placed)
        close(got, wanted)
        mixed = (0, None, None, 0)
        shared = [placed[0], args[1][0], args[2][0], placed[3]]
        close(
            jax.jit(jax.vmap(step, mixed))(*shared), jax.jit(jax.vmap(step, mixed))(*[args[0], *shared[1:3], args[3]])
        )
    assert not collectives(compiled)
    assert all(x.sharding.is_equivalent_to(placed[0].sharding, x.ndim) for x in got)


# ---- shard_map -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("manual", [{"d", "m"}, {"d"}, {"m"}], ids=lambda names: "+".join(sorted(names)))
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_over_all_axes_and_over_some(kind, manual, check, shares):
    args = inputs()
    mesh = mesh_of(kind)
    spec = P("d" if "d" in manual else None, None, "m" if "m" in manual else None)
    wanted = jax.jit(step)(*args)
    shares.clear()
    f = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4, axis_names=manual, check_vma=check)
    with jax.set_mesh(mesh):
        placed = place(mesh, args, [BOTH] * 4)
        compiled = jax.jit(f).lower(*placed).compile()
        close(compiled(*placed), wanted)
    assert set(shares) == {(4, 8, 2, 8)}
    # jax 0.10 and 0.11 themselves gather at the border of a shard_map over some axes of an explicit mesh (jnp.sin too)
    border = kind == AxisType.Explicit and len(manual) == 1
    assert border or not collectives(compiled)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("repeated", ["keys", "query"])
def test_row38_scan_inside_shard_map_and_grads_inside_and_outside(repeated, check):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v, dout = inputs(s=8, n=2, k=2, d=8, v=8)
    specs = (P("x"), P(), P(), P("x")) if repeated == "keys" else (P(), P("x"), P("x"), P())
    q, k, v, dout = (x if spec == P("x") else x[:1] for x, spec in zip((q, k, v, dout), specs, strict=True))

    def layers(q: Any, k: Any, v: Any) -> Any:
        if check and repeated == "query":
            q = jax.lax.pcast(q, ("x",), to="varying")
        out = jax.lax.scan(lambda c, _: (causal(c, k, v), None), q, length=2)[0]
        assert not check or sharding.varying(out) == {"x"}
        return out

    def whole(*args: Any) -> Any:
        q, k, v = (jnp.broadcast_to(x, (8, *x.shape[1:])) for x in args)
        return causal(causal(q, k, v), k, v)

    wanted = jax.jit(jax.grad(lambda *x: jnp.sum(whole(*x) * dout), (0, 1, 2)))(q, k, v)
    over = partial(jax.shard_map, mesh=mesh, check_vma=check)
    outside = over(layers, in_specs=specs[:3], out_specs=P("x"))
    close(jax.jit(jax.grad(lambda *x: jnp.sum(outside(*x) * dout), (0, 1, 2)))(q, k, v), wanted)
    if check:  # without the check, gradients taken inside are the caller's to sum
        inside = jax.grad(lambda *x: jax.lax.psum(jnp.sum(layers(*x[:3]) * x[3]), "x"), (0, 1, 2))
        close(jax.jit(over(inside, in_specs=specs, out_specs=specs[:3]))(q, k, v, dout), wanted)


def test_two_processes_share_a_mesh():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    program = str(Path(__file__).with_name("two_processes.py"))
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": os.pathsep.join([str(Path(jax_fa4.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, program, port, str(i)], **options) for i in range(2)]
    try:
        for process in running:
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err[-2000:]
            found = re.search(r"2 processes, 4 devices, off by (\S+)", out)
            assert found and float(found[1]) < 2e-5, out
    finally:
        for process in running:
            process.kill()


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_the_shardy_rule_in_words():
    spec = AttentionSpec(segments=True, sinks=True)
    named = {
        "query": (2, 8, 6, 4),
        "key": (2, 9, 3, 4),
        "value": (2, 9, 3, 5),
        "window": (2,),
        "scale": (),
        "soft_cap": (),
    }
    named |= dict.fromkeys(("offset", "q_len", "kv_len"), (2,))
    named |= {"q_segments": (2, 8), "kv_segments": (2, 9), "sinks": (6,), "out": (2, 8, 6, 5), "lse": (2, 6, 8)}
    names = (*operands.names_in(spec, "fwd"), "out", "lse")
    rule, sizes = sharding.shardy_rule(spec, "fwd", [named[name] for name in names])
    assert rule == (
        "b0 x0 (k g) x1, b0 x2 k x3, b0 x4 k x5, x6, b0, b0, b0, , , b0 x7, b0 x8, (k g)"
        " -> b0 x9 (k g) x10, b0 (k g) x11"
    )
    assert sizes == {"g": 2}


def test_device_orders_are_read_back_from_shardings():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    for spec in (P(("c", "a"), None, "b"), P("b", None, ("a", "c")), P(None, None, ("c", "b", "a")), P("a"), P()):
        q = jax.ShapeDtypeStruct((8, 4, 8, 2), jnp.float32, sharding=NamedSharding(mesh, spec))
        found, split = sharding.partitioner_split(q, 8)
        shape = {"query": q.shape}
        back = NamedSharding(
            jax.sharding.Mesh(mesh.devices.reshape(found.axis_sizes), found.axis_names), split.spec("query", q.shape)
        )
        assert back.is_equivalent_to(q.sharding, 4), (spec, shape)
