"""The attention calls that a JAX function makes: traced, never run; found in every jaxpr inside its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_fa4 import primitives
from jax_fa4.primitives import How
from jax_fa4.spec import Problem


class Call(NamedTuple):
    """One forward or backward pass in a traced function."""

    problem: Problem
    how: How
    times: int  # lengths of the scans around it, multiplied


def calls_in(fn: Callable[..., Any], *args: Any) -> list[Call]:
    """Every attention pass of `fn(*args)`, in the order of the jaxpr, also those that XLA will run.

    `args` may be arrays or `jax.ShapeDtypeStruct`s, in any pytree. Looked through: whatever holds a jaxpr (jit, scan,
    while, cond, custom_vjp, remat, shard_map, ...). Inside a shard_map the shapes are one device's. A backward pass is
    there only if `fn` differentiates: pass the gradient function or the training step, not the loss.
    """
    return list(_calls(jax.make_jaxpr(fn)(*args).jaxpr, 1))


def attention_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Floating point operations of all attention passes in `fn(*args)`, a multiply and an add counted as two.

    Each pass counts its full square of scores, whatever the mask: 2 b n t s (d + v) forward, 2 b n t s (3 d + 2 v)
    backward. A scan counts its length, every branch of a cond and the body of a while count once; inside a shard_map
    it is one device's share. XLA's own `cost_analysis()` cannot know a custom call: it counts each as -1.
    `jax.experimental.roofline.roofline(fn)(*args)` counts the same, and the bytes that the passes read and write.

    >>> attention_flops(jax.grad(loss), params, batch)
    """
    return sum(primitives.flops(call.problem) * call.times for call in calls_in(fn, *args))


def _calls(jaxpr: Jaxpr, times: int) -> Iterator[Call]:
    for eqn in jaxpr.eqns:
        if eqn.primitive in (primitives.fwd_p, primitives.bwd_p):
            direction = "fwd" if eqn.primitive is primitives.fwd_p else "bwd"
            query, key, value = (x.aval for x in eqn.invars[:3])
            how = eqn.params["how"]
            yield Call(primitives.problem_of(query, key, value, how.spec, direction), how, times)
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in _jaxprs(eqn.params.values()):
            yield from _calls(inner, inside)


def _jaxprs(params: Any) -> Iterator[Jaxpr]:
    for x in params:
        if isinstance(x, ClosedJaxpr):
            yield x.jaxpr
        elif isinstance(x, Jaxpr):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _jaxprs(x)


def _register_rooflines() -> None:
    """Tells jax's roofline what a pass costs: its products, and each operand and result moved once; scores never."""
    try:
        from jax.experimental import roofline
    except ImportError:  # experimental: a jax to come may lack it
        return

    def register(primitive: Any, direction: str) -> None:
        def rule(ctx: Any, *args: Any, how: How, devices: Any) -> Any:
            del devices
            query, key, value = args[:3]
            done = primitives.flops(primitives.problem_of(query, key, value, how.spec, direction))
            moved = roofline.RooflineShape.total_bytes([*ctx.avals_in, *ctx.avals_out])
            return roofline.RooflineResult(flops=done, unfused_flops=done, hbm_bytes=moved, unfused_hbm_bytes=moved)

        roofline.register_roofline(primitive)(rule)

    register(primitives.fwd_p, "fwd")
    register(primitives.bwd_p, "bwd")


_register_rooflines()
