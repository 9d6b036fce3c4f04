"""What every reward does with frames alike: refuse what is none, pick some of a video, reduce their scores to one a sample."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from mdiff_core.errors import RewardFailed
from mdiff_core.options import Options
from mdiff_core.types import Prompt


class FrameCount(Options):
    """How much of a video is looked at; an image is its own only frame."""

    frames: int = Field(default=4, ge=1)
    """Frames looked at, spread evenly over the video; all of a shorter one."""


class FrameOptions(FrameCount):
    """Which frames of a video are scored, and what their scores become."""

    over_frames: Literal["mean", "min"] = "mean"
    """A sample's score from those of its frames: the mean, or the worst."""


Measure = Callable[[np.ndarray, Sequence[Prompt]], np.ndarray]
"""Images [N, H, W, 3] uint8 and the prompt of each to scores [N]."""


def check(reward: str, frames: np.ndarray, prompts: Sequence[Prompt]) -> None:
    """RewardFailed unless `frames` are [B, F, H, W, 3] uint8, none 0, one prompt a sample."""
    if frames.dtype != np.uint8 or frames.ndim != 5 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise RewardFailed(f"{reward}: frames are {frames.dtype} {frames.shape}; give uint8 [B, F, H, W, 3], none 0")
    if len(frames) != len(prompts):
        raise RewardFailed(f"{reward}: {len(frames)} samples and {len(prompts)} prompts; give one prompt a sample")


def picked(frames: np.ndarray, count: int) -> np.ndarray:
    """[B, min(count, F), H, W, 3]: the middle frame of each of `count` equal parts of the video."""
    length = frames.shape[1]
    count = min(count, length)
    return frames[:, [(2 * i + 1) * length // (2 * count) for i in range(count)]]


def scores(
    reward: str, frames: np.ndarray, prompts: Sequence[Prompt], options: FrameOptions, measure: Measure
) -> np.ndarray:
    """[B] float64: `measure` of the picked frames, reduced; RewardFailed for what is not frames."""
    check(reward, frames, prompts)
    some = picked(frames, options.frames)
    each = measure(some.reshape(-1, *some.shape[2:]), [prompt for prompt in prompts for _ in range(some.shape[1])])
    table = np.asarray(each, np.float64).reshape(some.shape[:2])
    found: np.ndarray = table.mean(axis=1) if options.over_frames == "mean" else table.min(axis=1)
    return found
