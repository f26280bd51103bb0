"""The shapes of MaxText, Levanter and AXLearn: stand-ins of their interfaces, results from dense formulas."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.flax.adaptors import AxlearnFlashAttention, fused_attention, levanter_attention

B, T, N, K, D = 2, 6, 4, 2, 8
Q, KEY, VALUE = (jax.random.normal(jax.random.key(i), (B, T, n, D)) for i, n in enumerate((N, K, K)))
IDS = jnp.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 2]])
I, J = np.arange(T)[:, None], np.arange(T)[None, :]
CAUSAL, SAME = J <= I, np.asarray(IDS)[:, :, None] == np.asarray(IDS)[:, None, :]


def dense(mask, scale=1.0, q=Q, k=KEY, v=VALUE, bias=0.0):
    """(out [B, T, N, D], lse [B, N, T]) by the formula; mask broadcasts to [B, T, S]."""
    k, v = (np.repeat(np.asarray(x, np.float64), N // K, axis=2) for x in (k, v))
    scores = scale * np.einsum("btnh,bsnh->bnts", np.asarray(q, np.float64), k) + bias
    mask = np.broadcast_to(mask, (B, q.shape[1], k.shape[1]))[:, None]
    weights = np.where(mask, np.exp(scores), 0)
    total = weights.sum(-1)
    return np.einsum("bnts,bsnh->btnh", weights / total[..., None], v), np.log(total)


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), b, atol=3e-6, rtol=3e-6)


# ---- MaxText ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_maxtext_training(mode):
    for ids, mask in ((None, CAUSAL), (IDS, CAUSAL & SAME)):
        for mine, want in zip(fused_attention(Q, KEY, VALUE, ids, mode), dense(mask), strict=True):
            close(mine, want)
    out, _ = fused_attention(Q, KEY, VALUE, None, mode, sliding_window_size=2, scale=0.5)
    close(out, dense(CAUSAL & (J > I - 2), 0.5)[0])


def test_maxtext_steps_merge_two_caches():
    """A query against two caches, the prompt's and the steps', merged by lse as MaxText does, is one attention."""
    used = jnp.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    later = jnp.array([[0, 1, 0], [1, 1, 0]])  # not a prefix: that cache is a ring
    k2, v2 = KEY[:, :3] + 1, VALUE[:, :3] - 1
    parts = [
        fused_attention(Q[:, :1], k, v, ids, "autoregressive") for k, v, ids in ((KEY, VALUE, used), (k2, v2, later))
    ]
    lse = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * jnp.exp(s - lse).transpose(0, 2, 1)[..., None] for out, s in parts)
    mask = np.concatenate([used, later], 1)[:, None] == 1
    close(merged, dense(mask, 1.0, Q[:, :1], jnp.concatenate([KEY, k2], 1), jnp.concatenate([VALUE, v2], 1))[0])


def test_maxtext_errors():
    with pytest.raises(ValueError, match="model_mode must be 'train', 'prefill' or 'autoregressive'; it is 'serve'"):
        fused_attention(Q, KEY, VALUE, None, "serve")
    with pytest.raises(ValueError, match="at least 1; it is 0"):
        fused_attention(Q, KEY, VALUE, sliding_window_size=0)
    with pytest.raises(ValueError, match="as many queries as keys in mode 'train'; there are 1 and 6"):
        fused_attention(Q[:, :1], KEY, VALUE, IDS[:, :1])
    with pytest.raises(ValueError, match="sliding_window_size=3 is not offered in mode 'autoregressive'"):
        fused_attention(Q[:, :1], KEY, VALUE, IDS, "autoregressive", sliding_window_size=3)


# ---- Levanter --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class AttentionMask:
    is_causal: bool = False
    segment_ids: tuple | None = None
    sliding_window: int | None = None


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, J >= 0),
        (AttentionMask(True), CAUSAL),
        (AttentionMask(True, sliding_window=3), CAUSAL & (J >= I - 2)),
        (AttentionMask(False, sliding_window=3), J >= I - 2),
        (AttentionMask(True, (IDS, IDS)), CAUSAL & SAME),
        (AttentionMask(False, (IDS[0], IDS[0])), SAME[:1]),
        (jnp.asarray(SAME), SAME),
        (jnp.asarray(CAUSAL), CAUSAL),
    ],
)
def test_levanter(mask, seen):
    close(levanter_attention(Q, KEY, VALUE, mask), dense(seen, D**-0.5)[0])


def test_levanter_additive_mask_and_errors():
    bias = jax.random.normal(jax.random.key(5), (B, T, T))
    close(levanter_attention(Q, KEY, VALUE, bias), dense(True, D**-0.5, bias=np.asarray(bias)[:, None])[0])
    with pytest.raises(ValueError, match=r"must have shape \[Q, K\] or \[B, Q, K\]; it has \(2, 1, 6, 6\)"):
        levanter_attention(Q, KEY, VALUE, bias[:, None])
    with pytest.raises(
        ValueError, match="sliding_window counts the query's own key, so it must be at least 1; it is 0"
    ):
        levanter_attention(Q, KEY, VALUE, AttentionMask(True, sliding_window=0))


# ---- AXLearn ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class BoolBias:
    """As AXLearn's: a bool that says who attends, None where it says nothing."""

    seen: Any

    def bool_value(self):
        return self.seen

    def value(self):
        return None if self.seen is None else jnp.where(self.seen, 0.0, -1e15)

    def has_value(self):
        return self.seen is not None


