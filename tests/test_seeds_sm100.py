"""The Blackwell kernels under many schedules in the emulator, a problem a test: part of `make prove`.

JAX_FA4_SEEDS: schedules of each problem, 2 unless it says more. What 20 to 200 of them gave is in docs/measured, where
tests/seeds_sm100_*.py write it; they go on where they were stopped.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEEDS = int(os.environ.get("JAX_FA4_SEEDS", "2"))
if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the CuTe DSL is not installed", allow_module_level=True)

import seeds_sm100_bwd as backward  # noqa: E402
import seeds_sm100_fwd as forward  # noqa: E402

pytestmark = pytest.mark.prove


def limit() -> float:
    """When a test gives up, if its machine is that busy: a seed of a problem takes a second or two of a core."""
    return time.time() + 600 * SEEDS


@pytest.mark.parametrize(("case", "fields"), forward.CASES, ids=[case.name for case, _ in forward.CASES])
def test_the_forward_under_every_seed(case, fields):
    import test_emulated_sm100 as tests

    made = forward.passes_each(case, fields, range(SEEDS), limit(), tests.passes)
    assert made["seeds"] == SEEDS and not made["failed"], made


@pytest.mark.parametrize("case", backward.CASES, ids=[case.name for case in backward.CASES])
def test_the_backward_under_every_seed(case):
    report = {"cases": {}}
    backward.run_case(report, case, SEEDS, limit())
    made = report["cases"][case.name]
    assert made["seeds"] == SEEDS and not made["failed"], made


@pytest.mark.parametrize("case", backward.ORDERED, ids=[case.name for case in backward.ORDERED])
def test_bits_do_not_depend_on_the_schedule(case):
    """Of the deterministic forms, of single CTAs, pairs and sweeps, with one copy of dQ or several; of the others they
    do."""
    report = {"bits": {}}
    backward.compare(report, case, True, max(SEEDS, 4), limit())
    (same,) = report["bits"].values()
    assert (same["seeds"], same["different results"]) == (max(SEEDS, 4), 1)
    if case.name not in backward.ONE_FORM:
        backward.compare(report, case, False, backward.LOOSE, limit())
        loose = report["bits"][f"{case.name}, not deterministic"]
        assert loose["seeds"] == backward.LOOSE and loose["different results"] > 1


@pytest.mark.parametrize(("script", "name"), [("fwd", "len_1x1"), ("bwd", "len_64x65")])
def test_a_script_goes_on_where_it_was_stopped(script, name, tmp_path):
    """Unless the PTX is another one: then what the file has is of other kernels."""
    out = tmp_path / "seeds.json"

    def seeds(count: int) -> dict:
        command = [sys.executable, str(HERE / f"seeds_sm100_{script}.py"), name, "--seeds", str(count)]
        done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(out.read_text())["cases"][name]

    first = seeds(1)
    assert (first["seeds"], first["failed"]) == (1, [])
    report = json.loads(out.read_text())
    report["cases"][name]["seconds"] = 1000.0
    out.write_text(json.dumps(report))
    again = seeds(1)
    assert again == report["cases"][name], "nothing is left to do"
    report["cases"][name]["ptx"] = "other"
    out.write_text(json.dumps(report))
    assert seeds(1)["seconds"] < 1000
