"""How like its prompt a frame is, by CLIP."""

from collections.abc import Sequence

import numpy as np

from mdiff_core import frames as pictures
from mdiff_core.clip import Clip
from mdiff_core.types import Prompt
from mdiff_core.vision import ModelOptions


class ClipOptions(ModelOptions):
    """Which CLIP."""

    model: str = "openai/clip-vit-large-patch14"
    """Folder or hub id with weights, preprocessing and tokenizer."""


class ClipScore:
    """Cosine of frame and prompt, in [-1, 1] (CLIPScore, arXiv 2104.08718, without its factor of 2.5)."""

    Options = ClipOptions
    groupwise = False

    def __init__(self, options: ClipOptions) -> None:
        self.options = options
        self.clip = Clip(options.model, options.model, options)

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        return pictures.scores("clip", frames, prompts, self.options, self.measure)

    def measure(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Cosines [N] of images [N, H, W, 3]."""
        found: np.ndarray = self.clip.cosines(images, [prompt.text for prompt in prompts]).numpy()
        return found
