"""The known-good kernels that faults are planted in: our forwards and backwards, and micro-kernels; tiny shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
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
# rings wrap; once with small scores, so that every product counts, once with large ones, so that rows rescale. Causal,
# each tile's last keys lie in the upper half of their block, else half of a product is hidden.
RAGGED = (
    Case("ragged", b=1, t=200, s=260, n=1, k=1, d=64, q_lens=(129,), kv_lens=(250,)),
    Case("ragged", b=1, t=300, s=400, n=1, k=1, d=64, q_lens=(280,), kv_lens=(390,), spread=3.0),
)
CAUSAL = (
    Case("causal", b=1, t=140, s=760, n=2, k=1, d=128, causal=True, bottom_right=True, q_lens=(130,), kv_lens=(750,)),
    Case("causal", b=1, t=370, s=370, n=1, k=1, d=128, causal=True, spread=3.0),
)
# A window too: its last steps are masked on the other side, in a loop of their own.
BAND = (CAUSAL[0], Case("window", b=1, t=370, s=700, n=1, k=1, d=128, window=(383, 0), bottom_right=True, spread=1.5))
# Two CTAs take 512 queries.
PAIRED = (
    Case("pair", b=1, t=400, s=400, n=1, k=1, d=128, q_lens=(390,), kv_lens=(380,)),
    Case("pair", b=1, t=520, s=260, n=1, k=1, d=128, kv_lens=(250,), spread=4.0),
)
WIDE = (
    Case("wide", b=1, t=200, s=600, n=1, k=1, d=256, q_lens=(190,), kv_lens=(590,)),
    Case("wide", b=1, t=260, s=260, n=1, k=1, d=256, kv_lens=(250,), spread=3.0),
)
# Few queries: heads that share keys fill a tile and half of the next, and CTAs share the keys.
FEW = (
    Case("few", b=1, t=25, s=1100, n=8, k=1, d=128, kv_lens=(1090,)),
    Case("few", b=2, t=24, s=700, n=8, k=1, d=128, kv_lens=(690, 370), spread=3.0),
)
# Several query tiles for one CTA of a persistent grid; one example without keys, and others behind it.
MANY = (
    Case("many", b=1, t=400, s=260, n=2, k=1, d=64, q_lens=(390,), kv_lens=(250,)),
    Case("many", b=2, t=300, s=400, n=1, k=1, d=64, q_lens=(290, 300), kv_lens=(0, 300), spread=3.0),
)
GRADIENT = (
    Case("gradient", b=1, t=200, s=200, n=1, k=1, d=64, q_lens=(150,), kv_lens=(190,)),
    Case("gradient", b=2, t=390, s=128, n=1, k=1, d=64, q_lens=(390, 100), kv_lens=(128, 128)),
)
GRADIENT_PAIR = (
    Case("gradient", b=1, t=200, s=300, n=1, k=1, d=128, q_lens=(150,), kv_lens=(290,)),
    Case("gradient", b=1, t=390, s=300, n=1, k=1, d=128, q_lens=(390,), kv_lens=(290,)),
)
# The last step of a sweep is a product of its own: its tile is nearly full, or most of the product would be of zeros.
GRADIENT_DEEP = (
    Case("gradient", b=1, t=200, s=200, n=1, k=1, d=256, q_lens=(150,), kv_lens=(190,)),
    Case("gradient", b=1, t=250, s=250, n=1, k=1, d=256, kv_lens=(250,)),
)
# Likewise several key tiles for one CTA, and more query tiles than a ring has places.
# Of the last tiles' rows more than 96 are there, so that some threads have none to clear.
GRADIENT_MANY = (
    Case("gradient", b=1, t=400, s=250, n=2, k=1, d=64, q_lens=(358,), kv_lens=(230,)),
    Case("gradient", b=2, t=150, s=260, n=1, k=1, d=64, q_lens=(140, 150), kv_lens=(128, 260)),
)
GRADIENT_CAUSAL = (
    Case("gradient causal", b=1, t=160, s=200, n=2, k=1, d=128, causal=True, kv_lens=(150,)),
    Case("gradient causal", b=1, t=300, s=150, n=1, k=1, d=128, causal=True, bottom_right=True, q_lens=(290,)),
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


def blackwell_forward(both: tuple[Case, ...], plan_of: Callable | None, name: str) -> Subject:
    """plan_of: of a case, with fields of the plan; None: what a call chooses."""
    from test_emulated_sm100 import plan_of as chosen
    from verifier import cases

    from jax_fa4.kernels.sm100.fwd.plan import bind

    case = both[0]
    plan = (plan_of or chosen)(case, stage_cap=3)  # few stages, so that rings wrap
    plan = replace(plan, workers=1) if plan.workers else plan  # one CTA with all the tiles, for the same reason
    softmax, correct, rest = plan.registers

    def verify(text: str) -> Any:
        lengths = (case.lengths[0][0], case.lengths[1][0])
        left, right = case.sides
        return cases.judge(cases.Case(plan, cases.RESCALE, _shapes(case), left, right, lengths), text, timeout=200)

    shares = {softmax: plan.queries, correct: 1, rest: 1}
    return attention(name, both, plan, bind, emulated.ptx_of(plan), verify=verify, shares=shares)


def blackwell_backward(both: tuple[Case, ...], form: Any, name: str) -> Subject:
    """form: the module of its emulator tests."""
    from jax_fa4.kernels.sm100.bwd.plan import bind

    plan = form.plan_of(both[0])
    return attention(name, both, plan, getattr(form, "bind", bind), emulated.ptx_of(plan))


def hopper_forward(both: tuple[Case, ...], name: str) -> Subject:
    from jax_fa4.kernels.sm90.fwd.plan import bind

    plan = hopper_plan(both[0])
    return attention(name, both, plan, bind, hopper_fwd.ptx_of(plan).rstrip("\0"))


def hopper_backward(both: tuple[Case, ...], name: str) -> Subject:
    from jax_fa4.kernels.sm90.bwd.plan import bind

    plan = hopper_bwd.plan_of(both[0])
    plan = replace(plan, workers=1) if plan.workers else plan
    return attention(name, both, plan, bind, hopper_bwd.built(plan).ptx.rstrip("\0"))


def at_depth(cases: tuple[Case, ...], d: int, v: int | None = None, **sizes: Any) -> tuple[Case, ...]:
    return tuple(replace(case, d=d, v=v or d, **sizes) for case in cases)


def kernels() -> Iterator[tuple[str, Callable[[str], Subject]]]:
    """Forward and backward, every form of the Blackwell ones, and Hopper: (name, what makes it of the name)."""
    import test_emulated_sm100_bwd_pair as bwd_pair
    import test_emulated_sm100_bwd_wide as bwd_wide
    import test_sm100_pair
    import test_sm100_wide

    for kind, both, plan_of in (
        ("D 64, ragged", RAGGED, None),
        ("D 128, causal", CAUSAL, None),
        ("D 64, causal", at_depth(CAUSAL, 64), None),
        ("D 192 and 128, ragged", at_depth(RAGGED, 192, 128), None),
        ("D 256, wide", WIDE, test_sm100_wide.plan_of),
        ("D 128, pair", PAIRED, test_sm100_pair.plan_of),
        ("D 128, few queries", FEW, None),
    ):
        yield f"Blackwell forward, {kind}", partial(blackwell_forward, both, plan_of)
    for kind, both, form in (
        ("D 64, ragged", GRADIENT, blackwell_bwd),
        ("D 128, causal", GRADIENT_CAUSAL, blackwell_bwd),
        ("D 128, pair", GRADIENT_PAIR, bwd_pair),
        ("D 256, wide", GRADIENT_DEEP, bwd_wide),
    ):
        yield f"Blackwell backward, {kind}", partial(blackwell_backward, both, form)
    yield "Hopper forward, D 64, ragged", partial(hopper_forward, MANY)
    yield "Hopper forward, D 128, causal", partial(hopper_forward, BAND)
    yield "Hopper backward, D 64, ragged", partial(hopper_backward, GRADIENT_MANY)


def hopper_plan(case: Case) -> Any:
    from jax_fa4.kernels import select
    from jax_fa4.spec import Problem

    plan = select(Problem(case.spec, case.b, case.t, case.s, case.n, case.k, case.d, case.v, "bfloat16"), "sm_90a")
    return replace(plan, workers=1) if plan.workers else plan  # one CTA with all the tiles: rings wrap


def _exact(ptx: str, calls: tuple[tuple[Launch, dict], ...], name: str, verify: Any = None) -> Subject:
    """A kernel on integers, with one memory or several: its results are right if they are the same."""

    def variant_of(launch: Launch, memory: dict) -> Variant:
        good = run(ptx, launch, memory).check().outputs

        def right(outputs: dict) -> bool:
            return all(np.array_equal(good[key], outputs[key]) for key in good)

        return Variant(lambda text, seed: run(text, launch, memory, seed=seed), right)

    return Subject(name, ptx, tuple(variant_of(*call) for call in calls), verify=verify)


def _call(micro: Any, rng: np.random.Generator) -> tuple[Launch, dict]:
    """A micro-kernel's launch, and small integers for it to work on."""
    kinds, memory = {"bfloat16": np.uint16, "float32": np.float32}, {}
    for b in micro.inputs:
        x = rng.integers(-4, 5, b.shape).astype(np.float32)
        if micro is power.MICRO:  # down to results that are subnormal, and below
            x = rng.uniform(-300, 100, b.shape).astype(np.float32)
        memory[b.name] = (x.view(np.uint32) >> 16).astype(np.uint16) if b.dtype == "bfloat16" else x
    memory |= {b.name: Uninitialised(b.shape, kinds[b.dtype]) for b in micro.outputs}
    return to_emulator(build.launched(micro)), memory


