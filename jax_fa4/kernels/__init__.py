"""select: the plan for a problem on an arch, or Unsupported naming what is in its way. Never imports cutlass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax_fa4.kernels.common.parts import Plan
from jax_fa4.kernels.sm90.bwd import choose_plan as sm90_bwd
from jax_fa4.kernels.sm90.fwd import choose_plan as sm90_fwd
from jax_fa4.kernels.sm100.bwd.pair import plan as sm100_bwd
from jax_fa4.kernels.sm100.fwd import plan as sm100_fwd
from jax_fa4.spec import KERNEL_DTYPES, Problem, Unsupported

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")  # Hopper, Blackwell

# No such GPU has run our kernels yet: they are compiled, verified statically and emulated. Callers are told once.
NEVER_RUN = ("sm_100a", "sm_103a")

# (arch, direction) -> plan of a problem, or Unsupported where a depth or a combination is in the way.
_CHOOSE: dict[tuple[str, str], Callable[[Problem], Plan]] = {
    ("sm_90a", "fwd"): sm90_fwd.choose,
    ("sm_90a", "bwd"): sm90_bwd.choose,
    ("sm_100a", "fwd"): sm100_fwd.choose,
    ("sm_100a", "bwd"): sm100_bwd.choose,
    ("sm_103a", "fwd"): partial(sm100_fwd.choose, arch="sm_103a"),
    ("sm_103a", "bwd"): partial(sm100_bwd.choose, arch="sm_103a"),
}
_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


# Those whose plan follows from the shapes too: what chooses the plan that serves every shape.
_CHOOSE_ANY_SHAPE: dict[tuple[str, str], Callable[[Problem], Plan]] = {
    ("sm_90a", "fwd"): partial(sm90_fwd.choose, any_shape=True),
    ("sm_100a", "fwd"): partial(sm100_fwd.choose, any_shape=True),
    ("sm_103a", "fwd"): partial(sm100_fwd.choose, arch="sm_103a", any_shape=True),
    ("sm_90a", "bwd"): partial(sm90_bwd.choose, any_shape=True),
}
# Problems of the same kind, so that each plan that shapes may decide for is the plan of one.
_STAND_INS: dict[tuple[str, str], Callable[[Problem], list[Problem]]] = {
    ("sm_90a", "fwd"): sm90_fwd.stand_ins,
    ("sm_100a", "fwd"): sm100_fwd.stand_ins,
    ("sm_103a", "fwd"): sm100_fwd.stand_ins,
    ("sm_90a", "bwd"): sm90_bwd.stand_ins,
}


def select(problem: Problem, arch: str, any_shape: bool = False) -> Plan:
    """The plan whose object computes `problem` on `arch`: the fastest for its shapes, or (any_shape) the one plan that
    is right for every batch, length and number of heads.

    Raises Unsupported: no kernel; its text names the argument and what would work. Empty shapes are the caller's.
    """
    if problem.dtype not in KERNEL_DTYPES:
        raise Unsupported(
            f"dtype {problem.dtype}: kernels take {' and '.join(KERNEL_DTYPES)}; implementation='xla' takes it"
        )
    for name in ("bias", "mask"):
        if getattr(problem.spec, name):
            raise Unsupported(f"a dense {name}: no kernel takes one; implementation='xla' does{_INSTEAD[name]}")
    if arch not in ARCHITECTURES:
        raise Unsupported(
            f"arch {arch!r}: kernels are built for {', '.join(ARCHITECTURES)}; implementation='xla' runs anywhere"
        )
    choose = _CHOOSE.get((arch, problem.direction))
    if choose is None:
        have = ", ".join(f"{_DIRECTIONS[d]} on {a}" for a, d in _CHOOSE)
        raise Unsupported(
            f"no {_DIRECTIONS[problem.direction]} kernel for arch {arch!r} yet; there are {have};"
            " implementation='xla' runs anywhere"
        )
    if any_shape:
        choose = _CHOOSE_ANY_SHAPE.get((arch, problem.direction), choose)
    return choose(problem)


def of_every_shape(problem: Problem, arch: str) -> list[Problem]:
    """The problem, and problems of its kind for every other plan that shapes may decide for on `arch`."""
    if 0 in (problem.b, problem.t, problem.s, problem.n):
        return [problem]  # needs no kernel
    return [problem, *_STAND_INS.get((arch, problem.direction), lambda _: [])(problem)]


_INSTEAD = {
    "bias": "",
    "mask": ", and is_causal, local_window_size, lengths and segment ids run in kernels",
}
