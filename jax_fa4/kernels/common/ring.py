"""A place in a ring of shared-memory stages, and how it moves: ring in, ring out.

State that moves is returned and rebound. A helper that advances a place without returning it compiles silently and
waits forever on stage 0 (DSL 4.8.1), so nothing here mutates.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Place(NamedTuple):
    """Which stage, and the parity of the phase that the next wait on it expects."""

    index: Int32
    phase: Int32


def start(phase):
    """The first place. Consumers start with parity 0; producers with 1, which a fresh barrier lets pass."""
    return Place(Int32(0), Int32(phase))


@cute.jit
def step(at: Place, stages: cutlass.Constexpr):
    """The next place of a ring of `stages`."""
    index = at.index + 1
    phase = at.phase
    if index == stages:
        index = Int32(0)
        phase = phase ^ 1
    return Place(index, phase)


def wait(barriers, at: Place):
    """Blocks until the phase of `at.phase`'s parity has completed."""
    cute.arch.mbarrier_wait(barriers + at.index, at.phase)


@cute.jit
def arrive(barriers, at: Place):
    """One arrival for the warp: counts in the ring table are in warps wherever a warp's lanes act together."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barriers + at.index)
