"""Sharded attention on the GPUs of one host: right, how fast against one GPU, what moves and what of it is exposed.

    python benchmarks/several_gpus.py --out several.json            # every GPU here; 64k and 128k tokens

For each length: one GPU alone, the sequence over all GPUs in each context-parallel mode (causal, zigzag and contiguous
layouts), and at a fixed size batch and heads over the GPUs. Times are medians of whole jitted forward-and-backward
programs. efficiency = time on one GPU / (GPUs x time). `moved_mb` is what a device sends in one forward and backward,
counted from the shapes; `link_ms` times the same transfers alone, so that exposed = time - (one GPU's time / GPUs).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import context_parallel as cp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from context_parallel import distance, inputs, with_gradients


def milliseconds(run: Any, given: Any, samples: int = 5) -> float:
    """Median of whole programs, after two that warm up."""
    for _ in range(2):
        jax.block_until_ready(run(*given))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        jax.block_until_ready(run(*given))
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def temporary_mb(run: Any, given: Any) -> float:
    """Compiled temporary memory of one device."""
    return run.lower(*given).compile().memory_analysis().temp_size_in_bytes / 1e6


def moved_mb(mode: str, size: int, shapes: dict[str, int]) -> float:
    """Sent by one device in forward and backward, bf16 (float32 for the ring's dK and dV)."""
    s, n, k, d = (shapes[x] for x in ("length", "heads", "kv_heads", "depth"))
    kv, local = 2 * s * k * d / size, s / size
    if mode == "all_gather":
        return (kv * (size - 1) * 2 * 2) / 1e6  # gather K, V; reduce-scatter dK, dV
    if mode == "ring":
        return (kv * 2 * (size - 1) * 2 + kv * 4 * size) / 1e6  # K, V twice round; dK, dV once, in float32
    per_pass = (2 * n + 2 * k) * d * local * (size - 1) / size
    return per_pass * 2 * 2 / 1e6


def sequence_rows(length: int, shapes: dict[str, int], mesh: Any) -> list[dict[str, Any]]:
    """One GPU against the sequence over all of them."""
    size = mesh.shape["x"]
    shapes = shapes | {"length": length}
    arrays = inputs(length, shapes["heads"], shapes["kv_heads"], shapes["depth"], jnp.bfloat16)
    alone = with_gradients(lambda q, k, v: jax_fa4.attention(q, k, v, is_causal=True))
    want = alone(*arrays)
    one = milliseconds(alone, arrays)
    flops = 3.5 * 4 * shapes["heads"] * shapes["depth"] * length**2 / 2
    rows = [
        {"what": "one GPU", "length": length, "ms": one, "tflops": flops / one / 1e9, "mb": temporary_mb(alone, arrays)}
    ]
    place = NamedSharding(mesh, P(None, "x"))
    for mode in cp.MODES:
        for layout in cp.LAYOUTS:
            balanced = layout == "zigzag"
            given = [jax.device_put(cp.to_zigzag(x, size) if balanced else x, place) for x in arrays]
            call = functools.partial(cp.attention, mesh=mesh, axis="x", mode=mode, layout=layout, is_causal=True)
            run = with_gradients(call)
            got = run(*given)
            back = [cp.from_zigzag(x, size) if balanced else x for x in got]
            worst = max(distance(a, b) for a, b in zip(back, want, strict=True))
            ms = milliseconds(run, given)
            rows.append(
                {
                    "what": f"{mode} {layout}",
                    "length": length,
                    "ms": ms,
                    "efficiency": one / size / ms,
                    "exposed_ms": ms - one / size,
                    "moved_mb": moved_mb(mode, size, shapes),
                    "error": worst,
                    "mb": temporary_mb(run, given),
                }
            )
            print(rows[-1], flush=True)
    return rows


def link_rows(mesh: Any, megabytes: int = 256) -> list[dict[str, Any]]:
    """Rates of the collectives alone, GB/s sent by each device."""
    size = mesh.shape["x"]
    x = jax.device_put(jnp.ones((size, megabytes * 500_000 // 4, 4), jnp.bfloat16), NamedSharding(mesh, P("x")))
    turn = [(r, (r + 1) % size) for r in range(size)]
    programs = {
        "ppermute": (lambda x: jax.lax.ppermute(x, "x", turn), P("x"), 1),
        "all_gather": (lambda x: jax.lax.all_gather(x, "x", axis=0, tiled=True)[:1], P("x"), size - 1),
        "all_to_all": (lambda x: jax.lax.all_to_all(x[0], "x", 0, 0, tiled=True)[None], P("x"), (size - 1) / size),
    }
    rows = []
    for name, (body, out, share) in programs.items():
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))
        ms = milliseconds(run, (x,))
        rows.append({"what": f"link {name}", "gb_per_s": share * x.nbytes / size / ms / 1e6, "ms": ms})
    return rows


def placed_rows(shapes: dict[str, int], mesh: Any, length: int = 8192) -> list[dict[str, Any]]:
    """Batch over the GPUs, heads over the GPUs: the same work as one GPU, divided."""
    size = mesh.shape["x"]
    keys = jax.random.split(jax.random.key(1), 4)
    n, k, d = shapes["heads"], shapes["kv_heads"], shapes["depth"]
    arrays = [
        jax.random.normal(key, (2 * size, length, h, d), jnp.bfloat16)
        for key, h in zip(keys, (n, k, k, n), strict=True)
    ]
    run = with_gradients(lambda q, k, v: jax_fa4.attention(q, k, v, is_causal=True))
    want, one = run(*arrays), milliseconds(run, arrays)
    rows = [{"what": "one GPU", "length": length, "batch": 2 * size, "ms": one}]
    for what, spec in (("batch", P("x")), ("heads", P(None, None, "x"))):
        given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        got = run(*given)
        text = run.lower(*given).compile().as_text()
        ms = milliseconds(run, given)
        rows.append(
            {
                "what": f"{what} sharded",
                "length": length,
                "ms": ms,
                "efficiency": one / size / ms,
                "all_gathers": text.count("all-gather("),
                "error": max(distance(a, b) for a, b in zip(got, want, strict=True)),
            }
        )
        print(rows[-1], flush=True)
    return rows


def last_device_first(shapes: dict[str, int]) -> dict[str, Any]:
    """A call placed on the last device, made before any other: right there?"""
    last = jax.devices()[-1]
    ones = [jax.device_put(jnp.ones((4, 16, 32, 64), jnp.bfloat16), last) for _ in range(3)]
    out = jax_fa4.attention(*ones)
    assert out.devices() == {last}
    return {"what": f"first call on {last}", "right": bool((out == 1).all())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--fixed-length", type=int, default=8192, help="of the batch- and head-sharded rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = {"heads": args.heads, "kv_heads": args.kv_heads, "depth": args.depth}
    rows: list[dict[str, Any]] = [last_device_first(shapes)]
    print(rows[0], flush=True)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    rows += placed_rows(shapes, mesh, args.fixed_length)
    rows += link_rows(mesh)
    print(rows[-3:], flush=True)
    for length in args.lengths:
        rows += sequence_rows(length, shapes, mesh)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "count": jax.device_count(),
        "jax": jax.__version__,
        "shapes": shapes,
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1))
    for row in rows:
        print("  ".join(f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in row.items()))
    return 0 if all(row.get("error", 0) < 1e-2 and row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
