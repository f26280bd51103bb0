"""Compiles one of FlashAttention-4's kernels to PTX without a GPU: `python build.py PACKAGES FOLDER VARIANT`.

A process of its own, as the package is driven by environment variables and by torch's fake tensors.
"""

import os
import sys
import types

# name -> direction, depth, causal, pair of CTAs
VARIANTS = {
    "forward D 64": ("fwd", 64, False, False),
    "forward D 64 causal": ("fwd", 64, True, False),
    "forward D 128": ("fwd", 128, False, False),
    "forward D 128 causal": ("fwd", 128, True, False),
    "forward D 128 pair": ("fwd", 128, False, True),
    "backward D 128": ("bwd", 128, False, False),
    "backward D 128 pair": ("bwd", 128, False, True),
}


def main(packages: str, folder: str, variant: str) -> None:
    direction, depth, causal, pair = VARIANTS[variant]
    os.environ.update(
        FLASH_ATTENTION_ARCH="sm_100",
        FLASH_ATTENTION_FAKE_TENSOR="1",
        FLASH_ATTENTION_NUM_SMS="148",
        FA_DISABLE_2CTA="0" if pair else "1",
        CUTE_DSL_ARCH="sm_100a",
        CUTE_DSL_KEEP="ptx",
        CUTE_DSL_DUMP_DIR=folder,
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    sys.path.insert(0, packages)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Its package initialiser wants a GPU; the modules that are needed do not.
    quack = types.ModuleType("quack")
    quack.__path__ = [f"{packages}/quack"]
    sys.modules["quack"] = quack
    from flash_attn.cute import interface
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    torch.cuda.get_device_capability = lambda *_, **__: (10, 0)
    torch.cuda.current_device = lambda: 0
    properties = types.SimpleNamespace(multi_processor_count=148, major=10, minor=0, name="sm_100")
    torch.cuda.get_device_properties = lambda *_, **__: properties
    # The persistent form's launch code asks the driver how many SMs there are; the kernel's roles are the same.
    make = FlashAttentionForwardSm100.__init__

    def not_persistent(self, *args, **kwargs):
        make(self, *args, **{**kwargs, "is_static_persistent": False})

    FlashAttentionForwardSm100.__init__ = not_persistent
    with FakeTensorMode():
        q, k, v, out, dout = (torch.empty(1, 512, 1, depth, dtype=torch.bfloat16, device="cuda") for _ in range(5))
        lse = torch.empty(1, 1, 512, dtype=torch.float32, device="cuda")
        if direction == "fwd":
            interface._flash_attn_fwd(q, k, v, softmax_scale=depth**-0.5, causal=causal, return_lse=True)
        else:
            interface._flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=depth**-0.5, causal=causal)


if __name__ == "__main__":
    main(*sys.argv[1:])
