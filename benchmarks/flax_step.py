"""Times a training step of a 6-layer nnx transformer under three attentions, and compares their loss curves.

    python benchmarks/flax_step.py --out flax_step.json         # 2k and 8k tokens, bfloat16, on a GPU
    python benchmarks/flax_step.py --toy --out toy.json         # a tiny model on a CPU: shows that the script runs

The attentions: `jax_fa4` (jax_fa4.flax.nnx.MultiHeadAttention), `flax` (nnx.MultiHeadAttention as it comes, which calls
jax.nn.dot_product_attention through XLA) and `cudnn` (the same module with attention_fn=jax.nn.dot_product_attention,
implementation="cudnn"). All three have the same parameters: same keys, same tree. An attention that fails (no cuDNN,
out of memory) is recorded with its error, and the others go on. Exits with status 1 when jax_fa4 fails, or when its
loss curve leaves the others'.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_fa4
from jax_fa4.flax.nnx import MultiHeadAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import textdata

ATTENTIONS = ("jax_fa4", "flax", "cudnn")


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model; heads are width / heads deep."""

    layers: int = 6
    width: int = 2048
    heads: int = 16
    vocabulary: int = textdata.VOCABULARY


def cudnn(query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False, **others: Any) -> Any:
    """jax.nn.dot_product_attention by cuDNN, for nnx, which passes more arguments than that function takes."""
    assert mask is None and not others.get("dropout_rate"), "this benchmark uses neither"
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="cudnn")


class Block(nnx.Module):
    """Norm, causal attention, norm, two dense layers; both added to their input."""

    def __init__(self, size: Size, attention: str, dtype: Any, rngs: nnx.Rngs):
        make = MultiHeadAttention if attention == "jax_fa4" else nnx.MultiHeadAttention
        options = {"attention_fn": cudnn} if attention == "cudnn" else {}
        self.norm_attention = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.attention = make(size.heads, size.width, dtype=dtype, use_bias=False, decode=False, rngs=rngs, **options)
        self.norm_hidden = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(size.width, 4 * size.width, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * size.width, size.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.norm_hidden(x))))


