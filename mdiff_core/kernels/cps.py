"""Coefficient-preserving sampling (FlowCPS, arXiv 2509.05952): each latent holds the noise that its sigma says."""

import math

from pydantic import Field
from torch import Tensor

from mdiff_core.options import Options
from mdiff_core.sde import per_row, row_mean
from mdiff_core.types import Moments


class CPSOptions(Options):
    """Noise level."""

    eta: float = Field(default=0.8, ge=0, le=1)
    """Share of the next latent's noise that is fresh: 0 none (the ode), 1 all."""


class CPS:
    """std = s' sin(eta pi/2); the step to sigma 0 has none, so it cannot be trained."""

    Options = CPSOptions
    stochastic = True
    normalised = False

    def __init__(self, options: CPSOptions) -> None:
        self.fresh = math.sin(options.eta * math.pi / 2)
        # cos, not sqrt(1 - sin^2): the same number without the cancellation near eta 1.
        self.carried = math.cos(options.eta * math.pi / 2)

    def moments(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_ceiling: Tensor) -> Moments:
        """Gaussian of x_next: the predicted sample and the predicted noise, remixed; `sigma_ceiling` plays no part."""
        x0 = x - per_row(sigma, x) * v
        x1 = x + per_row(1 - sigma, x) * v
        mean = per_row(1 - sigma_next, x) * x0 + per_row(sigma_next * self.carried, x) * x1
        scale = sigma_next * self.fresh
        return Moments(mean=mean, scale=scale, std=scale)

    def step(self, x: Tensor, moments: Moments, noise: Tensor) -> Tensor:
        """mean + scale * noise."""
        return moments.mean + per_row(moments.scale, x) * noise

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """[B], -mean((x_next - mean)^2): without variance and constants, as in the paper; no normalised density."""
        return -row_mean((x_next - moments.mean) ** 2)
