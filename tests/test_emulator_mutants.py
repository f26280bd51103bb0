"""The emulator's own alarm: faults planted in small right kernels are all noticed, or their survival is explained."""

import numpy as np
import pytest
from emulator import SEEDS, Launch, Pointer, Uninitialised, run
from emulator.mutants import ARITHMETIC, FAULTS, mutants
from emulator.snippets import body, mma_setup, module, wgmma_setup

VALUES = np.random.default_rng(0).integers(-4, 5, (2, 128, 64))
LINT = {"tensor core fence removed", "barrier fence removed"}  # the lint's matter, as tests/test_mutation.py shows
ONE_WARP = "named barrier removed"  # these kernels have one warp: its barrier orders nothing
SURVIVORS = {
    "load": {ONE_WARP},
    "store": {ONE_WARP, "shared store shifted"},  # the shift is of the last store, which nobody reads
    "shared": {ONE_WARP},
}


def kernel(name):
    """(PTX, launch, memory)."""
    if name in ("mma", "wgmma"):
        params, memory, how = (mma_setup if name == "mma" else wgmma_setup)(VALUES)
        text = module(body(name), params, how["block"], how.get("target", "sm_100a"))
        return text, Launch(params, block=(how["block"], 1, 1), shared_bytes=how["shared"]), memory
    params = (Pointer("x"), Pointer("out"))
    memory = {"x": np.arange(1024, dtype=np.uint32), "out": Uninitialised((1024,), np.uint32)}
    return module(body(name), params), Launch(params, shared_bytes=16384), memory


def noticed(text, launch, memory, good):
    """How a mutant is noticed, or None."""
    for seed in SEEDS:
        report = run(text, launch, memory, seed=seed)
        if report.deadlock or report.errors:
            return str(report.deadlock or report.errors[0])
        if not np.array_equal(report.outputs["out"], good):
            return "values"
    return None


@pytest.mark.parametrize("name", ["load", "store", "tmem", "shared", "mma", "wgmma"])
def test_planted_faults_are_noticed(name):
    text, launch, memory = kernel(name)
    good = run(text, launch, memory).check().outputs["out"]
    made = [m for m in mutants(text) if m.kind not in ARITHMETIC | LINT]
    assert len(made) >= 3
    survivors = {m.kind for m in made if noticed(m.text, launch, memory, good) is None}
    assert survivors == SURVIVORS.get(name, set())


def test_mutants_differ_in_one_line_and_name_it():
    text = kernel("mma")[0]
    before = text.split("\n")
    for m in mutants(text):
        after = m.text.split("\n")
        assert m.kind in FAULTS and m.text != text
        grown = len(after) - len(before)
        assert before[: m.line - 1] == after[: m.line - 1] and before[m.line :] == after[m.line + grown :]
