"""Classifier-free guidance: one definition for the engine that samples and the trainer that repeats its steps."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mdiff_core.types import Conditioning

if TYPE_CHECKING:
    from mdiff_core.contracts import Family


def guided_velocity(
    family: "Family", transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning
) -> Tensor:
    """v_neg + guidance * (v_pos - v_neg), [B, *latent] float32; one doubled batch, or one plain one without guidance.

    x [B, *latent] float32, sigma [B] float32. Texts of different lengths, which no batch can hold, are two passes.
    """
    if not conditioning.negative:
        return family.velocity(transformer, x, sigma, conditioning.positive)
    if any(conditioning.negative[key].shape != value.shape for key, value in conditioning.positive.items()):
        negative = family.velocity(transformer, x, sigma, conditioning.negative)
        positive = family.velocity(transformer, x, sigma, conditioning.positive)
    else:
        condition = {
            key: torch.cat((conditioning.negative[key], value)) for key, value in conditioning.positive.items()
        }
        both = family.velocity(transformer, torch.cat((x, x)), torch.cat((sigma, sigma)), condition)
        negative, positive = both.chunk(2)
    return negative + conditioning.guidance * (positive - negative)