class Model(nnx.Module):
    """int [b, t] -> float32 logits [b, t, vocabulary]; positions are learned."""

    def __init__(self, size: Size, length: int, attention: str, dtype: Any, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(size.vocabulary, size.width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(length, size.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(size, attention, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.readout = nnx.Linear(size.width, size.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x)).astype(jnp.float32)


def make(size: Size, length: int, attention: str, dtype: Any) -> tuple[Any, Any]:
    """(loss(parameters, int [b, t + 1]), parameters), the same parameters for every attention."""
    graph, parameters = nnx.split(Model(size, length, attention, dtype, nnx.Rngs(0)), nnx.Param)

    def loss(parameters: Any, window: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, parameters)(window[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

    return loss, parameters


def timed(run: Any, repeats: int) -> dict[str, float]:
    """Seconds of `run()`, waited for each time: the first call apart, then two to warm up, then `repeats`."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    first = time.perf_counter() - began
    samples = []
    for i in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(run())
        if i >= 2:
            samples.append(time.perf_counter() - began)
    return {"first_s": first, "median_s": statistics.median(samples), "min_s": min(samples), "max_s": max(samples)}


def step_time(size: Size, length: int, batch: int, attention: str, dtype: Any, repeats: int) -> dict[str, Any]:
    """Times of loss and gradients, and of the loss alone, at one length."""
    loss, parameters = make(size, length, attention, dtype)
    window = jnp.asarray(np.random.default_rng(0).integers(0, size.vocabulary, (batch, length + 1)), jnp.int32)
    both = jax.jit(jax.value_and_grad(loss)).lower(parameters, window).compile()
    forward = jax.jit(loss).lower(parameters, window).compile()
    memory = both.memory_analysis()
    return {
        "forward_backward": timed(functools.partial(both, parameters, window), repeats),
        "forward": timed(functools.partial(forward, parameters, window), repeats),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
    }


def loss_curve(size: Size, length: int, batch: int, attention: str, dtype: Any, steps: int) -> list[float]:
    """Losses of `steps` steps of AdamW on the text of the examples, same windows for every attention."""
    loss, parameters = make(size, length, attention, dtype)
    rate = optax.warmup_cosine_decay_schedule(3e-5, 3e-4, max(1, steps // 10), max(2, steps), 3e-5)
    optimise = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))
    state = jax.jit(optimise.init)(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, window: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, window)
        updates, state = optimise.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    data = textdata.batches(textdata.load().train, batch, length, seed=0)
    losses = []
    for _ in range(steps):
        parameters, state, value = step(parameters, state, jnp.asarray(next(data)))
        losses.append(value)
    return [float(x) for x in losses]


def attempt(what: str, run: Any) -> Any:
    """The result, or {"error": text}; what fails is said at once."""
    began = time.perf_counter()
    try:
        result = run()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:2000]}
    note = f"failed: {result['error'][:200]}" if isinstance(result, dict) and "error" in result else "done"
    print(f"{what}: {note} ({time.perf_counter() - began:.1f} s)", file=sys.stderr, flush=True)
    return result


def compare_curves(curves: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Distance of each curve from that of jax_fa4: the largest at a step, and between means of the last tenth.

    The tolerance binds the second: single steps drift apart once roundings differ, as any two right attentions' do.
    """
    good = {name: np.asarray(x) for name, x in curves.items() if isinstance(x, list)}
    if "jax_fa4" not in good:
        return {"ok": False, "reason": "jax_fa4 has no curve"}
    ours = good["jax_fa4"]
    tail = max(1, len(ours) // 10)
    out: dict[str, Any] = {"tolerance": tolerance, "finite": bool(np.isfinite(ours).all()), "against": {}}
    for name, x in good.items():
        if name != "jax_fa4":
            out["against"][name] = {
                "largest_at_a_step": float(np.abs(ours - x).max()),
                "first_step": float(abs(ours[0] - x[0])),
                "end": float(abs(ours[-tail:].mean() - x[-tail:].mean())),
            }
    out["ok"] = out["finite"] and all(d["end"] <= tolerance for d in out["against"].values())
    return out


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; --toy changes the defaults of what is not given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of the results, JSON")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sequence (default 2048 8192; toy 64 128)")
    parser.add_argument("--tokens", type=int, help="tokens of a step, batch = tokens / length (default 16384; toy 256)")
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--repeats", type=int, help="timed steps (default 20; toy 2)")
    parser.add_argument("--curve-steps", type=int, help="steps of the loss curve, 0 = none (default 200; toy 8)")
    parser.add_argument("--curve-length", type=int, help="tokens of a sequence there (default 1024; toy 32)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="nats between the ends of two curves")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="(default bfloat16; toy float32)")
    options = parser.parse_args(argv)
    toy = {"lengths": [64, 128], "tokens": 256, "repeats": 2, "curve_steps": 8, "curve_length": 32, "dtype": "float32"}
    full = {"lengths": [2048, 8192], "tokens": 16384, "repeats": 20, "curve_steps": 200, "curve_length": 1024}
    for name, default in (toy if options.toy else full | {"dtype": "bfloat16"}).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def main(argv: list[str] | None = None) -> int:
    """0 when jax_fa4 ran everything and its loss curve ends where the others' do."""
    o = arguments(argv)
    size = Size(layers=2, width=32, heads=2) if o.toy else Size()
    dtype = jnp.dtype(o.dtype)
    device = jax.devices()[0]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"), "device": device.device_kind, "platform": device.platform,
        "python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__,
        "jax_fa4": jax_fa4.__version__, "size": dataclasses.asdict(size), "dtype": o.dtype, "tokens": o.tokens,
        "steps": {}, "curves": {},
    }  # fmt: skip

    def keep() -> None:
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps(result, indent=1))

    depth = size.width // size.heads
    for length in o.lengths:
        batch = max(1, o.tokens // length)
        q = jax.ShapeDtypeStruct((batch, length, size.heads, depth), dtype)
        row = result["steps"][str(length)] = {
            "batch": batch,
            "runs": jax_fa4.implementation_used(q, q, q, is_causal=True),
        }
        for name in o.attentions:
            what = f"{length} tokens, {name}"
            row[name] = attempt(what, lambda n=name: step_time(size, length, batch, n, dtype, o.repeats))  # noqa: B023
            keep()
    if o.curve_steps:
        batch = max(1, o.tokens // o.curve_length)
        for name in o.attentions:
            run = functools.partial(loss_curve, size, o.curve_length, batch, name, dtype, o.curve_steps)
            result["curves"][name] = attempt(f"{o.curve_steps} steps, {name}", run)
            keep()
        result["comparison"] = compare_curves(result["curves"], o.tolerance)
        keep()
    show(result)
    ours = [row.get("jax_fa4", {}) for row in result["steps"].values()]
    return int(any("error" in x for x in ours) or not result.get("comparison", {"ok": True})["ok"])


def show(result: dict[str, Any]) -> None:
    """The numbers as a table on stdout."""
    print(f"{result['device']}, jax {result['jax']}, flax {result['flax']}, {result['dtype']}")
    for length, row in result["steps"].items():
        print(f"{length} tokens x {row['batch']}: jax_fa4 runs {row['runs']}")
        for name in ATTENTIONS:
            if name not in row:
                continue
            if "error" in row[name]:
                print(f"  {name:8} {row[name]['error'].splitlines()[0][:100]}")
            else:
                both, forward = (row[name][k]["median_s"] * 1e3 for k in ("forward_backward", "forward"))
                print(f"  {name:8} {both:10.2f} ms forward and backward, {forward:10.2f} ms forward")
    if "comparison" in result:
        print(f"loss curves: {json.dumps(result['comparison'])}")


if __name__ == "__main__":
    sys.exit(main())
