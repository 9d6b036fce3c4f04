"""The deterministic step: Euler on the flow's ordinary differential equation."""

import torch
from torch import Tensor

from mdiff_core.errors import BadSetting
from mdiff_core.options import Options
from mdiff_core.sde import euler
from mdiff_core.types import Moments


class ODEOptions(Options):
    """Nothing to set."""


class ODE:
    """x_next = x + v dt, with no noise and therefore no density."""

    Options = ODEOptions
    stochastic = False
    normalised = False

    def __init__(self, options: ODEOptions) -> None:
        """`options` is empty; every kernel is made from its options."""

    def moments(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_ceiling: Tensor) -> Moments:
        """All mass at x + v dt; `sigma_ceiling` plays no part."""
        none = torch.zeros_like(sigma)
        return Moments(mean=euler(x, v, sigma, sigma_next), scale=none, std=none)

    def step(self, x: Tensor, moments: Moments, noise: Tensor) -> Tensor:
        """The mean; `noise` plays no part."""
        return moments.mean

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """BadSetting: a deterministic step has no density."""
        raise BadSetting("sampling.kernel: 'ode' has no log-prob; choose 'flow_sde', or a loss that needs no log-prob")
