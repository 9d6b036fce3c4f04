"""What a plug-in of each slot must offer. A plug-in is a class that names its settings type in `Options`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from mdiff_core.options import Options
from mdiff_core.types import (
    Cells,
    Condition,
    Conditioning,
    Frozen,
    Moments,
    Needs,
    PolicyVersion,
    Prompt,
    Request,
    Rows,
    ScoreColumns,
    Trajectory,
    Transitions,
)


@runtime_checkable
class Kernel(Protocol):
    """One sampler step and its density; `step` and `log_prob` share `moments`, so they cannot disagree."""

    Options: ClassVar[type[Options]]
    stochastic: ClassVar[bool]
    """False when there is no density (ode): ratio losses are refused."""
    normalised: ClassVar[bool]
    """Whether the density integrates to 1."""

    def moments(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_ceiling: Tensor) -> Moments:
        """Gaussian of x_next: x, v [B, *latent] float32; sigmas [B] float32."""
        ...

    def step(self, x: Tensor, moments: Moments, noise: Tensor) -> Tensor:
        """x_next = mean + scale * noise, [B, *latent]."""
        ...

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """[B] float32, mean over the latent's dimensions."""
        ...


KernelMaker = Callable[[str, Mapping[str, Any]], Kernel]
"""Registry name and options to a kernel: how a plug-in, which cannot import the registry, gets one."""


@runtime_checkable
class Window(Protocol):
    """Which steps are stochastic and trained."""

    Options: ClassVar[type[Options]]

    def draw(self, *, steps: int, seed: int, round: int) -> tuple[int, ...]:
        """Ascending step indices in 0..steps-1; a function of its arguments alone."""
        ...

    def check(self, steps: int) -> None:
        """Raise BadSetting when the window cannot be drawn from `steps` steps."""
        ...

    def reach(self, steps: int) -> tuple[int, ...]:
        """Ascending steps that some round may draw."""
        ...


