"""JPEG rewards: Flow-GRPO's scale, and flatter is more compressible."""

import io

import numpy as np
import pytest
from PIL import Image

from mdiff_core.rewards.jpeg import JpegCompressibility, JpegIncompressibility, JpegOptions
from mdiff_core.types import Prompt

PROMPT = Prompt(id="p", text="a cat", metadata={})


def noisy(frames: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, frames, 32, 32, 3), np.uint8)


def kilobytes(frame: np.ndarray, quality: int = 95) -> float:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000


def test_scales() -> None:
    """Size in kB at quality 95; compressibility is minus that over 500."""
    size = kilobytes(noisy()[0, 0])
    assert JpegIncompressibility(JpegOptions())(noisy(), [PROMPT]).tolist() == [size]
    assert JpegCompressibility(JpegOptions())(noisy(), [PROMPT]).tolist() == [-size / 500]


def test_flat_is_more_compressible_than_noise() -> None:
    both = np.concatenate([np.full((1, 1, 32, 32, 3), 90, np.uint8), noisy()])
    compressible = JpegCompressibility(JpegOptions())(both, [PROMPT] * 2)
    incompressible = JpegIncompressibility(JpegOptions())(both, [PROMPT] * 2)
    assert compressible[0] > compressible[1] and incompressible[0] < incompressible[1]


def test_a_video_is_the_mean_of_its_frames() -> None:
    clip = noisy(frames=3)
    sizes = [kilobytes(frame) for frame in clip[0]]
    assert JpegIncompressibility(JpegOptions())(clip, [PROMPT])[0] == pytest.approx(np.mean(sizes), rel=1e-12)


def test_quality_is_used() -> None:
    reward = JpegIncompressibility(JpegOptions(quality=10))
    assert reward(noisy(), [PROMPT]).tolist() == [kilobytes(noisy()[0, 0], quality=10)]


@pytest.mark.parametrize("quality", [0, 101, "95"])
def test_quality_is_checked(quality: object) -> None:
    with pytest.raises(ValueError, match="quality"):
        JpegOptions.model_validate({"quality": quality})
