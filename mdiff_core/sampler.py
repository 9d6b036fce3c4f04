"""How a sample comes about: which noise, which steps, what is kept for training. Engines that sample in-process use all of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mdiff_core import seeds
from mdiff_core.errors import BadSetting
from mdiff_core.guidance import guided_velocity
from mdiff_core.types import Conditioning, Request, SamplingPlan

if TYPE_CHECKING:
    from mdiff_core.contracts import Family, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A sampled batch, on the model's device."""

    latents: Tensor
    """[B, M, *latent] float32: the latents before each of `latent_steps`."""
    log_probs: Tensor
    """[B, W] float32."""
    clean: Tensor
    """[B, *latent] float32."""


def condition_key(text: str) -> str:
    """Key of a text's row in the conditions table: the same from every engine."""
    return f"text-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def latent_steps(sde_steps: Sequence[int]) -> tuple[int, ...]:
    """Steps whose latents training needs: before and after each trained one."""
    return tuple(sorted({*sde_steps, *(step + 1 for step in sde_steps)}))


def shared_plan(engine: str, requests: Sequence[Request]) -> SamplingPlan:
    """The plan of all requests of a batch; BadSetting when they have different ones."""
    plan = requests[0].plan
    if any(request.plan != plan for request in requests):
        raise BadSetting(f"{engine} engine: requests with different sampling plans in one batch; send them apart")
    return plan


def draw_noise(sample_seeds: Sequence[int], sde_steps: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """[1+W, B, *shape] float32 on the CPU: initial noise, then each trained step's; a row depends on its own seed alone."""
    names: list[tuple[Any, ...]] = [("initial",), *(("step", step) for step in sde_steps)]
    rows = [torch.randn(shape, generator=seeds.generator(seed, *name)) for name in names for seed in sample_seeds]
    return torch.stack(rows).reshape(len(names), len(sample_seeds), *shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A model and the rule of its steps."""

    family: "Family"
    transformer: nn.Module
    kernel: "Kernel"
    """Takes the `sde_steps`."""
    ode: "Kernel"
    """Takes all others."""

    @torch.no_grad()
    def draw(self, sigmas: Tensor, sde_steps: Sequence[int], conditioning: Conditioning, noise: Tensor) -> Drawn:
        """One batch; nothing in the loop waits for the device. sigmas [T+1] float32, noise as from `draw_noise`, on one device."""
        times = sigmas[:, None].expand(-1, noise.shape[1])
        x, kept = noise[0], latent_steps(sde_steps)
        latents: list[Tensor] = []
        log_probs: list[Tensor] = []
        for step in range(len(sigmas) - 1):
            if step in kept:
                latents.append(x)
            v = guided_velocity(self.family, self.transformer, x, times[step], conditioning)
            moved = (x, v, times[step], times[step + 1], times[1])
            if step in sde_steps:
                moments = self.kernel.moments(*moved)
                x = self.kernel.step(x, moments, noise[1 + len(log_probs)])
                log_probs.append(self.kernel.log_prob(x, moments))
            else:
                x = self.ode.moments(*moved).mean
        if len(sigmas) - 1 in kept:
            latents.append(x)
        nothing = x.new_zeros(len(x), 0, *x.shape[1:])
        return Drawn(
            latents=torch.stack(latents, dim=1) if latents else nothing,
            log_probs=torch.stack(log_probs, dim=1) if log_probs else x.new_zeros(len(x), 0),
            clean=x,
        )
