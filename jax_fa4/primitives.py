"""The two primitives fa4_fwd and fa4_bwd: abstract evaluation, batching by folding, and one lowering a platform.

On cuda they lower to kernels where a plan exists, everywhere else to the XLA path, so that one jaxpr runs anywhere.
Operands are flat, in the order of `reference.Operands`; optional ones are there when the spec says so.
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

from jax_fa4 import kernels, reference, sharding
from jax_fa4.reference import Operands
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

# Axis 0 of these is the batch; it is where vmap folds to.
BATCH_FIRST = ("query", "key", "value", "offset", "q_len", "kv_len", "q_segments", "kv_segments")
SCORES_LIKE = ("bias", "mask")  # axis 0 is the batch or 1
UNBATCHED = ("window", "scale", "soft_cap", "sinks")  # no batch to fold into
REQUIRED = Operands._fields[:9]


@dataclass(frozen=True)
class How:
    """Everything static about a call."""

    spec: AttentionSpec
    implementation: tuple[str, ...] = ("fa4", "xla")
    arch: str | None = None  # None: the arch of the devices that run it


def present(spec: AttentionSpec) -> tuple[str, ...]:
    """Names of the operands that a call of this spec has, in order."""
    extra = {"q_segments": spec.segments, "kv_segments": spec.segments, "sinks": spec.sinks}
    extra |= {"bias": spec.bias, "mask": spec.mask}
    return REQUIRED + tuple(name for name, there in extra.items() if there)


def flatten(ops: Operands, spec: AttentionSpec) -> list[Any]:
    return [getattr(ops, name) for name in present(spec)]


def unflatten(flat: Sequence[Any], spec: AttentionSpec) -> Operands:
    return Operands(**dict.fromkeys(Operands._fields) | dict(zip(present(spec), flat, strict=True)))


def problem_of(query: Any, key: Any, value: Any, spec: AttentionSpec, direction: str) -> Problem:
    """The Problem of arrays or abstract values of folded shape [B, T, N, D]."""
    b, t, n, d = query.shape
    _, s, k, _ = key.shape
    return Problem(spec, b, t, s, n, k, d, value.shape[-1], jnp.dtype(query.dtype).name, direction)


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
        return kernels.select(problem, arch)
    except Unsupported as reason:
        if not xla_after:
            raise
        warn_once(f"jax_fa4: the {problem.direction} pass runs in XLA on this GPU, because {reason}")
        return None


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
    """out [B, T, N, V] in the query's dtype and lse [B, N, T] (float32, or float64 for float64)."""
    out, lse = fwd_p.bind(*sharding.vary(flatten(ops, how.spec)), how=how)
    return out, lse


