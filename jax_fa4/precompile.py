"""precompile(): the kernels of given problems, or of a traced function, built into a store without a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax_fa4 import kernels, traced
from jax_fa4.config import config
from jax_fa4.ffi import bundle, store
from jax_fa4.ffi.store import Store
from jax_fa4.spec import Problem, Unsupported


class Refused(NamedTuple):
    """A pass that no kernel takes: XLA runs it, or `implementation="fa4"` raises."""

    problem: Problem
    arch: str
    reason: str


@dataclass(frozen=True)
class Precompiled:
    """What `precompile` did. `plans` and `entries` go together: a plan, and its line in the manifest."""

    store: Store
    plans: tuple[Any, ...]
    entries: tuple[bundle.Entry, ...]
    refused: tuple[Refused, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def __str__(self) -> str:
        lines = [f"{len(self.entries)} kernels, {self.bytes / 1e6:.1f} MB, in {self.store.home}"]
        lines += [f"no kernel: {describe(r.problem)} on {r.arch}: {r.reason}" for r in self.refused]
        return "\n".join(lines)


def precompile(
    problems_or_fn: Problem | Iterable[Problem] | Callable[..., Any],
    *args: Any,
    archs: str | Iterable[str],
    store: Store | str | Path | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Precompiled:
    """Builds the kernels that a program will need on `archs` and puts them into a store. Needs no GPU, runs nothing.

    A process that finds the store (JAX_FA4_STORE) and has the same version of jax_fa4 then compiles nothing, and needs
    no compiler. A kernel is right for every batch, length, window, scale and cap: only the kinds of things used, depths
    and dtype need another. Of a kind there may be several, of which the shapes decide the fastest: for few queries,
    few query tiles, long sequences. A call whose own is not in the store, as a device's part of a call that a mesh cuts
    may be, gets another of its kind, which is slower.

    Args:
      problems_or_fn: a JAX function, traced with `args` (arrays or `jax.ShapeDtypeStruct`s) as `jax.jit` would; its
        attention calls are collected. A function that does not differentiate has no backward pass: give the training
        step or `jax.grad(loss)`. An nnx module is one of `args`, not closed over. Or a `spec.Problem`, or several: all
        kernels that problems of its kind may get, whatever their shapes.
      archs: "sm_90a", "sm_100a", or several.
      store: a `Store`, a folder, or None for this process's (JAX_FA4_STORE, else the user's cache folder). What it has
        is not built again. For other hosts than this one's architecture: `Store([folder], host_target=...)`.
      jobs: processes at a time; one for each core by default.

    Returns:
      `Precompiled`: entries (bytes, seconds) and what was refused, with reasons. Calls with implementation="xla" are
      passed over.

    Raises:
      Unsupported: the function asks for implementation="fa4" where an arch has no kernel, as it would there.
      CompilerMissing: something is to be built, and the CuTe DSL is not installed.
      BundleError: some kernels could not be built; the others are in the store.

    >>> jax_fa4.precompile(train_step, params, batch, archs=["sm_90a", "sm_100a"], store="kernels")
    """
    archs = [archs] if isinstance(archs, str) else list(archs)
    plans, refused = plans_for(wanted(problems_or_fn, args, archs))
    return fill(plans, refused, as_store(store), jobs=jobs, progress=progress)


def wanted(problems_or_fn: Any, args: tuple[Any, ...], archs: list[str]) -> list[tuple[Problem, str]]:
    """(problem, arch), each once, in order."""
    unknown = [arch for arch in archs if arch not in kernels.ARCHITECTURES]
    if unknown or not archs:
        raise ValueError(f"archs must be of {', '.join(kernels.ARCHITECTURES)}; they are {archs}")
    found: list[tuple[Problem, str]] = []
    if isinstance(problems_or_fn, Problem) or not callable(problems_or_fn):
        problems = [problems_or_fn] if isinstance(problems_or_fn, Problem) else list(problems_or_fn)
        odd = [x for x in problems if not isinstance(x, Problem)]
        if odd or args:
            raise TypeError(f"precompile takes a function and its arguments, or problems; it was given {odd or args}")
        found = [(one, arch) for arch in archs for problem in problems for one in kernels.of_every_shape(problem, arch)]
    else:
        for arch in archs:
            with config(arch=arch):  # one trace an arch: implementation="fa4" is refused while tracing
                for call in traced.calls_in(problems_or_fn, *args):
                    if call.how.implementation[0] == "fa4":
                        found.append((call.problem, call.how.arch or arch))
    return list(dict.fromkeys(pair for pair in found if 0 not in (pair[0].b, pair[0].t, pair[0].s, pair[0].n)))


def plans_for(pairs: Iterable[tuple[Problem, str]]) -> tuple[list[Any], list[Refused]]:
    """The plans, each once, and what no kernel takes, one for each kind."""
    plans: dict[Any, None] = {}
    refused: dict[tuple[str, str, str], Refused] = {}
    for problem, arch in pairs:
        try:
            plans[kernels.select(problem, arch)] = None
        except Unsupported as reason:
            kind = (describe(problem), arch, str(reason))
            refused.setdefault(kind, Refused(problem, arch, str(reason)))
    return list(plans), list(refused.values())


def fill(
    plans: list[Any],
    refused: list[Refused],
    into: Store,
    *,
    jobs: int | None = None,
    progress: bool = True,
    builder: str | None = None,
) -> Precompiled:
    """Builds what the store lacks."""
    builder = bundle.BUILDER if builder is None else builder
    if builder.startswith("jax_fa4.") and any(into.find(plan) is None for plan in plans):
        _need_compiler()
    entries = bundle.precompile(plans, into, jobs=jobs, progress=progress, builder=builder)
    return Precompiled(into, tuple(plans), tuple(entries), tuple(refused))


def as_store(where: Store | str | Path | None) -> Store:
    """A folder as a store of its own; None as the process's."""
    if where is None:
        return store.default_store()
    return where if isinstance(where, Store) else Store([where])


def describe(problem: Problem) -> str:
    """The kind of a problem in words, without shapes: "forward bfloat16 D128 band+sinks"."""
    depth = f"D{problem.d}" if problem.d == problem.v else f"D{problem.d},{problem.v}"
    kinds = [name for name in problem.spec.__dataclass_fields__ if getattr(problem.spec, name)]
    direction = {"fwd": "forward", "bwd": "backward"}[problem.direction]
    return f"{direction} {problem.dtype} {depth} {'+'.join(kinds) or 'full'}"


def _need_compiler() -> None:
    from jax_fa4.ffi import compile as compiler

    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tqdm", "tqdm")):
        if importlib.util.find_spec(module) is None:
            raise compiler.CompilerMissing(
                f"building kernels needs {package}, which is not installed: pip install 'jax_fa4[compile]' (or"
                " [cuda12], [cuda13] with jax for a GPU)"
            )
