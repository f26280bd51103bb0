"""Objects from plans, without a GPU: they build, spill nothing, have the same bytes each time, or are refused."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from jax_fa4.ffi import compile as compiling
from jax_fa4.ffi.compile import BuildError, CompilerMissing, SlowKernel, build, read_remarks
from jax_fa4.kernels import select
from jax_fa4.kernels.common.parts import label
from jax_fa4.kernels.passes.plan import BwdPre
from jax_fa4.kernels.sm90.fwd.choose_plan import MEASURED
from jax_fa4.kernels.sm90.fwd.plan import Plan, bind, tiles_for
from jax_fa4.spec import AttentionSpec, Problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")


def forward(d, v=None, dtype="bfloat16", **kinds):
    v = d if v is None else v
    return Plan(dtype, d, v, **kinds, **tiles_for(d, v, "segments" in kinds or "soft_cap" in kinds))


ALL_KINDS = {"band": True, "segments": True, "soft_cap": True, "sinks": True}
PLANS = {
    "d128": forward(128),
    "d64 band fp16": forward(64, dtype="float16", band=True),
    "d128 everything": forward(128, **ALL_KINDS),
    "d256 everything": forward(256, dtype="float16", **ALL_KINDS),
    "d192 v128 band": forward(192, 128, band=True),
    "d72 v40": forward(72, 40),
    "pre sm_90a": BwdPre("sm_90a", "bfloat16", 128, 64, 128),
    "pre sm_100a": BwdPre("sm_100a", "float16", 96, 128, 96),
}
PLANS |= {
    f"measured {d} {v} {band} {longest}": Plan("bfloat16", d, v, band=band, **(tiles_for(d, v) | fields))
    for (d, v, band), forms in MEASURED.items()
    for longest, fields in forms
}
FEW = {
    "few queries": Problem(AttentionSpec(band=True, soft_cap=True, sinks=True), 1, 1, 4096, 8, 1, 128, 128),
    "few queries d64": Problem(AttentionSpec(), 1, 4, 4096, 8, 1, 64, 64, "float16"),
    "few tiles": Problem(AttentionSpec(band=True, sinks=True), 1, 8192, 8192, 1, 1, 128, 128),
    "few tiles d64": Problem(AttentionSpec(band=True, sinks=True), 1, 1024, 1024, 8, 8, 64, 64),
}
PLANS |= {name: select(problem, "sm_90a") for name, problem in FEW.items()}
built = {}


def once(name):
    if name not in built:
        built[name] = build(PLANS[name], keep_ptx=True)
    return built[name]


@pytest.mark.parametrize("name", PLANS)
def test_builds_without_spills(name):
    made, plan = once(name), PLANS[name]
    assert made.object[:4] == b"\x7fELF" and made.object[18:20] == b"\x3e\x00", "an x86-64 object"
    assert made.cubin[:4] == b"\x7fELF"
    assert f".target {plan.arch}" in made.ptx
    assert len(made.facts.kernels) == made.ptx.count(".entry ") == (2 if getattr(plan, "splits", False) else 1)
    assert made.facts.spills == 0 and made.facts.serialised == ()
    assert all(k.stack == 0 for k in made.facts.kernels)
    assert 0 < made.facts.kernels[0].registers <= 168
    assert made.facts.kernels[0].name.startswith(label(plan) + "_kernel_"), "what a profiler shows"


@pytest.mark.parametrize("name", [n for n in PLANS if n.startswith("d")])
def test_bulk_copies_are_elected_and_counted(name):
    """One elected thread issues each copy, and the boxes of a stage carry the bytes that its barrier expects."""
    plan, ptx = PLANS[name], once(name).ptx
    lines = [line.strip() for line in ptx.splitlines()]
    copies = [i for i, line in enumerate(lines) if line.startswith("cp.async.bulk.tensor")]
    stores = [i for i in copies if ".global.shared::cta" in lines[i]]
    pieces = {d: -(-2 * d // (128 if 2 * d % 128 == 0 else 64)) for d in (plan.inner, plan.inner_value)}
    assert len(stores) == pieces[plan.inner_value]
    assert len(copies) - len(stores) == 2 * pieces[plan.inner] + pieces[plan.inner_value]
    for i in copies:
        back = next(line for line in reversed(lines[:i]) if line.startswith(("elect.sync", "$L__", "bar.", "ret")))
        assert back.startswith("elect.sync"), lines[i - 12 : i + 1]
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    operands = re.findall(r"mbarrier\.arrive\.expect_tx\S*\s.*, ([%r\d]+);", ptx)
    assert sorted(int(constants.get(x, x)) for x in operands) == sorted(r.bytes for r in plan.rings)


def test_the_parameters_are_those_of_the_launch():
    """Descriptors with their extents, then pointers, then int32 extents, in the order that bind says."""
    plan = PLANS["d128 everything"]
    (kernel,) = bind(plan, plan.extents({"B": 1, "T": 1, "S": 1, "N": 1, "K": 1}))
    entry = once("d128 everything").ptx.split(".entry ")[1].split("{")[0]
    kinds = re.findall(r"\.param (\.align \d+ \.b8 \S+\[(\d+)\]|\.u64|\.u32)", entry)
    shape = [size or kind for kind, size in kinds]
    maps = len(kernel.descriptors)
    assert shape[: 2 * maps] == ["128", "12"] * maps, shape
    rest = shape[2 * maps :]
    assert len(rest) == len(kernel.pointers) + len(kernel.extents), (shape, kernel)


def test_the_host_code_asks_for_the_plans_shared_memory():
    plan = replace(PLANS["d128"])
    made = compiling._compile(plan, "--gpu-arch sm_90a")
    text = made.ir_module.operation.get_asm(large_elements_limit=10)
    assert f"llvm.mlir.constant({plan.smem} : i64)" in text
    assert f"llvm.mlir.constant({plan.smem + 8} : i64)" not in text


REBUILD = """
import hashlib, sys
sys.path.insert(0, {root!r})
from tests.test_compile import PLANS
from jax_fa4.ffi.compile import build
print(hashlib.sha256(build(PLANS[{name!r}]).object).hexdigest())
"""


@pytest.mark.parametrize("name", ["d64 band fp16", "pre sm_100a"])
def test_the_same_bytes_in_another_process(name):
    """Other hash seed, other default arch, no PTX kept: the same object."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {**os.environ, "PYTHONHASHSEED": "4711", "CUTE_DSL_ARCH": "sm_80", "PYTHONPATH": root}
    code = REBUILD.format(root=root, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == hashlib.sha256(once(name).object).hexdigest()


def test_threads_build_one_at_a_time_with_the_same_bytes():
    """Concurrent compiles abort the process; the lock keeps them apart. What others print meanwhile is theirs."""
    found = []
    plan = PLANS["pre sm_90a"]
    threads = [threading.Thread(target=lambda: found.append(build(plan))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [f.object for f in found] == [once("pre sm_90a").object] * 4
    assert all(f.facts.kernels == once("pre sm_90a").facts.kernels for f in found)


def test_an_object_for_grace():
    made = build(PLANS["pre sm_90a"], host_target="linux-aarch64")
    assert made.object[18:20] == b"\xb7\x00", "an aarch64 object"


def test_what_cannot_be_built_is_refused_and_what_is_slow_is_said():
    with pytest.raises(ValueError, match=r"sm_80.*sm_90a"):
        build(replace(PLANS["pre sm_90a"], arch="sm_80"))
    with pytest.raises(ValueError, match=r"riscv.*x86-64-v2"):
        build(PLANS["pre sm_90a"], host_target="riscv")
    # 240 registers a thread do not hold scores of 64 x 256, their 16-bit copy and O
    with pytest.warns(SlowKernel, match=r"fwd_sm_90a_d64_full.*serialises wgmma.*C7512"):
        build(Plan("bfloat16", 64, 64, keys=256, stages=1))
    with pytest.warns(SlowKernel, match=r"[1-9]\d* bytes of register spills, 0 are allowed"):
        assert build(Plan("bfloat16", 64, 64, band=True, workers=2, turns=True, halfway=True)).facts.spills


# As the DSL prints them: plain where ptxas is content, coloured and wrapped where it is not.
PLAIN = """\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Used 30 registers
"""
WRAPPED = """\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills
   |
  \x1b[96mremark:\x1b[0m Spilled values are placed in local memory.
          ptxas output:
          ptxas info    : Compiling entry function
          'one'
          for 'sm_90a'
          ptxas         .     16 bytes stack frame, 212 bytes spill stores, 220 bytes
          spill loads
          ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size
"""
SERIALISED = """
          ptxas info    : (C7519) warpgroup.arrive is injected in around line 9 by compiler in function 'one'
          ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
          serialized due to insufficient register resources for the function
          'one'
"""


def test_remarks_become_facts():
    numbers = lambda facts: [  # noqa: E731
        (k.name, k.registers, k.spill_stores, k.spill_loads, k.stack, k.barriers) for k in facts.kernels
    ]
    assert numbers(read_remarks(PLAIN)) == [("one", 168, 0, 0, 0, 3), ("two", 30, 0, 0, 0, 0)]
    assert numbers(read_remarks(WRAPPED)) == [("one", 168, 212, 220, 16, 3)]
    assert (read_remarks(PLAIN).spills, read_remarks(WRAPPED).spills) == (0, 220)
    assert read_remarks(WRAPPED).serialised == read_remarks(PLAIN).serialised == ()
    for text in (SERIALISED + WRAPPED, PLAIN + SERIALISED):
        (serialised,) = read_remarks(text).serialised
        assert serialised.startswith("(C7512)") and "insufficient register resources" in serialised


def test_bad_facts_are_no_build():
    plan = PLANS["d128"]
    compiling._judge(plan, read_remarks(PLAIN))
    with pytest.warns(SlowKernel, match=r"220 bytes.*0 are allowed"):
        compiling._judge(plan, read_remarks(WRAPPED))
    compiling._judge(replace(plan, spill_allowance=220), read_remarks(WRAPPED))
    with pytest.warns(SlowKernel, match=r"serialises wgmma.*C7512"):
        compiling._judge(replace(plan, spill_allowance=999), read_remarks(SERIALISED + WRAPPED))
    with pytest.raises(BuildError, match=r"another form than known"):
        compiling._judge(plan, read_remarks("no remarks came"))


def test_without_the_dsl_the_error_names_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(compiling, "_LOADED", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "cutlass" else find(name, *a))
    with pytest.raises(CompilerMissing, match=r"nvidia-cutlass-dsl.*jax_fa4\[compile\].*precompile"):
        build(PLANS["pre sm_90a"])
