"""Flow-GRPO's stochastic step (Liu et al. 2025, arXiv 2505.05470)."""

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core.options import Options
from mdiff_core.sde import gaussian_log_prob, per_row, sde_moments
from mdiff_core.types import Moments


class FlowSDEOptions(Options):
    """Noise level."""

    eta: float = Field(default=0.7, gt=0, le=10)
    """Scale of the noise, a in the paper. Must be above 0: without noise there is no density; that is kernel `ode`."""


class FlowSDE:
    """std = eta sqrt(s / (1-s)): much noise early, little late."""

    Options = FlowSDEOptions
    stochastic = True
    normalised = True

    def __init__(self, options: FlowSDEOptions) -> None:
        self.eta = options.eta

    def moments(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_ceiling: Tensor) -> Moments:
        """Gaussian of x_next; at sigma 1, where std would be infinite, `sigma_ceiling` stands in for it."""
        # Engines compare by closeness too: a schedule whose first sigma is a rounding below 1 must not explode.
        bounded = torch.where(torch.isclose(sigma, torch.ones_like(sigma)), sigma_ceiling, sigma)
        return sde_moments(x, v, sigma, sigma_next, self.eta * torch.sqrt(sigma / (1 - bounded)))

    def step(self, x: Tensor, moments: Moments, noise: Tensor) -> Tensor:
        """mean + scale * noise."""
        return moments.mean + per_row(moments.scale, x) * noise

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """[B], mean over the latent's dimensions."""
        return gaussian_log_prob(x_next, moments)
