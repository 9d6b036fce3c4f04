"""What comes back from `/rollout/generate`, and everything that can be wrong with it.

The server names one seed per answer, so the order of samples is checked by their first latent: it must be the noise of the seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mdiff_core.contracts import Serving
from mdiff_core.engines.sglang.requests import steps_asked
from mdiff_core.engines.sglang.texts import negative_key
from mdiff_core.sampler import condition_key, latent_steps
from mdiff_core.types import Condition, PolicyVersion, Request, SamplingPlan, Trajectory

SAME_NOISE = 0.99
"""Least cosine between a first latent and the noise of its seed; independent noise is at 0, rounding to bf16 costs 1e-5."""


class WrongAnswer(ValueError):
    """An answer that is not one to the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One image or video of an answer, checked."""

    noise: Tensor
    """[*latent] float32, what it started from."""
    latents: Tensor
    """[M, *latent] float32, of the steps asked for."""
    clean: Tensor
    """[*latent] float32."""
    sigmas: Tensor
    """[T+1] float32."""
    log_probs: Tensor
    """[W] float32."""
    frames: np.ndarray
    """[F, H, W, 3] uint8."""


def samples_of(
    entries: Any, request: Request, kept: Sequence[int], schedule: Tensor, device: torch.device
) -> list[Sample]:
    """One per seed, in order; WrongAnswer says what is not as asked for. `schedule` [T+1] float32 is the family's."""
    if not isinstance(entries, list) or len(entries) != len(request.seeds):
        raise WrongAnswer(f"asked for {len(request.seeds)} samples, the answer holds {len(entries)}")
    for entry in entries:
        told = {"prompt": request.prompt.text, "seed": request.seeds[0]}
        for name, asked in told.items():
            if entry.get(name) != asked:
                raise WrongAnswer(f"the answer's {name} is {entry.get(name)!r}, asked for was {asked!r}")
    samples = [sample_of(entry, request.plan, kept) for entry in entries]
    for sample in samples:
        if not torch.equal(sample.sigmas, schedule):
            raise WrongAnswer(f"drawn with sigmas {sample.sigmas.tolist()}, the family's are {schedule.tolist()}")
    check_noise([sample.noise for sample in samples], request.seeds, device)
    return samples


def check_noise(noise: Sequence[Tensor], seeds: Sequence[int], device: torch.device) -> None:
    """WrongAnswer when a first latent is not what its seed gives on that device, which is asked once for all."""
    drawn = [
        torch.randn(one.shape, generator=torch.Generator(device).manual_seed(seed), device=device)
        for one, seed in zip(noise, seeds, strict=True)
    ]
    likeness = cosine_similarity(torch.stack(drawn).flatten(1).cpu(), torch.stack(list(noise)).flatten(1))
    for seed, one in zip(seeds, likeness.tolist(), strict=True):
        if one < SAME_NOISE:
            raise WrongAnswer(
                f"a sample does not start from the noise of its seed {seed} (cosine {one:.3f}), as when samples are swapped"
            )


def sample_of(entry: Mapping[str, Any], plan: SamplingPlan, kept: Sequence[int]) -> Sample:
    """One entry of an answer."""
    found = {
        **tensors_of(entry.get("dit_trajectory"), ("latents", "sigmas")),
        **tensors_of(entry, ("generated_output", "rollout_log_probs")),
    }
    asked = steps_asked(plan, kept)
    latents, sigmas, log_probs = found["latents"].float(), found["sigmas"].float(), found["rollout_log_probs"].float()
    for name, length, wanted in (
        ("latents", latents, len(asked)),
        ("sigmas", sigmas, plan.steps + 1),
        ("rollout_log_probs", log_probs, plan.steps),
    ):
        if len(length) != wanted:
            raise WrongAnswer(f"{name} has {len(length)} entries, asked for were {wanted}")
    return Sample(
        noise=latents[0],
        latents=latents[[asked.index(step) for step in kept]],
        clean=latents[-1].clone(),
        sigmas=sigmas,
        log_probs=log_probs[list(plan.sde_steps)],
        frames=frames_of(found["generated_output"]),
    )


def trajectory_of(request: Request, i: int, sample: Sample, policy: PolicyVersion, checksum: str) -> Trajectory:
    """The request's sample `i` as a record; `checksum` is that of the weights which drew it."""
    plan = request.plan
    return Trajectory(
        sample=f"{request.group}/{request.indices[i]}",
        group=request.group,
        index=request.indices[i],
        prompt=request.prompt,
        seed=request.seeds[i],
        policy=policy.version,
        weights=checksum,
        condition=condition_key(request.prompt.text),
        negative=negative_key(plan.negative) if plan.guidance > 1 else "",
        guidance=plan.guidance,
        sigmas=sample.sigmas,
        sde_steps=plan.sde_steps,
        latent_steps=latent_steps(plan.sde_steps),
        latents=sample.latents,
        log_probs=sample.log_probs,
        clean=sample.clean,
        frames=sample.frames,
    )


def frames_of(pixels: Tensor) -> np.ndarray:
    """[3, H, W] or [3, F, H, W] in 0..1 -> [F, H, W, 3] uint8, rounded as diffusers' image processor does."""
    video = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels
    levels = video.float().clamp(0, 1).mul(255).round().to(torch.uint8)
    return np.ascontiguousarray(levels.permute(1, 2, 3, 0).numpy())


def conditions_of(
    entries: Sequence[Mapping[str, Any]], text: str, negative: str | None, serving: Serving
) -> dict[str, Condition]:
    """By key: of the prompt, and of the negative one if there is guidance. They come with the first sample."""
    known = entries[0].get("denoising_env") or {}
    found = {condition_key(text): condition_of(known.get("pos_cond_kwargs"), serving)}
    if negative is not None:
        found[negative_key(negative)] = condition_of(known.get("neg_cond_kwargs"), serving)
    return found


def condition_of(told: Mapping[str, Any] | None, serving: Serving) -> Condition:
    """By the family's names, without the batch dimension, which SGLang drops for a single sample."""
    found = tensors_of(told, tuple(serving.conditions))
    return {ours: found[theirs] for theirs, ours in serving.conditions.items()}


def tensors_of(told: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, Tensor]:
    """The named ones, all there and finite."""
    found = {}
    for name in names:
        value = (told or {}).get(name)
        if not isinstance(value, Tensor):
            raise WrongAnswer(f"the answer has no {name}, as when the model's pipeline is not SGLang's own")
        if not bool(torch.isfinite(value).all()):
            raise WrongAnswer(f"{name} hold numbers that are not finite")
        found[name] = value
    return found


def decode(answer: bytes) -> Any:
    """msgpack with safetensors inside."""
    import msgspec
    from safetensors import SafetensorError

    try:
        return tensors_in(msgspec.msgpack.decode(answer))
    except (msgspec.DecodeError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise WrongAnswer(f"the answer of {len(answer)} bytes is not msgpack with safetensors ({error})") from error


def tensors_in(value: Any) -> Any:
    """The same with each packed tensor as one."""
    from safetensors.torch import load

    if isinstance(value, dict):
        return (
            load(value["data"])["t"]
            if value.get("__tensor__")
            else {key: tensors_in(one) for key, one in value.items()}
        )
    return [tensors_in(one) for one in value] if isinstance(value, list) else value
