"""Sharded attention on the GPUs of one host: right, how fast against one GPU, what moves and what of it is exposed.

    python benchmarks/several_gpus.py --out several.json            # every GPU here; 64k and 128k tokens

For each length: one GPU alone, the sequence over all GPUs in each context-parallel mode (causal, zigzag and contiguous
layouts), and at a fixed size batch and heads over the GPUs; the collectives alone. examples/shardmeasure.py says what
the columns mean; examples/scaling.py adds a model and predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import jax_fa4

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from shardmeasure import link_rows, placed_rows, say, sequence_rows


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
        print(say(row))
    return 0 if all(row.get("error", 0) < 1e-2 and row.get("right", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
