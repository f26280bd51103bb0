"""FlashAttention-4 for JAX: public names only. Importing this imports neither the CuTe DSL nor Flax."""

from jax_fa4.api import attention, attention_varlen, implementation_used, is_supported
from jax_fa4.config import config
from jax_fa4.ffi.call import disabled_checks as export_disabled_checks
from jax_fa4.precompile import precompile
from jax_fa4.spec import Unsupported
from jax_fa4.version import __version__

__all__ = [
    "Unsupported",
    "__version__",
    "attention",
    "attention_varlen",
    "config",
    "export_disabled_checks",
    "implementation_used",
    "is_supported",
    "precompile",
]
