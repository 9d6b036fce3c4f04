"""The fleet's interface over engines in this process: stages without Ray."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from mdiff_core.fleet.actor import EngineActor
from mdiff_core.policies import Weights
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, Request, Trajectory

ACTORS: dict[str, EngineActor] = {}
"""Engines made so far, by their settings."""


class InlineFleet:
    """One engine, whatever `rollout.engines` says."""

    def __init__(self, rollout: Rollout, model: Model, policy: Path, weights: Weights = "live") -> None:
        name = rollout.engine.model_dump_json() + model.to_json()
        self._actor = ACTORS.setdefault(name, EngineActor(rollout.to_json(), model.to_json(), 0))
        self._actor.load(str(policy), weights, None)
        self.metrics: dict[str, Any] = {"images": 0, "seconds": 1.0, "restarts": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(
        self, batches: Sequence[Sequence[Request]]
    ) -> Iterator[tuple[int, list[Trajectory], dict[str, Condition]]]:
        for number, batch in enumerate(batches):
            trajectories, conditions = self._actor.generate(batch)
            self.metrics["images"] += len(trajectories)
            yield number, trajectories, conditions
