"""Measure a policy on held-out prompts: the same noise and the ode sampler every time, so that numbers and pictures compare."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core import diversity, generation, scoring, seeds, tables
from mdiff_core import prompts as prompt_files
from mdiff_core.errors import BadSetting
from mdiff_core.fleet import RewardPool
from mdiff_core.jobs import EvaluateJob
from mdiff_core.settings import Score
from mdiff_core.types import Prompt, Request, SamplingPlan, Scored, Trajectory

VERSION = "3"
MAIN = ""
"""Name of the set whose numbers carry no name: prompts.held_out."""
GOLD = "gold"
"""Folder of the gold rewards' scores."""


def run(job: EvaluateJob, prompts: Path, policy: Path, out: Path) -> dict[str, Any]:
    """Writes `trajectories`, `conditions` and `scores` of the first prompts of each set, and gold's scores in `gold`.

    Metrics: `reward/*`, `gold/*` and `diversity` of the held-out set, the same of others under `sets/<name>/`, `evaluate/*`.
    """
    counts = {MAIN: job.evaluate.prompts} | {each.name: each.count for each in job.evaluate.sets}
    wanted = {name: requests(job, name, chosen(prompts, name, count)) for name, count in counts.items()}
    everything = [request for some in wanted.values() for request in some]
    generation.check_seeds(everything)
    measured = generation.generate([everything], job.rollout, job.model, policy, out, job.evaluate.weights)
    scored = scores(job.score, tables.read_trajectories(out))
    tables.write_scores(out, scored)
    gold = scores(gold_settings(job), map(judged_by_all, tables.read_trajectories(out))) if job.evaluate.gold else []
    if gold:
        tables.write_scores(out / GOLD, gold)
    sketches = {sample.sample: diversity.sketch(sample.frames) for sample in tables.read_trajectories(out)}
    told: dict[str, Any] = {f"evaluate/{name}": value for name, value in measured.items()}
    for name, some in wanted.items():
        groups = {request.group for request in some}
        found = numbers(
            [row for row in scored if row.group in groups], [row for row in gold if row.group in groups], sketches
        )
        told |= {f"sets/{name}/{key}" if name else key: value for key, value in found.items()}
    return told


def chosen(folder: Path, name: str, count: int) -> list[Prompt]:
    """The first prompts of a set; BadSetting when there are fewer."""
    found = prompt_files.read(folder / (prompt_files.set_file(name) if name else prompt_files.HELD_OUT))
    if len(found) < count:
        field, what = (f"evaluate.sets ({name})", "") if name else ("evaluate.prompts", " held-out")
        raise BadSetting(f"{field}: {count}, but there are {len(found)}{what} prompts; use {len(found)} at most")
    return found[:count]


def scores(settings: Score, samples: Iterator[Trajectory]) -> Sequence[Scored]:
    """By these rewards, here or in processes of their own."""
    if not settings.workers:
        return scoring.score(samples, settings).scored
    with RewardPool(settings) as pool:
        return scoring.score(samples, settings, pool).scored


def gold_settings(job: EvaluateJob) -> Score:
    """As the training rewards are asked, of the gold ones."""
    return job.score.model_copy(update={"rewards": job.evaluate.gold, "combine": "sum"})


def judged_by_all(sample: Trajectory) -> Trajectory:
    """The same, without its prompt's choice among the training rewards."""
    metadata = {key: value for key, value in sample.prompt.metadata.items() if key != prompt_files.REWARDS}
    return replace(sample, prompt=replace(sample.prompt, metadata=metadata))


def numbers(scored: Sequence[Scored], gold: Sequence[Scored], sketches: dict[str, np.ndarray]) -> dict[str, float]:
    """What is told of one set."""
    found = scoring.summary(scored) | {"samples": float(len(scored))}
    for name in gold[0].rewards if gold else ():
        values = scoring.finite([row.rewards[name] for row in gold])
        if values.size:
            found |= {f"gold/{name}/mean": float(values.mean()), f"gold/{name}/std": float(values.std())}
    groups: dict[str, list[np.ndarray]] = {}
    for row in scored:
        groups.setdefault(row.group, []).append(sketches[row.sample])
    spread = diversity.within(groups)
    return found | ({} if np.isnan(spread) else {"diversity": spread})


def requests(job: EvaluateJob, name: str, some: Sequence[Prompt]) -> list[Request]:
    """One per prompt; seeds depend on run, set, prompt and index, and on neither round nor policy."""
    indices, where = tuple(range(job.evaluate.samples)), (name,) if name else ()
    plan = SamplingPlan(
        width=job.evaluate.width or job.sampling.width,
        height=job.evaluate.height or job.sampling.height,
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
            group="-".join(("evaluate", *where, prompt.id)),
            indices=indices,
            seeds=tuple(seeds.derive("evaluate", job.seed, *where, prompt.id, index) for index in indices),
            plan=plan,
        )
        for prompt in some
    ]
