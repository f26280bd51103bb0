"""Cold start of a training step of a 24-layer model: with an empty store against a filled one, each in a new process.

    python benchmarks/cold_start.py --arch sm_90a --out cold_start.json    # no GPU: to the lowered program for CUDA
    python benchmarks/cold_start.py --filled DIR --out cold_start.json     # on a GPU: to the end of the first step

Layers look at all tokens before them and through a window of 1024 in turn, 16 query heads share 4 key heads, depth 128,
bfloat16. Times are seconds, kernels are counted by the store. `--filled` gives a store that is filled already, and
leaves the empty one out: for machines without the compiler. Exit code 1 if a filled store had to build anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, HEADS, KEY_HEADS, DEPTH, VOCABULARY = 2048, 16, 4, 128, 256


def shapes(layers: int) -> dict[str, Any]:
    """Shapes of the parameters."""
    block = {
        "query": (WIDTH, HEADS, DEPTH), "key": (WIDTH, KEY_HEADS, DEPTH), "value": (WIDTH, KEY_HEADS, DEPTH),
        "out": (HEADS, DEPTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
    }  # fmt: skip
    return {"tokens": (VOCABULARY, WIDTH), "blocks": [block] * layers}


def make_step() -> Any:
    """step(parameters, tokens [b, t + 1]) -> (parameters, loss): plain gradient descent."""
    import jax
    import jax.numpy as jnp

    import jax_fa4

    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["tokens"][tokens[:, :-1]]
        for i, block in enumerate(parameters["blocks"]):
            y = norm(x)
            q, k, v = (jnp.einsum("btw,wnd->btnd", y, block[name]) for name in ("query", "key", "value"))
            window = {"local_window_size": (1023, 0)} if i % 2 else {}
            out = jax_fa4.attention(q, k, v, is_causal=True, implementation="fa4", **window)
            x = x + jnp.einsum("btnd,ndw->btw", out, block["out"])
            x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
        logits = jnp.einsum("btw,cw->btc", norm(x), parameters["tokens"]).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    def step(parameters: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, parameters, gradients), value

    return step


def child(args: argparse.Namespace) -> dict[str, Any]:
    """In a new process: seconds since its start, kernels built and read."""
    began = time.perf_counter()
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jax_fa4
    from jax_fa4.ffi import store

    found: dict[str, Any] = {"import_s": time.perf_counter() - began}
    gpu = jax.default_backend() == "gpu"
    if not gpu:
        jax_fa4.config.update(arch=args.arch)
    tree = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes(args.layers), is_leaf=lambda s: isinstance(s, tuple)
    )
    tokens = jax.ShapeDtypeStruct((args.batch, args.length + 1), jnp.int32)
    step = jax.jit(make_step(), donate_argnums=0)
    start = time.perf_counter()
    lowered = step.trace(tree, tokens).lower(lowering_platforms=("cuda",))
    found["lowered_s"] = time.perf_counter() - start
    found["kernels"] = {name: store.counters()[name] for name in ("builds", "disk_hits")}
    if gpu:
        start = time.perf_counter()
        compiled = lowered.compile()
        found["xla_compile_s"] = time.perf_counter() - start
        key = jax.random.key(0)
        parameters = jax.tree.map(lambda s: 0.02 * jax.random.normal(key, s.shape, s.dtype), tree)
        batch = jax.random.randint(key, tokens.shape, 0, VOCABULARY)
        jax.block_until_ready((parameters, batch))
        for name in ("first_step_s", "second_step_s"):
            start = time.perf_counter()
            parameters, value = jax.block_until_ready(compiled(parameters, batch))
            found[name] = time.perf_counter() - start
        found["loss"] = float(value)
        assert np.isfinite(found["loss"]), found
    found["device"], found["jax"] = jax.devices()[0].device_kind, jax.__version__
    return found


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`child` in a new process on this store, and the seconds of the whole process."""
    command = [sys.executable, __file__, "--child", "--arch", args.arch, "--layers", str(args.layers)]
    command += ["--batch", str(args.batch), "--length", str(args.length)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_FA4_STORE": str(folder)})
    if done.returncode:
        raise SystemExit(f"cold_start: the process with the store {folder} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": time.perf_counter() - start}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", default="sm_90a", help="where there is no GPU (default: sm_90a)")
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--filled", type=Path, metavar="DIR", help="a filled store; none is filled here")
    p.add_argument("--out", type=Path, default=Path("cold_start.json"))
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.filled or Path(temporary)
        if not args.filled:
            found["empty"] = run(args, folder)
        found["filled"] = run(args, folder)
    found |= {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": os.cpu_count()}
    found |= {name: getattr(args, name) for name in ("layers", "batch", "length", "arch")}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(found["filled"]["kernels"]["builds"] > 0)


if __name__ == "__main__":
    sys.exit(main())