def compiled_micros() -> Iterator[Subject]:
    """Micro-kernels in the DSL. Of the gemm, whose ring wraps, also one step alone."""
    from verifier import run as verifier

    rng = np.random.default_rng(0)
    for micro, *more in ((add.MICRO,), (copy.MICRO,), (power.MICRO,), (gemm.micro(5), gemm.micro(1))):

        def verify(text: str, micro: Any = micro) -> Any:
            return verifier.judge(build.launched(micro, text), timeout=60)

        calls = tuple(_call(one, rng) for one in (micro, *more))
        assert all(build.ptx(one) == build.ptx(micro) for one in more), micro
        yield _exact(build.ptx(micro), calls, f"micro {micro.module}", verify)


def written_micros() -> Iterator[Subject]:
    """Micro-kernels written in PTX."""
    values = np.random.default_rng(0).integers(-4, 5, (2, 128, 64))
    for name, setup in (("mma", mma_setup), ("wgmma", wgmma_setup)):
        params, memory, how = setup(values)
        text = module(body(name), params, how["block"], how.get("target", "sm_100a"))
        launch = Launch(params, block=(how["block"], 1, 1), shared_bytes=how["shared"])
        yield _exact(text, ((launch, memory),), f"PTX {name}")


def subjects(part: str = "") -> Iterator[Subject]:
    """Those whose name has `part`, the small ones first. Only these kernels are compiled."""
    yield from (one for one in (*written_micros(), *compiled_micros()) if part in one.name)
    yield from (make(name) for name, make in kernels() if part in name)


def names(part: str = "") -> list[str]:
    """Of `subjects`; kernels are not compiled for it, micro-kernels are."""
    micros = [one.name for one in (*written_micros(), *compiled_micros())]
    return [name for name in (*micros, *(name for name, _ in kernels())) if part in name]
