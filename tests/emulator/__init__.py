"""A test-only interpreter of the PTX text of our kernels (sm_90a, sm_100a): numpy in, numpy out, findings. Reads
docs/emulator.md first.
"""

from .launch import Launch, Opaque, Pointer, Scalar, Tma, Uninitialised
from .parse import PtxError
from .run import Report, run
from .schedule import SEEDS

__all__ = ["SEEDS", "Launch", "Opaque", "Pointer", "PtxError", "Report", "Scalar", "Tma", "Uninitialised", "run"]
