"""Fuzzing kernels on a GPU: a table of calls that few compiled objects serve, and the judge in float64 on the device.

The plans of the table are known beforehand, so that a machine without a GPU can build them; what a call may change
without another object (batch, lengths, windows, alignment, scale, cap, values, segments) is drawn.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compare import Result, visibility
from problems import Inputs

from fuzz import runner
from fuzz.judge import Fault, Worst, measure, worst_of
from fuzz.trial import Signature, Trial
from jax_fa4 import kernels
from jax_fa4.spec import AttentionSpec, Problem


class Kind(NamedTuple):
    """What decides objects, but for shapes."""

    d: int
    v: int
    kinds: str  # of band, segments, cap, sinks
    dtype: str = "bfloat16"
    deterministic: bool = False


KINDS = (
    Kind(128, 128, ""), Kind(128, 128, "band"), Kind(64, 64, ""), Kind(64, 64, "band"),
    Kind(128, 128, "band", deterministic=True), Kind(64, 64, "", deterministic=True),
    Kind(128, 128, "band segments cap sinks"), Kind(64, 64, "segments"), Kind(192, 128, "band"),
    Kind(128, 128, "band sinks", "float16"), Kind(64, 64, "band cap"), Kind(256, 256, "band"),
    Kind(96, 96, "band"), Kind(72, 72, "", "float16"), Kind(128, 128, "segments", deterministic=True),
    Kind(64, 64, "band", "float16", True), Kind(192, 128, "", deterministic=True), Kind(64, 128, "band"),
    Kind(128, 64, "sinks"), Kind(40, 40, "band segments", deterministic=True), Kind(256, 256, "", deterministic=True),
    Kind(160, 160, ""), Kind(8, 8, "band"), Kind(128, 128, "cap sinks"), Kind(192, 192, "band cap", "float16"),
    Kind(248, 8, "sinks"), Kind(96, 96, "", deterministic=True), Kind(200, 200, "band segments", "float16"),
)  # fmt: skip
SHAPES = (  # (leading axes, t, s, n, k)
    ((2,), 129, 257, 4, 2),
    ((3,), 1, 600, 8, 2),  # decoding
    ((2, 2), 65, 190, 2, 2),
    ((12,), 300, 200, 16, 4),  # many query tiles
    ((), 333, 127, 7, 1),
    ((1,), 200, 4200, 2, 1),  # few query tiles with many keys
    ((2,), 700, 300, 4, 4),
    ((1, 3), 77, 1000, 8, 1),
    ((2,), 5, 700, 14, 2),
    ((1,), 1030, 1030, 2, 1),
    ((23,), 65, 2049, 23, 1),  # many query tiles with many keys
)
ROUNDS = 4  # shapes for a kind, at most


def table(most: int, arch: str, seed: int = 0) -> tuple[Signature, ...]:
    """Signatures that `most` plans serve on `arch`, the same for the same arguments: each kind with one shape, then
    with others, while their plans fit in."""
    rng, made, have = np.random.default_rng(seed), [], set[Any]()
    for turn in range(ROUNDS):
        for i, kind in enumerate(KINDS):
            sig = signature(kind, SHAPES[(3 * i + 4 * turn) % len(SHAPES)], rng)
            need = have | set(plans_of(sig, arch))
            if len(need) <= most and sig not in made:
                made.append(sig)
                have = need
    return tuple(made)


def signature(kind: Kind, shape: tuple, rng: np.random.Generator) -> Signature:
    on = dict.fromkeys(kind.kinds.split(), True)
    return Signature(
        (*shape, kind.d, kind.v), kind.dtype, on.get("band", False), bool(rng.random() < 0.6),
        on.get("segments", False), on.get("cap", False), on.get("sinks", False), None, None, False, False,
        str(rng.choice(["default", "number", "traced"])), bool(rng.random() < 0.6), kind.deterministic or None,
        bool(rng.random() < 0.1),
    )  # fmt: skip


def plans_of(sig: Signature, arch: str) -> list[Any]:
    """Of both passes."""
    lead, t, s, n, k, d, v = sig.shape
    spec = AttentionSpec(
        band=sig.band, lengths=sig.lengths, segments=sig.segments, soft_cap=sig.soft_cap, sinks=sig.sinks,
        deterministic=bool(sig.deterministic),
    )  # fmt: skip
    forward = Problem(spec, int(np.prod(lead)), t, s, n, k, d, v, sig.dtype)
    backward = replace(forward.backward(), spec=replace(spec, sinks=False))
    return [kernels.select(one, arch) for one in (forward, backward)]


def plans(signatures: tuple[Signature, ...], arch: str) -> list[Any]:
    """All plans of a table, each once."""
    return list(dict.fromkeys(plan for sig in signatures for plan in plans_of(sig, arch)))


def judged(trial: Trial) -> Fault:
    """Runs a call twice and judges it: bits that must repeat, operands that nobody may write, results in float64."""
    first, rest, cotangents = trial.operands()
    placed = [jnp.asarray(x) for x in first], rest, tuple(jnp.asarray(x) for x in cotangents)
    got, again = runner.attend(trial, placed), runner.attend(trial, placed)
    for name in got._fields if trial.signature.deterministic else ("out", "lse"):
        one, two = getattr(got, name), getattr(again, name)
        assert one is None or np.asarray(one).tobytes() == np.asarray(two).tobytes(), f"{name}: other bits in a repeat"
    for name, x, host in zip("qkv", placed[0], first, strict=True):
        assert np.asarray(x).tobytes() == host.tobytes(), f"{name} was written to"
    found = measured(trial, got)
    return worst_of(found, got)


def measured(trial: Trial, got: Result) -> dict[str, Worst]:
    """`judge.measure` on the device: one program for a signature, with every drawn number an operand."""
    sig, case, inp = trial.signature, trial.case, trial.arrays
    arrays = {name: getattr(inp, name) for name in ("query", "key", "value", "dout", "dlse", "sinks")}
    with jax.enable_x64(True):
        found = _measure(sig)(
            got, arrays, visibility(case, inp), np.float64(case.scale_value), np.float64(case.soft_cap or 0)
        )
    return jax.device_get(found)


@cache
def _measure(sig: Signature) -> Any:
    made = Trial(sig, False, None, False, None, None, "int32", 1.0, 1.0, "normal", 1.0, False, False, None, 0, None)
    case = made.case

    def run(got: Result, arrays: dict[str, Any], see: Any, scale: Any, cap: Any) -> dict[str, Worst]:
        one = replace(case, scale=scale, soft_cap=cap if sig.soft_cap else None)
        return measure(got, one, Inputs(**arrays), see, (sig.dtype, sig.dtype), jnp)

    return jax.jit(run)


def poison() -> None:
    """Fills freed memory of the device with NaN, so that a result that nobody writes shows."""
    blocks = [jnp.full(1 << n, jnp.nan, jnp.float32) for n in (*range(10, 25), 26)]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()
