"""Runs pyflyte with a SIGKILL waiting for it: `python tests/workflows/killed.py WHERE pyflyte-arguments...`.

The signal goes to this very process, at a place in round 2 that `WHERE` names; nothing gets to clean up.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit.clis.sdk_in_container.pyflyte import main

from mdiff_core import artifacts, tables
from mdiff_core.stages import pair, score
from mdiff_core.train import loop


def die() -> None:
    """Now."""
    os.kill(os.getpid(), signal.SIGKILL)


def is_second(trajectories: Path) -> bool:
    """Whether they are those of round 2."""
    return artifacts.read_manifest(str(trajectories)).job["round"] == 1


def patch(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace an attribute by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def between_rounds() -> None:
    """After round 1 has been told."""
    from tasks import record

    def make(tell: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            told = tell(*arguments)
            if any(found["kind"] == "round" for found in told):
                die()
            return told

        return run

    patch(record, "tell", make)


def in_rollout() -> None:
    """With some samples of the round in the writer."""

    def make(add: Callable[..., None]) -> Callable[..., None]:
        def run(writer: Any, trajectory: Any) -> None:
            add(writer, trajectory)
            if trajectory.group.startswith("r00001") and trajectory.index == 1:
                die()

        return run

    patch(tables.TrajectoryWriter, "add", make)


def in_score() -> None:
    """With the table written and no manifest yet."""

    def make(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(job: Any, trajectories: Path, out: Path) -> Any:
            metrics = stage(job, trajectories, out)
            return die() if is_second(trajectories) else metrics

        return run

    patch(score, "run", make)


def in_pair() -> None:
    """With the rows written and no manifest yet."""

    def make(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(job: Any, trajectories: Path, scores: Path, out: Path) -> Any:
            metrics = stage(job, trajectories, scores, out)
            return die() if is_second(trajectories) else metrics

        return run

    patch(pair, "run", make)


def in_update() -> None:
    """In the optimizer loop, after its first step."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(trainer: Any, *arguments: Any) -> Any:
            metrics = step(trainer, *arguments)
            return die() if trainer._job.round == 1 else metrics

        return run

    patch(loop.Trainer, "_step", make)


def while_publishing() -> None:
    """With the round's policy in its place and its train state not."""

    def make(finish: Callable[..., None]) -> Callable[..., None]:
        def run(folder: Path, uri: str, manifest: artifacts.Manifest) -> None:
            if manifest.stage == "state" and manifest.job.get("round") == 1:
                die()
            finish(folder, uri, manifest)

        return run

    patch(artifacts, "finish", make)


PLACES = {
    place.__name__: place for place in (between_rounds, in_rollout, in_score, in_pair, in_update, while_publishing)
}

if __name__ == "__main__":
    where = sys.argv.pop(1)
    PLACES[where]()
    main()
