"""What several losses are made of: ratios of log-probs and their clip, distances between policies, noised samples."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mdiff_core import seeds
from mdiff_core.contracts import Policies, Policy
from mdiff_core.options import Options
from mdiff_core.sde import per_row, row_mean
from mdiff_core.types import Moments, Samples, Transitions

Anchor = Literal["reference", "start", "ema"]
"""Where a KL term may pull to: the base (LoRA off), a frozen copy of what the run started from, or the average."""


class StepKL(Options):
    """The KL term of losses over sampler steps: mean((mu - mu_anchor)^2) / (2 std^2)."""

    beta: float = Field(default=0.0, ge=0, le=1e4)
    """Weight of the KL term; 0 leaves it out and saves its forward pass."""
    kl_against: Anchor = "reference"
    """Where the KL term pulls to: the base (LoRA off), a frozen copy of what the run started from, or the average."""

    @property
    def anchors(self) -> frozenset[Anchor]:
        """The policies that the term needs."""
        return frozenset({self.kl_against} if self.beta > 0 else ())

    def term(self, policies: Policies, rows: Transitions, live: Moments) -> Tensor:
        """[B] the unweighted KL, with gradient; asks for the anchor, so only when beta > 0."""
        return distance(live, policies.frozen(self.kl_against).transition(rows), live.std)


class OnSamples(Options):
    """How losses on drawn samples noise them."""

    timesteps: float = Field(default=0.99, gt=0, le=1)
    """Share of the sampler's sigmas at which each sample is trained in an optimizer step."""
    guided: bool = False
    """Allow rollouts with guidance; the guided velocity is then what is trained, which such losses are not derived for."""


class VelocityKL(Options):
    """The KL term of losses on drawn samples: mean((v - v_anchor)^2)."""

    kl: float = Field(default=0.0, ge=0, le=1e4)
    """Weight of the KL term; 0 leaves it out and saves its forward pass."""
    kl_against: Anchor = "reference"
    """Where the KL term pulls to: the base (LoRA off), a frozen copy of what the run started from, or the average."""

    @property
    def anchors(self) -> frozenset[Anchor]:
        """The policies that the term needs."""
        return frozenset({self.kl_against} if self.kl > 0 else ())

    def term(self, policies: Policies, rows: Samples, x: Tensor, v: Tensor) -> Tensor:
        """[B] the unweighted KL at the noised latents x, with gradient to v; only when kl > 0."""
        return velocity_gap(v, policies.frozen(self.kl_against).velocity(x, rows.sigma, rows.conditioning))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Trained steps under the live policy, and against their log-probs of the rollout."""

    moments: Moments
    noisy: Tensor
    """[B] bool: a step without noise (the last of `cps`) has no density and trains nothing."""
    log_ratio: Tensor
    """[B] log p - log p_rollout; 0 without noise."""

    def metrics(self, stopped: Tensor, log_ratio: Tensor | None = None) -> dict[str, Tensor]:
        """ratio, abs_log_ratio and approx_kl (of `log_ratio`, if the loss has its own), clip_fraction, noiseless."""
        used = self.log_ratio if log_ratio is None else log_ratio
        return {
            "ratio": torch.exp(used),
            "clip_fraction": stopped.float(),
            # k2 rather than k3, which loses all its digits in float32 at ratios this close to 1.
            "approx_kl": 0.5 * used**2,
            "abs_log_ratio": used.abs(),
            "noiseless": (~self.noisy).float(),
        }


def compared(live: Policy, rows: Transitions) -> Compared:
    """The live policy at the rows' steps."""
    moments = live.transition(rows)
    noisy = moments.scale > 0
    log_ratio = torch.where(noisy, live.log_prob(rows.x_next, moments) - rows.log_prob, 0.0)
    return Compared(moments=moments, noisy=noisy, log_ratio=log_ratio)


def clipped(ratio: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """[B] max(-A rho, -A clip(rho, 1-e, 1+e)), and [B] bool where the clip stopped the gradient (arXiv 1707.06347, eq. 7)."""
    low, high = 1 - clip, 1 + clip
    term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
    return term, ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))


def distance(live: Moments, other: Moments, spread: Tensor) -> Tensor:
    """[B] mean((mu - mu_other)^2) / (2 spread^2), spread [B]; 0 where that is 0. No gradient to the other."""
    noisy = spread > 0
    variance = torch.where(noisy, spread, 1.0) ** 2
    return torch.where(noisy, row_mean((live.mean - other.mean.detach()) ** 2) / (2 * variance), 0.0)


def velocity_gap(v: Tensor, other: Tensor) -> Tensor:
    """[B] mean((v - v_other)^2), the KL in velocity space; no gradient to the other."""
    return row_mean((v - other.detach()) ** 2)


def noised(x0: Tensor, sigma: Tensor, row_seeds: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """x_s = (1-s) x0 + s eps and eps, [B, *latent] each; eps from the rows' seeds and the loss's name alone."""
    eps = seeds.normal_like(x0, row_seeds, loss, "noise")
    share = per_row(sigma, x0)
    return (1 - share) * x0 + share * eps, eps
