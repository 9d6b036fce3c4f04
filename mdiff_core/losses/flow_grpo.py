"""Flow-GRPO (Liu et al. 2025, arXiv 2505.05470): the clipped policy gradient over sampler steps, with a KL term."""

from typing import Literal

import torch
from pydantic import Field

from mdiff_core.contracts import Policies
from mdiff_core.objectives import StepKL, clipped, compared
from mdiff_core.types import Cells, Needs, Transitions


class FlowGRPOOptions(StepKL):
    """How far a step may move the policy."""

    clip: float = Field(default=1e-4, gt=0, lt=1)
    """A ratio beyond 1 +- clip no longer pulls; small, because a log-prob is a mean over the latent's dimensions."""


class FlowGRPO:
    """max(-A rho, -A clip(rho, 1-e, 1+e)) + beta mean((mu - mu_ref)^2) / (2 std^2)."""

    Options = FlowGRPOOptions
    rows: Literal["transitions"] = "transitions"

    def __init__(self, options: FlowGRPOOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The policy that the KL term pulls to, when there is one."""
        return Needs(policies=self.options.anchors)

    def __call__(self, policies: Policies, rows: Transitions) -> Cells:
        """Metrics: ratio, clip_fraction (rows whose pull the clip stopped), approx_kl, abs_log_ratio, noiseless; kl when
        beta > 0."""
        step = compared(policies.live, rows)
        loss, stopped = clipped(torch.exp(step.log_ratio), rows.advantage, self.options.clip)
        metrics = step.metrics(stopped)
        if self.options.beta > 0:
            metrics["kl"] = self.options.term(policies, rows, step.moments)
            loss = loss + self.options.beta * metrics["kl"]
        return Cells(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
