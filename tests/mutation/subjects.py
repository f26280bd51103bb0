"""The known-good kernels that faults are planted in: our forwards and backwards, and micro-kernels; tiny shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import emulated
import numpy as np
import test_compile_bwd as hopper_bwd
import test_emulated_sm90 as hopper_fwd
import test_emulated_sm100_bwd as blackwell_bwd
from compare import Result, check
from emulator import Launch, Uninitialised, run
from emulator.snippets import body, mma_setup, module, wgmma_setup
from launch import launches, to_emulator
from micro import add, build, copy, gemm, power
from problems import DTYPES, Case, inputs

from mutation.judge import Subject, Variant

# Two launches each. Ragged in both directions, so that no code for edges is dead; at least three key tiles, so that
# rings wrap; once with small scores, so that every product counts, once with large ones, so that rows rescale.
RAGGED = (
    Case("ragged", b=1, t=200, s=300, n=1, k=1, d=64, q_lens=(190,), kv_lens=(270,)),
    Case("ragged", b=1, t=140, s=520, n=1, k=1, d=64, q_lens=(129,), kv_lens=(500,), spread=3.0),
)
CAUSAL = (
    Case("causal", b=1, t=150, s=500, n=2, k=1, d=128, causal=True, bottom_right=True, kv_lens=(460,)),
    Case("causal", b=1, t=260, s=260, n=1, k=1, d=128, causal=True, spread=3.0),
)
# Several query tiles for one CTA of a persistent grid; one example without keys.
MANY = (
    Case("many", b=1, t=400, s=260, n=2, k=1, d=64, q_lens=(390,), kv_lens=(250,)),
    Case("many", b=2, t=300, s=400, n=1, k=1, d=64, q_lens=(290, 300), kv_lens=(380, 0), spread=3.0),
)
GRADIENT = (
    Case("gradient", b=1, t=200, s=200, n=1, k=1, d=64, q_lens=(150,), kv_lens=(190,)),
    Case("gradient", b=1, t=390, s=128, n=1, k=1, d=64, q_lens=(390,), kv_lens=(128,)),
)
GRADIENT_CAUSAL = (
    Case("gradient causal", b=1, t=160, s=200, n=2, k=1, d=128, causal=True, kv_lens=(150,)),
    Case("gradient causal", b=1, t=300, s=150, n=1, k=1, d=128, causal=True, bottom_right=True, kv_lens=(150,)),
)
SIZES = ("b", "t", "s", "n", "k")


def _shapes(case: Case) -> dict[str, int]:
    return {size.upper(): getattr(case, size) for size in SIZES}


def _empty(plan: Any, shapes: dict[str, int]) -> dict[str, Uninitialised]:
    half = emulated.raw(np.zeros(0), plan.dtype).dtype
    kinds = {plan.dtype: half, "float32": np.dtype(np.float32), "int32": np.dtype(np.int32)}
    e = plan.extents(shapes)
    return {b.name: Uninitialised(b.sized(e), kinds[b.dtype]) for b in plan.outputs}


def _entry_lines(ptx: str, entry: str) -> tuple[int, int]:
    """First and last line of a kernel of a module."""
    lines = ptx.split("\n")
    starts = [i + 1 for i, text in enumerate(lines) if ".entry" in text] + [len(lines) + 1]
    at = next(i for i in starts[:-1] if entry in lines[i - 1])
    return at, starts[starts.index(at) + 1] - 1


def _numbers(memory: dict, names: tuple[str, ...], dtype: str) -> dict[str, np.ndarray]:
    """Buffers as float64."""
    found = {}
    for name in names:
        x = memory[name]
        found[name] = (x.view(DTYPES[dtype]) if x.dtype == np.uint16 else x).astype(np.float64)
    return found


def _obeys(case: Case, inp: Any, found: dict[str, np.ndarray], dtype: str) -> bool:
    try:
        check(Result(*[found.get(name) for name in Result._fields]), case, inp, dtype)
    except AssertionError:
        return False
    return True


def variant(case: Case, plan: Any, bind: Callable, ptx: str) -> tuple[Variant, tuple[int, int]]:
    """A call of a plan, and the lines of its main kernel. What comes before that runs once, what comes after it runs
    to judge the results."""
    shapes, dtype = _shapes(case), plan.dtype
    inp = inputs(case, dtype)
    given = hopper_bwd.operands(plan, case, inp)
    memory = {b.name: given[b.name] for b in plan.inputs} | _empty(plan, shapes)
    calls = launches(plan, bind, shapes, ptx)
    places = [_entry_lines(ptx, one.entry) for one in calls]
    at = max(range(len(calls)), key=lambda i: places[i][1] - places[i][0])  # the main kernel is the longest
    for one in calls[:at]:
        memory |= run(one.ptx, to_emulator(one), memory).check().outputs
    main, results = to_emulator(calls[at]), ("dq", "dk", "dv") if "dv" in memory else ("out", "lse")

    def right(outputs: dict) -> bool:
        made = dict(outputs)
        for one in calls[at + 1 :]:
            made |= run(one.ptx, to_emulator(one), made).outputs
        return _obeys(case, inp, _numbers(made, results, dtype), dtype)

    return Variant(lambda text, seed: run(text, main, memory, seed=seed), right), places[at]


def attention(name: str, cases: tuple[Case, ...], plan: Any, bind: Callable, ptx: str, **more: Any) -> Subject:
    """Calls of one plan; faults go into its main kernel."""
    made = [variant(case, plan, bind, ptx) for case in cases]
    return Subject(name, ptx, tuple(v for v, _ in made), made[0][1], loose=("work", "dq"), **more)


def blackwell_forward(name: str, both: tuple[Case, ...]) -> Subject:
    from test_emulated_sm100 import plan_of
    from verifier import cases

    from jax_fa4.kernels.sm100.fwd.plan import bind

    case = both[0]
    plan = plan_of(case, stage_cap=3)  # few stages, so that rings wrap
    softmax, correct, rest = plan.registers

    def verify(text: str) -> Any:
        lengths = (case.lengths[0][0], case.lengths[1][0])
        left, right = case.sides
        return cases.judge(cases.Case(plan, cases.RESCALE, _shapes(case), left, right, lengths), text, timeout=200)

    shares = {softmax: 2, correct: 1, rest: 1}
    return attention(name, both, plan, bind, emulated.ptx_of(plan), verify=verify, shares=shares)


def kernels() -> Iterator[Subject]:
    """Forward and backward, Blackwell and Hopper."""
    from jax_fa4.kernels.sm90.bwd.plan import bind as hopper_bind
    from jax_fa4.kernels.sm90.fwd.plan import bind as hopper_fwd_bind
    from jax_fa4.kernels.sm100.bwd.plan import bind as blackwell_bind

    yield blackwell_forward("Blackwell forward, D 64, ragged", RAGGED)
    yield blackwell_forward("Blackwell forward, D 128, causal", CAUSAL)
    for kind, both in (("D 64, ragged", GRADIENT), ("D 128, causal", GRADIENT_CAUSAL)):
        plan = blackwell_bwd.plan_of(both[0])
        yield attention(f"Blackwell backward, {kind}", both, plan, blackwell_bind, blackwell_bwd.ptx_of(plan))
    for kind, both in (("D 64, ragged", MANY), ("D 128, causal", CAUSAL)):
        plan = hopper_plan(both[0])
        yield attention(f"Hopper forward, {kind}", both, plan, hopper_fwd_bind, hopper_fwd.ptx_of(plan).rstrip("\0"))
    plan = hopper_bwd.plan_of(GRADIENT[0])
    ptx = hopper_bwd.built(plan).ptx.rstrip("\0")
    yield attention("Hopper backward, D 64, ragged", GRADIENT, plan, hopper_bind, ptx)


def hopper_plan(case: Case) -> Any:
    from dataclasses import replace

    from jax_fa4.kernels import select
    from jax_fa4.spec import Problem

    plan = select(Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, "bfloat16"), "sm_90a")
    return replace(plan, workers=1) if plan.workers else plan  # one CTA with all the tiles: rings wrap


def _exact(ptx: str, launch: Launch, memory: dict, name: str, verify: Any = None) -> Subject:
    """A kernel on integers: its results are right if they are the same."""
    good = run(ptx, launch, memory).check().outputs

    def right(outputs: dict) -> bool:
        return all(np.array_equal(good[key], outputs[key]) for key in good)

    one = Variant(lambda text, seed: run(text, launch, memory, seed=seed), right)
    return Subject(name, ptx, (one,), verify=verify)


def compiled_micros() -> Iterator[Subject]:
    """Micro-kernels in the DSL."""
    from verifier import run as verifier

    rng = np.random.default_rng(0)
    kinds = {"bfloat16": np.uint16, "float32": np.float32}
    for micro in (add.MICRO, copy.MICRO, power.MICRO, gemm.micro(5)):
        memory: dict[str, Any] = {}
        for b in micro.inputs:
            x = rng.integers(-4, 5, b.shape).astype(np.float32)
            if micro is power.MICRO:  # down to results that are subnormal, and below
                x = rng.uniform(-300, 100, b.shape).astype(np.float32)
            memory[b.name] = (x.view(np.uint32) >> 16).astype(np.uint16) if b.dtype == "bfloat16" else x
        memory |= {b.name: Uninitialised(b.shape, kinds[b.dtype]) for b in micro.outputs}
        launch = to_emulator(build.launched(micro))

        def verify(text: str, micro: Any = micro) -> Any:
            return verifier.judge(build.launched(micro, text), timeout=60)

        yield _exact(build.ptx(micro), launch, memory, f"micro {micro.module}", verify)


def written_micros() -> Iterator[Subject]:
    """Micro-kernels written in PTX."""
    values = np.random.default_rng(0).integers(-4, 5, (2, 128, 64))
    for name, setup in (("mma", mma_setup), ("wgmma", wgmma_setup)):
        params, memory, how = setup(values)
        text = module(body(name), params, how["block"], how.get("target", "sm_100a"))
        yield _exact(
            text, Launch(params, block=(how["block"], 1, 1), shared_bytes=how["shared"]), memory, f"PTX {name}"
        )


def subjects() -> Iterator[Subject]:
    """All of them, the small ones first."""
    yield from written_micros()
    yield from compiled_micros()
    yield from kernels()
