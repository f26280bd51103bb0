"""FlashAttention-4's own Hopper kernels as plans, so that they can be timed beside ours; its code is fetched, not kept.

    python benchmarks/fa4_hopper.py FOLDER                  # fetches the packages that tests/public/measure.py names
    FA4_PACKAGES=FOLDER python benchmarks/peers.py fill     # and compiles them into the store, where the DSL is

They run through our handler on our buffers: no torch is called, the kernels are the package's own, in the forms that
its interface chooses for this card. On the GPU neither the packages nor the DSL are needed.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.tiles import up

ENV = "FA4_PACKAGES"
DEPTHS = (64, 128)
TABLES = ("FwdConfig", "BwdConfig", "_tile_size_fwd_sm90", "_tile_size_bwd_sm90")  # of the package's interface


@dataclass(frozen=True)
class _Fa4:
    """What plans of the package's kernels have in common."""

    depth: int
    causal: bool
    dtype: str = "bfloat16"
    arch: str = "sm_90a"
    direction: str = ""
    spill_allowance: int = 1 << 20  # it is as it is

    launcher = "fa4_hopper"


@dataclass(frozen=True)
class Fa4Forward(_Fa4):
    """out and LSE, bf16, one depth, as many key heads as query heads."""

    direction: str = "fwd"

    @property
    def rows(self) -> int:
        """Queries of a tile: the package's table for sm_90, the same for both masks at these depths."""
        return 192 if self.depth == 64 else 128

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return _rows(self, "q k v")

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return (*_rows(self, "out", role="out"), Buffer("lse", "float32", ("B", "N", "T"), "out"))

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        return dict(shapes)


@dataclass(frozen=True)
class Fa4Backward(_Fa4):
    """dq, dk and dv of out and LSE, bf16, one depth, as many key heads as query heads."""

    direction: str = "bwd"
    ordered = False

    @property
    def rows(self) -> int:
        """Queries of a step: the package's table for sm_90."""
        return 128 if self.depth == 64 else 64 if self.causal else 80

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return (*_rows(self, "q k v out dout"), Buffer("lse", "float32", ("B", "N", "T")))

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        line = ("B", "N", "P")
        return (
            *_rows(self, "dq dk dv", role="out"),
            Buffer("lse2", "float32", line, "scratch"),
            Buffer("delta", "float32", line, "scratch"),
            Buffer("work", "float32", (*line, self.depth), "scratch"),
        )

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """P: queries of whole tiles."""
        return {**shapes, "P": up(shapes["T"], self.rows) * self.rows}


KEYS = ("k", "v", "dk", "dv")  # of S positions and K heads; the others have T and N


def _rows(plan: Fa4Forward | Fa4Backward, names: str, role: str = "in") -> tuple[Buffer, ...]:
    """Operands or results of one row a position and head."""
    sides = {name: ("S", "K") if name in KEYS else ("T", "N") for name in names.split()}
    return tuple(Buffer(name, plan.dtype, ("B", t, n, plan.depth), role) for name, (t, n) in sides.items())


class Modules(NamedTuple):
    """Of the package."""

    forward: Any
    before: Any
    backward: Any
    after: Any


def modules() -> Modules:
    """The package's Hopper kernels. Its initialisers want torch on a GPU; the kernels do not."""
    packages = os.environ[ENV]
    if packages not in sys.path:
        sys.path.append(packages)
    os.environ.update(FLASH_ATTENTION_ARCH="sm_90", FLASH_ATTENTION_FAKE_TENSOR="1", CUTE_DSL_ARCH="sm_90a")
    for name in ("quack", "flash_attn", "flash_attn.cute"):
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [str(Path(packages, *name.split(".")))]
    from flash_attn.cute import flash_bwd_postprocess, flash_bwd_preprocess, flash_bwd_sm90, flash_fwd_sm90

    return Modules(flash_fwd_sm90, flash_bwd_preprocess, flash_bwd_sm90, flash_bwd_postprocess)


