"""What a user's own module may hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mdiff_core.contracts import ScoreColumns
from mdiff_core.types import Prompt

NOT_A_FUNCTION = 3


def brightness(frames: np.ndarray, prompts: Sequence[Prompt], scale: float = 1.0) -> np.ndarray:
    return scale * frames.mean(axis=(1, 2, 3, 4)) / 255


def rank(frames: np.ndarray, prompts: Sequence[Prompt]) -> list[int]:
    """Place of each sample among its siblings, the darkest first."""
    return np.argsort(np.argsort(frames.mean(axis=(1, 2, 3, 4)), kind="stable")).tolist()


def nonsense(frames: np.ndarray, prompts: Sequence[Prompt]) -> Any:
    return ["good"] * len(frames)


def odd(table: ScoreColumns, word: str = "odd") -> list[str]:
    """A filter: drops samples whose index is odd."""
    return [word if int(sample.rpartition("/")[2]) % 2 else "" for sample in table.sample]
