"""What a user's own module may hold."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core.types import Prompt, ScoreColumns

NOT_A_FUNCTION = 3


def brightness(frames: np.ndarray, prompts: Sequence[Prompt], scale: float = 1.0) -> np.ndarray:
    return scale * frames.mean(axis=(1, 2, 3, 4)) / 255


def smoothness(frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
    """Minus the mean difference of neighbouring pixels."""
    across = np.abs(np.diff(frames.astype(np.float64), axis=3)).mean(axis=(1, 2, 3, 4))
    return -(across + np.abs(np.diff(frames.astype(np.float64), axis=2)).mean(axis=(1, 2, 3, 4)))


def rank(frames: np.ndarray, prompts: Sequence[Prompt]) -> list[int]:
    """Place of each sample among its siblings, the darkest first."""
    return np.argsort(np.argsort(frames.mean(axis=(1, 2, 3, 4)), kind="stable")).tolist()


def process(frames: np.ndarray, prompts: Sequence[Prompt], name: str = "", fail: bool = False) -> list[int]:
    """Who scored."""
    if fail:
        raise RuntimeError("the scorer broke")
    return [os.getpid()] * len(frames)


def nonsense(frames: np.ndarray, prompts: Sequence[Prompt]) -> Any:
    return ["good"] * len(frames)


def misbehaving(
    frames: np.ndarray, prompts: Sequence[Prompt], deed: str = "", at: int = -1, mark: str = "", slow: float = 0.0
) -> Any:
    """The mean pixel; a batch with a pixel of `at` is treated as `deed` says, once only if `mark` is a file's path."""
    time.sleep(slow)
    if (frames == at).any() and not (mark and Path(mark).exists()):
        if mark:
            Path(mark).touch()
        if deed == "hang":
            time.sleep(3600)
        elif deed == "die":
            os._exit(1)
        elif deed == "raise":
            raise RuntimeError("the scorer broke")
    return frames.mean(axis=(1, 2, 3, 4))


def odd(table: ScoreColumns, word: str = "odd") -> list[str]:
    """A filter: drops samples whose index is odd."""
    return [word if int(sample.rpartition("/")[2]) % 2 else "" for sample in table.sample]
