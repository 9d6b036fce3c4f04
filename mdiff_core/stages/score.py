"""Score and filter a round's trajectories."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mdiff_core import filters, scoring, tables
from mdiff_core.fleet import RewardPool
from mdiff_core.jobs import ScoreJob
from mdiff_core.settings import Score
from mdiff_core.types import Scored

VERSION = "1"


def run(job: ScoreJob, trajectories: Path, out: Path) -> dict[str, float]:
    """Writes `scores` for every trajectory, the dropped ones included; metrics `reward/*` and `score/*`.

    Where the rollout has scored already (`score.stream`), its scores are taken. BadSetting, MissingReward, RewardFailed: see
    `scoring.score`.
    """
    sheet, measured = (streamed if job.score.stream else scored_now)(job.score, trajectories)
    scored = scoring.judged(sheet, job.score)
    if job.groups:
        scored = filters.enough(scored, job.groups)
    tables.write_scores(out, scored)
    return {
        **sheet.metrics,
        **_metrics(scored, job.groups),
        **{f"score/{name}": value for name, value in measured.items()},
    }


def scored_now(settings: Score, trajectories: Path) -> tuple[scoring.Sheet, dict[str, float]]:
    """The rewards, in this process or in others; and what the others had to do."""
    samples = tables.read_trajectories(trajectories)
    if not settings.workers:
        return scoring.score(samples, settings), {}
    with RewardPool(settings) as pool:
        return scoring.score(samples, settings, pool), pool.metrics


def streamed(settings: Score, trajectories: Path) -> tuple[scoring.Sheet, dict[str, float]]:
    """What the rollout wrote beside its samples."""
    scored = tables.read_scores(trajectories)
    samples = list(tables.read_trajectories(trajectories))
    sheet = scoring.Sheet(
        scored=scored,
        fingerprint=[scoring.digest(sample.frames) for sample in samples],
        metadata=[sample.prompt.metadata for sample in samples],
        metrics=scoring.summary(scored),
    )
    return sheet, {}


def _metrics(scored: Sequence[Scored], wanted: int) -> dict[str, float]:
    kept = [row for row in scored if row.kept]
    drops = Counter(row.reason.partition(":")[0] for row in scored if not row.kept)
    counts = {
        "score/samples": len(scored),
        "score/groups": len({row.group for row in scored}),
        "score/kept_samples": len(kept),
        "score/kept_groups": len(filters.groups_kept(scored)),
    }
    if wanted:
        counts["score/short_groups"] = max(0, wanted - int(counts["score/kept_groups"]))
    counts |= {f"score/dropped/{name}": number for name, number in sorted(drops.items())}
    return {name: float(number) for name, number in counts.items()}
