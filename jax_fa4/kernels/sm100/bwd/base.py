"""What the three plans of the Blackwell backward (bwd/plan, bwd/pair, bwd/wide) have alike."""

from __future__ import annotations

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.gradients import backward_inputs, gradients
from jax_fa4.kernels.passes.plan import BwdPre


class Backward:
    """Members that follow from a plan's fields, its first warps by role and its preprocess; no fields of its own."""

    ROLES: tuple[str, ...] = ("REDUCE", "COMPUTE", "MMA", "LOAD")  # in the order of their warps, the last has one
    DEPTHS: tuple[int, ...] = ()  # the native ones, ascending
    depth: int
    value_depth: int

    @property
    def pre(self) -> BwdPre:
        """The preprocess of this plan's tile."""
        raise NotImplementedError

    @property
    def chained(self) -> bool:
        """Whether turns are told by name, see sm100/bwd/chain.py."""
        return False

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Warps by role, for counters and reports."""
        first = [getattr(self, name) for name in self.ROLES]
        ends = (*first[1:], first[-1] + 1)
        return {name.lower(): tuple(range(a, b)) for name, a, b in zip(self.ROLES, first, ends, strict=True)}

    def native(self, depth: int) -> int:
        """The depth in shared memory: TMA reads the difference as zeros, and clips it when storing."""
        return next(d for d in self.DEPTHS if d >= depth)

    @property
    def inner(self) -> int:
        """Depth of Q and K in shared memory, of dK and dQ in tensor memory."""
        return self.native(self.depth)

    @property
    def inner_value(self) -> int:
        """Likewise of V, dO and dV."""
        return self.native(self.value_depth)

    def depth_of(self, name: str) -> int:
        """Depth of an operand or gradient in shared memory."""
        return self.inner_value if name in ("v", "dv", "dout", "doutt") else self.inner

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return backward_inputs(self)

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return gradients(self) + self.pre.outputs
