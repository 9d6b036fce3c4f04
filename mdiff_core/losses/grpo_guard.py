"""GRPO-Guard (Wang et al. 2025, arXiv 2510.22319): Flow-GRPO with ratios that are centred on 1 and alike at every step."""

from typing import Literal

import torch
from pydantic import Field

from mdiff_core.contracts import Policies
from mdiff_core.objectives import StepKL, clipped, compared, distance
from mdiff_core.types import Cells, Needs, Transitions


class GRPOGuardOptions(StepKL):
    """How far a step may move the policy."""

    clip: float = Field(default=2e-6, gt=0, lt=1)
    """A ratio beyond 1 +- clip no longer pulls; smaller than Flow-GRPO's, as the log-ratio is scaled by the step's noise."""


class GRPOGuard:
    """max(-A rho, -A clip(rho)) / (-dt) with rho = exp((log p - log p_old + b) std sqrt(-dt)), b = mean((mu - mu_old)^2) / (2 scale^2)."""

    Options = GRPOGuardOptions
    rows: Literal["transitions"] = "transitions"

    def __init__(self, options: GRPOGuardOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The policy that drew the rows; b is what its log-prob loses on average, if that is a Gaussian's."""
        return Needs(policies=self.options.anchors | {"old"}, normalised=True)

    def __call__(self, policies: Policies, rows: Transitions) -> Cells:
        """Metrics: those of flow_grpo, for this ratio; bias."""
        step = compared(policies.live, rows)
        bias = distance(step.moments, policies.frozen("old").transition(rows), step.moments.scale)
        log_ratio = (step.log_ratio + bias) * step.moments.scale  # which is std sqrt(-dt)
        loss, stopped = clipped(torch.exp(log_ratio), rows.advantage, self.options.clip)
        loss = loss / (rows.sigma - rows.sigma_next)
        metrics = step.metrics(stopped, log_ratio) | {"bias": bias}
        if self.options.beta > 0:
            metrics["kl"] = self.options.term(policies, rows, step.moments)
            loss = loss + self.options.beta * metrics["kl"]
        return Cells(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
