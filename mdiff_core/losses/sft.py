"""Supervised fine-tuning: flow matching on clean latents (Lipman et al. 2023; Esser et al. 2024, arXiv 2403.03206)."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core import seeds
from mdiff_core.contracts import Policies
from mdiff_core.options import Options
from mdiff_core.sde import per_row, row_mean
from mdiff_core.sigmas import shifted
from mdiff_core.types import Cells, CleanRows, Needs


class SFTOptions(Options):
    """Which sigmas are trained, and how much each counts."""

    sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of sigma: sigmoid of a normal (middle sigmas most), or even."""
    logit_mean: float = Field(default=0.0, ge=-20, le=20)
    """Of the normal; unused by uniform."""
    logit_std: float = Field(default=1.0, gt=0, le=20)
    """Of the normal; unused by uniform."""
    shift: float = Field(default=1.0, gt=0, le=1000)
    """Moves the sigmas towards noise as the sampler's shift does; 1 leaves them."""
    weighting: Literal["none", "cosmap"] = "none"
    """cosmap: 2 / (pi (1 - 2s + 2s^2)), up to twice as much at middle sigmas (arXiv 2403.03206, section 3.1)."""


class SFT:
    """mean((v - (eps - x0))^2) at x_s = (1-s) x0 + s eps, weighted by the row's advantage (1 for captioned images)."""

    Options = SFTOptions
    rows: Literal["clean"] = "clean"
    needs = Needs()

    def __init__(self, options: SFTOptions) -> None:
        self.options = options

    def __call__(self, policies: Policies, rows: CleanRows) -> Cells:
        """Metrics: mse (unweighted) and sigma."""
        sigma = self.sigma(rows.x0, rows.seed)
        noise = seeds.normal_like(rows.x0, rows.seed, "sft", "noise")
        share = per_row(sigma, rows.x0)
        velocity = policies.live.velocity((1 - share) * rows.x0 + share * noise, sigma, rows.conditioning)
        mse = row_mean((velocity - (noise - rows.x0)) ** 2)
        return Cells(loss=rows.advantage * self.weight(sigma) * mse, metrics={"mse": mse.detach(), "sigma": sigma})

    def sigma(self, x0: Tensor, row_seeds: Tensor) -> Tensor:
        """[B] in [0, 1], row b from its seed alone."""
        one_each = x0.flatten(1)[:, 0]
        if self.options.sampling == "uniform":
            sigma = seeds.uniform_like(one_each, row_seeds, "sft", "sigma")
        else:
            normal = seeds.normal_like(one_each, row_seeds, "sft", "sigma")
            sigma = torch.sigmoid(self.options.logit_mean + self.options.logit_std * normal)
        return shifted(sigma, self.options.shift)

    def weight(self, sigma: Tensor) -> Tensor:
        """[B] how much each sigma counts."""
        if self.options.weighting == "none":
            return torch.ones_like(sigma)
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
