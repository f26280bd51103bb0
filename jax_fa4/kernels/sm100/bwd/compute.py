"""The compute warpgroups: P^T = exp2(S^T - LSE), dS^T = P^T (dP^T - delta); finally dK and dV leave.

Group 0 has the first 64 queries, group 1 the rest; a warp 32 of the keys, which are its lanes of tensor memory. A
thread has four of these keys and 16 queries, as in a fragment of a matrix product: then it wants statistics, which are
of queries, for 16 of them. With a key and 64 queries a thread, their reads took 256 clocks of shared memory for a tile
of 128 x 128; so they take 64 (counted in the emulator, 2026-11-30).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from jax_fa4.kernels.common.copies import put, views
from jax_fa4.kernels.common.dtypes import DTYPES
from jax_fa4.kernels.common.ring import arrive, start, step, wait
from jax_fa4.kernels.passes.plan import FRAGMENT
from jax_fa4.kernels.sm100 import tmem
from jax_fa4.kernels.sm100.bwd.mask import ROWS, WORD, covered, hide_fragment
from jax_fa4.kernels.sm100.bwd.plan import GROUP
from jax_fa4.kernels.sm100.bwd.segments import LANES, hide_others_fragment, key_id, query_ids
from jax_fa4.kernels.sm100.bwd.turns import after
from jax_fa4.kernels.sm100.sync import after_wait, arrive_warp, before_arrive

LOG2_E = 1.4426950408889634
MEET = 1  # named barrier of the compute warps
CHUNK = 8  # 16-bit numbers of one 16-byte store
SWIZZLED = 128  # bytes of a row of dS, whose 16-byte chunks are swizzled


@cute.jit
def statistics(ctx, at, which: cutlass.Constexpr, first):
    """WORD statistics, LSE in base 2 (0) or delta (1), of the queries from `first` on."""
    n = ctx.plan.tile
    found = cute.make_rmem_tensor(WORD, Float32)
    source = (ctx.held + (at.index * (2 * n) + which * n + first)).align(16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(WORD)), found)
    return found


def rounded(plan, line):
    """(the numbers in 16 bits, the same registers as words)."""
    count, kind = cute.size(line), DTYPES[plan.dtype]
    words = cute.make_rmem_tensor(count // 2, Float32)
    half = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=kind), cute.make_layout(count))
    half.store(line.load().to(kind))
    return half, words


def piece(line, first, count):
    return cute.make_tensor(line.iterator + first, cute.make_layout(count))


@cute.jit
def cap(ctx, line):
    """tanh(scale * score / cap) in place, as 1 - 2 / (1 + exp 2x), as in the forward."""
    grown = ctx.cap[0] * (2.0 * LOG2_E)
    for c in cutlass.range_constexpr(cute.size(line)):
        line[c] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(line[c] * grown, fastmath=True))


@cute.jit
def fragment_statistics(ctx, at, which: cutlass.Constexpr, first):
    """The thread's of WORD statistics from `first` on, which lie in the order of `passes/plan.in_fragments`."""
    n = ctx.plan.tile
    found = cute.make_rmem_tensor(WORD // ROWS, Float32)
    lane = ctx.thread % LANES % 4
    for b in cutlass.range_constexpr(0, WORD, FRAGMENT):
        source = (ctx.held + (at.index * (2 * n) + which * n + first + b + 4 * lane)).align(16)
        part = cute.make_tensor(found.iterator + b // ROWS, cute.make_layout(4))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), part)
    return found


def of(j, rows):
    """Which statistic number j of a line has: the one of its column, or in a fragment its two rows' of its column."""
    return j if rows == 1 else j // 4 * 2 % (WORD // ROWS) + j % 2


@cute.jit
def exponentials(part, lse, scale, to, rows: cutlass.Constexpr = 1):
    """P of a part of a row of scores, or of a fragment of `rows` rows."""
    for j in cutlass.range_constexpr(0, cute.size(part), 2):
        s = of(j, rows)
        pair = cute.arch.fma_packed_f32x2((part[j], part[j + 1]), (scale, scale), (-lse[s], -lse[s + 1]))
        for i in cutlass.range_constexpr(2):
            to[j + i] = cute.math.exp2(pair[i], fastmath=True)


@cute.jit
def capped(part, weights):
    """P (1 - tanh^2) in tanh's place, which is what dP - delta is multiplied with. A hidden score's -inf stands for
    tanh there, so its factor is held at 0: 0 * inf does not arise."""
    for j in cutlass.range_constexpr(cute.size(part)):
        part[j] = weights[j] * cute.arch.fmax(1.0 - part[j] * part[j], Float32(0.0))


@cute.jit
def differences(part, slope, delta, rows: cutlass.Constexpr = 1):
    """dS in place of P, likewise."""
    for j in cutlass.range_constexpr(0, cute.size(part), 2):
        s = of(j, rows)
        pair = cute.arch.sub_packed_f32x2((slope[j], slope[j + 1]), (delta[s], delta[s + 1]))
        part[j], part[j + 1] = cute.arch.mul_packed_f32x2((part[j], part[j + 1]), pair)


def first_key(thread):
    """Of the four keys of a thread in a fragment, which are eight lanes apart."""
    return thread // LANES * LANES + thread % LANES // 4


def named(base, thread):
    """Where the 16 bytes begin that a thread names to `put_fragment`: of the first 16 keys of its warp and the first 16
    queries. base: of the rows of 128 bytes, swizzled, a key's each, that lie from a multiple of 1024 on."""
    row, chunk = thread // LANES * LANES + thread % 16, thread % LANES // 16
    return base + row * SWIZZLED + ((chunk ^ (row % 8)) << 4)


@cute.jit
def put_fragment(words, place, column: cutlass.Constexpr):
    """Stores a warp's WORD columns of 32 rows from `column` on, four 8 x 8 matrices at a time: 16 rows, 16 columns."""
    bits = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Uint32), cute.make_layout(cute.size(words)))
    for j in cutlass.range_constexpr(0, cute.size(words), 4):
        half, rest = j // (WORD // 4), j % (WORD // 4) // 4
        to = (place ^ ((column + 16 * rest) * 2)) + half * (16 * SWIZZLED)
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[to, bits[j], bits[j + 1], bits[j + 2], bits[j + 3]],
        )


