"""Score and filter a round's trajectories."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mdiff_core import filters, registry, scoring, tables
from mdiff_core.jobs import ScoreJob
from mdiff_core.types import Scored

VERSION = "1"


def run(job: ScoreJob, trajectories: Path, out: Path) -> dict[str, float]:
    """Writes `scores` for every trajectory, the dropped ones included; metrics `reward/*` and `score/*`."""
    sheet = scoring.score(tables.read_trajectories(trajectories), job.score)
    judges = [(choice.name, registry.make("filter", choice)) for choice in job.score.filters]
    scored = filters.apply(judges, sheet.scored, fingerprint=sheet.fingerprint, metadata=sheet.metadata)
    tables.write_scores(out, scored)
    return {**sheet.metrics, **_metrics(scored)}


def _metrics(scored: Sequence[Scored]) -> dict[str, float]:
    kept = [row for row in scored if row.kept]
    drops = Counter(row.reason.partition(":")[0] for row in scored if not row.kept)
    counts = {
        "score/samples": len(scored),
        "score/groups": len({row.group for row in scored}),
        "score/kept_samples": len(kept),
        "score/kept_groups": len({row.group for row in kept}),
    }
    counts |= {f"score/dropped/{name}": number for name, number in sorted(drops.items())}
    return {name: float(number) for name, number in counts.items()}
