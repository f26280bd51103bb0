"""Trains a small causal transformer on Python's own manual and compares it with a unigram model.

    python examples/train_text.py                 # 500 steps; about a minute on two idle CPU cores
    python examples/train_text.py --steps 2000 --batch 64 --length 512 --out runs/long     # for a GPU
    python examples/train_text.py --api nnx --checkpoint runs/nnx      # in Flax; run again, it goes on after a stop

Needs jax_fa4 with the `bench` extra and optax. On a GPU the products and the attention run in bfloat16, elsewhere in
float32. Exits with status 1 when the held-out loss does not beat the unigram model's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import textdata
import textloop
import textmodel

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PROMPT = "The statement"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="training steps (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot (default ./%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows a step (default %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens a window (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample (default %(default)s)")
    parser.add_argument(
        "--api",
        choices=("plain", "linen", "nnx"),
        default="plain",
        help="how the model is written (default %(default)s)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of checkpoints; a run that was stopped goes on from there"
    )
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--stop", type=int, help="end after so many steps, as if interrupted; needs --checkpoint")
    options = parser.parse_args(argv)
    if options.stop is not None and options.checkpoint is None:
        parser.error("--stop needs --checkpoint: else what was trained is lost")
    for name in ("steps", "batch", "length", "every", *(("stop",) if options.stop is not None else ())):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; it is {getattr(options, name)}")
    return options


def build(options: argparse.Namespace, dtype: Any) -> tuple[Any, Callable[..., jax.Array], dict[str, Any]]:
    """(weights, apply, the settings that a checkpoint of the run belongs to)."""
    key = jax.random.key(options.seed)
    settings = {n: getattr(options, n) for n in ("api", "steps", "batch", "length", "seed")} | {"dtype": dtype.name}
    if options.api == "plain":
        size = textmodel.Size()
        return textmodel.init(key, size), partial(textmodel.apply, size=size, dtype=dtype), settings
    import textflax  # Flax is needed here only

    places = max(options.length, textflax.Size.length)
    model = textflax.model(options.api, textflax.Size(length=places), dtype)
    return model.init(key), model.apply, settings | {"places": places}


def keeper_of(options: argparse.Namespace, settings: dict[str, Any]) -> textloop.Keeper | None:
    """The checkpoints, where a folder is given for them."""
    if options.checkpoint is None:
        return None
    import textsave  # so is orbax

    kept = textsave.Checkpoints(options.checkpoint, options.every, settings)
    if kept.latest:
        print(f"goes on after step {kept.latest} of {options.checkpoint}")
    return kept


def plot(path: Path, losses: list[float], held_out: float, unigram: float) -> None:
    """Training loss by step, with the held-out loss and the baseline as lines."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, 1 + len(losses)), losses, lw=1, label="training, one batch")
    axes.axhline(held_out, color="tab:green", ls="--", label=f"held out, after training: {held_out:.3f}")
    axes.axhline(unigram, color="tab:red", ls=":", label=f"unigram, held out: {unigram:.3f}")
    axes.set(xlabel="step", ylabel="nats per byte", title="jax_fa4: causal transformer on Python's manual")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """0 when the model beats the unigram baseline on held-out text, else 1."""
    options = arguments(argv)
    platform = jax.default_backend()
    dtype = jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32)
    text = textdata.load()
    unigram = textdata.unigram_loss(text, options.length)
    weights, apply, settings = build(options, dtype)

    # Both models have the same heads and depths.
    used = textmodel.implementation(textmodel.Size(), dtype, options.batch, options.length)
    print(f"attention: {used}; device: {jax.devices()[0].device_kind}; {dtype.name}")
    parameters = sum(a.size for a in jax.tree.leaves(weights))
    print(f"model: {parameters:,} parameters; text: {text.train.size:,} bytes + {text.held_out.size:,} held out")

    data = textdata.batches(text.train, options.batch, options.length, options.seed)
    weights, history = textloop.fit(apply, weights, data, options.steps, keeper_of(options, settings), options.stop)
    if len(history.losses) < options.steps:
        print(f"stopped after step {len(history.losses)} of {options.steps}, as --stop asks")
        return 0
    held_out = textloop.evaluate(apply, weights, textdata.windows(text.held_out, options.length), batch=32)
    print(f"training loss: {history.losses[0]:.3f} -> {history.losses[-1]:.3f} in {options.steps} steps", end="")
    print(f", {history.tokens_per_second:,.0f} tokens/s" if history.tokens else "")
    print(f"held-out loss: {held_out:.3f} nats per byte; unigram baseline: {unigram:.3f}")

    prompt = textdata.encode(PROMPT)
    drawn = textloop.sample(apply, weights, prompt, count=115, temperature=0.7, seed=options.seed)
    line = " ".join((PROMPT + textdata.decode(drawn)).split())
    print(f"sample: {line}")

    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "train_text.png"
    plot(picture, history.losses, held_out, unigram)
    print(f"plot: {picture}")
    if not held_out < unigram:
        print(
            f"FAILED: the held-out loss {held_out:.3f} does not beat the unigram baseline {unigram:.3f};"
            f" {options.steps} steps may be too few",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
