"""PickScore: which of two pictures people would pick for a prompt."""

from collections.abc import Sequence

import numpy as np

from mdiff_core import frames as pictures
from mdiff_core.clip import VIT_H, Clip
from mdiff_core.types import Prompt
from mdiff_core.vision import ModelOptions


class PickScoreOptions(ModelOptions):
    """Which PickScore."""

    model: str = "yuvalkirstain/PickScore_v1"
    """Folder or hub id with the weights."""
    processor: str = VIT_H
    """Folder or hub id with preprocessing and tokenizer."""


class PickScore:
    """Preference of people who pick one of two pictures (arXiv 2305.01569), divided by 26 as in Flow-GRPO: near 0.8 to 0.9."""

    Options = PickScoreOptions
    groupwise = False

    def __init__(self, options: PickScoreOptions) -> None:
        self.options = options
        self.clip = Clip(options.model, options.processor, options)

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        return pictures.scores("pickscore", frames, prompts, self.options, self.measure)

    def measure(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores [N] of images [N, H, W, 3]."""
        cosines: np.ndarray = self.clip.cosines(images, [prompt.text for prompt in prompts]).numpy()
        return cosines * self.clip.scale / 26
