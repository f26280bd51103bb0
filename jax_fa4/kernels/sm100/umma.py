"""tcgen05 matrix products: operand layouts, instruction and shared-memory descriptors, and the raw issue.

Products are issued by inline PTX under one election a group, not through `cute.gemm`, which elects and branches per
instruction: 29 elections instead of 88 in the forward at depth 128, a 4-byte spill gone, and no `.collector` hint that
the static verifier refuses (DSL 4.8.1, 2026-11-29). The DSL's TiledMma only supplies layouts here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as helpers

from jax_fa4.kernels.common.dtypes import DTYPES

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SHARED, TENSOR = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM
K_STEP = 16  # 16-bit elements one instruction multiplies along K
FORMATS = {"float16": 0, "bfloat16": 1}  # operand formats of the instruction descriptor


PAIR_ROWS = 256  # a product of so many rows is one of a pair of CTAs: each has half of A's rows and half of B's


def group_of(rows):
    return tcgen05.CtaGroup.TWO if rows == PAIR_ROWS else tcgen05.CtaGroup.ONE


def product(dtype, rows, columns, b_major=K_MAJOR, a_source=SHARED):
    """The layouts of float32 [rows, columns] += A B^T with A K-major, on one CTA or, of 256 rows, on a pair."""
    kind, group = DTYPES[dtype], group_of(rows)
    return helpers.make_trivial_tiled_mma(kind, kind, K_MAJOR, b_major, Float32, group, (rows, columns), a_source)


def instruction(dtype, rows, columns, b_major=K_MAJOR):
    """The 32-bit instruction descriptor of that product: float32 accumulator, dense, nothing negated."""
    form = FORMATS[dtype]
    return 1 << 4 | form << 7 | form << 10 | (b_major == MN_MAJOR) << 16 | columns >> 3 << 17 | rows >> 4 << 24


def in_shared(fragment):
    """(base, offsets): the descriptor of one stage of a shared fragment (MMA, 1, K), and what each K step adds."""
    base = tcgen05.smem_descriptor_to_int(fragment.iterator)
    steps = range(cute.size(fragment, mode=[2]))
    return base, [int(cute.crd2idx((0, 0, i), fragment.layout)) for i in steps]


def in_tensor(base, steps):
    """(base, offsets) of a 16-bit A operand in tensor memory: two elements of K share a column."""
    return base.toint(), [K_STEP // 2 * i for i in range(steps)]


_MMA = """{{ .reg .pred add; .reg .b{bits} a; .reg .b64 b; setp.ne.b32 add, {{$r4}}, 0;
add.s{bits} a, {{$r1}}, {a}; add.s64 b, {{$r2}}, {b};
tcgen05.mma.cta_group::{group}.kind::f16 [{{$r0}}], {left}, b, {{$r3}}, add; }}"""


def _text(a_source, a_offset, b_offset, group):
    """One instruction; offsets are immediates, so that one base an operand stays in registers, not one a step."""
    bits, left = (64, "a") if a_source == SHARED else (32, "[a]")
    return _MMA.format(bits=bits, a=a_offset, b=b_offset, left=left, group=group).replace("\n", " ")


def signal(barrier, ctas):
    """`barrier`, in each CTA of the pair, completes when every product that this thread has issued so far has.

    Of a pair: never twice with no product between. A commit of nothing is said to signal its own CTA alone.
    """
    if ctas == 2:
        tcgen05.commit(barrier, 0b11, tcgen05.CtaGroup.TWO)
    else:
        tcgen05.commit(barrier)


@cute.jit
def issue(
    acc,
    a,
    b,
    idesc: cutlass.Constexpr,
    a_source: cutlass.Constexpr,
    steps: cutlass.Constexpr,
    adds,
    barrier,
    paired: cutlass.Constexpr = False,
):
    """acc (+)= A B^T over the K steps [steps[0], steps[1]), then a commit to `barrier` unless it is None.

    acc: tensor-memory address, of both CTAs of a pair. a, b: (base, offsets) from `in_shared`, or a from `in_tensor`.
    adds: whether the first step adds to acc or overwrites it. paired: of a pair, though it has 128 rows. Called by a
    converged warp: one lane is elected.
    """
    ctas = 2 if paired or idesc >> 24 == PAIR_ROWS >> 4 else 1
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(steps[0], steps[1]):
            add = Int32(adds) if const_expr(i == steps[0]) else Int32(1)
            cute.arch.inline_ptx(
                _text(a_source, a[1][i], b[1][i], ctas), read_only_args=[acc, a[0], b[0], Int32(idesc), add]
            )
        if const_expr(barrier is not None):
            signal(barrier, ctas)
