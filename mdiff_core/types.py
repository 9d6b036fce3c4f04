"""The records of a round, in the order in which they are made. Tensors live on the CPU unless a field says otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    """Stable: the line number and a digest of the text, so equal texts stay different prompts."""
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How every sample of a round is drawn; one per round, the same for each engine."""

    width: int
    height: int
    frames: int
    steps: int
    guidance: float
    """Classifier-free guidance; 1.0 means none, and no negative branch is computed."""
    negative: str
    """Text of the negative branch."""
    kernel: str
    """Registry name of the kernel that takes the `sde_steps`; all others are ode."""
    kernel_options: Mapping[str, Any]
    sde_steps: tuple[int, ...]
    """Indices of the steps that are stochastic, recorded and trained; empty for evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Some samples of one prompt, asked for together."""

    prompt: Prompt
    group: str
    """Id of the group the samples belong to; never a position."""
    indices: tuple[int, ...]
    """Sample index within the group, one per sample."""
    seeds: tuple[int, ...]
    """One per sample, aligned with `indices`."""
    plan: SamplingPlan


Condition = dict[str, Tensor]
"""What the model is told about one text: family-named tensors without a batch dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One generated sample and what training needs of how it came about."""

    sample: str
    """`<group>/<index>`."""
    group: str
    index: int
    prompt: Prompt
    seed: int
    policy: str
    """Version of the policy that drew it."""
    weights: str
    """Checksum of the weights that drew it (`policies.checksum_of`), as the engine reports it."""
    condition: str
    """Key of the prompt's row in the conditions table."""
    negative: str
    """Key of the negative text's row; empty without guidance."""
    guidance: float
    sigmas: Tensor
    """[T+1] float32, decreasing to 0: the schedule the engine used."""
    sde_steps: tuple[int, ...]
    """[W] trained steps."""
    latent_steps: tuple[int, ...]
    """[M] ascending; every trained step k needs k and k+1 here."""
    latents: Tensor
    """[M, *latent] the latents before step `latent_steps[m]` (T is the final one)."""
    log_probs: Tensor
    """[W] float32, mean over the latent's dimensions."""
    clean: Tensor
    """[*latent] the final latent."""
    frames: np.ndarray
    """[F, H, W, 3] uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """What rewards see of a sample: light enough to be sent to another process."""

    sample: str
    group: str
    prompt: Prompt
    frames: np.ndarray
    """[F, H, W, 3] uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rewards said of a batch of samples; all lists are aligned with it."""

    values: Mapping[str, list[float]]
    """By reward; NaN where it failed, and where it was not asked."""
    asked: Mapping[str, list[bool]]
    """By reward; False where the prompt's metadata choose others."""
    reasons: Mapping[str, list[str]]
    """By reward; why it failed, empty where it did not."""
    unavailable: frozenset[str]
    """Rewards whose server or process could not be asked at last, so that no sample is to blame."""
    retries: Mapping[str, int]
    """By reward; times that it was asked again."""
    seconds: float
    """That the rewards took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the rewards and filters said of one sample."""

    sample: str
    group: str
    rewards: Mapping[str, float]
    """Every raw component; NaN where the reward failed, or was not asked as the prompt chose others."""
    total: float
    """Combined reward; NaN where a component is missing."""
    error: str
    """Why a component is missing; empty when none is."""
    kept: bool
    """False when a filter drops the row from training."""
    in_baseline: bool
    """Whether the row still counts in its group's mean and std."""
    reason: str
    """Name of the filter that dropped it and why; empty when kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What a batch of latents is conditioned on; every tensor has the batch first, on the model's device."""

    positive: Condition
    negative: Condition
    """Empty without guidance."""
    guidance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """A micro-batch of trained steps: from `x` at `sigma` to `x_next` at `sigma_next`."""

    x: Tensor
    """[B, *latent] float32."""
    x_next: Tensor
    sigma: Tensor
    """[B] float32."""
    sigma_next: Tensor
    sigma_ceiling: Tensor
    """[B] float32: sigmas[1] of the schedule, which stands in for a sigma of 1 in flow_sde's std."""
    log_prob: Tensor
    """[B] float32 of the rollout."""
    advantage: Tensor
    """[B] float32."""
    conditioning: Conditioning
    seed: Tensor
    """[B] int64, stable per row: the only source of randomness a loss may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRows:
    """A micro-batch of finished latents."""

    x0: Tensor
    """[B, *latent] float32."""
    advantage: Tensor
    """[B] float32; 1 in supervised fine-tuning."""
    conditioning: Conditioning
    seed: Tensor
    """[B] int64, stable per row and epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A micro-batch of drawn latents, each to be noised to one sigma of the schedule it was drawn with."""

    x0: Tensor
    """[B, *latent] float32."""
    sigma: Tensor
    """[B] float32."""
    advantage: Tensor
    """[B] float32."""
    conditioning: Conditioning
    seed: Tensor
    """[B] int64, another one for each sigma of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """A micro-batch of best and worst samples of a group, likewise."""

    better: Tensor
    """[B, *latent] float32."""
    worse: Tensor
    """[B, *latent] float32."""
    sigma: Tensor
    """[B] float32."""
    conditioning: Conditioning
    seed: Tensor
    """[B] int64, another one for each sigma of a pair."""


Rows = Transitions | CleanRows | Samples | Preferences


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The Gaussian of one sampler step."""

    mean: Tensor
    """[B, *latent] float32, mu."""
    scale: Tensor
    """[B] float32: standard deviation of x_next."""
    std: Tensor
    """[B] float32: the diffusion coefficient, FORMULAS' std (for flow_sde scale = std * sqrt(-dt))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """What a loss says of a micro-batch: one number per row, so that the loop can take whole-step means."""

    loss: Tensor
    """[B] differentiable."""
    metrics: Mapping[str, Tensor]
    """Each [B], detached; averaged over the cells of the step on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """An opened policy artifact; see `policies.py`."""

    path: Path
    version: str
    parent: str
    """Version it was trained from; empty for a base."""
    kind: str
    """base | lora | full."""
    base: str
    """Where the base model is."""
    base_digest: str
    """Digest of the base transformer's config, to refuse a LoRA for another architecture."""
    base_weights: str = ""
    """Fingerprint of the base transformer's weight files, to refuse a LoRA for another model; empty when they were not on disk."""
    checksum: str
    """sha256 over the weight files' sha256; of the base digest when there are none."""
    targets: tuple[str, ...]
    """Names of the adapted modules; empty unless kind is lora."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreColumns:
    """What a filter sees: aligned columns of the samples that are kept so far, or dropped but in the baseline."""

    sample: Sequence[str]
    group: Sequence[str]
    total: np.ndarray
    """[N] float64."""
    fingerprint: Sequence[str]
    """Digest of each sample's frames."""
    metadata: Sequence[Mapping[str, Any]]


Frozen = Literal["reference", "start", "old", "ema"]
"""Policies that a loss may compare the live one with: the base (LoRA off, or a frozen copy), a frozen copy of what the run
started from, the old policy (`train.old`; without it what the round started from), and the average (`train.ema`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a loss asks of the run beside its rows."""

    policies: frozenset[Frozen] = frozenset()
    """Each costs a forward pass a row, and an adapter or, in full fine-tuning, a copy of the model."""
    timesteps: float = 0.0
    """Share of the sampler's sigmas at which a sample is trained in an optimizer step, each as a row; 0: one row as it is."""
    guidance: bool = True
    """Whether samples drawn with classifier-free guidance may be trained on; a loss that says no has an option `guided`."""
    normalised: bool = False
    """Whether log-probs must be of a density that integrates to 1."""
