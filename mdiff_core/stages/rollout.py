"""Draw one round's trajectories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdiff_core import generation, registry, seeds
from mdiff_core import prompts as prompt_files
from mdiff_core.jobs import RolloutJob
from mdiff_core.types import Prompt, Request, SamplingPlan

VERSION = "1"


def run(job: RolloutJob, prompts: Path, policy: Path, out: Path) -> dict[str, Any]:
    """Writes `trajectories` and `conditions` as samples come; metrics `rollout/*`.

    EngineFailed when the engines cannot finish, or return something else than was asked for.
    """
    found = prompt_files.read(prompts / "train.jsonl")
    drawn = prompt_files.draw(found, per_round=job.prompts_per_round, round=job.round, seed=job.seed)
    plan = sampling_plan(job)
    wanted = requests(job, drawn, plan)
    generation.check_seeds(wanted)
    measured = generation.generate(wanted, job.rollout, job.model, policy, out, job.rollout.weights)
    measured |= {"groups": len(wanted), "trained_steps": list(plan.sde_steps)}
    return {f"rollout/{name}": value for name, value in measured.items()}


def sampling_plan(job: RolloutJob) -> SamplingPlan:
    """The one plan of the round; a kernel without density has no trained steps."""
    sampling = job.sampling
    window = registry.make("window", sampling.window)
    stochastic = registry.find("kernel", sampling.kernel.name).stochastic
    return SamplingPlan(
        width=sampling.width,
        height=sampling.height,
        frames=sampling.frames,
        steps=sampling.steps,
        guidance=sampling.guidance,
        negative=sampling.negative,
        kernel=sampling.kernel.name,
        kernel_options=sampling.kernel.options,
        sde_steps=window.draw(steps=sampling.steps, seed=job.seed, round=job.round) if stochastic else (),
    )


def requests(job: RolloutJob, drawn: Sequence[tuple[str, Prompt]], plan: SamplingPlan) -> list[Request]:
    """One per group; a sample's seed follows from run, round, prompt, group and index."""
    indices = tuple(range(job.rollout.group_size))
    return [
        Request(
            prompt=prompt,
            group=group,
            indices=indices,
            seeds=tuple(seeds.derive(job.seed, job.round, prompt.id, group, index) for index in indices),
            plan=plan,
        )
        for group, prompt in drawn
    ]
