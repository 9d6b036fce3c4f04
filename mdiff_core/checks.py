"""Every contradiction between settings that can be found without a GPU, before one is asked for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from mdiff_core import prompts, registry
from mdiff_core.contracts import Kernel, Loss, Window
from mdiff_core.errors import BadSetting
from mdiff_core.options import Choice, Options
from mdiff_core.overrides import sentence
from mdiff_core.settings import RewardTerm, RunConfig, Sampling
from mdiff_core.types import Prompt


def check(config: RunConfig) -> None:
    """Raise BadSetting for the first contradiction: a sentence with the field, its value and a way out."""
    for slot, path, choice in choices(config):
        check_choice(slot, path, choice)
    check_algorithm(config)
    check_loss(config)
    check_policies(config)
    check_sampling(config)
    check_engine(config)
    check_rounds(config)
    check_score(config)
    check_train(config)
    check_hardware(config)
    check_evaluation(config)
    check_prompts(config)


def choices(config: RunConfig) -> Iterator[tuple[str, str, Choice]]:
    """(slot, dotted path, choice) of every plug-in the settings name."""
    yield "family", "model.family", config.model.family
    yield "kernel", "sampling.kernel", config.sampling.kernel
    yield "window", "sampling.window", config.sampling.window
    yield "engine", "rollout.engine", config.rollout.engine
    yield "loss", "loss", config.loss
    for i, term in enumerate(config.score.rewards):
        yield "reward", f"score.rewards.{i}", as_choice(term)
    for i, term in enumerate(config.evaluate.gold):
        yield "reward", f"evaluate.gold.{i}", as_choice(term)
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


def check_loss(config: RunConfig) -> None:
    """How samples are drawn against what the loss can train on."""
    name, kernel, guidance = config.loss.name, config.sampling.kernel.name, config.sampling.guidance
    loss: Loss = registry.make("loss", config.loss)
    if config.algorithm == "rl" and guidance > 1 and not loss.needs.guidance:
        raise BadSetting(
            f"sampling.guidance: {guidance:g}, but loss '{name}' is derived for samples that were drawn without guidance; set it to 1, "
            f"or loss.options.guided=true to train on them all the same"
        )
    if loss.needs.normalised and not registry.find("kernel", kernel).normalised:
        able = [one for one in registry.REGISTRY["kernel"] if registry.find("kernel", one).normalised]
        raise BadSetting(
            f"sampling.kernel.name: '{kernel}' leaves the variance out of its log-probs, which loss '{name}' needs; use {' or '.join(able)}"
        )
    if loss.rows == "preferences" and config.rollout.group_size < 2:
        raise BadSetting(
            f"rollout.group_size: 1 sample has no other to be better than, which loss '{name}' trains on; use 2 or more"
        )


def check_policies(config: RunConfig) -> None:
    """Which weights there are against which are asked for: by the loss, the rollout and the evaluation."""
    loss: Loss = registry.make("loss", config.loss)
    name, train, drawing = config.loss.name, config.train, config.rollout.weights
    asked = {"rollout.weights": drawing, "evaluate.weights": config.evaluate.weights}
    if "ema" in loss.needs.policies:
        asked["loss.options"] = "ema"
    for path, weights in asked.items():
        if weights != "live" and train.model_dump()[weights] is None:
            raise BadSetting(
                f"{path}: '{weights}', but train.{weights} is null, so there are none; set train.{weights}={{}} or use other weights"
            )
    if train.old is not None and ("old" not in loss.needs.policies or loss.rows == "transitions"):
        raise BadSetting(
            f"train.old: {train.old.to_json()}, but loss '{name}' has no old policy beside the one that drew the round; set it to null"
        )
    if config.algorithm == "sft" and drawing != "live":
        raise BadSetting(f"rollout.weights: '{drawing}' has no use with algorithm 'sft'; use 'live'")
    wanted = "old" if train.old is not None else "live"
    if drawing != wanted and (loss.rows == "transitions" or "old" in loss.needs.policies):
        raise BadSetting(
            f"rollout.weights: '{drawing}', but loss '{name}' compares with the policy that drew, which it takes to be '{wanted}'; use that"
        )


def check_sampling(config: RunConfig) -> None:
    """Size against the model, window against the steps, and noise in every step that may be trained."""
    sampling = config.sampling
    family = registry.make("family", config.model.family)
    family.check(config.model.path, width=sampling.width, height=sampling.height, frames=sampling.frames)
    window: Window = registry.make("window", sampling.window)
    window.check(sampling.steps)
    kernel: Kernel = registry.make("kernel", sampling.kernel)
    if not kernel.stochastic and sampling.window != Sampling.model_fields["window"].default:
        raise BadSetting(
            f"sampling.window.name: '{sampling.window.name}' chooses stochastic steps, and kernel '{sampling.kernel.name}' has none; "
            f"use 'all'"
        )
    if registry.find("loss", config.loss.name).rows == "transitions":
        check_noise(sampling, kernel, last=sampling.steps - 1 in window.reach(sampling.steps))


def check_noise(sampling: Sampling, kernel: Kernel, *, last: bool) -> None:
    """A trained step without noise has no density; `last` says whether the step to sigma 0 may be trained."""
    if not has_noise(kernel, 0.5, 0.25):
        raise BadSetting(
            f"sampling.kernel.options: {json.dumps(sampling.kernel.options)} leave kernel '{sampling.kernel.name}' no noise, and so no "
            f"log-probs to train on; raise eta"
        )
    if last and not has_noise(kernel, 0.5, 0.0):
        steps = sampling.steps
        way_out = (
            f"end the window at step {steps - 1} (window 'window' with hi={steps - 1})" if steps > 1 else "more steps"
        )
        raise BadSetting(
            f"sampling.window: step {steps - 1}, the last of {steps}, may be trained, and kernel '{sampling.kernel.name}' has no noise in "
            f"it; {way_out}, or use kernel 'flow_sde'"
        )


def has_noise(kernel: Kernel, sigma: float, sigma_next: float) -> bool:
    """Whether the kernel's step between two sigmas is stochastic."""
    import torch

    latent = torch.zeros(1, 1)
    moments = kernel.moments(latent, latent, *(torch.tensor([value]) for value in (sigma, sigma_next, 0.75)))
    return bool(moments.scale > 0)


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
    if score.gpus_per_worker and not score.workers:
        raise BadSetting(
            f"score.gpus_per_worker: {score.gpus_per_worker:g} has no use with score.workers=0; set score.workers, or leave it out: "
            "rewards in the stage's own process take its GPU"
        )
    hardware, engines = config.hardware, config.rollout.engines * config.rollout.gpus_per_engine
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


def check_train(config: RunConfig) -> None:
    """Settings that only make sense together."""
    train = config.train
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
