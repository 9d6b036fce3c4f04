"""Flow-GRPO (Liu et al. 2025, arXiv 2505.05470): the clipped policy gradient over sampler steps, with a KL term."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core.contracts import Needs, Policies
from mdiff_core.options import Options
from mdiff_core.sde import row_mean
from mdiff_core.types import Cells, Moments, Transitions


class FlowGRPOOptions(Options):
    """How far a step may move the policy."""

    clip: float = Field(default=1e-4, gt=0, lt=1)
    """A ratio beyond 1 +- clip no longer pulls; small, because a log-prob is a mean over the latent's dimensions."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term; 0 leaves it out and saves its forward pass."""
    kl_against: Literal["reference", "start", "ema"] = "reference"
    """Where the KL term pulls to: the base (LoRA off), a frozen copy of what the run started from, or the average."""


class FlowGRPO:
    """max(-A rho, -A clip(rho, 1-e, 1+e)) + beta mean((mu - mu_ref)^2) / (2 std^2)."""

    Options = FlowGRPOOptions
    rows: Literal["transitions"] = "transitions"

    def __init__(self, options: FlowGRPOOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The policy that the KL term pulls to, when there is one."""
        return Needs(policies=frozenset({self.options.kl_against} if self.options.beta > 0 else ()))

    def __call__(self, policies: Policies, rows: Transitions) -> Cells:
        """Metrics: ratio, clip_fraction (rows whose pull the clip stopped), approx_kl, abs_log_ratio, noiseless, kl.

        The kl is there when beta > 0. A step without noise (the last of `cps`) has no density: it trains nothing and
        counts in `noiseless`.
        """
        moments = policies.live.transition(rows)
        noisy = moments.scale > 0
        log_ratio = torch.where(noisy, policies.live.log_prob(rows.x_next, moments) - rows.log_prob, 0.0)
        loss, clipped = self.policy_term(log_ratio, rows.advantage)
        metrics = {
            "ratio": torch.exp(log_ratio),
            "clip_fraction": clipped.float(),
            # k2 rather than k3, which loses all its digits in float32 at ratios this close to 1.
            "approx_kl": 0.5 * log_ratio**2,
            "abs_log_ratio": log_ratio.abs(),
            "noiseless": (~noisy).float(),
        }
        if self.options.beta > 0:
            metrics["kl"] = divergence(moments, policies.frozen(self.options.kl_against).transition(rows))
            loss = loss + self.options.beta * metrics["kl"]
        return Cells(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})

    def policy_term(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The clipped objective [B] and where the clip stopped the gradient."""
        ratio = torch.exp(log_ratio)
        low, high = 1 - self.options.clip, 1 + self.options.clip
        term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        return term, ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))


def divergence(live: Moments, reference: Moments) -> Tensor:
    """[B] mean((mu - mu_ref)^2) / (2 std^2); 0 for a step without noise."""
    noisy = live.std > 0
    variance = torch.where(noisy, live.std, 1.0) ** 2
    return torch.where(noisy, row_mean((live.mean - reference.mean.detach()) ** 2) / (2 * variance), 0.0)
