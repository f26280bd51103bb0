"""The Blackwell forward's plan as data, and its compiled facts: counts in the PTX are those of the plan's formulas."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_fa4.kernels.common.parts import REGISTER_FILE, SMEM_LIMIT
from jax_fa4.kernels.sm100.fwd.plan import NATIVE_DEPTHS, Plan, Share, bind, choose, native
from jax_fa4.kernels.sm100.regions import Region, check_regions
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")
ALL_DEPTHS = [(d, v) for d in (8, 64, 72, 128, 136, 192) for v in (8, 64, 96, 128)]


def problem(d=64, v=None, dtype="bfloat16", **spec):
    return Problem(AttentionSpec(**spec), 2, 300, 333, 4, 2, d, d if v is None else v, dtype)


def decode(problem):
    """Of the same kind, a query against many keys."""
    return replace(problem, t=1, s=4096)


@pytest.mark.parametrize(("d", "v"), ALL_DEPTHS)
def test_resources_fit(d, v):
    for dtype in ("bfloat16", "float16"):
        plan = choose(problem(d, v, dtype, band=True, sinks=True))
        assert plan.inner >= d and plan.inner_value >= v and (plan.inner, plan.inner_value) in NATIVE_DEPTHS
        assert plan.smem <= SMEM_LIMIT and plan.stages >= 2
        softmax, correct, rest = plan.registers
        assert 128 * (2 * softmax + correct + rest) <= REGISTER_FILE
        assert max(r.end for r in plan.regions) <= 512


def test_ring_table_is_derived():
    plan = Plan("bfloat16", 128, 128)
    rings = {r.name: r for r in plan.rings}
    assert rings["probs"].full == 256 and rings["rest"].full == 4 and rings["stats"].empty == 128
    assert rings["kv"].bytes == 128 * 128 * 2 == rings["q"].bytes and rings["kv"].stages == 3
    assert Plan("float16", 192, 128).out_over_q and not plan.out_over_q
    assert sorted(w for warps in plan.roles.values() for w in warps) == list(range(16))


def test_launch_follows_the_shapes():
    plan = Plan("bfloat16", 72, 40, sinks=True)
    (k,) = bind(plan, plan.extents({"B": 3, "T": 300, "S": 77, "N": 4, "K": 2}))
    assert k.grid == (2 * 4 * 3, 1, 1) and k.block == 512 and k.smem == plan.smem
    q, key, value, out = k.descriptors
    assert q.dims == (300, 72, 4, 3) and q.strides == (4 * 72, 1, 72, 300 * 4 * 72) and q.box == (128, 128)
    assert key.dims == (77, 72, 2, 3) and value.dims == (77, 40, 2, 3) and out.store and out.dims == (300, 40, 4, 3)
    assert k.pointers == ("lse", "ints", "floats", "sinks") and k.extents == ("T", "S", "N", "K", "B")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"registers": (200, 80, 48)}, ["67584", "65536"]),
        ({"registers": (190, 80, 48)}, ["steps of 8"]),
        ({"lazy": 16.0}, ["overflow"]),
        ({"stage_cap": 1}, []),
        ({"depth": 200}, ["200"]),
    ],
)
def test_impossible_plans_are_our_bugs(bad, words):
    with pytest.raises(AssertionError) as error:
        replace(Plan("bfloat16", 64, 64), **bad)
    assert all(w in str(error.value) for w in words)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem(264), ["264", "256"]),
        (problem(64, 260), ["260", "multiples of 8"]),
        (problem(60), ["60", "multiples of 8"]),
        (problem(64, dtype="float32"), ["float32", "bfloat16"]),
        (problem(64, bias=True), ["bias"]),
        (problem(64, mask=True), ["mask"]),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(problem, words):
    with pytest.raises(Unsupported) as error:
        choose(problem)
    assert all(w in str(error.value) for w in words), error.value


def test_regions_refuse_overlap():
    ok = (Region("s", 0, 128), Region("p", 64, 64, "s", "order"), Region("o", 128, 384))
    check_regions(ok)
    for bad, word in (
        ((*ok[:2], Region("x", 500, 20)), "leaves"),
        ((*ok, Region("x", 120, 20)), "overlap"),
        ((ok[0], Region("p", 64, 128, "s", "order")), "overlap"),
        ((ok[0], Region("p", 64, 64, "s")), "does not say why"),
        ((ok[0], Region("p", 64, 64)), "overlap"),
    ):
        with pytest.raises(AssertionError, match=word):
            check_regions(bad)


def test_emulated_columns_depend_on_position_only_and_spare_the_last_quarter():
    plan = Plan("bfloat16", 128, 128)
    columns = [c for c in range(0, 128, 2) if plan.emulated(c)]
    assert plan.emulated_columns == 2 * len(columns) == 16
    assert all(32 <= c < 96 for c in columns)
    assert replace(plan, share=Share(10, 4, 1)).emulated_columns == 24
    assert replace(plan, share=None).emulated_columns == 0
    assert choose(problem(), "sm_103a").share is None


@pytest.mark.parametrize(
    ("d", "band", "most"), [(64, False, 820), (64, True, 820), (128, False, 832), (128, True, 896)]
)
def test_exponentials_on_mufu_take_few_enough_clocks(d, band, most):
    """Of a 128 x 128 tile, 16 results a clock."""
    plan = choose(problem(d, band=band))
    assert 128 * (128 - plan.emulated_columns) / 16 <= most


def test_which_plans_are_chosen():
    """Persistent where all pairs take equally long, by length in sections of heads elsewhere."""
    full, causal = choose(problem(128)), choose(problem(128, band=True))
    assert (full.workers, full.sections, full.registers) == (148, False, (184, 80, 64))
    assert (causal.workers, causal.sections, causal.skips) == (0, True, True)
    assert choose(problem(192, 128)).workers == 0  # O over Q
    assert choose(problem(64, segments=True)).workers == 0
    assert (full.share, causal.share, choose(problem()).share) == (Share(10, 4, 1), Share(16, 4, 1), Share(8, 4, 1))


def test_polynomials_are_the_fitted_ones_and_as_exact_as_stated():
    """Coefficients are read from the kernel's source: importing it would need the compiler."""
    pytest.importorskip("scipy")
    root = Path(__file__).parent.parent
    sys.path.insert(0, str(root / "tools"))
    try:
        import fit_exp2
    finally:
        sys.path.pop(0)
    source = (root / "jax_fa4/kernels/sm100/exp2.py").read_text()
    found = re.findall(r"^    (\d): \(([^)]*)\),  # ([\d.e-]+)$", source, re.M)
    assert [int(n) for n, _, _ in found] == [3, 4]
    for degree, numbers, stated in found:
        c = tuple(float(x) for x in numbers.split(","))
        assert all(float(np.float32(x)) == x for x in c) and len(c) == int(degree)
        assert float(stated) * 0.95 <= fit_exp2.error(c) <= float(stated) * 1.02, (degree, fit_exp2.error(c))
        np.testing.assert_allclose(c, fit_exp2.coefficients(int(degree)), rtol=2e-4)
        x = np.array([-np.inf, -127, -300, 0, 1, 2, -1, 8, 127], np.float32)
        np.testing.assert_array_equal(fit_exp2.evaluate(x, c), [0, 0, 0, 1, 2, 4, 0.5, 256, 2.0**127])


