"""Attention over a sequence that is sharded: all three ways on every device here, checked against the unsharded call.

python examples/context_parallel.py                     # 8 virtual CPU devices where there is no GPU
python examples/context_parallel.py --length 65536      # the GPUs of one host
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

if "XLA_FLAGS" not in os.environ:  # read when jax starts; harmless where there are GPUs
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fa4
from jax_fa4 import context_parallel


def inputs(length: int, heads: int, kv_heads: int, depth: int, dtype: Any) -> list[jax.Array]:
    """q, k, v and a non-uniform cotangent."""
    shapes = [(1, length, n, depth) for n in (heads, kv_heads, kv_heads, heads)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def with_gradients(call: Any) -> Any:
    """(out, dq, dk, dv) in one program."""

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(call, q, k, v)
        return (out, *back(dout))

    return jax.jit(run)


@jax.jit
def _relative(got: Any, want: Any) -> Any:
    def one(a: Any, b: Any) -> Any:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))))


def distance(got: Any, want: Any) -> float:
    """Relative L2, the largest over arrays, on the devices where `got` lies: gigabytes need not pass the host."""
    return float(_relative(got, jax.tree.map(lambda a, b: jax.device_put(b, a.sharding), got, want)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = jax.default_backend() == "gpu"
    parser.add_argument("--length", type=int, default=16384 if gpu else 512, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16 if gpu else 8)
    parser.add_argument("--kv-heads", type=int, default=8 if gpu else 4)
    parser.add_argument("--depth", type=int, default=128 if gpu else 32)
    args = parser.parse_args()
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("sequence",), axis_types=(AxisType.Auto,), devices=devices)
    dtype, tolerance = (jnp.bfloat16, 1e-2) if gpu else (jnp.float32, 1e-5)
    arrays = inputs(args.length, args.heads, args.kv_heads, args.depth, dtype)
    heads = f"{args.heads}:{args.kv_heads} heads of {args.depth}"
    print(f"{len(devices)} x {devices[0].device_kind}, {args.length} tokens, {heads}")

    want = with_gradients(lambda q, k, v: jax_fa4.attention(q, k, v, is_causal=True))(*arrays)
    place = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    failed = False
    for mode in context_parallel.MODES:
        for layout in context_parallel.LAYOUTS:
            balanced = layout == "zigzag"
            given = [context_parallel.to_zigzag(x, len(devices)) if balanced else x for x in arrays]
            given = [jax.device_put(x, place) for x in given]

            def call(q: Any, k: Any, v: Any, mode: str = mode, layout: str = layout) -> Any:
                return context_parallel.attention(
                    q, k, v, mesh=mesh, axis="sequence", mode=mode, layout=layout, is_causal=True
                )

            run = with_gradients(call)
            got = jax.block_until_ready(run(*given))
            start = time.perf_counter()
            jax.block_until_ready(run(*given))
            seconds = time.perf_counter() - start
            back = [context_parallel.from_zigzag(x, len(devices)) if balanced else x for x in got]
            worst = distance(back, list(want))
            failed |= not worst < tolerance
            print(
                f"{mode:10s} {layout:10s} largest difference {worst:.1e}   forward and backward {seconds * 1e3:8.1f} ms"
            )
    print("differs from the unsharded call" if failed else "all equal the unsharded call")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
