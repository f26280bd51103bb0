"""One attention over several devices, three ways: jit on automatic axes, explicit axes, shard_map. Runs anywhere.

On a machine without several GPUs: XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/shard_heads.py
"""

import os

if "XLA_FLAGS" not in os.environ:  # eight virtual CPU devices; changes nothing on GPUs
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4

count = jax.device_count()
model = 2 if count % 2 == 0 else 1
shape, names = (count // model, model), ("data", "model")
dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
batch = 2 * shape[0]
sizes = {"q": (batch, 256, 8, 64), "k": (batch, 256, 4, 64), "v": (batch, 256, 4, 64)}  # 8 query heads, 4 key heads
q, k, v = (jax.random.normal(jax.random.key(i), size).astype(dtype) for i, size in enumerate(sizes.values()))
weight = jax.random.normal(jax.random.key(3), sizes["q"])
cut = P("data", None, "model")  # examples over data, heads over model; sequences and depths stay whole


def step(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of a loss that treats every element differently."""
    return jax.grad(lambda *x: jnp.sum(jax_fa4.attention(*x, is_causal=True) * weight), (0, 1, 2))(q, k, v)


def report(
    way: str, compiled: jax.stages.Compiled, grads: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]
) -> None:
    """The distance to one device, and whether the compiled program gathers anything."""
    worst = max(float(jnp.abs(jnp.asarray(jax.device_get(a)) - b).max()) for a, b in zip(grads, wanted, strict=True))
    gathers = compiled.as_text().count(" all-gather(")
    print(f"{way:<15} dq lies {grads[0].sharding.spec}, all-gathers: {gathers}, off from one device by {worst:.1e}")
    assert gathers == 0 and worst < (0.1 if dtype == jnp.bfloat16 else 1e-4), way


print(f"{count} devices ({jax.devices()[0].device_kind}) as a {shape[0]} x {shape[1]} mesh {names}")
wanted = jax.jit(step)(q, k, v, weight)

automatic = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2)
placed = [jax.device_put(x, NamedSharding(automatic, cut)) for x in (q, k, v, weight)]
compiled = jax.jit(step).lower(*placed).compile()  # the compiler carries the shardings of q, k, v through the call
report("automatic axes", compiled, compiled(*placed), wanted)

explicit = jax.make_mesh(shape, names)  # shardings are part of types
with jax.set_mesh(explicit):
    placed = [jax.device_put(x, NamedSharding(explicit, cut)) for x in (q, k, v, weight)]
    compiled = jax.jit(step).lower(*placed).compile()
    report("explicit axes", compiled, compiled(*placed), wanted)

by_hand = jax.jit(jax.shard_map(step, mesh=automatic, in_specs=(cut,) * 4, out_specs=(cut,) * 3))
compiled = by_hand.lower(q, k, v, weight).compile()  # each device's code sees its own examples and heads
report("shard_map", compiled, by_hand(q, k, v, weight), wanted)
