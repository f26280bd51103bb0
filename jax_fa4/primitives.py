"""The two primitives fa4_fwd and fa4_bwd: abstract evaluation, batching by folding, and one lowering a platform.

On cuda they lower to kernels where a plan exists, everywhere else to the XLA path, so that one jaxpr runs anywhere.
Operands are flat, in the order of `reference.Operands`; optional ones are there when the spec says so. All may have any
number of leading axes (operands.AXES). On several devices the lowering goes through sharding.partitioned, unless the
code is inside a shard_map over all axes, or on a mesh with explicit axes, where the lowering makes that shard_map.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fa4 import kernels, operands, reference, sharding
from jax_fa4.kernels.common.parts import label
from jax_fa4.operands import UNBATCHED, flatten, names_in, unflatten
from jax_fa4.reference import Operands
from jax_fa4.spec import AttentionSpec, Problem, Unsupported


@dataclass(frozen=True)
class How:
    """Everything static about a call."""

    spec: AttentionSpec
    implementation: tuple[str, ...] = ("fa4", "xla")
    arch: str | None = None  # None: the arch of the devices that run it


def problem_of(query: Any, key: Any, value: Any, spec: AttentionSpec, direction: str) -> Problem:
    """The Problem of arrays or abstract values of shape [..., T, N, D]; all leading axes count as batch."""
    *lead, t, n, d = query.shape
    s, k = key.shape[-3:-1]
    return Problem(spec, math.prod(lead), t, s, n, k, d, value.shape[-1], jnp.dtype(query.dtype).name, direction)


def choose(problem: Problem, how: How, arch: str | None) -> Any:
    """The plan of a kernel for `problem` on `arch`, or None where XLA runs it; a reason is raised or warned of."""
    if "fa4" not in how.implementation:
        return None
    xla_after = "xla" in how.implementation[how.implementation.index("fa4") :]
    if how.implementation[0] == "xla":
        return None
    try:
        if arch is None:
            raise Unsupported(
                "no CUDA device is here to tell for which arch to build; set jax_fa4.config.update(arch='sm_90a') or"
                " 'sm_100a'"
            )
        plan = _at_hand(problem, arch)
        if arch in kernels.NEVER_RUN:
            warn_once(
                f"jax_fa4: the kernels for {arch} were emulated and in part verified, but have never run on such a GPU;"
                " check results against implementation='xla'"
            )
        return plan
    except Unsupported as reason:
        if not xla_after:
            raise
        warn_once(f"jax_fa4: the {problem.direction} pass runs in XLA on this GPU, because {reason}")
        return None


def _at_hand(problem: Problem, arch: str) -> Any:
    """The plan for these shapes; where a filled store lacks it and nothing can build it, another of this kind that is
    there. A store filled for a whole call has none for a device's part of it: fewer heads choose another, or one that
    no longer share keys."""
    from jax_fa4.ffi import call

    plan = kernels.select(problem, arch)
    what = call.missing(plan)
    if what is None:
        return plan
    kind = sorted(kernels.of_every_shape(problem, arch)[1:], key=lambda one: -one.t)  # the one for few queries last
    others = [kernels.select(problem, arch, any_shape=True), *(kernels.select(one, arch) for one in kind)]
    for other in dict.fromkeys(others):
        if other != plan and call.missing(other) is None:
            warn_once(
                f"jax_fa4: a slower kernel runs the {problem.direction} pass of shapes for which the store holds none:"
                f" {problem.t} queries, {problem.s} keys, {problem.n} and {problem.k} heads, batch {problem.b};"
                " precompile this problem too"
            )
            return other
    raise Unsupported(what)


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@functools.cache
def device_arch() -> str | None:
    """The arch of this process's CUDA devices, None where there are none; different ones are refused."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    found = {arch_of(d.compute_capability) for d in devices}
    if len(found) > 1:
        raise Unsupported(f"this process has CUDA devices of several archs, {sorted(found)}; make one kind visible")
    return found.pop() if found else None


def arch_of(capability: str) -> str:
    """'9.0' -> 'sm_90a'. Kernels use arch-specific instructions, hence the `a`, which exists from 9.0 on."""
    major, minor = str(capability).split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


# ---- forward -------------------------------------------------------------------------------------------------------

fwd_p = Primitive("fa4_fwd")
fwd_p.multiple_results = True
bwd_p = Primitive("fa4_bwd")
bwd_p.multiple_results = True


