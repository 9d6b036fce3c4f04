"""Turn scored trajectories into the rows of a round's optimizer steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core import advantages, pairs, tables
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import PairJob
from mdiff_core.types import Scored

VERSION = "1"

DROPPED = -1
"""In place of the optimizer step of a sample that does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample goes."""

    group: str
    advantage: float
    step: int
    """Optimizer step of the round, or DROPPED."""


def run(job: PairJob, trajectories: Path, scores: Path, out: Path) -> dict[str, float]:
    """Writes `rows` per optimizer step and `conditions`; metrics `pair/*`.

    BadArtifact when trajectories and scores are not of the same samples, BadSetting when no sample is left to train.
    """
    places = places_of(job, tables.read_scores(scores))
    rows = write_rows(job, trajectories, out, places)
    tables.copy_conditions(trajectories, out)
    trained = [place for place in places.values() if place.step != DROPPED]
    credit = np.array([place.advantage for place in trained])
    counts = {
        "pair/samples": len(trained),
        "pair/groups": len({place.group for place in trained}),
        "pair/updates": len(rows),
        "pair/rows": sum(rows.values()),
        "pair/smallest_update": min(rows.values()),
        "pair/largest_update": max(rows.values()),
        "pair/advantage_abs": np.abs(credit).mean(),
        "pair/advantage_zero": np.mean(credit == 0),
    }
    return {name: float(value) for name, value in counts.items()}


def places_of(job: PairJob, scored: Sequence[Scored]) -> dict[str, Place]:
    """Each sample's place; groups that train are split over at most `job.updates` optimizer steps."""
    credit = credit_of(job, scored)
    trained = trained_of(job, scored, credit)
    steps = pairs.split(
        Counter(row.group for row in scored if row.sample in trained),
        updates=job.updates,
        seed=job.seed,
        round=job.round,
    )
    if not steps:
        raise BadSetting(nothing_left(job, scored))
    places: dict[str, Place] = {}
    for row, advantage in zip(scored, credit.tolist(), strict=True):
        if row.sample in places:
            raise BadArtifact(f"scores: sample '{row.sample}' is there twice; run the score stage again")
        step = steps[row.group] if row.sample in trained else DROPPED
        places[row.sample] = Place(group=row.group, advantage=advantage, step=step)
    return places


def trained_of(job: PairJob, scored: Sequence[Scored], credit: np.ndarray) -> set[str]:
    """The samples that train: those that were kept, or of preferences the best and worst of them in each group."""
    kept = [(row.sample, row.group, value) for row, value in zip(scored, credit.tolist(), strict=True) if row.kept]
    if job.rows != "preferences":
        return {sample for sample, _, _ in kept}
    return pairs.extremes(*zip(*kept, strict=True)) if kept else set()


def credit_of(job: PairJob, scored: Sequence[Scored]) -> np.ndarray:
    """[N] advantages over all that count in the baseline; samples that lack a reward are not among them."""
    separate = job.combine == "gdpo"
    return advantages.compute(
        [[row.rewards[name] for name in job.rewards] for row in scored] if separate else [row.total for row in scored],
        [row.group for row in scored],
        options=job.advantage,
        in_baseline=[row.in_baseline for row in scored],
        # the score stage raised already if the recipe says so; samples that failed are outside the baseline
        on_missing="skip" if separate else "mask",
        combine="gdpo" if separate else "sum",
        weights=job.weights if separate else None,
    )


def write_rows(job: PairJob, trajectories: Path, out: Path, places: Mapping[str, Place]) -> dict[int, int]:
    """Write the rows of every optimizer step, a batch of trajectories at a time; rows by step."""
    left = dict(places)
    with ExitStack() as stack:
        steps = sorted({place.step for place in places.values()} - {DROPPED})
        writers = {step: stack.enter_context(tables.row_writer(out, step, job.rows)) for step in steps}
        makers = {step: pairs.Maker(job.rows, seed=job.seed, round=job.round) for step in steps}
        for batch in tables.trajectory_batches(trajectories, pairs.COLUMNS[job.rows]):
            found = match(batch, left)
            for step, writer in writers.items():
                chosen = [position for position, place in enumerate(found) if place.step == step]
                if chosen:
                    credit = np.array([found[position].advantage for position in chosen])
                    made = makers[step].make(batch, chosen, credit)
                    if made:
                        writer.add_batch(made)
        if left:
            raise BadArtifact(
                f"scores: sample '{next(iter(left))}' has no trajectory ({len(left)} such); run the score stage again"
            )
    return {step: writer.rows for step, writer in writers.items()}


def match(batch: Mapping[str, Any], left: dict[str, Place]) -> list[Place]:
    """Each row's place, taken out of `left`; by name, as nothing says that tables are in the same order."""
    found = []
    for sample, group in zip(batch["sample"], batch["group"], strict=True):
        place = left.pop(sample, None)
        if place is None or place.group != group:
            raise BadArtifact(
                f"trajectories: sample '{sample}' of group '{group}' is there twice or has no score of that group;"
                " run the score stage again on these trajectories"
            )
        found.append(place)
    return found


def nothing_left(job: PairJob, scored: Sequence[Scored]) -> str:
    """The sentence for a round whose samples were all dropped."""
    reasons = Counter(row.reason.partition(":")[0] or "as good as their group" for row in scored)
    counted = ", ".join(f"{name} {number}" for name, number in reasons.most_common())
    return (
        f"score.filters: round {job.round + 1} has nothing to train on, all {len(scored)} samples were dropped ({counted});"
        " loosen the filters, draw more samples a group (rollout.group_size) or more groups (prompts.per_round, prompts.oversample)"
    )
