"""The Blackwell kernels under many schedules in the emulator, as tests/seeds_sm100_*.py run them: part of `make prove`.

JAX_FA4_SEEDS: schedules of each problem, 2 unless it says more. What 20 to 200 of them gave is in docs/measured.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed"),
]
HERE = Path(__file__).parent
SEEDS = int(os.environ.get("JAX_FA4_SEEDS", "2"))
MINUTES = 30 * SEEDS  # a limit for a machine that is busy; a seed of all problems takes three to five


def report(tmp_path, script, *options):
    out = tmp_path / "seeds.json"
    command = [sys.executable, str(HERE / script), "--minutes", str(MINUTES), "--out", str(out), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-2000:]
    made = json.loads(out.read_text())
    failed = {name: case["failed"] for name, case in made["cases"].items() if case["failed"]}
    assert not failed and done.returncode == 0, (failed, done.stderr[-2000:])
    return made


def test_the_forward_under_every_seed(tmp_path):
    from seeds_sm100_fwd import CASES

    made = report(tmp_path, "seeds_sm100_fwd.py", "--seeds", SEEDS, "--many", SEEDS)
    assert {name: case["seeds"] for name, case in made["cases"].items()} == {case.name: SEEDS for case, _ in CASES}


def test_the_backward_under_every_seed(tmp_path):
    """And the bits: of the deterministic forms, of single CTAs and of pairs, always the same; of the others not."""
    from seeds_sm100_bwd import CASES, LOOSE, ORDERED, ORDERED_CAUSAL, ORDERED_PAIR

    orders = max(SEEDS, 4)
    made = report(tmp_path, "seeds_sm100_bwd.py", "--seeds", SEEDS, "--orders", orders)
    assert {name: case["seeds"] for name, case in made["cases"].items()} == {case.name: SEEDS for case in CASES}
    for case in (ORDERED, ORDERED_CAUSAL, ORDERED_PAIR):
        same, loose = (made["bits"][f"{case.name}, {kind}"] for kind in ("deterministic", "not deterministic"))
        assert (same["seeds"], same["different results"]) == (orders, 1)
        assert loose["seeds"] == LOOSE and loose["different results"] > 1
