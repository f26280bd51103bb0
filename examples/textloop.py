"""Training, evaluation and sampling of any `apply(weights, tokens) -> logits`: knows neither the model nor the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

Apply = Callable[[Any, jax.Array], jax.Array]  # weights, int [b, t] -> float32 [b, t, vocabulary]


@dataclass
class History:
    """What a run leaves behind. Seconds and tokens leave out the first step, which compiles."""

    losses: list[float] = field(default_factory=list)  # nats per token, one a step
    seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")


class Keeper(Protocol):
    """Where a run's checkpoints go; see textsave."""

    every: int

    def restore(self, weights: Any, state: Any) -> tuple[Any, Any, list[float]]: ...

    def save(self, weights: Any, state: Any, losses: list[float]) -> None: ...


def loss_of(apply: Apply, weights: Any, window: jax.Array) -> jax.Array:
    """Mean nats per token of int [b, t + 1], every token but the first predicted from those before it."""
    logits = apply(weights, window[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


def optimiser(steps: int, peak: float = 3e-3) -> optax.GradientTransformation:
    """AdamW with a warm-up of a tenth of the run (at most 50 steps) and a cosine down to a tenth of the peak."""
    rate = optax.warmup_cosine_decay_schedule(0.1 * peak, peak, max(1, min(50, steps // 10)), max(2, steps), 0.1 * peak)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))


def make_step(apply: Apply, optimise: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """The compiled step: (weights, state, int [b, t + 1]) -> (weights, state, loss)."""

    @jax.jit
    def step(weights: Any, state: Any, window: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda w: loss_of(apply, w, window))(weights)
        updates, state = optimise.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return step


def fit(
    apply: Apply,
    weights: Any,
    data: Iterator[np.ndarray],
    steps: int,
    keeper: Keeper | None = None,
    stop: int | None = None,
) -> tuple[Any, History]:
    """`steps` steps over `data`, progress bar on stderr. A loss that is not finite raises FloatingPointError.

    With a keeper the run goes on after its newest checkpoint, and leaves one every `keeper.every` steps and at the end.
    `stop` ends it after that many steps, counted from its first start, as an interruption would.
    """
    optimise = optimiser(steps)
    step, state, history = make_step(apply, optimise), optimise.init(weights), History()
    if keeper is not None:
        weights, state, history.losses = keeper.restore(weights, state)
    done, last = len(history.losses), steps if stop is None else min(stop, steps)
    for _ in range(done):
        next(data)
    with tqdm(total=steps, initial=done, desc="training", unit="step") as bar:
        for i in range(done, last):
            window = next(data)
            began = time.perf_counter()
            weights, state, loss = step(weights, state, jnp.asarray(window))
            history.losses.append(float(loss))  # waits for the device
            if i > done:
                history.seconds += time.perf_counter() - began
                history.tokens += window[:, 1:].size
            if not np.isfinite(history.losses[-1]):
                raise FloatingPointError(f"the loss of step {i} is {history.losses[-1]}")
            if keeper is not None and ((i + 1) % keeper.every == 0 or i + 1 == steps):
                keeper.save(weights, state, history.losses)
            bar.update()
            bar.set_postfix_str(
                f"loss {history.losses[-1]:.3f}, {history.tokens_per_second:,.0f} tokens/s", refresh=False
            )
    return weights, history


def evaluate(apply: Apply, weights: Any, windows: np.ndarray, batch: int) -> float:
    """Mean nats per token over all of int [n, t + 1], `batch` windows at a time."""
    sums = jax.jit(lambda w, x: loss_of(apply, w, x) * x.shape[0])
    parts: Iterable[np.ndarray] = (windows[i : i + batch] for i in range(0, len(windows), batch))
    return sum(float(sums(weights, jnp.asarray(p))) for p in parts) / len(windows)


def sample(apply: Apply, weights: Any, prompt: np.ndarray, count: int, temperature: float, seed: int) -> np.ndarray:
    """`count` tokens after `prompt` int [n], drawn at `temperature`; one compiled loop over a buffer of n + count.

    Each draw reads the logits of the last token so far; what stands after it in the buffer is hidden by causality.
    """
    n = len(prompt)
    if n == 0:
        raise ValueError("the prompt must hold at least one token")
    buffer = jnp.zeros((1, n + count), jnp.int32).at[0, :n].set(jnp.asarray(prompt))

    @jax.jit
    def run(weights: Any, buffer: jax.Array, key: jax.Array) -> jax.Array:
        def draw(i: jax.Array, buffer: jax.Array) -> jax.Array:
            logits = apply(weights, buffer)[0, i - 1]
            return buffer.at[0, i].set(jax.random.categorical(jax.random.fold_in(key, i), logits / temperature))

        return jax.lax.fori_loop(n, n + count, draw, buffer)

    return np.asarray(run(weights, buffer, jax.random.key(seed)))[0, n:]
