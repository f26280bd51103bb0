"""Runs fuzzed calls through the public function, forward and backward, and counts what it found."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
from compare import Result
from hypothesis import HealthCheck, Phase, given, seed, settings

import jax_fa4
from fuzz.judge import Fault, judge
from fuzz.trial import Signature, Trial, trials
from fuzz.wrong import WRONG
from jax_fa4 import reference

# Problems of more than 512 scores are cut in tiles of 8 x 8, as large ones are: both codes run, on small problems.
SMALL_TILES = {"WHOLE_ELEMENTS": 512, "TILE_ELEMENTS": 1, "TILE_MIN": 8}
DIFFERENTIABLE = ("bias", "sinks", "scale")


@dataclass
class Tally:
    """What a run has seen."""

    right: int = 0
    refused: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # tensor and dtype: largest error / bound
    signatures: set[Signature] = field(default_factory=set)
    kinds: Counter = field(default_factory=Counter)  # of refusals


def small_tiles() -> None:
    """For the rest of the process; before anything has been traced."""
    for name, value in SMALL_TILES.items():
        setattr(reference, name, value)


def call(first: list, rest: dict[str, Any], cotangents: tuple, options: dict[str, Any]) -> tuple:
    """(out, lse or None, gradients of q, k, v, then of bias, sinks and scale by name)."""
    some = {k: x for k, x in rest.items() if k in DIFFERENTIABLE}
    other = {k: x for k, x in rest.items() if k not in DIFFERENTIABLE}
    f = lambda q, k, v, some: jax_fa4.attention(q, k, v, **some, **other, **options)  # noqa: E731
    got, pull = jax.vjp(f, *first, some)
    if not options["return_residual"]:
        return got, None, pull(cotangents[0])
    assert got[1].dtype == np.float32, got[1].dtype
    return *got, pull(cotangents)


@cache
def jitted(_: Signature, frozen: tuple) -> Any:
    return jax.jit(lambda first, rest, cotangents: call(first, rest, cotangents, dict(frozen)))


def attend(trial: Trial, operands: tuple | None = None) -> Result:
    """The results of a right call, with one batch axis as the oracle has them."""
    first, rest, cotangents = operands or trial.operands()
    options = trial.options()
    first = [jax.numpy.asarray(x) for x in first]
    rest = {k: jax.numpy.asarray(x) if k in DIFFERENTIABLE else x for k, x in rest.items()}
    if trial.signature.jit:
        run = jitted(trial.signature, tuple(options.items()))
        out, lse, (dq, dk, dv, more) = run(first, rest, cotangents)
    else:
        out, lse, (dq, dk, dv, more) = call(first, rest, cotangents, options)
    for x, like in (
        (out, first[0]),
        (dq, first[0]),
        (dk, first[1]),
        (dv, first[2]),
        *((more[k], rest[k]) for k in more),
    ):
        assert x.dtype == like.dtype, f"{x.dtype} for an operand of {like.dtype}"
    b = trial.case.b
    out, dq, dk, dv = (np.asarray(x).reshape(b, *x.shape[-3:]) for x in (out, dq, dk, dv))
    lse = None if lse is None else np.moveaxis(np.asarray(lse).reshape(b, *lse.shape[-2:]), 2, 1)
    dbias = np.asarray(more["bias"]).reshape(trial.case.bias) if "bias" in more else None
    return Result(out, lse, dq, dk, dv, dbias, more.get("sinks"), more.get("scale"))


def refused(trial: Trial) -> None:
    """A wrong call raises what it should, and says so."""
    first, rest, _ = trial.operands()
    arguments = dict(zip(("query", "key", "value"), first, strict=True)) | rest | trial.options()
    wrong = WRONG[trial.wrong]
    wrong.spoil(arguments)
    try:
        jax_fa4.attention(**arguments)
    except wrong.error as error:
        assert re.search(wrong.text, str(error)), f"{trial.wrong}: the text does not say it: {error}"
        return
    raise AssertionError(f"{trial.wrong}: not refused")


def judged(trial: Trial) -> Fault:
    """Runs a right call and judges it."""
    dtype = trial.signature.dtype
    return judge(attend(trial), trial.case, trial.arrays, dtype, "float32" if trial.signature.wide_bias else dtype)


def check(trial: Trial, tally: Tally, judged: Callable[[Trial], Fault] = judged) -> None:
    """Right or refused; fails with the trial, which can be pasted back."""
    dtype = trial.signature.dtype
    x64 = jax.enable_x64(True) if dtype == "float64" else nullcontext()
    tally.signatures.add(trial.signature)
    with x64:
        if trial.wrong is not None:
            refused(trial)
            tally.refused += 1
            tally.kinds[trial.wrong] += 1
            return
        worst = judged(trial)
    key = f"{worst.name} {dtype}"
    tally.worst[key] = max(tally.worst.get(key, 0.0), worst.ratio)
    assert worst.ratio <= 1, f"{worst.text} ({worst.ratio:.3g} of the bound)"
    tally.right += 1


@dataclass(frozen=True)
class Run:
    """How calls are drawn and judged."""

    implementations: tuple = (None, "xla", ("fa4", "xla"))
    judged: Callable[[Trial], Fault] = judged
    shrink: bool = True


def fuzz(
    cases: int, start: int, signatures: tuple[Signature, ...], tally: Tally, seconds: float = np.inf, run: Run = Run()
) -> None:
    """The same number of cases (`cases` in all) for each signature. Raises the first failure, shrunk. Begins no
    signature after `seconds`."""
    end = time.monotonic() + seconds
    for i, signature in enumerate(signatures):
        if time.monotonic() > end:
            return
        share = cases * (i + 1) // len(signatures) - cases * i // len(signatures)
        if share:
            rounds(share, start + i, signature, tally, run)


def rounds(cases: int, start: int, signature: Signature, tally: Tally, run: Run = Run(), end: float = np.inf) -> None:
    """`cases` of one signature; none after the time `end`."""
    phases = (Phase.generate, Phase.shrink) if run.shrink else (Phase.generate,)

    @seed(start)
    @settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=phases,
        print_blob=False,
    )  # fmt: skip
    @given(trials(signature, run.implementations))
    def one(trial: Trial) -> None:
        if time.monotonic() < end:
            check(trial, tally, run.judged)

    one()
