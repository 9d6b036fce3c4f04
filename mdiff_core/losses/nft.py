"""DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117): good samples attract and bad ones repel, on the forward process."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core.contracts import Policies
from mdiff_core.objectives import OnSamples, VelocityKL, noised, velocity_gap
from mdiff_core.sde import per_row, row_mean
from mdiff_core.types import Cells, Needs, Samples

Mode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]

MODES: dict[Mode, Callable[[Tensor], Tensor]] = {
    "all": lambda advantage: advantage,
    "positive_only": lambda advantage: advantage.clamp(min=0),
    "negative_only": lambda advantage: advantage.clamp(max=0),
    "one_only": lambda advantage: (advantage > 0).to(advantage.dtype),
    "binary": torch.sign,
}

LEAST_ERROR = 1e-5
"""Of the adaptive weight's divisor."""


class NFTOptions(VelocityKL, OnSamples):
    """How much a sample's advantage says, and how far the policies are taken apart."""

    beta: float = Field(default=1.0, gt=0, le=1000)
    """How far the positive and negative policies are from the old one, in steps to the live one."""
    c: float = Field(default=5.0, gt=0, le=1000)
    """Advantage that counts as wholly good, and minus it as wholly bad."""
    advantages: Mode = "all"
    """As they are; only the good or the bad ones; 1 for good and 0 for others; or their sign."""
    adaptive: bool = True
    """Divide each squared error by the sample's mean absolute error."""


class NFT:
    """c [r mean((x0+ - x0)^2) / w+ + (1-r) mean((x0- - x0)^2) / w-] / beta + kl mean((v - v_ref)^2), r = clip(A/c, -1, 1)/2 + 1/2.

    v+ = beta v + (1-beta) v_old and v- = (1+beta) v_old - beta v; x0+- = x_s - s v+-; w+- is the mean absolute error (eq. 5).
    """

    Options = NFTOptions
    rows: Literal["samples"] = "samples"

    def __init__(self, options: NFTOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The policy that drew the samples, and the KL term's."""
        options = self.options
        return Needs(policies=options.anchors | {"old"}, timesteps=options.timesteps, guidance=options.guided)

    def __call__(self, policies: Policies, rows: Samples) -> Cells:
        """Metrics: reward_weight (r), positive, negative (their weighted errors), old_gap; kl when kl > 0."""
        options = self.options
        x, _ = noised(rows.x0, rows.sigma, rows.seed, "nft")
        v = policies.live.velocity(x, rows.sigma, rows.conditioning)
        v_old = policies.frozen("old").velocity(x, rows.sigma, rows.conditioning)
        good = self.good(rows.advantage)
        positive = self.error(options.beta * v + (1 - options.beta) * v_old, x, rows)
        negative = self.error((1 + options.beta) * v_old - options.beta * v, x, rows)
        loss = options.c / options.beta * (good * positive + (1 - good) * negative)
        metrics = {
            "reward_weight": good,
            "positive": positive,
            "negative": negative,
            "old_gap": velocity_gap(v, v_old),
        }
        if options.kl > 0:
            metrics["kl"] = options.term(policies, rows, x, v)
            loss = loss + options.kl * metrics["kl"]
        return Cells(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})

    def good(self, advantage: Tensor) -> Tensor:
        """[B] r in [0, 1]: how much of a sample counts as good."""
        return (MODES[self.options.advantages](advantage) / self.options.c).clamp(-1, 1) / 2 + 0.5

    def error(self, v: Tensor, x: Tensor, rows: Samples) -> Tensor:
        """[B] squared error of the sample that `v` predicts, over its mean absolute error, which has no gradient."""
        off = x - per_row(rows.sigma, x) * v - rows.x0
        squared = row_mean(off**2)
        if not self.options.adaptive:
            return squared
        size = row_mean(off.detach().double().abs()).clamp(min=LEAST_ERROR)
        return (squared / size).float()
