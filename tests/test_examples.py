"""The examples run as a user runs them, as separate processes, and say what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def modules(monkeypatch):
    """The examples' own modules, importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(script: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """One example on the CPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def number(pattern: str, output: str) -> float:
    """The first group of `pattern`, which the output must contain."""
    match = re.search(pattern, output)
    assert match, f"{pattern!r} not in:\n{output}"
    return float(match[1])


def test_quickstart():
    done = run("quickstart.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^runs on: (xla|fa4)", done.stdout, re.MULTILINE)
    assert "causal: (2, 256, 8, 64) bfloat16" in done.stdout
    assert "jit: True" in done.stdout
    assert "gradients: (2, 256, 8, 64) (2, 256, 2, 64) (2, 256, 2, 64)" in done.stdout
    assert "lengths: as the short example alone: True" in done.stdout
    assert number(r"largest value past its end: ([\d.e+-]+)", done.stdout) == 0
    assert "log-sum-exp: (2, 256, 8) float32" in done.stdout


def test_training_beats_the_baseline(tmp_path):
    """A short run already knows more than byte frequencies, and leaves its picture."""
    done = run(
        "train_text.py", "--steps", "60", "--batch", "8", "--length", "64", "--out", str(tmp_path / "new" / "out")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^attention: (xla|fa4).*; device: .*; float32$", done.stdout, re.MULTILINE)
    first, last = (number(rf"training loss: {p}", done.stdout) for p in (r"([\d.]+)", r"[\d.]+ -> ([\d.]+)"))
    assert abs(first - np.log(256)) < 0.01  # the readout starts at zero
    assert last < first - 1.5
    assert number(r"held-out loss: ([\d.]+)", done.stdout) < number(r"unigram baseline: ([\d.]+)", done.stdout)
    assert number(r"([\d,]+) tokens/s".replace(",", ""), done.stdout.replace(",", "")) > 0
    assert re.search(r"^sample: The statement.+", done.stdout, re.MULTILINE)
    assert "training: 100%" in done.stderr  # the bar
    picture = tmp_path / "new" / "out" / "train_text.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5_000


def test_training_that_fails_says_so(tmp_path):
    done = run("train_text.py", "--steps", "1", "--batch", "1", "--length", "64", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"FAILED: the held-out loss [\d.]+ does not beat the unigram baseline [\d.]+", done.stderr)
    assert (tmp_path / "out" / "train_text.png").exists()  # ./out by default


@pytest.mark.parametrize("option", ["--steps", "--batch", "--length"])
def test_bad_options(modules, capsys, option):
    import train_text

    with pytest.raises(SystemExit) as stop:
        train_text.arguments([option, "0"])
    assert stop.value.code == 2
    assert f"{option} must be at least 1; it is 0" in capsys.readouterr().err


def test_splits_are_apart(modules):
    """No paragraph stands on both sides, nothing is lost, and both sides read as English."""
    import textdata

    text = textdata.load()
    sides = [textdata.decode(s).split("\n\n") for s in (text.train, text.held_out)]
    assert not set(sides[0]) & set(sides[1])
    assert sorted([*sides[0], *sides[1]]) == sorted(textdata.manual())
    assert 0.05 < text.held_out.size / (text.train.size + text.held_out.size) < 0.15
    assert all(" the " in "".join(s) for s in sides)


def test_missing_text_is_named(modules, monkeypatch):
    import textdata

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"without the module pydoc_data\.topics"):
        textdata.load()


def test_unigram_loss_by_hand(modules):
    """Two bytes, 3:1 in training; one added to each of 256 counts."""
    import textdata

    text = textdata.Text(textdata.encode("aaab" * 100), textdata.encode("ababa"))
    pa, pb = 301 / 656, 101 / 656
    assert np.isclose(textdata.unigram_loss(text, 2), -(2 * np.log(pa) + 2 * np.log(pb)) / 4)
    with pytest.raises(ValueError, match=r"length 5 need 6 tokens; the text has 5"):
        textdata.unigram_loss(text, 5)


def test_windows_and_batches(modules):
    import textdata

    tokens = np.arange(11, dtype=np.int32)
    assert textdata.windows(tokens, 5).tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    drawn = [next(textdata.batches(tokens, 64, 5, seed)) for seed in (0, 0, 1)]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()
    assert (np.diff(drawn[0]) == 1).all() and drawn[0].min() == 0 and drawn[0].max() == 10  # both ends are reached


def test_model_is_causal_and_knows_order(modules):
    """A token changes the logits at and after its place, and none before; swapping two earlier ones is noticed."""
    import jax
    import jax.numpy as jnp
    import textmodel

    size = textmodel.Size(width=32, layers=1, hidden=64)  # of two layers, the second tells order by causality alone
    weights = textmodel.init(jax.random.key(0), size)
    weights["readout"] = jax.random.normal(jax.random.key(1), weights["readout"].shape)

    def logits(x):
        return np.asarray(textmodel.apply(weights, jnp.asarray(x), size, jnp.float32))[0]

    x = np.arange(12)[None]
    changed, swapped = x.copy(), x.copy()
    changed[0, 7] = 99
    swapped[0, [1, 2]] = x[0, [2, 1]]
    moved = np.abs(logits(changed) - logits(x)).max(-1)
    assert (moved[:7] == 0).all() and (moved[7:] > 1e-4).all()
    assert np.abs(logits(swapped) - logits(x)).max(-1)[-1] > 1e-4


def test_sampling_follows_a_certain_model(modules):
    """A model that is sure of the next number counts on from the prompt's last, whatever stands later in the buffer."""
    import jax
    import textloop

    def count_up(weights, tokens):
        return 1e4 * jax.nn.one_hot(tokens + 1, 256)

    assert textloop.sample(count_up, None, np.array([3, 7]), 5, 1.0, 0).tolist() == [8, 9, 10, 11, 12]


def test_evaluation_weighs_each_window_once(modules):
    """Five windows in batches of two: the short last one counts for one window, not for a batch."""
    import jax.numpy as jnp
    import textloop

    windows = np.array([[0, c] for c in (1, 1, 1, 1, 2)], np.int32)
    logits = jnp.log(jnp.array([0.25, 0.25, 0.5]))
    loss = textloop.evaluate(lambda w, x: jnp.broadcast_to(logits, (*x.shape, 3)), None, windows, batch=2)
    assert np.isclose(loss, -(4 * np.log(0.25) + np.log(0.5)) / 5)


def test_a_loss_that_is_not_finite_stops_the_run(modules):
    import jax.numpy as jnp
    import textloop

    data = iter([np.zeros((1, 3), np.int32)] * 3)
    with pytest.raises(FloatingPointError, match=r"step 0 is nan"):
        textloop.fit(lambda w, x: jnp.full((*x.shape, 4), jnp.nan) * w, jnp.ones(()), data, 3)
