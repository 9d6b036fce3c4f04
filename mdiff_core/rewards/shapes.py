"""How far a frame shows the coloured shapes that its prompt's metadata asks for: the verifier of the shapes world as a reward."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mdiff_core.errors import RewardFailed
from mdiff_core.options import Options
from mdiff_core.types import Prompt
from mdiff_core.worlds import shapes, verify


class ShapesOptions(Options):
    """How the score is told."""

    exact: bool = False
    """1 for exactly what was asked and 0 for anything else, instead of partial credit."""


class Shapes:
    """Score in 0..1, 1 for exactly what was asked; the mean over a sample's frames."""

    Options: ClassVar[type[Options]] = ShapesOptions
    groupwise = False

    def __init__(self, options: ShapesOptions) -> None:
        self.measure = verify.exact if options.exact else verify.score

    def check(self, prompt: Prompt) -> None:
        """BadSetting when the metadata are not of the shapes world."""
        shapes.content_of(prompt.metadata)

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, 64, 64, 3] uint8; RewardFailed for anything else."""
        size = (shapes.SIZE, shapes.SIZE, 3)
        if frames.dtype != np.uint8 or frames.ndim != 5 or frames.shape[2:] != size or 0 in frames.shape:
            raise RewardFailed(f"shapes: frames are {frames.dtype} {frames.shape}; give uint8 [B, F, {size}], none 0")
        if len(frames) != len(prompts):
            raise RewardFailed(f"shapes: {len(frames)} samples and {len(prompts)} prompts; give one prompt a sample")
        metadatas = [prompt.metadata for prompt in prompts for _ in frames[0]]
        scores = self.measure(frames.reshape(-1, *size), metadatas)
        return np.asarray(scores.reshape(frames.shape[:2]).mean(1), np.float64)
