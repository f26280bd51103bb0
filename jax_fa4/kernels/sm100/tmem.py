"""Tensor memory: rows to and from registers, 128 lanes by 512 columns of 32 bits.

Thread t of a warpgroup that starts at a multiple of four warps owns lane t; a warp reaches no other warp's lanes. Or a
warp has its 32 lanes as fragments of matrix products have their rows: see `read_fragment`.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

COLUMNS = 512
LANE_STRIDE = 1 << 16  # a tensor-memory address is lane << 16 | column
WIDEST = 32  # columns of one instruction

loaded = cute.arch.fence_view_async_tmem_load  # the registers of every earlier read of this thread are valid
stored = cute.arch.fence_view_async_tmem_store  # every earlier write of this thread has reached tensor memory


def _copy(base, columns, thread, operation, repetitions=None):
    words = cute.make_tensor(base, cute.make_layout((128, columns), stride=(LANE_STRIDE, 1)))
    atom = cute.make_copy_atom(operation(tcgen05.Repetition(repetitions or min(columns, WIDEST))), Float32)
    return words, tcgen05.make_tmem_copy(atom, words).get_slice(thread), cute.make_identity_tensor((128, columns))


def _even(base):
    """The same address, known to be a multiple of four columns."""
    return cute.make_ptr(Float32, base.toint(), cute.AddressSpace.tmem, assumed_align=16)


def _read(copied, columns):
    words, mine, names = copied
    piece = cute.make_rmem_tensor(mine.partition_D(names).shape, Float32)
    cute.copy(mine, mine.partition_S(words), piece)
    return cute.make_tensor(piece.iterator, cute.make_layout(columns))


def _write(copied, line):
    words, mine, names = copied
    piece = cute.make_tensor(line.iterator, cute.make_layout(mine.partition_S(names).shape))
    cute.copy(mine, piece, mine.partition_D(words))


def read(base, columns, thread):
    """Starts loading `columns` words of this thread's lane; a flat register tensor, valid only after `loaded()`."""
    return _read(_copy(base, columns, thread, tcgen05.Ld32x32bOp), columns)


def write(base, line, thread):
    """Starts storing the words of `line`, a flat register tensor of 32-bit words; visible after `stored()`."""
    _write(_copy(base, cute.size(line), thread, tcgen05.St32x32bOp), line)


def read_fragment(base, columns, thread):
    """Likewise `columns` words a thread, but of four lanes a quarter of the columns: lane l + 8 a + 16 b of the warp's,
    l being a quarter of the thread's number in it, and columns 8 i + 2 q + e, q the rest. In the order e, a, i, b.
    """
    return _read(_copy(_even(base), columns, thread, tcgen05.Ld16x256bOp, columns // 8), columns)


def write_fragment(base, line, thread):
    """`line` holds such numbers, two of 16 bits in a word: as many columns as words, half of those that were read."""
    columns = cute.size(line)
    _write(_copy(_even(base), columns, thread, tcgen05.St16x128bOp, columns // 4), line)
