"""A short fuzz of `attention` (tools/fuzz.py runs the long ones), what fuzzing has found, and that it can find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import Result, visibility
from fuzz import device, shares
from fuzz.judge import judge, measure
from fuzz.runner import Tally, attend, check
from fuzz.trial import Trial, table, trials
from fuzz.wrong import WRONG
from hypothesis import given, settings
from rules import ROOT

import jax_fa4

CASES, SIGNATURES = 150, 24


def test_short_fuzz(tmp_path):
    """In a process of its own, for it sets the tiles of the XLA path for good."""
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "tools/fuzz.py", "--cases", str(CASES), "--seed", "4", "--signatures", str(SIGNATURES)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert result["cases"] == CASES and result["signatures"] == SIGNATURES and "seed 4" in run.stdout
    assert result["right"] > CASES / 2 and result["refused"] > 0
    assert max(result["largest_error_over_bound"].values()) > 0.02, "bounds so wide that they say nothing"


@pytest.fixture(scope="module")
def trial() -> Trial:
    """A right call with band, lengths, sinks, bias."""
    sig = replace(
        table(1)[0], dtype="float32", band=True, lengths=True, segments=False, soft_cap=False, sinks=True,
        bias=(1, 2, 7, 9), mask=None, scale="traced", residual=True, deterministic=None, jit=False, wide_bias=False,
        short=False,
    )  # fmt: skip
    return Trial(
        sig, True, None, True, (7, 5), (9, 8), "int32", 0.5, 1.0, "normal", 1.0, False, True, None, 11, None
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(WRONG))
def test_refusals(name, trial):
    tally = Tally()
    check(replace(trial, wrong=name), tally)
    assert tally.refused == 1


def test_a_call_that_is_not_refused_is_noticed(trial, monkeypatch):
    monkeypatch.setitem(WRONG, "nothing", WRONG["scale 0"]._replace(spoil=lambda a: None))
    with pytest.raises(AssertionError, match="nothing: not refused"):
        check(replace(trial, wrong="nothing"), Tally())


def test_wrong_results_are_noticed(trial):
    """The call as it was made is within its bounds in every tensor; judged as slightly another call, it is not."""
    got = attend(trial)
    assert judge(got, trial.case, trial.arrays, "float32").ratio <= 1
    case, inp = trial.case, trial.arrays
    others = {
        "a key more": replace(case, kv_lens=(9, 9)),
        "a query less": replace(case, q_lens=(6, 5)),
        "the other alignment": replace(case, bottom_right=False),
        "a scale of 1.0001": replace(case, scale=0.5 * 1.0001),
    }
    for name, other in others.items():
        assert judge(got, other, inp, "float32").ratio > 1, name
    for name in ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks", "dscale"):
        x = np.array(getattr(got, name), np.float64)
        at = np.unravel_index(np.abs(x).argmax(), x.shape)
        x[at] *= 1.001
        assert judge(got._replace(**{name: x}), case, inp, "float32").name == name
        x[at] = np.nan
        assert judge(got._replace(**{name: x}), case, inp, "float32").ratio == np.inf


def test_rows_of_two_tiles_with_low_logits():
    """Found by fuzzing, 2026-11-29: in float16, with more than 1024 queries that tiles do not divide, a row that two
    tiles share and that has a log-sum-exp below -11 made all of dv NaN (exp(-lse) is inf in float16)."""
    q = jnp.full((1, 1031, 1, 8), 6, jnp.float16)
    k = jnp.full((1, 16, 1, 8), -2, jnp.float16)
    loss = lambda q, k, v: jax_fa4.attention(q, k, v).astype(jnp.float32).sum()  # noqa: E731
    dq, dk, dv = jax.grad(loss, argnums=(0, 1, 2))(q, k, k)
    assert np.allclose(dv, 1031 / 16, rtol=1e-3)
    assert np.abs(dq).max() < 1e-3 and np.abs(dk).max() < 1e-2  # both 0 but for rounding; dk sums 1031 rows of 6


def test_a_sink_without_keys_learns_from_queries_that_exist():
    """Found by fuzzing, 2026-11-30: with S = 0, NaN past a query's length reached the sinks' gradient."""
    q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 2, 8))
    call = lambda sinks: jax_fa4.attention(  # noqa: E731
        q, k, k, sinks=sinks, query_seq_lengths=jnp.array([2]), return_residual=True
    )[1]
    lse, pull = jax.vjp(call, jnp.array([0.5, -1.0]))
    assert np.array_equal(lse, [[[0.5, -1.0]] * 3])
    assert np.array_equal(pull(jnp.array([[[1.0, 2.0], [10.0, 20.0], [np.nan] * 2]]))[0], [11.0, 22.0])


# ---- larger problems, judged on the device -------------------------------------------------------------------------


def test_table_of_the_device_is_served_by_its_plans():
    """Within the bound, every kind, both passes; the same each time."""
    signatures = device.table(60, "sm_90a")
    plans = device.plans(signatures, "sm_90a")
    assert len(plans) <= 60 and {plan.direction for plan in plans} == {"fwd", "bwd"}
    assert signatures == device.table(60, "sm_90a") and len(signatures) == len(set(signatures)) > 60
    assert {(s.shape[-2:], s.dtype) for s in signatures} == {((k.d, k.v), k.dtype) for k in device.KINDS}
    assert len(device.plans(device.table(10, "sm_90a"), "sm_90a")) <= 10


def test_lengths_of_the_larger_problems_fit_their_dtype():
    """Found on the card, 2026-11-30: a length of 384 was drawn as uint8, which numpy refuses."""
    one_of = next(sig for sig in device.table(60, "sm_90a") if sig.shape[2] == 600)
    sig = replace(one_of, lengths=True, jit=False)
    seen = set()

    @settings(max_examples=60, database=None, deadline=None)
    @given(trials(sig, ("fa4",)))
    def one(trial: Trial) -> None:
        trial.operands()
        seen.add(trial.int_dtype)
        seen.update((max(trial.kv_lens or (0,)) > 255, trial.kv_lens is not None and 64 in trial.kv_lens))

    one()
    assert seen == {"int32", "int64", "uint16", True, False}


def large(**changes) -> Trial:
    """A right call of the larger kind, with everything that kernels take."""
    kind = device.Kind(16, 16, "band segments cap sinks", "bfloat16", True)
    sig = device.signature(kind, ((2,), 70, 90, 4, 2), np.random.default_rng(0))
    sig = replace(sig, lengths=True, residual=True, scale="traced", jit=False)
    made = Trial(
        sig, True, (40, 0), True, (70, 33), (90, 41), "int32", 0.3, 4.0, "normal", 1.0, False, True, "xla", 12, None
    )
    return replace(made, **changes)


def test_the_judge_on_the_device_is_the_judge():
    trial = large()
    got = attend(trial)
    here = measure(
        Result(*(None if x is None else np.asarray(x) for x in got)), trial.case, trial.arrays,
        visibility(trial.case, trial.arrays), ("bfloat16", "bfloat16"),
    )  # fmt: skip
    there = device.measured(trial, got)
    assert set(here) == set(there) and len(here) == 7
    for name, one in here.items():
        assert 0 < one.ratio < 1 and np.allclose(one.ratio, there[name].ratio, rtol=1e-6), name
        assert np.allclose([one.got, one.wanted, one.allowed], there[name][2:], rtol=1e-9), name
    other = replace(trial, kv_lens=(89, 41))
    assert max(x.ratio for x in device.measured(other, got).values()) > 1


def test_repeats_and_operands_are_compared(monkeypatch):
    """Another bit in a repeat, and an operand that was written to, are faults."""
    trial = large()
    assert device.judged(trial).ratio <= 1
    results, turn = attend(trial), iter(range(100))

    def drifting(trial, operands):
        return results._replace(dk=np.asarray(results.dk, np.float32) + (next(turn) % 2))

    monkeypatch.setattr(device.runner, "attend", drifting)
    with pytest.raises(AssertionError, match="dk: other bits in a repeat"):
        device.judged(trial)

    def spoiling(trial, operands):
        operands[0][1] = operands[0][1] * 2
        return results

    monkeypatch.setattr(device.runner, "attend", spoiling)
    with pytest.raises(AssertionError, match="k was written to"):
        device.judged(trial)


def test_shared_run_of_the_larger_problems(tmp_path):
    """By two processes; their results are put together."""
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "tools/fuzz.py", "--implementation", "xla", "--cases", "6", "--seed", "3"]
    command += ["--signatures", "2", "--jobs", "2", "--out", str(out)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert result["cases"] == 6 and result["signatures"] == 2 and result["failures"] == []


def test_a_process_that_dies_says_where():
    code = "import sys, os; open(sys.argv[-1], 'w').write(os.environ['SAVED']); os._exit(9)"
    saved = shares.result(Tally(), [], "Signature(7)")
    os.environ["SAVED"] = json.dumps(saved)
    try:
        found = shares.together(shares.spread(["-c", code], 2, 5.0))
    finally:
        del os.environ["SAVED"]
    assert len(found["failures"]) == 2 and all("exit status 9" in x and "Signature(7)" in x for x in found["failures"])


def test_kernels_are_not_fuzzed_without_a_gpu(tmp_path):
    command = [sys.executable, "tools/fuzz.py", "--implementation", "fa4", "--out", str(tmp_path / "x.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert run.returncode == 2 and "--precompile needs none" in run.stdout
