"""What the console shows of a stage, as HTML."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core import tables
from mdiff_core.observe import report


def grid(trajectories: Path, scores: Path) -> report.Grid:
    """The first samples with their scores; of a video, the middle frame."""
    totals = {row.sample: row.total for row in tables.read_scores(scores)}
    shown = list(islice(tables.read_trajectories(trajectories), report.SHOWN))
    return report.Grid(
        frames=np.stack([sample.frames[len(sample.frames) // 2] for sample in shown]),
        captions=[sample.prompt.text for sample in shown],
        rewards=[totals[sample.sample] for sample in shown],
        total=len(totals),
    )


def samples(trajectories: Path, scores: Path) -> str:
    """Pictures with captions and scores."""
    found = grid(trajectories, scores)
    return report.sample_grid(found.frames, found.captions, found.rewards, found.total)


def rewards(scores: Path) -> str:
    """Distribution of the totals."""
    return report.histogram([row.total for row in tables.read_scores(scores)], title="reward")


def numbers(metrics: Mapping[str, Any]) -> str:
    """What the stage returned."""
    return report.table(metrics)