def forward(ops: Operands, how: How) -> tuple[Any, Any]:
    """out [..., T, N, V] in the query's dtype and lse [..., N, T] (float32, or float64 for float64)."""
    out, lse = _bind("fwd", *flatten(ops, how.spec), how=how)
    return out, lse


def backward(ops: Operands, how: How, saved: tuple[Any, Any], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """(dq, dk, dv, dbias or None) from the saved (out, lse) and the cotangents (dout, dlse)."""
    grads = _bind("bwd", *flatten(ops, how.spec), *saved, *cotangents, how=how)
    return (*grads, None)[:4]


def _bind(direction: str, *flat: Any, how: How) -> Sequence[Any]:
    prim = fwd_p if direction == "fwd" else bwd_p
    devices = None if sharding.placed_by_types(flat) else sharding.needs_devices()
    return prim.bind(*sharding.vary(flat), how=how, devices=devices)


def _fwd_here(*flat: Any, how: How) -> list[Any]:
    return list(reference.forward(unflatten(flat, how.spec), how.spec))


def _bwd_here(*flat: Any, how: How) -> list[Any]:
    *ops, out, lse, dout, dlse = flat
    grads = reference.backward(unflatten(ops, how.spec), how.spec, out, lse, dout, dlse)
    return [g for g in grads if g is not None]


def _fwd_kernel(*flat: Any, how: How, plan: Any) -> list[Any]:
    ops = unflatten(flat, how.spec)
    results = _run(plan, _kernel_operands(ops))
    return [results["out"], results["lse"]]


def _bwd_kernel(*flat: Any, how: How, plan: Any) -> list[Any]:
    *flat_ops, out, lse, dout, dlse = flat
    ops = unflatten(flat_ops, how.spec)._replace(sinks=None)  # lse holds the sink; its gradient is api's
    results = _run(plan, _kernel_operands(ops) | {"out": out, "lse": lse, "dout": dout, "dlse": dlse})
    return [results["dq"], results["dk"], results["dv"]]


def _kernel_operands(ops: Operands) -> dict[str, Any]:
    """Operands by the names of the plans' buffers; the run-time values go into the two value operands."""
    from jax_fa4.ffi import call

    # A traced scale that is not above 0 cannot be refused before the launch: it shows as NaN, not as a wrong result.
    scale = jnp.where(ops.scale > 0, ops.scale, jnp.nan)
    ints, floats = call.value_operands(ops.window, ops.q_len, ops.kv_len, ops.offset, scale, ops.soft_cap)
    named = {"q": ops.query, "k": ops.key, "v": ops.value, "ints": ints, "floats": floats}
    more = {"q_segments": ops.q_segments, "kv_segments": ops.kv_segments, "sinks": ops.sinks}
    return named | {name: x for name, x in more.items() if x is not None}


def _run(plan: Any, operands: dict[str, Any]) -> dict[str, Any]:
    from jax_fa4.ffi import call

    (b, t, n, _), (_, s, k, _) = operands["q"].shape, operands["k"].shape
    with jax.named_scope(label(plan)):
        return call.call(plan, call.compiled(plan), operands, {"B": b, "T": t, "S": s, "N": n, "K": k})


# ---- abstract evaluation -------------------------------------------------------------------------------------------


def _abstract(direction: str, *avals: Any, how: How, devices: Any) -> list[Any]:
    del devices
    named = dict(zip(names_in(how.spec, direction), avals, strict=True))
    shapes = operands.result_shapes({name: x.shape for name, x in named.items()}, how.spec, direction)
    dtypes = operands.result_dtypes({name: x.dtype for name, x in named.items()}, how.spec, direction)
    returned = zip(operands.names_out(how.spec, direction), shapes, dtypes, strict=True)
    return sharding.result_avals(named, list(returned))


fwd_p.def_abstract_eval(functools.partial(_abstract, "fwd"))
bwd_p.def_abstract_eval(functools.partial(_abstract, "bwd"))


# ---- differentiation: only through custom_vjp ----------------------------------------------------------------------


def _no_derivative(what: str) -> Callable[..., Any]:
    def rule(*_: Any, **__: Any) -> Any:
        raise TypeError(
            f"jax_fa4: {what} is not offered; first derivatives in reverse mode (grad, vjp, jacrev) are. For others use"
            " jax.nn.dot_product_attention"
        )

    return rule


ad.primitive_jvps[fwd_p] = _no_derivative("forward mode (jvp, jacfwd) or a second derivative (hessian, grad of grad)")
ad.primitive_jvps[bwd_p] = _no_derivative("a second derivative (hessian, grad of grad)")


# ---- batching: one more leading axis -------------------------------------------------------------------------------


def _with_axis(name: str, x: Any, dim: int | None, size: int, direction: str) -> Any:
    """`x` with the mapped axis first. What is not mapped is repeated, save what broadcasts or has no leading axes."""
    if name in UNBATCHED:
        return x
    if dim is not None:
        return jnp.moveaxis(x, dim, 0)
    if name == "mask" or (name == "bias" and direction == "fwd"):
        return x[None]
    return jnp.broadcast_to(x[None], (size, *x.shape))  # in the backward each mapped example has its own dbias


def _batch(prim: Primitive, direction: str, args: Any, dims: Any, *, how: How, devices: Any) -> Any:
    names = names_in(how.spec, direction)
    if any(d is not None for name, d in zip(names, dims, strict=True) if name in UNBATCHED):
        return _batch_by_loop(prim, args, dims, how=how, devices=devices)
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    mapped = [_with_axis(name, x, d, size, direction) for name, x, d in zip(names, args, dims, strict=True)]
    results = prim.bind(*mapped, how=how, devices=devices)
    return results, [0] * len(results)


def _batch_by_loop(prim: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """One call after the other, for what has no batch axis: mapped sinks, scale, window."""
    moved = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def one(mapped: list[Any]) -> list[Any]:
        left = iter(mapped)
        return prim.bind(*[x if d is None else next(left) for x, d in zip(args, dims, strict=True)], **params)

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


batching.primitive_batchers[fwd_p] = functools.partial(_batch, fwd_p, "fwd")
batching.primitive_batchers[bwd_p] = functools.partial(_batch, bwd_p, "bwd")


# ---- lowering ------------------------------------------------------------------------------------------------------


def _lowerings(direction: str, here: Callable[..., Any], kernel: Callable[..., Any]) -> tuple[Any, Any]:
    cut = sharding.partitioned(functools.partial(_bind, direction), direction)

    def cut_up(ctx: Any, how: How) -> Any:
        """The pass as shares that are lowered again, each for one device; None where this is one already."""
        run = sharding.over_explicit_mesh(
            functools.partial(_bind, direction, how=how), ctx.avals_in, how.spec, direction
        )
        if run is None and sharding.several_devices(ctx):
            sharding.refuse_export(ctx)
            run = functools.partial(cut, how)
        return run

    def lower(ctx: Any, args: Any, body: Callable[..., Any], how: How) -> Any:
        run = operands.folded(body, how.spec, direction)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

    def xla(ctx: Any, *args: Any, how: How, devices: Any) -> Any:
        del devices
        if "xla" not in how.implementation:
            raise Unsupported(
                "implementation='fa4' needs a CUDA device; this computation is lowered for"
                f" {', '.join(ctx.module_context.platforms)}. implementation=None or 'xla' runs everywhere"
            )
        if run := cut_up(ctx, how):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
        return lower(ctx, args, functools.partial(here, how=how), how)

    def cuda(ctx: Any, *args: Any, how: How, devices: Any) -> Any:
        if run := cut_up(ctx, how):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
        query, key, value = ctx.avals_in[:3]
        problem = problem_of(query, key, value, how.spec, direction)
        empty = 0 in (problem.b, problem.t, problem.s, problem.n)
        plan = None if empty else choose(problem, how, how.arch or device_arch())
        if plan is None:
            return xla(ctx, *args, how=replace(how, implementation=("xla",)), devices=devices)
        return lower(ctx, args, functools.partial(kernel, how=how, plan=plan), how)

    return xla, cuda


def _register(prim: Primitive, direction: str, here: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    jitted = jax.jit(lambda *args, **params: prim.bind(*args, **params), static_argnames=("how", "devices"))
    xla, cuda = _lowerings(direction, here, kernel)
    prim.def_impl(jitted)
    mlir.register_lowering(prim, xla)
    mlir.register_lowering(prim, cuda, platform="cuda")


_register(fwd_p, "fwd", _fwd_here, _fwd_kernel)
_register(bwd_p, "bwd", _bwd_here, _bwd_kernel)


def flops(problem: Problem) -> int:
    """Multiply-adds counted as two, full square of scores: 2 products forward, 5 backward."""
    pairs = math.prod((problem.b, problem.n, problem.t, problem.s))
    per_pair = problem.d + problem.v if problem.direction == "fwd" else 3 * problem.d + 2 * problem.v
    return 2 * pairs * per_pair
