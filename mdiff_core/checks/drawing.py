"""How samples are drawn, by which engine, on which machines."""

import json

from mdiff_core import registry
from mdiff_core.contracts import Kernel, Window
from mdiff_core.errors import BadSetting
from mdiff_core.settings import RunConfig, Sampling


def check_sampling(config: RunConfig) -> None:
    """Size against the model, window against the steps, and noise in every step that may be trained."""
    sampling = config.sampling
    family = registry.make("family", config.model.family)
    family.check(config.model.path, width=sampling.width, height=sampling.height, frames=sampling.frames)
    window: Window = registry.make("window", sampling.window)
    window.check(sampling.steps)
    kernel: Kernel = registry.make("kernel", sampling.kernel)
    if not kernel.stochastic and sampling.window != Sampling.model_fields["window"].default:
        raise BadSetting(
            f"sampling.window.name: '{sampling.window.name}' chooses stochastic steps, and kernel '{sampling.kernel.name}' has none; "
            f"use 'all'"
        )
    if registry.find("loss", config.loss.name).rows == "transitions":
        check_noise(sampling, kernel, last=sampling.steps - 1 in window.reach(sampling.steps))


def check_noise(sampling: Sampling, kernel: Kernel, *, last: bool) -> None:
    """A trained step without noise has no density; `last` says whether the step to sigma 0 may be trained."""
    if not has_noise(kernel, 0.5, 0.25):
        raise BadSetting(
            f"sampling.kernel.options: {json.dumps(sampling.kernel.options)} leave kernel '{sampling.kernel.name}' no noise, and so no "
            f"log-probs to train on; raise eta"
        )
    if last and not has_noise(kernel, 0.5, 0.0):
        steps = sampling.steps
        way_out = (
            f"end the window at step {steps - 1} (window 'window' with hi={steps - 1})" if steps > 1 else "more steps"
        )
        raise BadSetting(
            f"sampling.window: step {steps - 1}, the last of {steps}, may be trained, and kernel '{sampling.kernel.name}' has no noise in "
            f"it; {way_out}, or use kernel 'flow_sde'"
        )


def has_noise(kernel: Kernel, sigma: float, sigma_next: float) -> bool:
    """Whether the kernel's step between two sigmas is stochastic."""
    import torch

    latent = torch.zeros(1, 1)
    moments = kernel.moments(latent, latent, *(torch.tensor([value]) for value in (sigma, sigma_next, 0.75)))
    return bool(moments.scale > 0)


def check_engine(config: RunConfig) -> None:
    """Whether the engine can draw what the settings ask for."""
    choice = config.rollout.engine
    registry.find("engine", choice.name).check(
        registry.options("engine", choice),
        family=registry.make("family", config.model.family),
        kernel=config.sampling.kernel.name,
        gpus=config.rollout.gpus_per_engine,
    )


def check_hardware(config: RunConfig) -> None:
    """Engines and trainer processes against the GPUs of their machines."""
    hardware, rollout = config.hardware, config.rollout
    processes = int(hardware.topology.split("x")[1])
    if hardware.update.gpu and processes != hardware.update.gpu:
        raise BadSetting(
            f"hardware.topology: '{hardware.topology}' starts {processes} processes a node, each with one GPU, and hardware.update.gpu is "
            f"{hardware.update.gpu}; make the two equal"
        )
    wanted, there = max(rollout.engines, 1) * rollout.gpus_per_engine, hardware.rollout_workers * hardware.rollout.gpu
    if wanted > there and not rollout.engines:
        raise BadSetting(
            f"rollout.gpus_per_engine: {rollout.gpus_per_engine:g}, but the stage itself draws (rollout.engines=0) and "
            f"its machine has {there} GPUs; set hardware.rollout.gpu=1 or rollout.gpus_per_engine=0"
        )
    if wanted > there:
        raise BadSetting(
            f"rollout.engines: {rollout.engines} with {rollout.gpus_per_engine:g} GPUs each need {wanted:g}, and "
            f"{hardware.rollout_workers} Ray workers (hardware.rollout_workers) with {hardware.rollout.gpu} GPUs have {there}; "
            f"use fewer engines or more workers"
        )
