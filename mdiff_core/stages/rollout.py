"""Draw one round's trajectories."""

import time
from collections.abc import Iterator, Sequence
from math import lcm
from pathlib import Path
from typing import Any

from mdiff_core import filters, generation, registry, scoring, seeds, tables
from mdiff_core import prompts as prompt_files
from mdiff_core.fleet import RewardPool
from mdiff_core.jobs import RolloutJob
from mdiff_core.settings import Score
from mdiff_core.types import Prompt, Request, SamplingPlan, Trajectory

VERSION = "2"


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
    return {f"rollout/{name}": value for name, value in (measured | {"trained_steps": list(plan.sde_steps)}).items()}


def draw(job: RolloutJob, wanted: Sequence[Request], policy: Path, out: Path) -> dict[str, Any]:
    """The samples; with `job.score`, their scores too, which the rewards give while the engines draw the next ones."""
    if job.score is None:
        measured = generation.generate([wanted], job.rollout, job.model, policy, out, job.rollout.weights)
        return measured | {"waves": 1, "groups": len(wanted)}
    with RewardPool(job.score) as pool:
        scores = Scores(job.score, pool)
        waves = Waves(job, wanted, scores)
        measured = generation.generate(waves, job.rollout, job.model, policy, out, job.rollout.weights, seen=scores.see)
        sheet = scores.sheet()
        measured |= {"waves": waves.waves, "groups": waves.groups, "score_wait_s": scores.waited}
        measured |= {f"score_{name}": value for name, value in pool.metrics.items()}
    tables.write_scores(out, sheet.scored)
    faults = {name: value for name, value in sheet.metrics.items() if name.endswith(("/missing", "/retries"))}
    return measured | faults


class Scores:
    """Scores of samples as they come."""

    def __init__(self, settings: Score, pool: RewardPool) -> None:
        self._batches, self._tally, self._pool = scoring.Batches(settings), scoring.Tally(settings), pool
        self.waited = 0.0
        """Seconds that nothing was drawn because scores lacked."""

    def see(self, trajectory: Trajectory) -> None:
        """Take one sample; does not wait for its score."""
        if batch := self._batches.add(scoring.shot(trajectory)):
            self._pool.submit(batch)
        for done in self._pool.finished():
            self._tally.add(*done)

    def sheet(self) -> scoring.Sheet:
        """Of all samples so far; waits for the scores that lack."""
        started = time.monotonic()
        if batch := self._batches.rest():
            self._pool.submit(batch)
        for done in self._pool.rest():
            self._tally.add(*done)
        self.waited += time.monotonic() - started
        return self._tally.sheet()


class Waves:
    """A round's requests: all of them, or with `job.groups` wave after wave until so many groups pass the filters.

    Only whole waves are judged, and all samples so far together, as the score stage will: timing decides nothing.
    """

    def __init__(self, job: RolloutJob, requests: Sequence[Request], scores: Scores) -> None:
        self._wanted, self._requests, self._scores = job.groups or len(requests), requests, scores
        self._settings = job.score
        # engines get the same batches as if all was drawn at once, so that a sample has the same bits in any wave
        self._step = lcm(job.rollout.batch, job.rollout.group_size) // job.rollout.group_size
        self.waves = self.groups = 0

    def __iter__(self) -> Iterator[Sequence[Request]]:
        kept, most = 0, len(self._requests)
        while more := top_up(drawn=self.groups, kept=kept, wanted=self._wanted, most=most, step=self._step):
            self.waves, self.groups = self.waves + 1, self.groups + more
            yield self._requests[self.groups - more : self.groups]
            if self.groups < most:
                kept = self._kept()

    def _kept(self) -> int:
        """Groups drawn so far that pass the filters."""
        assert self._settings is not None
        return len(filters.groups_kept(scoring.judged(self._scores.sheet(), self._settings)))


def top_up(*, drawn: int, kept: int, wanted: int, most: int, step: int) -> int:
    """How many groups to draw next, of at most `most` in all: as many as hold the lacking ones if they pass as often as those drawn so
    far, and on to a multiple of `step`; 0 when enough are kept or none is left to draw."""
    lacking = wanted - kept
    if lacking <= 0 or drawn >= most:
        return 0
    if drawn and not kept:
        return most - drawn
    more = -(-lacking * drawn // kept) if drawn else lacking
    return min(-(-(drawn + more) // step) * step, most) - drawn


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
