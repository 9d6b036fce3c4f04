"""How different the samples of a group are: what a policy that found one answer to everything has lost."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

SIDE = 16
"""Pictures are compared at this many cells a side, so that noise in single pixels counts little."""


def sketch(frames: np.ndarray) -> np.ndarray:
    """[SIDE * SIDE * 3] float32 in [0, 1]: the mean colour of each cell of the middle frame of [F, H, W, 3] uint8."""
    frame: np.ndarray = frames[len(frames) // 2].astype(np.float32) / 255
    for axis in (0, 1):
        length = frame.shape[axis]
        starts = [i * length // SIDE for i in range(SIDE)]
        # a cell of a picture smaller than the grid is its nearest pixel
        sizes = np.diff([*starts, length]).clip(1)
        sums = np.add.reduceat(frame, starts, axis=axis)
        frame = sums / sizes.reshape([-1 if each == axis else 1 for each in range(3)])
    return frame.ravel()


def within(sketches: Mapping[str, Sequence[np.ndarray]]) -> float:
    """Root mean square difference of two samples of a group, mean over pairs, then over the groups; NaN when no group has two."""
    found = [
        float(np.mean([rms(a, b) for a, b in combinations(some, 2)])) for some in sketches.values() if len(some) > 1
    ]
    return float(np.mean(found)) if found else float("nan")


def rms(a: np.ndarray, b: np.ndarray) -> float:
    """Of the difference of two sketches."""
    return float(np.sqrt(np.mean((a - b) ** 2)))
