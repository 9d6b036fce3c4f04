"""What the stochastic kernels share: the reverse SDE of a flow and the density of one of its Euler steps."""

import math

import torch
from torch import Tensor

from mdiff_core.types import Moments

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """[B] shaped so that it multiplies [B, *latent]."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def row_mean(values: Tensor) -> Tensor:
    """[B, *latent] -> [B], the mean over everything but the batch."""
    return values.flatten(1).mean(1)


def euler(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x + v dt, the ode step that every kernel tends to as its noise vanishes; x, v [B, *latent], sigmas [B]."""
    return x + v * per_row(sigma_next - sigma, x)


def sde_moments(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, std: Tensor) -> Moments:
    """Euler-Maruyama step of the SDE with diffusion `std` [B] and the flow's marginals (arXiv 2505.05470, eq. 9).

    mu = x (1 + std^2/(2s) dt) + v (1 + std^2 (1-s)/(2s)) dt and scale = std sqrt(-dt); float32 throughout.
    """
    dt = sigma_next - sigma
    pull = std**2 / (2 * sigma)
    mean = x * per_row(1 + pull * dt, x) + v * per_row(1 + pull * (1 - sigma), x) * per_row(dt, x)
    return Moments(mean=mean, scale=std * torch.sqrt(-dt), std=std)


def gaussian_log_prob(x_next: Tensor, moments: Moments) -> Tensor:
    """[B] log-density of x_next under N(mean, scale^2), averaged over the latent's dimensions."""
    z = (x_next - moments.mean) / per_row(moments.scale, x_next)
    return -0.5 * row_mean(z**2) - torch.log(moments.scale) - LOG_SQRT_2PI
