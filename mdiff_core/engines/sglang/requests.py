"""What is asked of `/rollout/generate`: no more than training uses."""

import json
from collections.abc import Sequence
from typing import Any

from mdiff_core.contracts import Kernel, Serving
from mdiff_core.types import Request, SamplingPlan

SDE_TYPES = {"flow_sde": "sde", "cps": "cps", "ode": "ode"}
"""Kernels that SGLang has, by registry name."""
UNNORMALISED = {"cps", "ode"}
"""SDE types whose log-prob is without variance and constants, as mdiff's kernels define it."""


def noise_level(kernel: Kernel, plan: SamplingPlan) -> float:
    """The kernel's eta, its default included; 0 for the ode."""
    found = kernel.Options.from_json(json.dumps(dict(plan.kernel_options))).model_dump()
    return float(found.get("eta", 0.0))


def steps_asked(plan: SamplingPlan, kept: Sequence[int]) -> list[int]:
    """Latents to return: the first (the noise), those that training needs, and the final one."""
    return sorted({0, *kept, plan.steps})


def sampling_body(
    request: Request, serving: Serving, eta: float, kept: Sequence[int], device: str, *, conditions: bool = False
) -> dict[str, Any]:
    """Draw the request's samples; nothing is returned but what training uses, its texts' conditions only when asked for.

    Evaluation asks for the `ode` too and not for `rollout=false`: the pictures are the same bits, but only a rollout tells
    its sigmas and latents, which are checked.
    """
    plan = request.plan
    kind = SDE_TYPES[plan.kernel] if plan.sde_steps else "ode"
    return {
        "prompt": request.prompt.text,
        "negative_prompt": plan.negative,
        "width": plan.width,
        "height": plan.height,
        "num_frames": plan.frames,
        serving.guidance: plan.guidance,
        "generator_device": device,
        "rollout": True,
        "rollout_debug_mode": False,
        "suppress_logs": True,
        "seed": request.seeds[0],
        "num_inference_steps": plan.steps,
        "num_outputs_per_prompt": len(request.seeds),
        "rollout_sde_type": kind,
        "rollout_noise_level": eta,
        "rollout_log_prob_no_const": kind in UNNORMALISED,
        "rollout_sde_step_indices": list(plan.sde_steps),
        "rollout_return_denoising_env": conditions,
        "rollout_return_dit_trajectory": True,
        "rollout_return_step_indices": steps_asked(plan, kept),
        "extra_sampling_params": {**serving.sampling_params, "seed": list(request.seeds)},
    }
