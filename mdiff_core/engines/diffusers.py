"""The in-process engine: the family's own modules and mdiff's own sampler, so that training repeats each step exactly."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from mdiff_core import policies
from mdiff_core.compilation import compile_in_place, on_device
from mdiff_core.contracts import Family, KernelMaker
from mdiff_core.determinism import deterministic, reserve_workspace
from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.options import Options
from mdiff_core.sampler import Drawn, Sampler, condition_key, draw_noise, latent_steps, shared_plan
from mdiff_core.types import Condition, Conditioning, PolicyVersion, Request, SamplingPlan, Trajectory

TEXTS_KEPT = 512
"""Encoded texts an engine remembers; a round's prompts come in order, so few are met again later."""


class DiffusersOptions(Options):
    """Speed and memory; none changes what is drawn by more than rounding."""

    compile: bool = False
    """Compile the transformer's blocks (torch.compile); worth its start-up on a GPU only."""
    compile_vae: bool = False
    """Compile what decodes latents, too."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's: the second tries several ways of each matrix product, at a minute or more of start-up."""
    deterministic: bool | None = None
    """Draw with the kernels that the update trains with, whose results depend least on the batch; null does so in float32 only,
    where other kernels' rounding is most of the drift. No difference on a CPU."""
    vae_batch: int = Field(default=8, ge=1)
    """Latents decoded at once."""
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the VAE, whose rounding shows in the images."""
    threads: int = Field(default=0, ge=0)
    """CPU threads; 0 keeps the process's own number."""

    @model_validator(mode="after")
    def _mode_of_something(self) -> Self:
        if not (self.compile or self.compile_vae) and self.compile_mode != "default":
            raise ValueError("compile_mode does nothing while compile and compile_vae are false; set one of them")
        return self


