"""How well frames compress as JPEG, in the scale of Flow-GRPO and DDPO (arXiv 2305.13301): cheap, with a known optimum."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from pydantic import Field

from mdiff_core import frames as pictures
from mdiff_core.options import Options
from mdiff_core.types import Prompt


class JpegOptions(Options):
    """How frames are compressed."""

    quality: int = Field(default=95, ge=1, le=100)
    """JPEG quality; 95 is what published curves use."""


class JpegIncompressibility:
    """Mean JPEG size of a sample's frames in kB (1000 bytes): more detail, more reward."""

    Options = JpegOptions
    groupwise = False

    def __init__(self, options: JpegOptions) -> None:
        self.quality = options.quality

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] kB for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        pictures.check("jpeg", frames, prompts)
        return np.array([np.mean([self.kilobytes(frame) for frame in sample]) for sample in frames], np.float64)

    def kilobytes(self, frame: np.ndarray) -> float:
        """Size of one frame [H, W, 3]."""
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell() / 1000


class JpegCompressibility(JpegIncompressibility):
    """Minus the JPEG size in units of 500 kB: flatter pictures, more reward; 0 is out of reach, a 512 px photo is near -0.2."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] -kB/500."""
        return -super().__call__(frames, prompts) / 500