def chosen(plan: Fa4Forward | Fa4Backward) -> Any:
    """What the package's interface chooses for the plan's depth and mask, in its own words.

    Only its tables are run: the interface itself wants torch. ValueError if the plan, which must know its rows where
    the package is not, has others.
    """
    tree = ast.parse(Path(os.environ[ENV], "flash_attn", "cute", "interface.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in TABLES]
    names: dict[str, Any] = {"dataclass": dataclass}
    exec(compile(tree, "interface.py", "exec"), names)
    form = names[f"_tile_size_{plan.direction}_sm90"](plan.depth, plan.depth, plan.causal, False)
    if form.m_block_size != plan.rows:
        raise ValueError(f"{plan} has {plan.rows} queries a tile; this package's interface chooses {form}")
    return form


def launch(stream: Any, plan: Fa4Forward | Fa4Backward, data: dict[str, Any], e: dict[str, Any]) -> None:
    """The package's kernels, as its interface starts them. data: pointers by buffer name; e: extents by symbol."""
    (_forward if plan.direction == "fwd" else _backward)(stream, plan, data, e)


def _tensors(plan: Fa4Forward | Fa4Backward, data: dict[str, Any], e: dict[str, Any]) -> dict[str, Any]:
    """Every buffer as the tensor that the interface would make of it: lengths at run time, rows aligned."""
    import cutlass.cute as cute
    from cutlass import Int64

    made = {}
    for buffer in plan.inputs + plan.outputs:
        name, d = buffer.name, plan.depth
        if len(buffer.shape) == 4 and name != "work":
            t, n = (e[x] for x in buffer.shape[1:3])
            strides = [cute.assume(x, divby=d) for x in (t.to(Int64) * n * d, n.to(Int64) * d)]
            layout = cute.make_layout((e["B"], t, n, d), stride=(*strides, d, 1))
        else:  # lines: of queries as they are (lse), of whole tiles (lse2, delta), and of tiles of dQ (work)
            length, width, by = {"lse": (e["T"], 1, 1), "work": (e.get("P"), d, d)}.get(name, (e.get("P"), 1, 16))
            strides = [cute.assume(x, divby=by) for x in (length.to(Int64) * e["N"] * width, length.to(Int64) * width)]
            layout = cute.make_layout((e["B"], e["N"], length * width), stride=(*strides, 1))
        made[name] = cute.make_tensor(data[name], layout)
    return made


def _forward(stream: Any, plan: Fa4Forward, data: dict[str, Any], e: dict[str, Any]) -> None:
    import cutlass

    x, d, form = _tensors(plan, data, e), plan.depth, chosen(plan)
    kernel = modules().forward.FlashAttentionForwardSm90(
        cutlass.BFloat16,
        d,
        d,
        1,
        is_causal=plan.causal,
        is_local=False,
        pack_gqa=False,  # as many key heads as query heads
        tile_m=form.m_block_size,
        tile_n=form.n_block_size,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=form.intra_wg_overlap,
        mma_pv_is_rs=form.mma_pv_is_rs,
    )
    kernel(*(x[name] for name in ("q", "k", "v", "out", "lse")), cutlass.Float32(d**-0.5), stream=stream)


def _backward(stream: Any, plan: Fa4Backward, data: dict[str, Any], e: dict[str, Any]) -> None:
    """Its three kernels: delta and a cleared sum of dQ, the gradients, dQ in half precision."""
    import cutlass
    from cutlass import Float32

    x, d, form, made = _tensors(plan, data, e), plan.depth, chosen(plan), modules()
    dtype, scale, threads = cutlass.BFloat16, Float32(d**-0.5), (form.num_wg + 1) * 128
    given = [x[name] for name in ("out", "dout", "delta", "lse", "lse2", "work")]
    before = made.before.FlashAttentionBackwardPreprocess(dtype, d, d, form.m_block_size)
    before(*given, *[None] * 5, Float32(1.0), stream=stream)
    kernel = made.backward.FlashAttentionBackwardSm90(
        dtype,
        d,
        d,
        1,
        plan.causal,
        tile_m=form.m_block_size,
        tile_n=form.n_block_size,
        Q_stage=form.num_stages_Q,
        dO_stage=form.num_stages_dO,
        PdS_stage=form.num_stages_PdS,
        SdP_swapAB=form.SdP_swapAB,
        dKV_swapAB=form.dKV_swapAB,
        dQ_swapAB=form.dQ_swapAB,
        AtomLayoutMSdP=form.AtomLayoutMSdP,
        AtomLayoutNdKV=form.AtomLayoutNdKV,
        AtomLayoutMdQ=form.AtomLayoutMdQ,
        num_threads=threads,
        dQ_single_wg=form.dQ_single_wg,
    )
    given = [x[name] for name in ("q", "k", "v", "dout", "lse2", "delta", "work", "dk", "dv")]
    kernel(*given, scale, stream=stream)
    order = (threads - 128, form.AtomLayoutMdQ, form.dQ_swapAB)  # in which the math warps left dQ
    after = made.after.FlashAttentionBackwardPostprocess(dtype, d, 90, form.m_block_size, *order)
    after(x["work"], x["dq"], scale, *[None] * 3, stream=stream)


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root), str(root / "tests")]
    from public.measure import fetch

    fetch(Path(sys.argv[1]))
