"""Every contradiction between settings that can be found without a GPU, before one is asked for."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from mdiff_core import prompts, registry
from mdiff_core.errors import BadSetting
from mdiff_core.options import Choice, Options
from mdiff_core.overrides import sentence
from mdiff_core.settings import RewardTerm, RunConfig
from mdiff_core.types import Prompt

ANNOUNCED_REWARDS = frozenset({"ocr", "pickscore"})
"""Rewards that published recipes name before this version has them: such a recipe can be read and checked, not run."""


def check(config: RunConfig) -> None:
    """Raise BadSetting for the first contradiction: a sentence with the field, its value and a way out."""
    for slot, path, choice in choices(config):
        check_choice(slot, path, choice)
    check_algorithm(config)
    check_sampling(config)
    check_engine(config)
    check_rounds(config)
    check_train(config)
    check_hardware(config)
    check_prompts(config)


def check_runnable(config: RunConfig) -> None:
    """BadSetting when the recipe names a reward that this version only announces."""
    for i, term in enumerate(config.score.rewards):
        if term.name not in registry.REGISTRY["reward"]:
            known = ", ".join(sorted(registry.REGISTRY["reward"]))
            raise BadSetting(
                f"score.rewards.{i}.name: '{term.name}' is not part of this version of mdiff; use one of {known}"
            )


def choices(config: RunConfig) -> Iterator[tuple[str, str, Choice]]:
    """(slot, dotted path, choice) of every plug-in the settings name, but the announced ones."""
    yield "family", "model.family", config.model.family
    yield "kernel", "sampling.kernel", config.sampling.kernel
    yield "window", "sampling.window", config.sampling.window
    yield "engine", "rollout.engine", config.rollout.engine
    yield "loss", "loss", config.loss
    for i, term in enumerate(config.score.rewards):
        if term.name not in ANNOUNCED_REWARDS or term.name in registry.REGISTRY["reward"]:
            yield "reward", f"score.rewards.{i}", as_choice(term)
    for i, choice in enumerate(config.score.filters):
        yield "filter", f"score.filters.{i}", choice


def as_choice(term: RewardTerm) -> Choice:
    """A reward without its weight."""
    return Choice(name=term.name, options=term.options)


def check_choice(slot: str, path: str, choice: Choice) -> Options:
    """The plug-in's validated options; complaints carry the full dotted path."""
    try:
        return registry.options(slot, choice)
    except ValidationError as error:
        kind: type[Options] = registry.find(slot, choice.name).Options
        raise BadSetting(f"{sentence(error, kind, f'{path}.options')} ({slot} '{choice.name}')") from None
    except BadSetting as error:
        raise BadSetting(f"{path}.name: {str(error).removeprefix(f'{slot}: ')}") from None


def check_algorithm(config: RunConfig) -> None:
    """What the loss trains on must be what the run makes."""
    loss, kernel = registry.find("loss", config.loss.name), config.sampling.kernel
    if config.algorithm == "sft":
        if config.data is None:
            raise BadSetting(
                "data: null, but algorithm is 'sft'; set data.captions to a JSONL file of captioned images"
            )
        if loss.rows != "clean":
            raise BadSetting(
                f"loss.name: '{config.loss.name}' trains on sampler steps, which algorithm 'sft' does not draw; use 'sft'"
            )
        if config.target_reward is not None:
            raise BadSetting(
                f"target_reward: {config.target_reward} has no meaning with algorithm 'sft'; set it to null"
            )
    elif config.data is not None:
        raise BadSetting(
            f"data.captions: '{config.data.captions}' has no use with algorithm 'rl'; set data=null, or algorithm=sft"
        )
    elif loss.rows == "transitions" and not registry.find("kernel", kernel.name).stochastic:
        raise BadSetting(
            f"sampling.kernel.name: '{kernel.name}' has no noise and so no log-probs, which loss '{config.loss.name}' needs; use 'flow_sde'"
        )


def check_sampling(config: RunConfig) -> None:
    """Size against the model, window against the steps."""
    sampling = config.sampling
    family = registry.make("family", config.model.family)
    family.check(config.model.path, width=sampling.width, height=sampling.height, frames=sampling.frames)
    registry.make("window", sampling.window).check(sampling.steps)


def check_engine(config: RunConfig) -> None:
    """Whether the engine can draw what the settings ask for."""
    choice = config.rollout.engine
    registry.find("engine", choice.name).check(
        registry.options("engine", choice),
        family=registry.make("family", config.model.family),
        kernel=config.sampling.kernel.name,
        gpus=config.rollout.gpus_per_engine,
    )


