"""A process of its own for tests on a GPU: python gpu_child.py [DEVICE]. Prints digests of what it computed, as JSON.

The first call of the process is inside a jitted function; gradients are deterministic, so that digests compare.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4

CALL = functools.partial(jax_fa4.attention, is_causal=True, implementation="fa4", deterministic=True)


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    """The same numbers in every process, whatever its settings."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(jnp.bfloat16) for shape in shapes]


def digest(*results: Any) -> str:
    found = hashlib.sha256()
    for x in results:
        x = np.asarray(x)
        assert np.isfinite(x.astype(np.float32)).all()
        found.update(f"{x.shape}{x.dtype}".encode() + x.tobytes())
    return found.hexdigest()


def gradients(q: Any, k: Any, v: Any, dout: Any, scale: Any = None) -> Any:
    out, back = jax.vjp(lambda *x: CALL(*x, scale=scale), q, k, v)
    return out, *back(dout)


def layers(x: Any, k: Any, v: Any) -> Any:
    """Eight layers: a loop that XLA may take into one graph, with its gradient."""

    def loss(x: Any) -> Any:
        last, _ = jax.lax.scan(lambda c, _: (c + CALL(c, k, v), None), x, length=8)
        return (last.astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss)(x)


def decoded(q: Any, k: Any, v: Any) -> Any:
    """One query a step, with elementwise work around it."""
    for n in range(1, 5):
        q = q + CALL(q, k, v, key_value_seq_lengths=jnp.array([200 * n, 7]), causal_alignment="bottom_right")
    return q


def work() -> dict[str, str]:
    q, k, v, dout = arrays((2, 300, 8, 128), (2, 300, 2, 128), (2, 300, 2, 128), (2, 300, 8, 128))
    found = {}
    run = jax.jit(gradients)
    found["first call, jitted"] = digest(*run(q, k, v, dout))
    for _ in range(5):
        assert digest(*run(q, k, v, dout)) == found["first call, jitted"], "a repeat differs"
    found["eager"] = digest(*gradients(q, k, v, dout))
    found["numpy scale"] = digest(*jax.jit(functools.partial(gradients, scale=np.float64(0.1)))(q, k, v, dout))
    found["eight layers"] = digest(*jax.jit(layers)(q, k, v))
    one, long, more = arrays((2, 1, 8, 128), (2, 900, 2, 128), (2, 900, 2, 128), seed=1)
    found["decoding"] = digest(jax.jit(decoded)(one, long, more))
    empty = jax.jit(lambda x: CALL(x[:, :0], x, x))(q)
    found["no queries"] = digest(empty, jax.jit(lambda x: x + 1)(empty))
    return found


if __name__ == "__main__":
    device = jax.devices()[int(sys.argv[1])] if len(sys.argv) > 1 else jax.devices()[0]
    with jax.default_device(device):
        print("RESULT " + json.dumps(work()))
