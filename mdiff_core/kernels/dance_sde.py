"""DanceGRPO's stochastic step (Xue et al. 2025, arXiv 2505.07818): Flow-GRPO's SDE with a constant diffusion."""

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core.options import Options
from mdiff_core.sde import gaussian_log_prob, per_row, sde_moments
from mdiff_core.types import Moments


class DanceSDEOptions(Options):
    """Noise level."""

    eta: float = Field(default=0.3, gt=0, le=10)
    """The diffusion coefficient. Must be above 0: without noise there is no density; that is kernel `ode`."""


class DanceSDE:
    """std = eta, whatever the sigma."""

    Options = DanceSDEOptions
    stochastic = True
    normalised = True

    def __init__(self, options: DanceSDEOptions) -> None:
        self.eta = options.eta

    def moments(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_ceiling: Tensor) -> Moments:
        """Gaussian of x_next; a constant diffusion is finite everywhere, so `sigma_ceiling` plays no part."""
        return sde_moments(x, v, sigma, sigma_next, torch.full_like(sigma, self.eta))

    def step(self, x: Tensor, moments: Moments, noise: Tensor) -> Tensor:
        """mean + scale * noise."""
        return moments.mean + per_row(moments.scale, x) * noise

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """[B], mean over the latent's dimensions."""
        return gaussian_log_prob(x_next, moments)
