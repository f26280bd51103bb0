"""Every plan that a call can get builds, and none spills or serialises wgmma: hours of compiler, so `make prove`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jax_fa4 import kernels
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

# The native depths, one that is padded to each of them, and depths of value that are not those of keys.
DEPTHS = [(d, d) for d in (16, 64, 72, 96, 120, 128, 136, 192, 200, 256)]
DEPTHS += [(192, 128), (128, 64), (64, 128), (128, 8), (256, 64), (64, 256)]
FLAGS = ("band", "soft_cap", "sinks", "segments", "deterministic")


DIRECTIONS, DTYPES = ("fwd", "bwd"), ("bfloat16", "float16")


def plans(
    arch: str,
    depth: int,
    value_depth: int,
    directions: Sequence[str] = DIRECTIONS,
    dtypes: Sequence[str] = DTYPES,
) -> Iterator[Any]:
    """Of all kinds, forward and backward, as `precompile` finds them."""
    seen = set()
    for dtype, direction, (n, k) in itertools.product(dtypes, directions, ((1, 1), (8, 2))):
        for flags in itertools.product((False, True), repeat=len(FLAGS)):
            spec = AttentionSpec(**dict(zip(FLAGS, flags, strict=True)))
            problem = Problem(spec, 1, 1, 1, n, k, depth, value_depth, dtype, direction)
            for stand_in in kernels.of_every_shape(problem, arch):
                try:
                    plan = kernels.select(stand_in, arch)
                except Unsupported:
                    continue
                if plan not in seen:
                    seen.add(plan)
                    yield plan


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_list_has_both_directions_and_every_flag(arch: str) -> None:
    some = list(plans(arch, 128, 128))
    assert {p.direction for p in some} == {"fwd", "bwd"} and {p.dtype for p in some} == {"bfloat16", "float16"}
    for name in ("band", "soft_cap", "segments", "sinks", "ordered"):
        assert {getattr(p, name) for p in some if hasattr(p, name)} == {False, True}, name
    assert len(some) > 50


@pytest.mark.prove
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl (jax_fa4[compile])")
@pytest.mark.parametrize("depths", DEPTHS, ids=lambda d: f"{d[0]}v{d[1]}")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_plan_is_slower_than_it_should_be(arch: str, dtype: str, direction: str, depths: tuple[int, int]) -> None:
    from jax_fa4.ffi.compile import BuildError, SlowKernel, build

    made = list(plans(arch, *depths, [direction], [dtype]))
    assert len(made) >= 8, len(made)
    bad = []
    for plan in made:
        try:
            build(plan)
        except (SlowKernel, BuildError) as error:  # a warning is an error here
            bad.append(str(error)[:400])
    assert not bad, "\n".join([f"{len(bad)} plans:", *bad])
