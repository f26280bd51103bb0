"""Checkpoints of a training run with orbax: all that a step depends on, so that a resumed run repeats bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class Checkpoints:
    """A folder with the newest checkpoints of one run.

    The settings of the run stand beside them, and a run with others is refused: it would not go on where this one
    stopped. Batches are not kept, since they follow from the seed and the number of steps done.
    """

    def __init__(self, folder: Path, every: int, settings: dict[str, Any]):
        self.every = every
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        noted = folder / "settings.json"
        if noted.exists() and (before := json.loads(noted.read_text())) != settings:
            different = sorted(k for k in before.keys() | settings.keys() if before.get(k) != settings.get(k))
            raise ValueError(
                f"{folder} holds a run with {different[0]}={before.get(different[0])!r}; this one has"
                f" {settings.get(different[0])!r}. Take another folder, or the same settings"
            )
        noted.write_text(json.dumps(settings))
        self._manager = ocp.CheckpointManager(folder / "steps", options=ocp.CheckpointManagerOptions(max_to_keep=2))

    @property
    def latest(self) -> int:
        """Steps done at the newest checkpoint; 0 where there is none."""
        return self._manager.latest_step() or 0

    def restore(self, weights: Any, state: Any) -> tuple[Any, Any, list[float]]:
        """(weights, optimiser state, losses so far) of the newest checkpoint; what is given where there is none."""
        if not self.latest:
            return weights, state, []
        like = {"weights": weights, "state": state, "losses": np.zeros(self.latest)}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))
        return found["weights"], found["state"], [float(x) for x in found["losses"]]

    def save(self, weights: Any, state: Any, losses: list[float]) -> None:
        """Writes a checkpoint of `len(losses)` steps and waits until it is whole."""
        tree = {"weights": weights, "state": state, "losses": np.asarray(losses, np.float64)}
        self._manager.save(len(losses), args=ocp.args.StandardSave(tree))
        self._manager.wait_until_finished()
