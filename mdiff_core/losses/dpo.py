"""Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908) in its flow form, online: the best against the worst of each group."""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from mdiff_core.contracts import Policies, Policy
from mdiff_core.objectives import Anchor, OnSamples, noised
from mdiff_core.sde import row_mean
from mdiff_core.types import Cells, Conditioning, Needs, Preferences


class DPOOptions(OnSamples):
    """How strict the comparison is."""

    beta: float = Field(default=2000.0, gt=0)
    """Sharpness; large, because an error is a mean over the latent's dimensions. Also what holds the policy to the reference."""
    against: Anchor = "reference"
    """What errors are compared with: the base (LoRA off), a frozen copy of what the run started from, or the average."""


class DPO:
    """-log sigmoid(-beta/2 [(l - l_ref of the better) - (l - l_ref of the worse)]), l = mean((v - (eps - x0))^2), eq. 14.

    Both samples are noised alike, and go through the model as one batch of twice the rows.
    """

    Options = DPOOptions
    rows: Literal["preferences"] = "preferences"

    def __init__(self, options: DPOOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The reference."""
        options = self.options
        return Needs(policies=frozenset({options.against}), timesteps=options.timesteps, guidance=options.guided)

    def __call__(self, policies: Policies, rows: Preferences) -> Cells:
        """Metrics: accuracy (the better one is preferred), margin (by how much, before beta/2), mse of the better and worse."""
        x0 = torch.cat((rows.better, rows.worse))
        sigma, conditioning = rows.sigma.repeat(2), twice(rows.conditioning)
        x, eps = noised(x0, sigma, rows.seed.repeat(2), "dpo")

        def errors(policy: Policy) -> tuple[Tensor, Tensor]:
            better, worse = row_mean((policy.velocity(x, sigma, conditioning) - (eps - x0)) ** 2).chunk(2)
            return better, worse

        better, worse = errors(policies.live)
        better_then, worse_then = errors(policies.frozen(self.options.against))
        margin = (worse - worse_then) - (better - better_then)
        metrics = {
            "accuracy": (margin > 0).float(),
            "margin": margin,
            "mse_better": better,
            "mse_worse": worse,
        }
        return Cells(
            loss=-logsigmoid(self.options.beta / 2 * margin),
            metrics={name: value.detach() for name, value in metrics.items()},
        )


def twice(conditioning: Conditioning) -> Conditioning:
    """For a batch that has each row twice, one half after the other."""
    positive, negative = (
        {name: torch.cat((value, value)) for name, value in condition.items()}
        for condition in (conditioning.positive, conditioning.negative)
    )
    return replace(conditioning, positive=positive, negative=negative)
