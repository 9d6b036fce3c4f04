"""What a run says as it goes: a line and a record for each round and each evaluation."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core import runs
from mdiff_core.artifacts import Manifest, read_manifest
from mdiff_core.observe import metrics, report
from mdiff_core.settings import RunConfig
from tasks import hardware
from tasks.handoff import uri_of

STAGES = {"trajectories": "rollout", "scores": "score", "pairs": "pair", "policy": "update", "evaluation": "evaluate"}
"""Role of an artifact -> stage that makes it."""
LINEAGE = ("policy", "parent", "checksum")


@task(container_image=hardware.SCORE_IMAGE, requests=hardware.SMALL, enable_deck=True, deck_fields=())
def record(config: str, made: list[FlyteDirectory]) -> bool:
    """Tell what the artifacts of a round, of an evaluation or of both say; True when the target reward is reached."""
    settings = RunConfig.from_json(config)
    with runs.opened(settings.store, settings.name) as folder:
        told = tell(folder, [read_manifest(uri_of(handle)) for handle in made])
        Deck("rewards", report.curve(series(folder), title="reward by round"))
    rewards = [found[metrics.REWARD] for found in told if metrics.REWARD in found]
    return settings.target_reward is not None and any(reward >= settings.target_reward for reward in rewards)


def tell(folder: Path, manifests: Sequence[Manifest]) -> list[metrics.Record]:
    """Append the records and print a line for each, but for what the run has already told."""
    made = {stage_of(manifest): manifest for manifest in manifests}
    known = {(found["kind"], found["round"]) for found in metrics.read(folder)}
    rounds = max((number for kind, number in known if kind == "round"), default=0)
    told = []
    evaluation = made.pop("evaluate", None)
    if made:
        rounds = made["update"].job["round"] + 1
        told.append(round_of(rounds, made))
    if evaluation:
        told.append(evaluation_of(rounds, evaluation))
    with metrics.Metrics(folder) as sinks:
        for found in told:
            if (found["kind"], found["round"]) not in known:
                sinks.write(found)
                say(metrics.one_line(found))
    return told


def stage_of(manifest: Manifest) -> str:
    """The stage that made the artifact; pairs come from two."""
    return "encode" if manifest.stage == "pairs" and "data" in manifest.job else STAGES[manifest.stage]


def round_of(number: int, made: Mapping[str, Manifest]) -> metrics.Record:
    """Record of a round from the manifests of its stages."""
    update = made["update"].metrics
    return metrics.round_record(
        round=number,
        stages={stage: own(stage, manifest) for stage, manifest in made.items()},
        seconds={stage: manifest.seconds for stage, manifest in made.items()},
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


def own(stage: str, manifest: Manifest) -> dict[str, Any]:
    """The stage's numbers without its name, which the record puts before them."""
    found = {name: value for name, value in manifest.metrics.items() if name not in LINEAGE}
    return {name.removeprefix(f"{stage}/").replace("reward/", "reward_"): value for name, value in found.items()}


def series(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Reward by round, of training and of evaluation."""
    found = metrics.read(folder)
    keys = {"training": metrics.REWARD, "held out": metrics.EVALUATED}
    points = {name: [(float(r["round"]), float(r[key])) for r in found if key in r] for name, key in keys.items()}
    return {name: some for name, some in points.items() if some}


def say(line: str) -> None:
    """To whoever watches the run."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
