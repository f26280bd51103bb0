"""The text model of train_text.py on a data x model mesh: by jit and shardings, and by shard_map, as on one device.

Examples are cut over `data`, heads and hidden units over `model`. The three loss curves must be equal to rounding; the
exit status is 1 when they are not. Runs on any number of GPUs, or on eight virtual CPU devices.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

if "XLA_FLAGS" not in os.environ:  # eight virtual CPU devices; changes nothing on GPUs
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import textdata
import textloop
import textmodel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

COLUMNS, ROWS = P(None, "model"), P("model")  # of a matrix [in, out]: out cut, in cut
LAYER = {"query": COLUMNS, "key": COLUMNS, "value": COLUMNS, "out": ROWS, "up": COLUMNS, "down": ROWS}
Step = Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]


def specs_of(weights: Any) -> Any:
    """Where each weight lies: matrices of attention and of the hidden layer are cut over `model`, the rest is whole."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: LAYER.get(path[-1].key, P()) if len(path) > 1 else P(), weights
    )


def state_specs(optimise: optax.GradientTransformation, weights: Any, specs: Any) -> Any:
    """Where the optimiser's state lies: moments like their weights, counters whole."""
    state = jax.eval_shape(optimise.init, weights)
    return optax.tree_map_params(optimise, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())


def by_jit(apply: Any, optimise: Any, mesh: Any, specs: Any, states: Any) -> Step:
    """The plain step; shardings of weights and data are all that is said."""
    put = partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    return jax.jit(
        textloop.make_step(apply, optimise),
        in_shardings=(put(specs), put(states), NamedSharding(mesh, P("data"))),
        out_shardings=(put(specs), put(states), NamedSharding(mesh, P())),
    )


def by_shard_map(size: textmodel.Size, dtype: Any, optimise: Any, mesh: Any, specs: Any, states: Any) -> Step:
    """The step of one device's share, with the sums over devices written out."""
    parts = mesh.shape["model"]
    share = textmodel.Size(
        size.vocabulary, size.width, size.layers, size.heads // parts, size.key_heads // parts, size.depth,
        size.hidden // parts,
    )  # fmt: skip

    def loss_of(weights: Any, window: jax.Array) -> jax.Array:
        """Mean over all data shares of the loss of this share's examples."""
        logits = apply_share(weights, window[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()
        return jax.lax.pmean(loss, "data")

    def apply_share(weights: Any, tokens: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda a: a.astype(dtype), weights)
        x = w["embedding"][tokens]
        for layer in w["layers"]:
            normed = textmodel.rms_norm(x, layer["norm_attention"])
            x = x + jax.lax.psum(textmodel.attention_block(layer, normed, share, textmodel.causal_attention), "model")
            hidden = jax.nn.gelu(textmodel.rms_norm(x, layer["norm_hidden"]) @ layer["up"])
            x = x + jax.lax.psum(hidden @ layer["down"], "model")
        return jnp.matmul(textmodel.rms_norm(x, w["norm"]), w["readout"], preferred_element_type=jnp.float32)

    gradient = jax.shard_map(
        jax.value_and_grad(loss_of), mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs)
    )

    @jax.jit
    def step(weights: Any, state: Any, window: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = gradient(weights, window)
        updates, state = optimise.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    del states
    return step


def curve(step: Step, weights: Any, state: Any, windows: list[np.ndarray]) -> list[float]:
    """Losses of the steps over `windows`."""
    losses = []
    for window in windows:
        weights, state, loss = step(weights, state, jnp.asarray(window))
        losses.append(float(loss))
    return losses


def main(argv: list[str] | None = None) -> int:
    """0 when the sharded curves are those of one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps of each curve (default %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens a window (default %(default)s)")
    options = parser.parse_args(argv)
    count = jax.device_count()
    model = 2 if count % 2 == 0 else 1
    mesh = jax.make_mesh((count // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    size = textmodel.Size(heads=4, key_heads=2, width=64, hidden=256, layers=2)
    text = textdata.load()
    data = textdata.batches(text.train, 2 * count // model, options.length, 0)
    windows = [next(data) for _ in range(options.steps)]
    weights = textmodel.init(jax.random.key(0), size)
    apply = partial(textmodel.apply, size=size, dtype=dtype)
    optimise = textloop.optimiser(options.steps)
    specs = specs_of(weights)
    states = state_specs(optimise, weights, specs)
    print(f"{count} devices ({jax.devices()[0].device_kind}): data {count // model} x model {model}")

    one = curve(textloop.make_step(apply, optimise), weights, optimise.init(weights), windows)
    put = partial(jax.tree.map, lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    start = put(weights, specs), put(optimise.init(weights), states)
    ways = {
        "jit": by_jit(apply, optimise, mesh, specs, states),
        "shard_map": by_shard_map(size, dtype, optimise, mesh, specs, states),
    }
    print(f"{'one device':<12} loss {one[0]:.4f} -> {one[-1]:.4f}")
    worst = 0.0
    for name, step in ways.items():
        losses = curve(step, *start, windows)
        off = max(abs(a - b) for a, b in zip(losses, one, strict=True))
        worst = max(worst, off)
        print(f"{name:<12} loss {losses[0]:.4f} -> {losses[-1]:.4f}, off from one device by at most {off:.1e}")
    allowed = 5e-2 if dtype == jnp.bfloat16 else 2e-3
    if not (worst <= allowed and one[-1] < one[0]):
        print(f"FAILED: the curves differ by {worst:.1e} (allowed {allowed:.0e}), or do not fall", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