# Compiled facts ---------------------------------------------------------------------------------------------------

PLANS = {
    "d64": choose(problem()),
    "d64 band sinks fp16": choose(problem(dtype="float16", band=True, sinks=True)),
    "d128": choose(problem(128)),
    "d128 fp16 sinks": choose(problem(128, dtype="float16", sinks=True)),
    "d128 band": choose(problem(128, band=True)),
    "d192 128": choose(problem(192, 128)),
    "d192 128 band": choose(problem(192, 128, band=True)),
    "d72 40": Plan("bfloat16", 72, 40),
    "d128 no halves left out": Plan("bfloat16", 128, 128, band=True, skips=False),
    "d128 segments band": choose(problem(128, band=True, segments=True)),
    "d192 everything": choose(problem(192, 128, "float16", band=True, segments=True, soft_cap=True, sinks=True)),
    "d64 cap": choose(problem(soft_cap=True)),
    "d128 cap sinks": choose(problem(128, soft_cap=True, sinks=True)),
    "d192 cap": choose(problem(192, 128, soft_cap=True)),
    "d128 decode": choose(decode(problem(128, band=True, sinks=True))),
    "d64 decode": choose(decode(problem())),
    "d192 decode": choose(decode(problem(192, 128, "float16", soft_cap=True))),
    # Spilled 16, 4, 4 and 12 bytes with 32 columns of O at a time at the end.
    "d64 cap segments fp16": choose(problem(64, dtype="float16", soft_cap=True, segments=True)),
    "d128 cap segments sinks": choose(problem(128, soft_cap=True, segments=True, sinks=True)),
    "d64 cap sinks decode": choose(decode(problem(soft_cap=True, sinks=True))),
    "d192 segments sinks": choose(problem(192, 128, segments=True, sinks=True)),
    "sm_103a": choose(problem(128), "sm_103a"),
    "sm_103a d64": choose(problem(), "sm_103a"),
}
made: dict = {}


