"""Bulk copies between global and shared memory, and the shared memory and barriers that a plan's tables ask for."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.common.ring import Place


def tensor_map(descriptor, pointer, layout):
    """(atom, coordinate tensor) of a bound Descriptor. `layout`: of one tile in shared memory, as (rows, columns)."""
    op = cpasync.CopyBulkTensorTileS2GOp() if descriptor.store else cpasync.CopyBulkTensorTileG2SOp()
    tensor = cute.make_tensor(pointer, cute.make_layout(descriptor.dims, stride=descriptor.strides))
    return cpasync.make_tiled_tma_atom(op, tensor, layout, descriptor.box)


@cute.jit
def add_bulk(to, source, nbytes: cutlass.Constexpr):
    """Starts and commits one bulk addition to global memory, of float32; by one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint(), Int32(nbytes)],
    )
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def put_bulk(to, source, nbytes: cutlass.Constexpr):
    """Starts and commits one bulk store to global memory; by one thread."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[to.toint(), source.toint(), Int32(nbytes)],
    )
    cute.arch.cp_async_bulk_commit_group()


def make_barriers(memory, rings):
    """Full and empty barriers by ring name: dicts of pointers. A ring without arrivals on a side has none there."""
    full, empty = {}, {}
    for ring in rings:
        if ring.full:
            full[ring.name] = memory.allocate_array(Int64, ring.stages)
        if ring.empty:
            empty[ring.name] = memory.allocate_array(Int64, ring.stages)
    return full, empty


@cute.jit
def init_barriers(rings: cutlass.Constexpr, full, empty):
    """By one warp of the CTA; the caller then fences and synchronises."""
    with cute.arch.elect_one():
        for ring in rings:
            for stage in cutlass.range_constexpr(ring.stages):
                if cutlass.const_expr(ring.full > 0):
                    cute.arch.mbarrier_init(full[ring.name] + stage, ring.full)
                if cutlass.const_expr(ring.empty > 0):
                    cute.arch.mbarrier_init(empty[ring.name] + stage, ring.empty)


def views(operand, box, head, batch, column=0):
    """(atom, shared view, global view) of one head: the shared one by stage, the global one by tile of rows.

    operand: (atom, coordinate tensor, shared tensor (rows, columns, stages)). box: (rows, columns). column: which tile
    along depth.
    """
    atom, coords, shared = operand
    tiles = cute.local_tile(coords[None, None, head, batch], box, (None, column))
    inside, outside = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return atom, inside, outside


@cute.jit
def fetch(copy, tile, barriers, at: Place, nbytes: cutlass.Constexpr):
    """Starts the load of a tile into stage `at`. A whole warp calls it: the copy elects its thread itself."""
    atom, inside, outside = copy
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barriers + at.index, nbytes)
    cute.copy(atom, outside[None, tile], inside[None, at.index], tma_bar_ptr=barriers + at.index)


@cute.jit
def put(copy, tile):
    """Stores stage 0 to a tile and waits until shared memory was read. A whole warp calls it.

    Unlike loads, bulk tensor stores do not elect (DSL 4.8.1): unguarded, all 32 lanes would store. The group that is
    waited for belongs to the thread that committed it, so all three stand under one election.
    """
    atom, inside, outside = copy
    with cute.arch.elect_one():
        cute.copy(atom, inside[None, 0], outside[None, tile])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def send(copy, tile, stage):
    """Starts the store of a stage to a tile. A whole warp calls it; `settle` by the same warp waits for it."""
    atom, inside, outside = copy
    with cute.arch.elect_one():
        cute.copy(atom, inside[None, stage], outside[None, tile])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def settle():
    """Waits until all that this warp has sent was read from shared memory. One election elects the same thread."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
