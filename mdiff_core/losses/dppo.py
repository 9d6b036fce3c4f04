"""Flow-DPPO (Ping et al. 2026, arXiv 2606.11025): the policy gradient, stopped by the divergence of a step instead of its ratio."""

from typing import Literal

import torch
from pydantic import Field

from mdiff_core.contracts import Policies
from mdiff_core.objectives import StepKL, compared, distance
from mdiff_core.types import Cells, Needs, Transitions


class DPPOOptions(StepKL):
    """How far a step may move the policy."""

    limit: float = Field(default=1e-5, gt=0, le=1000)
    """Divergence from the old policy, a mean over the latent's dimensions, from which on a step no longer moves away from it."""


class DPPO:
    """-A rho, but nothing where D = mean((mu - mu_old)^2) / (2 scale^2) is at its limit and rho has moved the advantage's way."""

    Options = DPPOOptions
    rows: Literal["transitions"] = "transitions"

    def __init__(self, options: DPPOOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The policy that drew the rows."""
        return Needs(policies=self.options.anchors | {"old"})

    def __call__(self, policies: Policies, rows: Transitions) -> Cells:
        """Metrics: those of flow_grpo, clip_fraction being the rows that were stopped; divergence."""
        step = compared(policies.live, rows)
        ratio, advantage = torch.exp(step.log_ratio), rows.advantage
        with torch.no_grad():
            divergence = distance(step.moments, policies.frozen("old").transition(rows), step.moments.scale)
            away = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
            stopped = away & (divergence >= self.options.limit)
        loss = torch.where(stopped, 0.0, -advantage * ratio)
        metrics = step.metrics(stopped) | {"divergence": divergence}
        if self.options.beta > 0:
            metrics["kl"] = self.options.term(policies, rows, step.moments)
            loss = loss + self.options.beta * metrics["kl"]
        return Cells(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
