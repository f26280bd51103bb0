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
from fuzz.judge import judge
from fuzz.runner import Tally, attend, check
from fuzz.trial import Trial, table
from fuzz.wrong import WRONG
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
