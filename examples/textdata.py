"""The text that the examples train on: Python's own reference manual, as bytes, split, batched and counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

VOCABULARY = 256  # a token is one byte of UTF-8
GROUP = 16  # neighbouring paragraphs stay together when the split is made
HELD_OUT_EVERY = 10  # one group in ten is held out


@dataclass(frozen=True)
class Text:
    """Tokens of the two splits, int32 [n]. No paragraph of one occurs in the other."""

    train: np.ndarray
    held_out: np.ndarray


def manual() -> list[str]:
    """The paragraphs of the language reference that `help()` shows, each once, in order of topic.

    Topics quote each other at length, so repeats are dropped: else the held-out text would hold parts of the other.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python comes without the module pydoc_data.topics, which holds the text that this example trains on;"
            " a CPython from python.org, a distribution's full package or conda has it"
        ) from error
    paragraphs = (p.strip("\n") for topic in sorted(topics) for p in topics[topic].split("\n\n"))
    return list(dict.fromkeys(p for p in paragraphs if p.strip()))


def encode(text: str) -> np.ndarray:
    """UTF-8 bytes as int32 [n]."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """The text of int [n]; bytes that are not UTF-8 become the replacement sign."""
    return bytes(np.asarray(tokens).astype(np.uint8)).decode(errors="replace")


def load() -> Text:
    """The manual, nine parts for training and one held out."""
    paragraphs = manual()
    groups = [paragraphs[i : i + GROUP] for i in range(0, len(paragraphs), GROUP)]
    held = [g for i, g in enumerate(groups) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    kept = [g for i, g in enumerate(groups) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    train, held_out = (encode("\n\n".join(p for g in part for p in g)) for part in (kept, held))
    if min(train.size, held_out.size) < 10_000:
        raise RuntimeError(
            f"pydoc_data.topics is too short to train on: {train.size} bytes for training, {held_out.size} held out"
        )
    return Text(train, held_out)


def batches(tokens: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Endless windows at random places: int32 [batch, length + 1], inputs and targets overlapping by all but one."""
    if tokens.size < length + 1:
        raise ValueError(f"windows of length {length} need {length + 1} tokens; the text has {tokens.size}")
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, tokens.size - length, size=batch)
        yield tokens[starts[:, None] + np.arange(length + 1)]


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """All whole windows in order: int32 [n, length + 1]; their targets are disjoint and cover the text but its tail."""
    n = (tokens.size - 1) // length
    if n == 0:
        raise ValueError(f"windows of length {length} need {length + 1} tokens; the text has {tokens.size}")
    return tokens[np.arange(n)[:, None] * length + np.arange(length + 1)]


def unigram_loss(text: Text, length: int) -> float:
    """Nats per token of a guess that knows no context, over the same targets as a model's held-out loss at `length`.

    Byte b has probability (count(b) + 1) / sum of these, counted on the training split.
    """
    counts = np.bincount(text.train, minlength=VOCABULARY) + 1.0
    targets = windows(text.held_out, length)[:, 1:]
    return float(-np.log(counts / counts.sum())[targets].mean())