@cute.jit
def _weigh(ctx, m, group, thread, stats_at, ids):
    """P^T of the thread, in float32 registers; 16-bit copies go over its warp's scores in tensor memory.

    ids: (its keys' segments, its queries' by lane), or None. With a soft cap what `capped` makes is given back.
    """
    plan = ctx.plan
    half = plan.tile // 2
    line = cute.make_rmem_tensor(half, Float32)
    for c in cutlass.range_constexpr(0, half, WORD):
        found = tmem.read_fragment(ctx.tmem + (plan.at("s") + half * group + c), WORD, thread)
        piece(line, c, WORD).store(found.load())
    tmem.loaded()
    scale = ctx.scale * LOG2_E
    if const_expr(plan.soft_cap):
        cap(ctx, line)
        scale = ctx.cap[1] * LOG2_E
    if not covered(ctx, m):
        hide_fragment(ctx, line, (ctx.tile * plan.tile + first_key(thread), m * plan.tile + half * group))
    if const_expr(plan.segments):
        hide_others_fragment(line, *ids)
    for c in cutlass.range_constexpr(0, half, WORD):
        part, lse = piece(line, c, WORD), fragment_statistics(ctx, stats_at, 0, half * group + c)
        weights = cute.make_rmem_tensor(WORD, Float32) if const_expr(plan.soft_cap) else part
        exponentials(part, lse, scale, weights, ROWS)
        _, words = rounded(plan, weights)
        tmem.write_fragment(ctx.tmem + (plan.at("p0") + half * group + c // 2), words, thread)
        if const_expr(plan.soft_cap):
            capped(part, weights)
    tmem.stored()
    before_arrive()
    arrive_warp(ctx.full["probs"])
    return line


@cute.jit
def _differ(ctx, line, group, thread, stats_at):
    """dS^T of the thread: over its warp's dP^T in tensor memory, and in shared memory, where a row is a key's."""
    plan = ctx.plan
    half = plan.tile // 2
    place = named(ctx.ds.iterator.toint() + group * (plan.tile * SWIZZLED), thread)
    for c in cutlass.range_constexpr(0, half, WORD):
        slope = tmem.read_fragment(ctx.tmem + (plan.at("dp") + half * group + c), WORD, thread)
        delta = fragment_statistics(ctx, stats_at, 1, half * group + c)
        tmem.loaded()
        part = piece(line, c, WORD)
        differences(part, slope, delta, ROWS)
        _, words = rounded(plan, part)
        tmem.write_fragment(ctx.tmem + (plan.at("ds0") + half * group + c // 2), words, thread)
        put_fragment(words, place, c)
    tmem.stored()
    before_arrive()
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_warp(ctx.full["ds"])


@cute.jit
def lay_down(ctx, name: cutlass.Constexpr, shared, who, factor, alive):
    """A thread's half of its row of a gradient, in the caller's dtype, into `shared`; 0 where nobody looked.

    who: (the thread's group, its row).
    """
    plan, (group, thread) = ctx.plan, who
    width = plan.depth_of(name) // 2
    chunks = cute.flat_divide(shared[None, None, 0], (1, CHUNK))
    for c in cutlass.range_constexpr(0, width, WORD):
        line = cute.make_rmem_tensor(WORD, Float32)
        line.fill(0.0)
        if alive:
            found = tmem.read(ctx.tmem + (plan.at(name) + width * group + c), WORD, thread)
            tmem.loaded()
            line.store(found.load() * factor)
        small, _ = rounded(plan, line)
        for j in cutlass.range_constexpr(0, WORD, CHUNK):
            source = cute.make_tensor(small.iterator + j, cute.make_layout((1, CHUNK)))
            cute.autovec_copy(source, chunks[None, None, thread, (width * group + c + j) // CHUNK])


@cute.jit
def compute(ctx):
    plan = ctx.plan
    group, thread = (ctx.warp - plan.COMPUTE) // 4, ctx.thread % GROUP
    total = ctx.group * (ctx.last - ctx.first)
    stats_at, m = start(0), cutlass.Int32(ctx.course.begin)
    own = None
    if const_expr(plan.segments):
        own = [key_id(ctx, ctx.tile * plan.tile + first_key(thread) + 8 * j) for j in range(ROWS)]
    for n in cutlass.range(total, unroll=1):
        ids = None
        if const_expr(plan.segments):  # they come while S does
            ids = (own, query_ids(ctx, m * plan.tile + plan.tile // 2 * group, plan.tile // 2))
        wait(ctx.full["stats"], stats_at)
        cute.arch.mbarrier_wait(ctx.full["scores"], n & 1)
        after_wait()
        line = _weigh(ctx, m, group, thread, stats_at, ids)
        cute.arch.mbarrier_wait(ctx.full["slopes"], n & 1)
        after_wait()
        _differ(ctx, line, group, thread, stats_at)
        arrive(ctx.empty["stats"], stats_at)
        stats_at = step(stats_at, 2)
        m = after(ctx.course, m)
    if total > 0:
        cute.arch.mbarrier_wait(ctx.full["final"], 0)
        after_wait()
    lay_down(ctx, "dv", ctx.dv[2], (group, thread), Float32(1.0), total > 0)
    lay_down(ctx, "dk", ctx.dk[2], (group, thread), ctx.scale, total > 0)
    before_arrive()  # tensor memory has been read; the caller signals that it may go
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=MEET, number_of_threads=2 * GROUP)
    if ctx.warp == plan.COMPUTE:
        put(views(ctx.dk, (plan.tile, plan.inner), ctx.kv_head, ctx.batch), ctx.tile)
        put(views(ctx.dv, (plan.tile, plan.inner_value), ctx.kv_head, ctx.batch), ctx.tile)
