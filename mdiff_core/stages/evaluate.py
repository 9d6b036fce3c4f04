"""Measure a policy on held-out prompts: the same noise and the ode sampler every time, so that numbers and pictures compare."""

from pathlib import Path
from typing import Any

from mdiff_core import generation, scoring, seeds, tables
from mdiff_core import prompts as prompt_files
from mdiff_core.errors import BadSetting
from mdiff_core.jobs import EvaluateJob
from mdiff_core.types import Prompt, Request, SamplingPlan

VERSION = "1"


def run(job: EvaluateJob, prompts: Path, policy: Path, out: Path) -> dict[str, Any]:
    """Writes `trajectories`, `conditions` and `scores` of the first held-out prompts; metrics `reward/*` and `evaluate/*`."""
    found = prompt_files.read(prompts / "held_out.jsonl")
    if len(found) < job.evaluate.prompts:
        raise BadSetting(
            f"evaluate.prompts: {job.evaluate.prompts}, but there are {len(found)} held-out prompts; use {len(found)} at most"
        )
    wanted = requests(job, found[: job.evaluate.prompts])
    generation.check_seeds(wanted)
    measured = generation.generate(wanted, job.rollout, job.model, policy, out, job.evaluate.weights)
    sheet = scoring.score(tables.read_trajectories(out), job.score)
    tables.write_scores(out, sheet.scored)
    return {**sheet.metrics} | {f"evaluate/{name}": value for name, value in measured.items()}


def requests(job: EvaluateJob, chosen: list[Prompt]) -> list[Request]:
    """One per prompt; seeds depend on run, prompt and index, and on neither round nor policy."""
    indices = tuple(range(job.evaluate.samples))
    plan = SamplingPlan(
        width=job.sampling.width,
        height=job.sampling.height,
        frames=job.sampling.frames,
        steps=job.evaluate.steps,
        guidance=job.evaluate.guidance,
        negative=job.sampling.negative,
        kernel="ode",
        kernel_options={},
        sde_steps=(),
    )
    return [
        Request(
            prompt=prompt,
            group=f"evaluate-{prompt.id}",
            indices=indices,
            seeds=tuple(seeds.derive("evaluate", job.seed, prompt.id, index) for index in indices),
            plan=plan,
        )
        for prompt in chosen
    ]
