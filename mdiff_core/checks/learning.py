"""What is trained on, by which loss, against which weights, with which settings."""

from mdiff_core import hub, registry
from mdiff_core.contracts import Loss
from mdiff_core.errors import BadSetting
from mdiff_core.settings import RunConfig


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


def check_targets(config: RunConfig) -> dict[str, tuple[int, ...]] | None:
    """The layers that a LoRA adapts: shape of the weight by name; None for full fine-tuning, or when no weights are here to look at."""
    weights = hub.shapes(config.model.path, "transformer") if config.train.method == "lora" else None
    if weights is None:
        return None
    linear = {
        name.removesuffix(".weight"): shape
        for name, shape in weights.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    suffixes = config.train.lora.targets or registry.find("family", config.model.family.name).lora_targets
    found: dict[str, tuple[int, ...]] = {}
    for suffix in suffixes:
        matched = {name: shape for name, shape in linear.items() if name == suffix or name.endswith(f".{suffix}")}
        if not matched:
            endings = {".".join(name.split(".")[-parts:]) for name in linear for parts in (1, 2)}
            raise BadSetting(
                f"train.lora.targets: '{suffix}' matches no linear layer of '{config.model.path}'; {registry.nearest(suffix, endings)}"
            )
        found |= matched
    return found


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
