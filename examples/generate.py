"""Continues a prompt token by token with the key and value cache of jax_fa4's Flax modules.

    python examples/train_text.py --api nnx --checkpoint runs/nnx       # trains, and keeps the weights
    python examples/generate.py --api nnx --checkpoint runs/nnx --prompt "The statement"

The prompt goes into the cache in one step, then each token in one of its own, all in one compiled program. Without a
checkpoint the weights are those before training, and the text is noise. With --check the logits of every step are
compared with those of one pass over the whole text; exits with status 1 when they differ.
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
import numpy as np
import textdata
import textflax
import textloop
import textsave


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=("linen", "nnx"), default="nnx", help="default %(default)s")
    parser.add_argument("--checkpoint", type=Path, help="folder that train_text.py --checkpoint wrote")
    parser.add_argument("--prompt", default="The statement", help="default %(default)r")
    parser.add_argument("--count", type=int, default=200, help="bytes to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 = the likeliest byte (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare with one pass over the whole text")
    options = parser.parse_args(argv)
    if options.count < 1 or options.temperature < 0 or not options.prompt:
        parser.error("--count must be at least 1, --temperature at least 0, and --prompt must not be empty")
    return options


def generate(text: textflax.Text, weights: Any, prompt: np.ndarray, o: argparse.Namespace) -> tuple[Any, Any]:
    """(tokens int [count], the logits they were drawn from [count, vocabulary]) after a prompt int [n]."""

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        if o.temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        return jax.random.categorical(key, logits / o.temperature).astype(jnp.int32)

    @jax.jit
    def run(weights: Any, prompt: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, o.count)
        cache, logits = text.step(weights, text.cache(weights, 1), prompt[None])
        first = logits[0, -1]

        def one(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[tuple[Any, jax.Array], Any]:
            cache, token = carry
            cache, logits = text.step(weights, cache, token[None, None])
            new = draw(logits[0, -1], key)
            return (cache, new), (new, logits[0, -1])

        token = draw(first, keys[0])
        _, (tokens, rest) = jax.lax.scan(one, (cache, token), keys[1:])
        return jnp.concatenate([token[None], tokens]), jnp.concatenate([first[None], rest])

    compiled = run.lower(weights, prompt, jax.random.key(o.seed)).compile()
    began = time.perf_counter()
    tokens, logits = jax.block_until_ready(compiled(weights, prompt, jax.random.key(o.seed)))
    print(f"{o.count} bytes in {time.perf_counter() - began:.3f} s, after compiling", file=sys.stderr)
    return tokens, logits


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when --check finds a difference."""
    o = arguments(argv)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    settings = {} if o.checkpoint is None else json.loads((o.checkpoint / "settings.json").read_text())
    size = textflax.Size(length=settings.get("places", textflax.Size.length))
    text = textflax.model(o.api, size, dtype)
    weights = text.init(jax.random.key(o.seed))
    prompt = textdata.encode(o.prompt)
    if prompt.size + o.count > size.length:
        print(
            f"a prompt of {prompt.size} bytes and {o.count} more do not fit into {size.length} places", file=sys.stderr
        )
        return 2
    if o.checkpoint is None:
        print("no --checkpoint: these weights know nothing yet", file=sys.stderr)
    else:
        if settings["api"] != o.api:
            print(f"{o.checkpoint} was trained with --api {settings['api']}, not {o.api}", file=sys.stderr)
            return 2
        kept = textsave.Checkpoints(o.checkpoint, 0, settings)
        weights, _, losses = kept.restore(weights, textloop.optimiser(settings["steps"]).init(weights))
        print(f"weights after {kept.latest} steps, loss {losses[-1]:.3f}", file=sys.stderr)

    tokens, logits = generate(text, weights, jnp.asarray(prompt), o)
    print(o.prompt + textdata.decode(tokens))
    if not o.check:
        return 0
    whole = jnp.concatenate([jnp.asarray(prompt), tokens])[None, :-1]
    expected = jax.jit(text.apply)(weights, whole)[0, prompt.size - 1 :]
    worst = float(jnp.abs(expected - logits).max())
    # Roundings differ between one product over all tokens and a product for each.
    allowed = (5e-2 if dtype == jnp.bfloat16 else 1e-4) * max(1.0, float(jnp.abs(expected).max()))
    print(f"largest difference from one pass: {worst:.2e}, allowed {allowed:.2e}", file=sys.stderr)
    return int(not worst <= allowed)


if __name__ == "__main__":
    sys.exit(main())
