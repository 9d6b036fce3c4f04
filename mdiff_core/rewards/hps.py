"""Human Preference Score, versions 2.0 and 2.1."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from mdiff_core import frames as pictures
from mdiff_core.clip import VIT_H, Clip
from mdiff_core.types import Prompt
from mdiff_core.vision import ModelOptions


class HpsOptions(ModelOptions):
    """Which version of the score."""

    version: Literal["v2.0", "v2.1"] = "v2.1"
    """Chooses the published checkpoint."""
    weights: str = ""
    """Another file: a path, or owner/name/file on the hub."""
    model: str = VIT_H
    """Folder or hub id with architecture, preprocessing and tokenizer."""


class Hps:
    """Human Preference Score v2 (arXiv 2306.09341): the cosine by a CLIP trained on choices of people; near 0.2 to 0.35."""

    Options = HpsOptions
    FILES: ClassVar[dict[str, str]] = {
        "v2.0": "xswu/HPSv2/HPS_v2_compressed.pt",
        "v2.1": "xswu/HPSv2/HPS_v2.1_compressed.pt",
    }
    groupwise = False

    def __init__(self, options: HpsOptions) -> None:
        self.options = options
        self.clip = Clip(options.model, options.model, options, options.weights or self.FILES[options.version])

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        return pictures.scores("hps", frames, prompts, self.options, self.measure)

    def measure(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Cosines [N] of images [N, H, W, 3], each seen whole."""
        found: np.ndarray = self.clip.cosines(images, [prompt.text for prompt in prompts], pad=True).numpy()
        return found
