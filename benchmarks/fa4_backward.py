"""FlashAttention-4's own Hopper backward as a plan, so that it can be timed beside ours; its code is fetched, not kept.

    python benchmarks/fa4_backward.py FOLDER      # fetches the packages that tests/public/measure.py names
    FA4_PACKAGES=FOLDER python benchmarks/backward_variants.py fill   # and compiles its three kernels into the store

It runs through our handler on our buffers: no torch is called, the kernels are the package's own, at the tiles that it
chooses for this card.
"""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_fa4.ffi.buffers import Buffer
from jax_fa4.kernels.common.tiles import up

ENV = "FA4_PACKAGES"
THREADS = 256  # of its two math warpgroups, whose order of dQ its postprocess reads


@dataclass(frozen=True)
class Fa4:
    """bf16, one depth, as many key heads as query heads."""

    depth: int
    causal: bool
    dtype: str = "bfloat16"
    arch: str = "sm_90a"
    direction: str = "bwd"
    spill_allowance: int = 1 << 20  # it is as it is

    launcher = "fa4_backward"
    ordered = False

    @property
    def rows(self) -> int:
        """Queries of a step: the package's table for sm_90."""
        return 128 if self.depth == 64 else 64 if self.causal else 80

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        query, key = ("B", "T", "N", self.depth), ("B", "S", "K", self.depth)
        names = {"q": query, "k": key, "v": key, "out": query, "dout": query}
        return (*(Buffer(n, self.dtype, s) for n, s in names.items()), Buffer("lse", "float32", ("B", "N", "T")))

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        query, key, line = ("B", "T", "N", self.depth), ("B", "S", "K", self.depth), ("B", "N", "P")
        return (
            Buffer("dq", self.dtype, query, "out"),
            Buffer("dk", self.dtype, key, "out"),
            Buffer("dv", self.dtype, key, "out"),
            Buffer("lse2", "float32", line, "scratch"),
            Buffer("delta", "float32", line, "scratch"),
            Buffer("work", "float32", (*line, self.depth), "scratch"),
        )

    def extents(self, shapes: dict[str, int]) -> dict[str, int]:
        """P: queries of whole tiles."""
        return {**shapes, "P": up(shapes["T"], self.rows) * self.rows}


def modules() -> tuple[Any, Any, Any]:
    """(preprocess, main, postprocess) of the package. Its initialisers want torch on a GPU; the kernels do not."""
    packages = os.environ[ENV]
    sys.path.append(packages)
    os.environ.update(FLASH_ATTENTION_ARCH="sm_90", FLASH_ATTENTION_FAKE_TENSOR="1", CUTE_DSL_ARCH="sm_90a")
    for name in ("quack", "flash_attn", "flash_attn.cute"):
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [str(Path(packages, *name.split(".")))]
    from flash_attn.cute import flash_bwd_postprocess, flash_bwd_preprocess, flash_bwd_sm90

    return flash_bwd_preprocess, flash_bwd_sm90, flash_bwd_postprocess


def launch(stream: Any, plan: Fa4, data: dict[str, Any], e: dict[str, Any]) -> None:
    """Its three kernels, as its interface starts them. data: pointers by buffer name; e: extents by symbol."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int64

    d = plan.depth

    def rows_of(name: str, length: Any, heads: Any) -> Any:
        strides = [cute.assume(x, divby=d) for x in (length.to(Int64) * heads * d, heads.to(Int64) * d)]
        return cute.make_tensor(data[name], cute.make_layout((e["B"], length, heads, d), stride=(*strides, d, 1)))

    def lines_of(name: str, length: Any, width: int, by: int) -> Any:
        strides = [cute.assume(x, divby=by) for x in (length.to(Int64) * e["N"] * width, length.to(Int64) * width)]
        return cute.make_tensor(data[name], cute.make_layout((e["B"], e["N"], length * width), stride=(*strides, 1)))

    q, out, dout, dq = (rows_of(x, e["T"], e["N"]) for x in ("q", "out", "dout", "dq"))
    k, v, dk, dv = (rows_of(x, e["S"], e["K"]) for x in ("k", "v", "dk", "dv"))
    lse = lines_of("lse", e["T"], 1, 1)
    lse2, delta = lines_of("lse2", e["P"], 1, 16), lines_of("delta", e["P"], 1, 16)
    work = lines_of("work", e["P"], d, d)
    pre, main, post = modules()
    dtype, scale = cutlass.BFloat16, Float32(d**-0.5)
    across, swapped = (2 if d == 64 else 1), plan.rows % 64 != 0
    given = (out, dout, delta, lse, lse2, work, *[None] * 5, Float32(1.0))
    pre.FlashAttentionBackwardPreprocess(dtype, d, d, plan.rows)(*given, stream=stream)
    form = {"tile_m": plan.rows, "tile_n": 128, "SdP_swapAB": True, "dQ_swapAB": swapped, "AtomLayoutMdQ": across}
    kernel = main.FlashAttentionBackwardSm90(dtype, d, d, 1, plan.causal, **form)
    kernel(q, k, v, dout, lse2, delta, work, dk, dv, scale, stream=stream)
    last = post.FlashAttentionBackwardPostprocess(dtype, d, 90, plan.rows, THREADS, across, swapped)
    last(work, dq, scale, *[None] * 3, stream=stream)


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root), str(root / "tests")]
    from public.measure import fetch

    fetch(Path(sys.argv[1]))
