"""What can be wrong with a call: each entry spoils the arguments of a right one and says how it must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from problems import DTYPES

from jax_fa4 import Unsupported

Arguments = dict[str, Any]


class Wrong(NamedTuple):
    """A fault: `spoil` changes the arguments in place."""

    spoil: Callable[[Arguments], None]
    error: type[Exception]
    text: str  # regular expression that the error's text must match


def _set(**changes: Any) -> Callable[[Arguments], None]:
    return lambda a: a.update(changes)


def _grow(name: str, axis: int) -> Callable[[Arguments], None]:
    def spoil(a: Arguments) -> None:
        pad = [(0, 0)] * a[name].ndim
        pad[axis] = (0, 1)
        a[name] = np.pad(a[name], pad)

    return spoil


def _both_longer(axis: int) -> Callable[[Arguments], None]:
    """Key and value grow together, so that they fit each other and not the query."""

    def spoil(a: Arguments) -> None:
        n = a["query"].shape[axis]
        for name in ("key", "value"):
            shape = list(a[name].shape)
            shape[axis] = n + 1
            a[name] = np.zeros(shape, a[name].dtype)

    return spoil


def _cast(name: str, dtype: Any) -> Callable[[Arguments], None]:
    return lambda a: a.update({name: np.zeros(a[name].shape, dtype)})


def _lengths(name: str, dtype: Any, more: int) -> Callable[[Arguments], None]:
    return lambda a: a.update({name: np.zeros((*a["query"].shape[:-3], *(1,) * more), dtype)})


def _segments(more: int, dtype: Any = np.int32, both: bool = True) -> Callable[[Arguments], None]:
    def spoil(a: Arguments) -> None:
        for name, of in (("query_segment_ids", "query"), ("key_value_segment_ids", "key")):
            a[name] = np.zeros((*a[of].shape[:-3], a[of].shape[-3] + more), dtype)
        if not both:
            a["key_value_segment_ids"] = None

    return spoil


def _scores(name: str, dtype: Any, more: int = 0, axes: int = 0) -> Callable[[Arguments], None]:
    def spoil(a: Arguments) -> None:
        q, k = a["query"].shape, a["key"].shape
        a[name] = np.zeros((*(1,) * axes, *q[:-3], q[-2], q[-3], k[-3] + more), dtype)

    return spoil


def _sinks(dtype: Any, more: int) -> Callable[[Arguments], None]:
    return lambda a: a.update(sinks=np.zeros(a["query"].shape[-2] + more, dtype))


def _kernels_only(**depths: int) -> Callable[[Arguments], None]:
    """implementation="fa4" with operands of these last axes."""

    def spoil(a: Arguments) -> None:
        for name, depth in depths.items():
            a[name] = np.zeros((*a[name].shape[:-1], depth), DTYPES["bfloat16"])
        a["implementation"] = "fa4"

    return spoil


WRONG: dict[str, Wrong] = {
    "key heads do not divide": Wrong(_both_longer(-2), ValueError, r"multiple of the number of key heads; \d"),
    "depths differ": Wrong(_grow("query", -1), ValueError, r"same depth; query has \d"),
    "key and value lengths differ": Wrong(_grow("value", -3), ValueError, r"same length; key has \d"),
    "key and value heads differ": Wrong(_grow("value", -2), ValueError, r"same number of heads; they have \d"),
    "two axes": Wrong(lambda a: a.update(query=np.zeros((3, 2), a["query"].dtype)), ValueError, "at least 3 axes"),
    "another axis": Wrong(lambda a: a.update(query=a["query"][None]), ValueError, "same number of axes"),
    "another batch": Wrong(lambda a: a.update({k: np.stack([a[k]] * n) for k, n in
                                               (("query", 2), ("key", 3), ("value", 3))}), ValueError, "batch axes"),
    "two dtypes": Wrong(_cast("key", np.int8), TypeError, "one dtype; they have"),
    "integers": Wrong(lambda a: a.update({k: np.zeros(a[k].shape, np.int32) for k in
                                          ("query", "key", "value")}), TypeError, "int32 is not supported"),
    "a list": Wrong(lambda a: a.update(query=[[1.0]]), TypeError, "query must be an array; it is list"),
    "window below 0": Wrong(_set(local_window_size=(-1, 0)), ValueError, "left side is -1"),
    "window of a float": Wrong(_set(local_window_size=(1.5, 0)), TypeError, "1.5"),
    "window of a bool": Wrong(_set(local_window_size=True), TypeError, "True"),
    "window of three": Wrong(_set(local_window_size=(1, 2, 3)), ValueError, "3 entries"),
    "scale 0": Wrong(_set(scale=0.0), ValueError, "above 0; it is 0"),
    "scale below 0": Wrong(_set(scale=-1.0), ValueError, "above 0; it is -1"),
    "scale nan": Wrong(_set(scale=float("nan")), ValueError, "it is nan"),
    "scale array": Wrong(_set(scale=np.ones(2, np.float32)), ValueError, r"scalar; it has shape \(2,\)"),
    "cap below 0": Wrong(_set(logits_soft_cap=-2.0), ValueError, "it is -2"),
    "cap inf": Wrong(_set(logits_soft_cap=float("inf")), ValueError, "it is inf"),
    "cap text": Wrong(_set(logits_soft_cap="much"), TypeError, "concrete number"),
    "float lengths": Wrong(_lengths("query_seq_lengths", np.float32, 0), TypeError, "must be integers"),
    "lengths of another shape": Wrong(_lengths("key_value_seq_lengths", np.int32, 1), ValueError, "batch shape"),
    "segments of one side": Wrong(_segments(0, both=False), ValueError, "both are needed"),
    "segments too long": Wrong(_segments(1), ValueError, "_segment_ids must have shape"),
    "float segments": Wrong(_segments(0, np.float32), TypeError, "must be integers"),
    "alignment": Wrong(_set(causal_alignment="centre"), ValueError, "'centre'"),
    "implementation": Wrong(_set(implementation="cudnn"), ValueError, "'cudnn'"),
    "no implementation": Wrong(_set(implementation=()), ValueError, "implementation must be"),
    "sinks of another shape": Wrong(_sinks(np.float32, 1), ValueError, r"sinks must have shape \[N\]"),
    "integer sinks": Wrong(_sinks(np.int32, 0), TypeError, "sinks must be floating"),
    "integer bias": Wrong(_scores("bias", np.int32), TypeError, "bias must be floating"),
    "bias too long": Wrong(_scores("bias", np.float32, 2), ValueError, "bias must broadcast"),
    "bias with an axis too many": Wrong(_scores("bias", np.float32, 0, 1), ValueError, "bias must broadcast"),
    "float mask": Wrong(_scores("mask", np.float32), TypeError, "mask must be boolean"),
    "mask too long": Wrong(_scores("mask", np.bool_, 2), ValueError, "mask must broadcast"),
    "deterministic text": Wrong(_set(deterministic="yes"), TypeError, "'yes'"),
    "causal number": Wrong(_set(is_causal=1), TypeError, "is_causal must be True or False; it is 1"),
    "kernels only, dense bias": Wrong(lambda a: (_scores("bias", np.float32)(a), a.update(implementation="fa4")),
                                      Unsupported, "dense bias|dtype float"),
    "kernels only, dense mask": Wrong(lambda a: (_scores("mask", np.bool_)(a), a.update(implementation="fa4")),
                                      Unsupported, "dense (bias|mask)|dtype float"),
    "kernels only, depth of 12": Wrong(_kernels_only(query=12, key=12, value=8), Unsupported,
                                       "depth 12 of query and key|dense"),
    "kernels only, values of depth 264": Wrong(_kernels_only(query=8, key=8, value=264), Unsupported,
                                               "depth 264 of value|dense"),
    "kernels only, float32": Wrong(
        lambda a: a.update({k: np.zeros(a[k].shape, np.float32) for k in ("query", "key", "value")},
                           implementation="fa4"), Unsupported, "dtype float32"),
}  # fmt: skip
