"""Dtype names of the plans as the DSL's types."""

from cutlass import BFloat16, Float16, Float32, Int32

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32}
