"""One of two processes that share a mesh: prints how far the sharded gradients are from those of one device."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4


def step(q, k, v, dout):
    return jax.grad(lambda *x: jnp.sum(jax_fa4.attention(*x, is_causal=True) * dout), (0, 1, 2))(q, k, v)


def main(port: str, process: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
    shapes = [(4, 8, 4, 8), (4, 12, 2, 8), (4, 12, 2, 4), (4, 8, 4, 4)]
    args = [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(shapes)]
    wanted = [np.asarray(x) for x in step(*map(jnp.asarray, args))]
    cut, worst = P("data", None, "model"), 0.0
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, jax.device_count() // 2), ("data", "model"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            place = NamedSharding(mesh, cut)
            placed = [jax.make_array_from_callback(x.shape, place, lambda i, x=x: x[i]) for x in args]
            grads = multihost_utils.process_allgather(jax.jit(step)(*placed), tiled=True)
        worst = max(worst, *(float(np.abs(a - b).max()) for a, b in zip(grads, wanted, strict=True)))
    print(f"{jax.process_count()} processes, {jax.device_count()} devices, off by {worst}")


if __name__ == "__main__":
    main(*sys.argv[1:])