class DiffusersEngine:
    """Draws each batch as one forward pass a step, in the process it lives in; see contracts.Engine.

    The device has one batch at a time; the host makes the noise of the next and the records of the last meanwhile.
    """

    Options: ClassVar[type[Options]] = DiffusersOptions
    batches_at_once: ClassVar[int] = 2

    @classmethod
    def check(cls, options: DiffusersOptions, *, family: Family, kernel: str, gpus: float) -> None:
        """BadSetting for more than one GPU; it draws with any family and kernel."""
        if gpus > 1:
            raise BadSetting(
                f"rollout.gpus_per_engine: {gpus:g}, but a diffusers engine uses one at most; set it to 1 and use more rollout.engines"
            )

    def __init__(
        self,
        options: DiffusersOptions,
        *,
        family: Family,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelMaker,
    ) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self._threads = torch.get_num_threads()
        self._repeatable = dtype == torch.float32 if options.deterministic is None else options.deterministic
        if self._repeatable and device.type == "cuda":
            reserve_workspace()
        self._options, self._family, self._model, self._device, self._kernels = options, family, model, device, kernels
        self._transformer: nn.Module | None = family.transformer(model, dtype, device)
        self._encoder = family.encoder(model, dtype, device)
        self._vae = family.decoder(model, vars(torch)[options.vae_dtype], device)
        self._policy: PolicyVersion | None = None
        self._checksum = ""
        self._texts: OrderedDict[str, Condition] = OrderedDict()
        self._sent: set[str] = set()
        if options.compile:
            compile_in_place(family.blocks(self._transformer), options.compile_mode)
        if options.compile_vae:
            compile_in_place(self._vae.networks(), options.compile_mode)

    def load(self, policy: PolicyVersion, weights: policies.Weights = "live") -> str:
        """Merge the policy's weights into the base, in place of the last ones."""
        if self._transformer is None:
            raise EngineFailed("diffusers engine: it was closed; make a new one")
        self._checksum = on_device(self._threads, policies.apply_to, self._transformer, policy, weights)
        self._policy = policy
        self._sent.clear()
        return self._checksum

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[Trajectory, Mapping[str, Condition]]]:
        """All requests as one batch; they share one plan."""
        plan = shared_plan("diffusers", requests)
        rows = [(request, i) for request in requests for i in range(len(request.seeds))]
        sigmas = self._family.sigmas(self._model, steps=plan.steps, width=plan.width, height=plan.height)
        shape = self._vae.latent_shape(width=plan.width, height=plan.height, frames=plan.frames)
        noise = draw_noise([request.seeds[i] for request, i in rows], plan.sde_steps, shape)
        drawn, frames, fresh = on_device(self._threads, self._batch, plan, sigmas, rows, noise)
        for row, (request, i) in enumerate(rows):
            trajectory = self._trajectory(request, i, sigmas, (drawn, row), frames[row])
            needed = [key for key in (trajectory.condition, trajectory.negative) if key in fresh]
            yield trajectory, {key: fresh.pop(key) for key in needed}

    def close(self) -> None:
        """Drop the transformer, the texts and the GPU's spare memory; the rest goes with the engine."""
        self._transformer = self._policy = None
        self._texts.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _trajectory(
        self, request: Request, i: int, sigmas: Tensor, drawn: tuple[Drawn, int], frames: np.ndarray
    ) -> Trajectory:
        """Row of the batch as a record of its own memory, so that sending one does not send all."""
        assert self._policy is not None
        (batch, row), plan = drawn, request.plan
        return Trajectory(
            sample=f"{request.group}/{request.indices[i]}",
            group=request.group,
            index=request.indices[i],
            prompt=request.prompt,
            seed=request.seeds[i],
            policy=self._policy.version,
            weights=self._checksum,
            condition=condition_key(request.prompt.text),
            negative=condition_key(plan.negative) if plan.guidance > 1 else "",
            guidance=plan.guidance,
            sigmas=sigmas,
            sde_steps=plan.sde_steps,
            latent_steps=latent_steps(plan.sde_steps),
            latents=batch.latents[row].clone(),
            log_probs=batch.log_probs[row].clone(),
            clean=batch.clean[row].clone(),
            frames=frames,
        )

    def _batch(
        self, plan: SamplingPlan, sigmas: Tensor, rows: Sequence[tuple[Request, int]], noise: Tensor
    ) -> tuple[Drawn, np.ndarray, dict[str, Condition]]:
        """All that needs the device: samples, their frames, and the conditions not handed out before."""
        keys, size = [condition_key(request.prompt.text) for request, _ in rows], self._options.vae_batch
        negative = condition_key(plan.negative) if plan.guidance > 1 else ""
        conditions = self._conditions({request.prompt.text for request, _ in rows}, plan)
        drawn = self._draw(plan, sigmas, self._conditioning(keys, negative, plan.guidance, conditions), noise)
        frames = [self._vae.decode(drawn.clean[at : at + size]) for at in range(0, len(rows), size)]
        fresh = {key: found for key, found in conditions.items() if key not in self._sent}
        self._sent.update(fresh)
        return drawn, np.concatenate(frames), fresh

    def _draw(self, plan: SamplingPlan, sigmas: Tensor, conditioning: Conditioning, noise: Tensor) -> Drawn:
        """The batch, back on the CPU."""
        if self._transformer is None or self._policy is None:
            raise EngineFailed("diffusers engine: asked for samples without a policy; call load first")
        kernel, ode = self._kernels(plan.kernel, plan.kernel_options), self._kernels("ode", {})
        sampler = Sampler(family=self._family, transformer=self._transformer, kernel=kernel, ode=ode)
        noise = (noise.pin_memory() if self._device.type == "cuda" else noise).to(self._device, non_blocking=True)
        with deterministic(self._device, self._repeatable):
            drawn = sampler.draw(sigmas.to(self._device), plan.sde_steps, conditioning, noise)
        return Drawn(latents=drawn.latents.cpu(), log_probs=drawn.log_probs.cpu(), clean=drawn.clean.cpu())

    def _conditions(self, prompts: set[str], plan: SamplingPlan) -> dict[str, Condition]:
        """Of every text that the batch needs, by key; a text is encoded once as long as it is remembered."""
        wanted = sorted(prompts | ({plan.negative} if plan.guidance > 1 else set()))
        texts = {condition_key(text): text for text in wanted}
        for key, text in texts.items():
            if key not in self._texts:
                # alone: its last bits would depend on those beside it, and so on which batch came first
                (self._texts[key],) = self._encoder([text])
            self._texts.move_to_end(key)
        found = {key: self._texts[key] for key in texts}
        while len(self._texts) > TEXTS_KEPT:
            self._texts.popitem(last=False)
        return found

    def _conditioning(
        self, keys: Sequence[str], negative: str, guidance: float, conditions: Mapping[str, Condition]
    ) -> Conditioning:
        """Each text moved to the device once and repeated there for its samples."""
        order, names = list(conditions), list(next(iter(conditions.values())))
        moved = {name: torch.stack([conditions[key][name] for key in order]).to(self._device) for name in names}
        positive_rows = torch.tensor([order.index(key) for key in keys], device=self._device)
        positive = {name: value[positive_rows] for name, value in moved.items()}
        unwanted = {name: value[order.index(negative)] for name, value in moved.items()} if negative else {}
        repeated = {name: value.expand(len(keys), *value.shape) for name, value in unwanted.items()}
        return Conditioning(positive=positive, negative=repeated, guidance=guidance)
