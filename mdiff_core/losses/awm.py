"""Advantage Weighted Matching (Xue et al. 2025, arXiv 2509.25050): the pretraining loss as a log-prob, in the policy gradient."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core.contracts import Policies
from mdiff_core.objectives import OnSamples, VelocityKL, clipped, noised
from mdiff_core.sde import row_mean
from mdiff_core.types import Cells, Needs, Samples

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]

SMALL = 1e-10
"""Keeps the roots below differentiable at a loss of 0."""

WEIGHTINGS: dict[Weighting, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda loss, t, power: loss,
    "t": lambda loss, t, power: t * loss,
    "t2": lambda loss, t, power: t**2 * loss,
    "huber": lambda loss, t, power: t * (torch.sqrt(loss + SMALL) - SMALL**0.5),
    "ghuber": lambda loss, t, power: t / power * ((loss + SMALL) ** power - SMALL**power),
}
"""w(l, t) by name."""


class AWMOptions(VelocityKL, OnSamples):
    """What stands for a log-prob, and how far a sample may move it."""

    weighting: Weighting = "ghuber"
    """w(l, t): l, t l, t^2 l, t (sqrt(l + e) - sqrt(e)), or t ((l + e)^p - e^p) / p."""
    power: float = Field(default=0.25, gt=0, le=1)
    """p of `ghuber`."""
    clip: float = Field(default=1.0, gt=0, le=1)
    """A ratio beyond 1 +- clip no longer pulls."""


class AWM:
    """max(-A rho, -A clip(rho)) + kl mean((v - v_ref)^2), log rho = w(l_old, t) - w(l, t), l = mean((v - (eps - x0))^2)."""

    Options = AWMOptions
    rows: Literal["samples"] = "samples"

    def __init__(self, options: AWMOptions) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        """The policy that drew the samples, and the KL term's."""
        options = self.options
        return Needs(policies=options.anchors | {"old"}, timesteps=options.timesteps, guidance=options.guided)

    def __call__(self, policies: Policies, rows: Samples) -> Cells:
        """Metrics: mse, ratio, abs_log_ratio, clip_fraction; kl when kl > 0."""
        options = self.options
        x, eps = noised(rows.x0, rows.sigma, rows.seed, "awm")
        v = policies.live.velocity(x, rows.sigma, rows.conditioning)
        v_old = policies.frozen("old").velocity(x, rows.sigma, rows.conditioning)
        mse, mse_old = (row_mean((each - (eps - rows.x0)) ** 2) for each in (v, v_old))
        weigh = WEIGHTINGS[options.weighting]
        log_ratio = weigh(mse_old, rows.sigma, options.power) - weigh(mse, rows.sigma, options.power)
        ratio = torch.exp(log_ratio)
        loss, stopped = clipped(ratio, rows.advantage, options.clip)
        metrics = {
            "mse": mse,
            "ratio": ratio,
            "abs_log_ratio": log_ratio.abs(),
            "clip_fraction": stopped.float(),
        }
        if options.kl > 0:
            metrics["kl"] = options.term(policies, rows, x, v)
            loss = loss + options.kl * metrics["kl"]
        return Cells(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
