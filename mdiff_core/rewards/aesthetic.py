"""How pleasing a frame is, whatever the prompt: LAION's predictor on CLIP ViT-L/14."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import nn

from mdiff_core import frames as pictures
from mdiff_core import hub
from mdiff_core.clip import Clip
from mdiff_core.types import Prompt
from mdiff_core.vision import ModelOptions, affine


class AestheticOptions(ModelOptions):
    """Which CLIP, and which head on it."""

    model: str = "openai/clip-vit-large-patch14"
    """Folder or hub id."""
    head: str = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"
    """The predictor's layers (sac+logos+ava1-l14-linearMSE): a path, or owner/name/file on the hub."""


class Aesthetic:
    """Predicted mark of people, about 1 to 10, as in DDPO (arXiv 2305.13301)."""

    Options = AestheticOptions
    groupwise = False

    def __init__(self, options: AestheticOptions) -> None:
        self.options = options
        self.clip = Clip(options.model, options.model, options)

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        return pictures.scores("aesthetic", frames, prompts, self.options, self.measure)

    def measure(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Marks [N] of images [N, H, W, 3]."""
        marks: np.ndarray = self._head(self.clip.pictures(images)).squeeze(1).numpy()
        return marks

    @cached_property
    def _head(self) -> nn.Sequential:
        return affine(hub.weights(self.options.head), "layers.", self.options.head)
