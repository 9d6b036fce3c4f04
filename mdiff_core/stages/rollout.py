"""Draw one round's trajectories."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdiff_core import generation, registry, scoring, seeds, tables
from mdiff_core import prompts as prompt_files
from mdiff_core.fleet import RewardPool
from mdiff_core.jobs import RolloutJob
from mdiff_core.types import Prompt, Request, SamplingPlan, Trajectory

VERSION = "1"


def run(job: RolloutJob, prompts: Path, policy: Path, out: Path) -> dict[str, Any]:
    """Writes `trajectories` and `conditions` as samples come, and with `job.score` their `scores`; metrics `rollout/*`.

    EngineFailed when the engines cannot finish, or return something else than was asked for.
    """
    found = prompt_files.read(prompts / prompt_files.TRAIN)
    drawn = prompt_files.draw(found, per_round=job.prompts_per_round, round=job.round, seed=job.seed)
    plan = sampling_plan(job)
    wanted = requests(job, drawn, plan)
    generation.check_seeds(wanted)
    measured = draw(job, wanted, policy, out)
    measured |= {"groups": len(wanted), "trained_steps": list(plan.sde_steps)}
    return {f"rollout/{name}": value for name, value in measured.items()}


def draw(job: RolloutJob, wanted: Sequence[Request], policy: Path, out: Path) -> dict[str, Any]:
    """The samples; with `job.score`, their scores too, which the rewards give while the engines draw the next ones."""
    if job.score is None:
        return generation.generate(wanted, job.rollout, job.model, policy, out, job.rollout.weights)
    batches, tally = scoring.Batches(job.score), scoring.Tally(job.score)
    with RewardPool(job.score) as pool:

        def seen(trajectory: Trajectory) -> None:
            if batch := batches.add(scoring.shot(trajectory)):
                pool.submit(batch)
            for done in pool.finished():
                tally.add(*done)

        measured = generation.generate(wanted, job.rollout, job.model, policy, out, job.rollout.weights, seen=seen)
        started = time.monotonic()
        if batch := batches.rest():
            pool.submit(batch)
        for done in pool.rest():
            tally.add(*done)
        waited = {"score_wait_s": time.monotonic() - started}
        measured |= waited | {f"score_{name}": value for name, value in pool.metrics.items()}
    sheet = tally.sheet()
    tables.write_scores(out, sheet.scored)
    faults = {name: value for name, value in sheet.metrics.items() if name.endswith(("/missing", "/retries"))}
    return measured | faults


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