def check_rounds(config: RunConfig) -> None:
    """Groups, and how a round is cut into optimizer steps."""
    if config.algorithm == "sft":
        return
    size, advantage = config.rollout.group_size, config.advantage
    if size == 1 and "group" in (advantage.mean, advantage.std):
        which = "mean" if advantage.mean == "group" else "std"
        raise BadSetting(
            f"rollout.group_size: 1 sample has no spread, so advantage.{which}=group makes every advantage 0; use 2 or more, "
            f"or advantage.mean=batch with advantage.std=batch"
        )
    updates, groups = config.train.updates_per_round, config.prompts.per_round
    if updates > groups:
        raise BadSetting(
            f"train.updates_per_round: {updates} optimizer steps cannot share {groups} groups (prompts.per_round); use {groups} at most"
        )
    names = [term.name for term in config.score.rewards]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise BadSetting(f"score.rewards.{i}.name: '{name}' is there twice; give it once, with the weights added")


def check_train(config: RunConfig) -> None:
    """Settings that only make sense together."""
    train = config.train
    if config.evaluate.weights == "ema" and train.ema is None:
        raise BadSetting(
            "evaluate.weights: 'ema', but train.ema is null, so there are none; set train.ema.decay or evaluate.weights=live"
        )
    if not all(0 <= beta < 1 for beta in train.betas):
        raise BadSetting(
            f"train.betas: {list(train.betas)} must both be at least 0 and below 1; AdamW's usual ones are [0.9, 0.999]"
        )
    if train.schedule != "constant" and train.total_steps <= train.warmup_steps:
        raise BadSetting(
            f"train.total_steps: {train.total_steps} leaves schedule '{train.schedule}' nothing after {train.warmup_steps} warm-up steps; "
            f"give more, or use train.schedule=constant"
        )
    if train.precision == "fp16" and config.hardware.update.gpu == 0:
        raise BadSetting("train.precision: 'fp16' needs a GPU and hardware.update.gpu is 0; use fp32 or bf16 on a CPU")
    if config.model.dtype == "float16" and config.rollout.gpus_per_engine == 0:
        raise BadSetting(
            "model.dtype: 'float16' needs a GPU and rollout.gpus_per_engine is 0; use float32 or bfloat16 on a CPU"
        )


def check_hardware(config: RunConfig) -> None:
    """Engines and trainer processes against the GPUs of their machines."""
    hardware, rollout = config.hardware, config.rollout
    processes = int(hardware.topology.split("x")[1])
    if hardware.update.gpu and processes != hardware.update.gpu:
        raise BadSetting(
            f"hardware.topology: '{hardware.topology}' starts {processes} processes a node, each with one GPU, and hardware.update.gpu is "
            f"{hardware.update.gpu}; make the two equal"
        )
    wanted, there = rollout.engines * rollout.gpus_per_engine, hardware.rollout_workers * hardware.rollout.gpu
    if wanted > there:
        raise BadSetting(
            f"rollout.engines: {rollout.engines} with {rollout.gpus_per_engine:g} GPUs each need {wanted:g}, and "
            f"{hardware.rollout_workers} Ray workers (hardware.rollout_workers) with {hardware.rollout.gpu} GPUs have {there}; "
            f"use fewer engines or more workers"
        )


def check_prompts(config: RunConfig) -> None:
    """Both files, every prompt against every reward."""
    rewards = [(path, registry.make("reward", choice)) for slot, path, choice in choices(config) if slot == "reward"]
    held_out = read_prompts("prompts.held_out", config.prompts.held_out, rewards)
    if config.algorithm == "rl":
        read_prompts("prompts.train", config.prompts.train, rewards)
    if config.evaluate.prompts > len(held_out):
        raise BadSetting(
            f"evaluate.prompts: {config.evaluate.prompts}, and '{config.prompts.held_out}' has {len(held_out)} prompts; "
            f"use {len(held_out)} at most"
        )


def read_prompts(field: str, path: str, rewards: Sequence[tuple[str, Any]]) -> list[Prompt]:
    """The file's prompts, each fit for every reward."""
    try:
        found = prompts.read(path)
        for _, reward in rewards:
            for prompt in found:
                reward.check(prompt)
    except BadSetting as error:
        raise BadSetting(f"{field}: {str(error).removeprefix('prompts: ')}") from None
    return found
