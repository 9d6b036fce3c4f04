"""How samples are scored and policies measured, and the prompts for both."""

from collections.abc import Mapping, Sequence
from typing import Any

from mdiff_core import prompts, registry
from mdiff_core.checks.plugins import choices
from mdiff_core.errors import BadSetting
from mdiff_core.settings import RunConfig
from mdiff_core.types import Prompt


def check_score(config: RunConfig) -> None:
    """Rewards by name once, and where they run."""
    score = config.score
    names = [term.name for term in score.rewards]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise BadSetting(f"score.rewards.{i}.name: '{name}' is there twice; give it once, with the weights added")
    if score.stream and not score.workers:
        raise BadSetting(
            "score.stream: true, but score.workers is 0, so nobody could score beside the engines; set score.workers=1 or more"
        )
    if score.keep_workers and not score.workers:
        raise BadSetting(
            "score.keep_workers: true, but score.workers is 0, so there is none to keep; set score.workers=1 or more"
        )
    if score.gpus_per_worker and not score.workers:
        raise BadSetting(
            f"score.gpus_per_worker: {score.gpus_per_worker:g} has no use with score.workers=0; set score.workers, or leave it out: "
            "rewards in the stage's own process take its GPU"
        )
    hardware, engines = config.hardware, max(config.rollout.engines, 1) * config.rollout.gpus_per_engine
    there, where = float(hardware.score.gpu), "hardware.score.gpu"
    if score.stream:
        there, where = (
            hardware.rollout_workers * hardware.rollout.gpu - engines,
            "the rollout's workers, engines served",
        )
    if score.workers * score.gpus_per_worker > there:
        raise BadSetting(
            f"score.workers: {score.workers} with {score.gpus_per_worker:g} GPUs each (score.gpus_per_worker) need "
            f"{score.workers * score.gpus_per_worker:g}, and there are {there:g} ({where}); use fewer, or ask for more"
        )


def check_evaluation(config: RunConfig) -> None:
    """Gold rewards that are gold, sets with names of their own, a size that the model takes."""
    trained = {term.name: i for i, term in enumerate(config.score.rewards)}
    for i, term in enumerate(config.evaluate.gold):
        if term.name in trained and term.options == config.score.rewards[trained[term.name]].options:
            raise BadSetting(
                f"evaluate.gold.{i}.name: '{term.name}' is trained on (score.rewards.{trained[term.name]}), so it cannot tell whether "
                "that one is gamed; name a reward that is not"
            )
    for path, names in (
        ("evaluate.gold", [term.name for term in config.evaluate.gold]),
        ("evaluate.sets", [each.name for each in config.evaluate.sets]),
    ):
        for i, name in enumerate(names):
            if name in names[:i]:
                raise BadSetting(
                    f"{path}.{i}.name: '{name}' is there twice; numbers are told apart by it, so use another"
                )
    width = config.evaluate.width or config.sampling.width
    height = config.evaluate.height or config.sampling.height
    family = registry.make("family", config.model.family)
    family.check(config.model.path, width=width, height=height, frames=config.sampling.frames)


def check_prompts(config: RunConfig) -> None:
    """Every file, every prompt against every reward that judges it."""
    made = {path: registry.make("reward", choice) for slot, path, choice in choices(config) if slot == "reward"}
    trained = {term.name: made[f"score.rewards.{i}"] for i, term in enumerate(config.score.rewards)}
    gold = [made[f"evaluate.gold.{i}"] for i in range(len(config.evaluate.gold))]
    measured = [("prompts.held_out", config.prompts.held_out, "evaluate.prompts", config.evaluate.prompts)]
    for i, each in enumerate(config.evaluate.sets):
        measured.append((f"evaluate.sets.{i}.prompts", each.prompts, f"evaluate.sets.{i}.count", each.count))
    for field, path, count_field, count in measured:
        found = read_prompts(field, path, trained, gold)
        if count > len(found):
            raise BadSetting(f"{count_field}: {count}, and '{path}' has {len(found)} prompts; use {len(found)} at most")
    if config.algorithm == "rl":
        read_prompts("prompts.train", config.prompts.train, trained)


def read_prompts(field: str, path: str, rewards: Mapping[str, Any], gold: Sequence[Any] = ()) -> list[Prompt]:
    """The file's prompts, each fit for every reward that judges it, and for all of `gold`."""
    try:
        found = prompts.numbered(path)
    except BadSetting as error:
        raise BadSetting(f"{field}: {str(error).removeprefix('prompts: ')}") from None
    for line, prompt in found:
        try:
            for reward in [*(rewards[name] for name in prompts.judges(prompt, tuple(rewards))), *gold]:
                reward.check(prompt)
        except BadSetting as error:
            raise BadSetting(f"{field}: {path}:{line}: {error}") from None
    return [prompt for _, prompt in found]