def backward(ops: Operands, how: How, saved: tuple[Any, Any], cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """(dq, dk, dv, dbias or None) from the saved (out, lse) and the cotangents (dout, dlse)."""
    flat = sharding.vary([*flatten(ops, how.spec), *saved, *cotangents])
    grads = bwd_p.bind(*flat, how=how)
    return (*grads, None)[:4]


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
    ops = unflatten(flat_ops, how.spec)
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
    with jax.named_scope(f"fa4_{plan.direction}_{plan.arch}_d{plan.depth}"):
        return call.call(plan, call.compiled(plan), operands, {"B": b, "T": t, "S": s, "N": n, "K": k})


# ---- abstract evaluation -------------------------------------------------------------------------------------------


def _fwd_abstract(*avals: Any, how: How) -> list[Any]:
    ops = unflatten(avals, how.spec)
    b, t, n, _ = ops.query.shape
    out = ((b, t, n, ops.value.shape[-1]), ops.query.dtype)
    return sharding.forward_avals(ops, out, ((b, n, t), ops.scale.dtype))


def _bwd_abstract(*avals: Any, how: How) -> list[Any]:
    ops = unflatten(avals[: len(present(how.spec))], how.spec)
    return sharding.backward_avals(ops)


fwd_p.def_abstract_eval(_fwd_abstract)
bwd_p.def_abstract_eval(_bwd_abstract)


# ---- differentiation: only through custom_vjp ----------------------------------------------------------------------


def _no_derivative(what: str) -> Callable[..., Any]:
    def rule(*_: Any, **__: Any) -> Any:
        raise TypeError(
            f"jax_fa4: {what} is not offered; first derivatives in reverse mode (grad, vjp, jacrev) are. For others use"
            " jax.nn.dot_product_attention"
        )

    return rule


ad.primitive_jvps[fwd_p] = _no_derivative("forward-mode differentiation (jvp, jacfwd)")
ad.primitive_jvps[bwd_p] = _no_derivative("a second derivative (grad of grad, hessian)")


# ---- batching: fold into the batch ---------------------------------------------------------------------------------


def _fold(name: str, x: Any, dim: int | None, size: int, batch: int) -> Any:
    """[..., m at `dim`, ...] -> axis 0 of length m * B; what is not mapped is repeated, save a broadcast axis."""
    if dim is None:
        if name in SCORES_LIKE and x.shape[0] == 1:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    else:
        x = jnp.moveaxis(x, dim, 0)
    if name in SCORES_LIKE and x.shape[1] != batch:
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _batch(prim: Primitive, names: Callable[[AttentionSpec], tuple[str, ...]], args: Any, dims: Any, how: How) -> Any:
    spec = how.spec
    called = names(spec)
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    query = called.index("query")
    batch = args[query].shape[0] if dims[query] is None else jnp.moveaxis(args[query], dims[query], 0).shape[1]
    mapped = {name for name, d in zip(called, dims, strict=True) if d is not None}
    shared_bias = prim is bwd_p and spec.bias and _leading(args, dims, called, "bias") != batch
    if mapped & set(UNBATCHED) or (shared_bias and batch != 1):
        return _batch_by_loop(prim, args, dims, how)
    folded = []
    for name, x, d in zip(called, args, dims, strict=True):
        if name in UNBATCHED:
            folded.append(x)
        elif name == "bias" and shared_bias and d is None:  # batch == 1: each mapped example gets its own dbias
            folded.append(jnp.broadcast_to(x, (size, *x.shape[1:])))
        else:
            folded.append(_fold(name, x, d, size, batch))
    results = prim.bind(*folded, how=how)
    return [r.reshape(size, r.shape[0] // size, *r.shape[1:]) for r in results], [0] * len(results)


def _leading(args: Any, dims: Any, called: tuple[str, ...], name: str) -> int:
    x, d = args[called.index(name)], dims[called.index(name)]
    shape = list(x.shape)
    if d is not None:
        del shape[d]
    return shape[0]


def _batch_by_loop(prim: Primitive, args: Any, dims: Any, how: How) -> Any:
    """One call after the other, for what has no batch axis to fold into: mapped sinks, scale, window; a shared bias."""
    moved = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def one(mapped: list[Any]) -> list[Any]:
        left = iter(mapped)
        return prim.bind(*[x if d is None else next(left) for x, d in zip(args, dims, strict=True)], how=how)

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


def _bwd_names(spec: AttentionSpec) -> tuple[str, ...]:
    return (*present(spec), "out", "lse", "dout", "dlse")


batching.primitive_batchers[fwd_p] = functools.partial(_batch, fwd_p, present)
batching.primitive_batchers[bwd_p] = functools.partial(_batch, bwd_p, _bwd_names)


# ---- lowering ------------------------------------------------------------------------------------------------------


def _lowerings(direction: str, here: Callable[..., Any], kernel: Callable[..., Any]) -> tuple[Any, Any]:
    def xla(ctx: Any, *args: Any, how: How) -> Any:
        if "xla" not in how.implementation:
            raise Unsupported(
                "implementation='fa4' needs a CUDA device; this computation is lowered for"
                f" {', '.join(ctx.module_context.platforms)}. implementation=None or 'xla' runs everywhere"
            )
        return mlir.lower_fun(functools.partial(here, how=how), multiple_results=True)(ctx, *args)

    def cuda(ctx: Any, *args: Any, how: How) -> Any:
        problem = problem_of(*ctx.avals_in[:3], how.spec, direction)
        plan = choose(problem, how, how.arch or device_arch())
        if plan is None:
            return xla(ctx, *args, how=replace(how, implementation=("xla",)))
        return mlir.lower_fun(functools.partial(kernel, how=how, plan=plan), multiple_results=True)(ctx, *args)

    return xla, cuda


def _register(prim: Primitive, direction: str, here: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    jitted = jax.jit(lambda *args, how: prim.bind(*args, how=how), static_argnames="how")

    def impl(*args: Any, how: How) -> Any:
        return jitted(*args, how=how)

    xla, cuda = _lowerings(direction, here, kernel)
    prim.def_impl(impl)
    mlir.register_lowering(prim, xla)
    mlir.register_lowering(prim, cuda, platform="cuda")


_register(fwd_p, "fwd", _fwd_here, _fwd_kernel)
_register(bwd_p, "bwd", _bwd_here, _bwd_kernel)


def flops(problem: Problem) -> int:
    """Multiply-adds counted as two, full square of scores: 2 products forward, 5 backward."""
    pairs = math.prod((problem.b, problem.n, problem.t, problem.s))
    per_pair = problem.d + problem.v if problem.direction == "fwd" else 3 * problem.d + 2 * problem.v
    return 2 * pairs * per_pair
