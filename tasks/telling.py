"""Records of a run from the manifests of its artifacts, and a line for each to whoever watches."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdiff_core.artifacts import Manifest
from mdiff_core.observe import alarm, metrics
from mdiff_core.settings import RunConfig
from tasks.local import say

STAGES = {"trajectories": "rollout", "scores": "score", "pairs": "pair", "policy": "update", "evaluation": "evaluate"}
"""Role of an artifact -> stage that makes it."""
LINEAGE = ("policy", "parent", "checksum")


def tell(settings: RunConfig, folder: Path, manifests: Sequence[Manifest]) -> list[metrics.Record]:
    """Append the records and print a line for each, but for what the run has already told."""
    made = {stage_of(manifest): manifest for manifest in manifests}
    begun = metrics.read_run(folder).get("begun", 0.0)
    earlier = metrics.read(folder)
    known = {(found["kind"], found["round"]) for found in earlier}
    told = []
    evaluation = made.pop("evaluate", None)
    if made:
        told.append(round_of(made["update"].job["round"] + 1, made, begun))
    if evaluation:
        rounds = rounds_of(evaluation.metrics["policy"], [*earlier, *told])
        told.append(alarmed(settings, earlier, evaluation_of(rounds, evaluation)))
    with metrics.Metrics(folder) as sinks:
        for found in told:
            if (found["kind"], found["round"]) not in known:
                sinks.write(found)
                say(metrics.one_line(found))
    return told


def stage_of(manifest: Manifest) -> str:
    """The stage that made the artifact; pairs come from two."""
    return "encode" if manifest.stage == "pairs" and "data" in manifest.job else STAGES[manifest.stage]


def round_of(number: int, made: Mapping[str, Manifest], begun: float = 0.0) -> metrics.Record:
    """Record of a round from the manifests of its stages; those from before the run `begun` (seconds since 1970) were reused."""
    update = made["update"].metrics
    return metrics.round_record(
        round=number,
        stages={stage: own(stage, manifest) for stage, manifest in made.items()},
        seconds={stage: manifest.seconds for stage, manifest in made.items()},
        reused=[stage for stage, manifest in made.items() if manifest.finished < begun],
        **{name: update[name] for name in LINEAGE},
    )


def evaluation_of(rounds: int, evaluation: Manifest) -> metrics.Record:
    """Record of an evaluation after `rounds` rounds."""
    return metrics.evaluation_record(
        round=rounds,
        metrics=own("evaluate", evaluation),
        seconds=evaluation.seconds,
        **{name: evaluation.metrics[name] for name in LINEAGE},
    )


def rounds_of(policy: str, told: Sequence[metrics.Record]) -> int:
    """The round, of those `told`, that made a policy; 0 for the one that a run starts from. Another process may have told later ones."""
    return max((found["round"] for found in told if found["kind"] == "round" and found["policy"] == policy), default=0)


def alarmed(settings: RunConfig, earlier: Sequence[metrics.Record], found: metrics.Record) -> metrics.Record:
    """The evaluation's record with what it says beside the `earlier` ones of whether the reward is gamed."""
    before = [each for each in earlier if each["kind"] == "evaluation" and each["round"] < found["round"]]
    why = alarm.reasons([*before, found], settings.evaluate.diversity_floor)
    return found | {metrics.ALARM: "; ".join(why), f"evaluate/{metrics.ALARM}": float(bool(why))}


def own(stage: str, manifest: Manifest) -> dict[str, Any]:
    """The stage's numbers without its name, which the record puts before them."""
    found = {name: value for name, value in manifest.metrics.items() if name not in LINEAGE}
    return {
        re.sub(r"(^|/)reward/", r"\1reward_", name.removeprefix(f"{stage}/"), count=1): value
        for name, value in found.items()
    }
