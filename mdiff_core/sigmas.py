"""The noise schedule, defined once. Sigma is the share of noise in a latent: x_sigma = (1 - sigma) x0 + sigma eps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdiff_core.errors import BadSetting

TRAIN_TIMESTEPS = 1000
"""Length of the grid the pretrained models were given: it sets the last sigma above 0, and transformers are told sigma times it."""
UNKNOWN = (
    *("use_dynamic_shifting", "shift_terminal", "invert_sigmas"),
    *("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"),
)
"""Scheduler settings that must be off, as in every published SD3."""


def shifted(sigma: Tensor, shift: float) -> Tensor:
    """Sigma moved towards 1 by `shift` > 1 (Esser et al. 2024, arXiv 2403.03206, eq. 23); the ends 0 and 1 stay."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def flow_match_sigmas(steps: int, shift: float) -> Tensor:
    """[steps+1] float32, decreasing from 1 to 0: bit for bit what diffusers' FlowMatchEulerDiscreteScheduler makes.

    That scheduler shifts twice, once to find the grid's ends in float32 and once over the grid in float64; so do we.
    BadSetting when `steps` < 1 or `shift` <= 0.
    """
    if steps < 1:
        raise BadSetting(f"steps: {steps} gives no schedule; ask for 1 or more")
    if not shift > 0:
        raise BadSetting(f"shift: {shift} is not above 0; 3.0 is SD3's, 1.0 leaves the schedule even")
    ends = shifted(torch.tensor([TRAIN_TIMESTEPS, 1], dtype=torch.float32) / TRAIN_TIMESTEPS, shift)
    first, last = (float(end) * TRAIN_TIMESTEPS for end in ends)
    even = torch.from_numpy(np.linspace(first, last, steps) / TRAIN_TIMESTEPS)
    return torch.cat([shifted(even, shift).float(), torch.zeros(1)])


def scheduled_sigmas(config: Mapping[str, Any], steps: int, model: str) -> Tensor:
    """`flow_match_sigmas` by a model's own scheduler_config.json; BadSetting names what in it is more than a shift."""
    odd = [name for name in UNKNOWN if config.get(name)]
    if odd or config.get("num_train_timesteps", TRAIN_TIMESTEPS) != TRAIN_TIMESTEPS:
        raise BadSetting(
            f"model.path '{model}': its scheduler sets {', '.join(odd) or 'num_train_timesteps'}, which is not known here; "
            f"use a shift alone and {TRAIN_TIMESTEPS} timesteps"
        )
    return flow_match_sigmas(steps, config.get("shift", 1.0))