def built(name):
    if name not in made:
        from jax_fa4.ffi.compile import build

        made[name] = build(PLANS[name], keep_ptx=True)
    return made[name]


def expected(plan):
    """name: (pattern, count in the text): one softmax copy, one copy of correction a tile, of P V a tile, two of the
    scores (start and loop)."""
    d, v, poly = plan.inner, plan.inner_value, plan.emulated_columns
    degree = plan.share.degree if plan.share else 0
    return {
        "mma": (r"tcgen05\.mma\.", 2 * (2 * d // 16 + 8)),
        "commit": (r"tcgen05\.commit", 9 + 5 * (plan.workers > 0)),
        "S and O loads": (r"tcgen05\.ld\S+x32\.", 4 + 2 * v // 32 * (plan.last_columns == 32)),
        "O loads to rescale or of few columns": (
            r"tcgen05\.ld\S+x16\.",
            2 * v // 16 * (1 + (plan.last_columns == 16)),
        ),
        "stores": (r"tcgen05\.st\S+x16\.", 4 + 2 * v // 16),
        "ex2": (r"ex2\.approx", 128 - poly + 1 + 4 * plan.sinks + 128 * plan.soft_cap),
        "add toward -inf": (r"add\.rm\.f32x2", poly // 2),
        "fma": (r"fma\.rn\.f32x2", 64 + degree * poly // 2),
        "row sum": (r"add\.rn\.f32x2", 64),
        "row maximum": (r"max\.f32", 66 + poly + 2 * plan.sinks),
        "votes": (r"vote\.sync", 2),
        "TMA loads": (r"cp\.async\.bulk\.tensor\S+shared::cta\.global", (d * (1 if plan.packed else 3) + v) // 64),
        "TMA stores": (r"cp\.async\.bulk\.tensor\S+global\.shared", 0 if plan.splits else 2 * v // 64),
        "ids": (r"shfl\.sync", 3 + 128 * plan.segments),  # three make a warp index uniform
        "local memory": (r"\.local\b", 0),
    }


def of_forward(ptx):
    """The text of the kernel with products; the one that combines parts is counted nowhere."""
    (text,) = (x for x in ptx.split(".entry ") if "tcgen05.mma" in x)
    return text


@needs_compiler
@pytest.mark.parametrize("name", PLANS)
def test_compiled_counts_are_the_plans(name):
    plan, ptx = PLANS[name], of_forward(built(name).ptx)
    wrong = {
        what: (len(re.findall(pattern, ptx)), count)
        for what, (pattern, count) in expected(plan).items()
        if len(re.findall(pattern, ptx)) != count
    }
    assert not wrong, wrong


@needs_compiler
@pytest.mark.parametrize("name", PLANS)
def test_no_spills(name):
    """The build warns, which is an error here; this looks at the compiler's own words."""
    kernels = built(name).facts.kernels
    assert [k.registers == 128 for k in kernels].count(True) == 1 == len(kernels) - PLANS[name].splits
    assert all(k.spill_stores == k.spill_loads == k.stack == 0 for k in kernels)


@needs_compiler
def test_spills_are_told():
    from jax_fa4.ffi.compile import SlowKernel, build

    with pytest.warns(SlowKernel, match="spill"):
        build(replace(PLANS["d128"], registers=(216, 48, 32)))


@needs_compiler
def test_the_static_checker_of_the_compiler_finds_no_error():
    """`warnings{nvvm}`: its errors are fatal. Its known warnings are of our shape, not faults: C3 takes a role of four
    warps for one; W0014 misses the wait::ld of a role that loads nothing."""
    script = (
        "import os, sys; os.environ['CUTE_DSL_ARCH'] = 'sm_100a'\n"
        "from jax_fa4.ffi import compile as c\n"
        "from jax_fa4.kernels.sm100.fwd.plan import Plan\n"
        "c._compiler()\n"
        "c._compile(Plan('bfloat16', 128, 128, band=True), '--gpu-arch sm_100a warnings{nvvm}')\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=300)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-2000:]
    codes = set(re.findall(r"\b([EWC]\d{1,4})\b", text))
    assert not [c for c in codes if c.startswith("E")], text[-3000:]
    assert codes <= {"C3", "C4", "W0014"}, codes


@pytest.mark.parametrize(("depths", "wanted"), [((64, 64), (64, 64)), ((65, 8), (128, 128)), ((193, 8), None)])
def test_native_depths(depths, wanted):
    assert native(*depths) == wanted
