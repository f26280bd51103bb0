"""Products, commits and arrivals of a pair of CTAs: what the even one, the leader, issues and hears."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from jax_fa4.kernels.sm100 import umma

LEADER = 0
BOTH = 0b11


@cute.jit
def arrive_leader(barrier, data: cutlass.Constexpr = False):
    """One arrival for the warp, after all its lanes got here, at the leader's `barrier`.

    data: whether it hands over shared memory to the other CTA. What is in tensor memory needs execution order only.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, LEADER, scope=nvvm.MemScopeKind.CLUSTER if data else None)


@cute.jit
def wait_pair(barrier, phase):
    """Waits for what threads of the other CTA did to shared memory too; a plain wait is ordered within its CTA only."""
    text = """{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};
    @!done bra again; }"""
    cute.arch.inline_ptx(text.replace("\n", " "), read_only_args=[barrier.toint(), Int32(phase)])


@cute.jit
def meet():
    """All threads of both CTAs."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


_MMA = """{{ .reg .pred add; .reg .b{bits} a; .reg .b64 b; setp.ne.b32 add, {{$r4}}, 0;
add.s{bits} a, {{$r1}}, {a}; add.s64 b, {{$r2}}, {b};
tcgen05.mma.cta_group::2.kind::f16 [{{$r0}}], {left}, b, {{$r3}}, add; }}"""


def _text(a_source, a_offset, b_offset):
    bits, left = (64, "a") if a_source == umma.SHARED else (32, "[a]")
    return _MMA.format(bits=bits, a=a_offset, b=b_offset, left=left).replace("\n", " ")


@cute.jit
def issue(acc, a, b, idesc: cutlass.Constexpr, a_source: cutlass.Constexpr, steps: cutlass.Constexpr, adds, barrier):
    """acc (+)= A B^T of the pair over `steps` steps along K, then a commit to `barrier` in both CTAs.

    acc: tensor-memory address, the same in both CTAs, as are the operands'. adds: whether the first step adds to acc
    or overwrites it. Called by a converged warp of the leader. One barrier a product, for all who wait for it: a commit
    with no product since the last one is said to signal its own CTA alone.
    """
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(steps):
            add = Int32(adds) if const_expr(i == 0) else Int32(1)
            cute.arch.inline_ptx(_text(a_source, a[1][i], b[1][i]), read_only_args=[acc, a[0], b[0], Int32(idesc), add])
        tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup.TWO)
