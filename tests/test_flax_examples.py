"""The Flax examples: the cache continues what one pass computes, and a resumed run repeats an uninterrupted one."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
sys.path.insert(0, EXAMPLES)
try:
    import generate
    import textdata
    import textflax
    import textloop
    import textsave
finally:
    sys.path.remove(EXAMPLES)

TINY = textflax.Size(width=32, layers=2, hidden=64, length=16)
ONE_LAYER = textflax.Size(width=32, layers=1, hidden=64, length=16)


def noisy(text, scale=0.1):
    """Weights with something in each of them, the readout included."""
    weights = text.init(jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + scale * rng.standard_normal(x.shape, np.float32), weights)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_steps_equal_one_pass(api):
    text = textflax.model(api, TINY, jnp.float32)
    weights = noisy(text)
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 256)
    step, cache, outs = jax.jit(text.step), text.cache(weights, 2), []
    for begin, end in ((0, 9), (9, 10), (10, 12)):
        cache, logits = step(weights, cache, tokens[:, begin:end])
        outs.append(logits)
    whole = jax.jit(text.apply)(weights, tokens)
    assert np.abs(whole).max() > 0.5
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole, atol=5e-6)
    _, logits = step(weights, cache, jnp.zeros((2, 5), jnp.int32))  # 12 + 5 > 16
    assert np.isnan(logits).all()


def test_both_libraries_have_the_same_number_of_weights():
    counts = [
        sum(
            x.size
            for x in jax.tree.leaves(jax.eval_shape(textflax.model(api, TINY, jnp.float32).init, jax.random.key(0)))
        )
        for api in ("linen", "nnx")
    ]
    assert counts[0] == counts[1]
    with pytest.raises(ValueError, match="api must be one of"):
        textflax.model("haiku", TINY, jnp.float32)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_resumed_run_repeats_bit_for_bit(api, tmp_path):
    text = textflax.model(api, ONE_LAYER, jnp.float32)
    steps = 8

    def run(keeper=None, stop=None):
        data = textdata.batches(np.arange(4000, dtype=np.int32) % 251, 4, 12, seed=3)
        return textloop.fit(text.apply, text.init(jax.random.key(0)), data, steps, keeper, stop)

    weights, history = run()
    settings = {"api": api, "steps": steps}
    _, stopped = run(textsave.Checkpoints(tmp_path, 2, settings), stop=5)
    assert len(stopped.losses) == 5
    keeper = textsave.Checkpoints(tmp_path, 2, settings)
    assert keeper.latest == 4  # the fifth step was lost, and is taken again
    again, resumed = run(keeper)
    assert resumed.losses == history.losses
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, again, weights)
    with pytest.raises(ValueError, match="holds a run with steps=8; this one has 9"):
        textsave.Checkpoints(tmp_path, 2, {"api": api, "steps": 9})


def test_generate(tmp_path, capsys):
    """From a checkpoint, checked against one pass; what does not fit is said."""
    settings = {"api": "nnx", "steps": 4, "places": 64}
    text = textflax.model("nnx", textflax.Size(length=64), jnp.float32)
    weights = noisy(text)
    textsave.Checkpoints(tmp_path, 1, settings).save(weights, textloop.optimiser(4).init(weights), [2.5] * 4)
    where = ["--checkpoint", str(tmp_path), "--prompt", "The cat"]
    assert generate.main([*where, "--api", "nnx", "--count", "20", "--temperature", "0", "--check"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("The cat") and "weights after 4 steps, loss 2.500" in said.err
    tokens = jnp.asarray(textdata.encode("The cat"))
    likeliest = int(jnp.argmax(jax.jit(text.apply)(weights, tokens[None])[0, -1]))
    assert said.out[7:8] == textdata.decode(np.array([likeliest]))[:1]
    assert generate.main([*where, "--api", "nnx", "--count", "58"]) == 2
    assert "7 bytes and 58 more do not fit into 64 places" in capsys.readouterr().err
    assert generate.main([*where, "--api", "linen", "--count", "5"]) == 2
    assert "trained with --api nnx, not linen" in capsys.readouterr().err