@runtime_checkable
class Family(Protocol):
    """A model architecture: how it is loaded, conditioned, asked for a velocity and decoded."""

    Options: ClassVar[type[Options]]
    lora_targets: ClassVar[tuple[str, ...]]
    """Module-name suffixes that LoRA adapts unless the recipe names others."""

    def check(self, model: str, *, width: int, height: int, frames: int) -> None:
        """Raise BadSetting for a size the VAE and patches cannot take; reads config files only, loads no weights."""
        ...

    def digest(self, model: str) -> str:
        """sha256 of the transformer's config, to tell one base from another; loads no weights."""
        ...

    def transformer(self, model: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The trained network, eval mode, no gradients."""
        ...

    def blocks(self, transformer: nn.Module) -> Sequence[nn.Module]:
        """The repeated layers: units of sharding, activation checkpointing and regional compilation."""
        ...

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """v [B, *latent] float32 for x [B, *latent] float32 at sigma [B] float32; condition has the batch first."""
        ...

    def encoder(self, model: str, dtype: torch.dtype, device: torch.device) -> "TextEncoder":
        """The text side."""
        ...

    def decoder(self, model: str, dtype: torch.dtype, device: torch.device) -> "LatentCodec":
        """The VAE side."""
        ...

    def sigmas(self, model: str, *, steps: int, width: int, height: int) -> Tensor:
        """[steps+1] float32, decreasing to 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How SGLang knows a family's models."""

    model_id: str
    """Name that makes it take its own pipeline for a model, wherever the model's files are."""
    text_encoders: int
    guidance: str = "guidance_scale"
    """Request field of classifier-free guidance."""
    sampling_params: Mapping[str, Any]
    """Of every request, beside those that all models have."""
    conditions: Mapping[str, str]
    """SGLang's name of each tensor that a text becomes, to the family's."""


@runtime_checkable
class Served(Protocol):
    """A family that SGLang serves with a pipeline of its own."""

    def serving(self) -> Serving:
        """Names and numbers of it."""
        ...


class TextEncoder(Protocol):
    """Texts to conditions."""

    def __call__(self, texts: Sequence[str]) -> list[Condition]:
        """One condition per text, tensors on the CPU without batch dimension."""
        ...


class LatentCodec(Protocol):
    """Latents to frames and back."""

    def latent_shape(self, *, width: int, height: int, frames: int) -> tuple[int, ...]:
        """Shape of one latent, no batch."""
        ...

    def decode(self, latents: Tensor) -> np.ndarray:
        """[B, *latent] -> [B, F, H, W, 3] uint8."""
        ...

    def encode(self, frames: np.ndarray) -> Tensor:
        """[B, F, H, W, 3] uint8 -> [B, *latent] float32, the posterior's mode."""
        ...

    def networks(self) -> Sequence[nn.Module]:
        """What `decode` runs, worth compiling in place."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Draws samples from a policy. Made as `cls(options, family=, model=, dtype=, device=, kernels=)` by the fleet."""

    Options: ClassVar[type[Options]]
    batches_at_once: ClassVar[int]
    """Calls of `generate` it takes at a time, each in a thread of its own."""

    @classmethod
    def check(cls, options: Any, *, family: Family, kernel: str, gpus: float) -> None:
        """Raise BadSetting for a family, kernel or number of GPUs that it cannot draw with; starts nothing."""
        ...

    def load(self, policy: PolicyVersion, weights: Literal["live", "ema", "old"] = "live") -> str:
        """Take these of the policy's weights; return `policies.checksum_of` what is now loaded. No condition counts as sent any more."""
        ...

    def generate(self, requests: Sequence[Request]) -> "Iterator[tuple[Trajectory, Mapping[str, Condition]]]":
        """Each sample once, with the conditions (by key) not yet sent; requests run as one batch where the engine can."""
        ...

    def close(self) -> None:
        """Free everything; safe to call twice."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores finished samples; one finite float per sample, whatever their order and, unless groupwise, whatever the batch."""

    Options: ClassVar[type[Options]]

    @property
    def groupwise(self) -> bool:
        """Whether a sample's score depends on its group: then each call holds one whole group and nothing else."""
        ...

    def check(self, prompt: Prompt) -> None:
        """Raise BadSetting when the prompt lacks what this reward needs (metadata), before anything is generated."""
        ...

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """frames [B, F, H, W, 3] uint8 -> [B] float64."""
        ...


@runtime_checkable
class Filter(Protocol):
    """Drops samples or groups from training, each with a reason. Applied in the recipe's order."""

    Options: ClassVar[type[Options]]

    @property
    def in_baseline(self) -> bool:
        """Whether what it drops still counts in its group's mean and std."""
        ...

    def __call__(self, table: ScoreColumns) -> list[str]:
        """One reason per sample; empty keeps it. Looks at columns only, never at position."""
        ...


class Policy(Protocol):
    """A model as a loss sees it."""

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Guided velocity [B, *latent] float32."""
        ...

    def transition(self, rows: Transitions) -> Moments:
        """Gaussian of the step that `rows` took, under this model and the recipe's kernel."""
        ...

    def log_prob(self, x_next: Tensor, moments: Moments) -> Tensor:
        """[B] float32 under the recipe's kernel."""
        ...


class Policies(Protocol):
    """The policies a loss may ask for; asking for one it did not declare is an error."""

    @property
    def live(self) -> Policy:
        """The one being trained; carries gradient."""
        ...

    def frozen(self, name: Frozen) -> Policy:
        """Another one to compare with. No gradient."""
        ...


RowKind = Literal["transitions", "clean", "samples", "preferences"]
"""Sampler steps; captioned or drawn pictures; drawn ones with their schedule; the best and worst of each group."""


@runtime_checkable
class Loss(Protocol):
    """An objective over rows; knows nothing of Flyte, Ray, files or ranks."""

    Options: ClassVar[type[Options]]
    rows: ClassVar[RowKind]
    """Kind of rows it trains on."""

    @property
    def needs(self) -> Needs:
        """May depend on the options."""
        ...

    def __call__(self, policies: Policies, rows: Rows) -> Cells:
        """Loss and metrics per row."""
        ...


SLOTS: dict[str, type] = {
    "family": Family,
    "kernel": Kernel,
    "window": Window,
    "engine": Engine,
    "reward": Reward,
    "filter": Filter,
    "loss": Loss,
}
"""Every slot of the registry and its contract."""