class MaskFnAttentionBias(BoolBias):
    target_positions = None


class CausalAttentionBias(MaskFnAttentionBias):
    pass


class SlidingWindowAttentionBias(MaskFnAttentionBias):
    sliding_window_size = 2  # keys to the left of the query's own


class SegmentIdAttentionBias(BoolBias):
    segment_ids = IDS


class TensorAttentionBias:
    def __init__(self, x):
        self.x = x

    def value(self):
        return self.x

    def has_value(self):
        return True


@dataclasses.dataclass
class CompositeAttentionBias:
    biases: list

    def has_value(self):
        return any(b.has_value() for b in self.biases)


WRONG = jnp.zeros((1, 1, T, T), bool)  # what must not be read where the kind of bias says it all
ADDED = jax.random.normal(jax.random.key(6), (1, N, T, T))
AXLEARN = {
    "none": (None, J >= 0, 0.0),
    "zero": (BoolBias(None), J >= 0, 0.0),
    "causal": (CausalAttentionBias(WRONG), CAUSAL, 0.0),
    "window": (SlidingWindowAttentionBias(WRONG), CAUSAL & (J >= I - 2), 0.0),
    "segments": (SegmentIdAttentionBias(WRONG), SAME, 0.0),
    "mask function": (MaskFnAttentionBias(jnp.asarray(abs(I - J) < 2)[None, None]), abs(I - J) < 2, 0.0),
    "tensor": (TensorAttentionBias(ADDED), J >= 0, np.asarray(ADDED)),
    "array": (ADDED, J >= 0, np.asarray(ADDED)),
    "nested": (
        CompositeAttentionBias([
            CausalAttentionBias(WRONG), BoolBias(None),
            CompositeAttentionBias([SegmentIdAttentionBias(WRONG), TensorAttentionBias(ADDED)]),
            BoolBias(jnp.asarray(J != 1)[None, None]), BoolBias(jnp.asarray(J + 1 != I)[None, None]),
        ]),
        CAUSAL & SAME & (J != 1) & (J + 1 != I), np.asarray(ADDED),
    ),
}  # fmt: skip


def batch(bias, **more):
    return {"query": Q, "key": KEY, "value": VALUE, "bias": bias, **more}


@pytest.mark.parametrize("name", AXLEARN)
def test_axlearn(name):
    bias, seen, added = AXLEARN[name]
    layer = AxlearnFlashAttention(softmax_scale=0.3, implementation="xla")
    assert layer.is_supported(batch(bias), None)
    out = np.asarray(layer(batch(bias)))
    rows = np.broadcast_to(seen, (B, T, T)).any(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        close(out[rows], dense(seen, 0.3, bias=added)[0][rows])
    assert np.abs(out[~rows]).max(initial=0) == 0


def test_axlearn_decoding_positions_are_read():
    bias = CausalAttentionBias(jnp.asarray(J <= I + 1)[None, None])
    bias.target_positions = jnp.array([1, 1])
    close(AxlearnFlashAttention(implementation="xla")(batch(bias)), dense(J <= I + 1)[0])


def test_axlearn_says_why_not(caplog):
    for layer, more, text in (
        (AxlearnFlashAttention(dropout_rate=0.1, implementation="xla"), {}, "dropout_rate=0.1"),
        (AxlearnFlashAttention(implementation="xla"), {"query": Q.astype(jnp.bfloat16)}, "bfloat16.*float32"),
        (AxlearnFlashAttention(), {}, "no CUDA device|float32"),
    ):
        caplog.clear()
        assert layer.is_supported(batch(None, **more), None) is False
        assert caplog.messages[0].startswith("Not using AxlearnFlashAttention because ")
        assert re.search(text, caplog.text)
    caplog.clear()
    assert AxlearnFlashAttention(implementation="xla").is_supported(batch(None), dict) is False
    assert "kv_cache_type=dict" in caplog.text
    layer = AxlearnFlashAttention(implementation="xla")
    for wrong, text in (
        ({"query": Q, "key": KEY, "value": VALUE}, "lacks 'bias'"),
        (batch(None, value=VALUE[:, :5]), r"one shape; they have \(2, 6, 2, 8\) and \(2, 5, 2, 8\)"),
        (batch(None, query=Q[:, :, :3]), "3 is not of 2"),
        (batch(None, logit_sink=jnp.zeros(3)), r"logit_sink must have shape \(4,\), .* it has \(3,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            layer.is_supported(wrong, None)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.1 is not offered"):
        AxlearnFlashAttention(dropout_rate=0.1)(batch(None))


def test_axlearn_sinks():
    sink = jnp.array([0.0, 1.0, -1.0, 2.0])
    out = AxlearnFlashAttention(implementation="xla")(batch(None, logit_sink=sink))
    plain, lse = dense(True)
    share = 1 / (1 + np.exp(np.asarray(sink)[:, None] - lse))  # what the sink leaves to the keys
    close(out, plain * share.transpose(0, 2, 1)[..., None])
