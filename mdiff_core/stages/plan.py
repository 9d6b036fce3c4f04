"""The start of a run: settings checked, then the prompts, the policy and the train state that the first round reads."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mdiff_core import checks, hub, policies, prompts, registry, runs
from mdiff_core import config as configs
from mdiff_core.artifacts import MANIFEST, Production, produce, production
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.settings import RunConfig
from mdiff_core.types import PolicyVersion, Prompt

VERSION = "1"


def settings(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """The run's settings, every check that needs no GPU passed."""
    config = configs.load(recipe, overrides)
    checks.check(config)
    return config


def opened(config: RunConfig, start: Path | None) -> PolicyVersion | None:
    """The policy to start from, its files verified and its base compared with the recipe's model; None starts from the base."""
    if start is None:
        return None
    try:
        policy = policies.open_policy(start)
        policies.check_base(policy, base_digest(config), base_weights(config))
    except BadArtifact as error:
        raise BadSetting(f"start_policy: {error}") from None
    if policy.kind not in ("base", config.train.method):
        raise BadSetting(
            f"start_policy: {policy.version} has {policy.kind} weights, and train.method is '{config.train.method}'; "
            f"set train.method={policy.kind} or start from another policy"
        )
    if policy.kind == "lora":
        check_lora(config, policy)
    return policy


def check_lora(config: RunConfig, policy: PolicyVersion) -> None:
    """Size, and where the model's weights are at hand the layers, of the LoRA to start from against the recipe's."""
    ours, its = config.train.lora, policies.adapter_of(policy)
    for field, wanted, there in (("rank", ours.rank, its.rank), ("alpha", ours.alpha, its.alpha)):
        if wanted != there:
            raise BadSetting(
                f"start_policy: {policy.version} is a LoRA of {field} {there:g}, and train.lora.{field} is {wanted:g}; make the two equal"
            )
    layers = checks.learning.check_targets(config)
    if layers is None:
        return
    odd = sorted(set(layers) ^ set(policy.targets))
    if odd:
        raise BadSetting(
            f"start_policy: {policy.version} adapts {len(policy.targets)} layers, and train.lora.targets {len(layers)} of the model, see "
            f"{odd[0]}; name the same targets or start from another policy"
        )
    found = policies.tensors(policy)
    for name, shape in layers.items():
        theirs = (found[f"{name}.lora_B.weight"].shape[0], found[f"{name}.lora_A.weight"].shape[1])
        if theirs != shape:
            raise BadSetting(
                f"start_policy: {policy.version} adapts {name} as a weight {theirs}, and the model's is {shape}; "
                "use the base it was trained from"
            )


def base_digest(config: RunConfig) -> str:
    """Of the recipe's model."""
    digest: str = registry.make("family", config.model.family).digest(config.model.path)
    return digest


def base_weights(config: RunConfig) -> str:
    """Fingerprint of what the recipe's model is trained from."""
    return hub.fingerprint(config.model.path, hub.TRAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked run, before anything of it exists."""

    config: RunConfig
    """With store and name filled in."""
    writers: Mapping[str, Callable[[Path], object]]
    """By role: fills the artifact's folder."""
    productions: Mapping[str, Production]
    """By role: where the artifact will be."""

    @property
    def files(self) -> dict[str, str]:
        """Address by role: prompts, policy, state."""
        return {role: made.uris[role] for role, made in self.productions.items()}


def plan(config: RunConfig, start: PolicyVersion | None) -> Plan:
    """What the first round will read, and the run's name; BadSetting when that name is another run's. Writes nothing."""
    read = {prompts.TRAIN: prompts.read(config.prompts.train), prompts.HELD_OUT: prompts.read(config.prompts.held_out)}
    read |= {prompts.set_file(each.name): prompts.read(each.prompts) for each in config.evaluate.sets}
    base = base_digest(config)

    def write_prompts(folder: Path) -> None:
        for name, some in read.items():
            prompts.write(folder / name, some)

    def write_policy(folder: Path) -> None:
        if start is None:
            policies.base_version(folder, base=config.model.path, base_digest=base, base_weights=base_weights(config))
        else:
            shutil.copytree(start.path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))

    def write_state(folder: Path) -> None:
        from mdiff_core.train.state import empty_state  # brings FSDP, for which a bad setting should not have to wait

        empty_state(folder)

    content = {
        "prompts": {name.removesuffix(".jsonl"): digest_of(some) for name, some in read.items()},
        "policy": {
            "base": base,
            "model": config.model.path,
            "weights": hub.fingerprint(config.model.path),
            "start": start.checksum if start else "",
        },
        "state": {},
    }
    productions = {
        role: production(config.store, "plan", VERSION, json.dumps(job), {}, (role,)) for role, job in content.items()
    }
    files = {role: made.uris[role] for role, made in productions.items()}
    name = config.name or f"{config.recipe}-{configs.digest(config.model_dump(mode='json'), files)}"
    named = config.model_copy(update={"name": name})
    runs.check_owner(config.store, named, files)
    writers = {"prompts": write_prompts, "policy": write_policy, "state": write_state}
    return Plan(config=named, writers=writers, productions=productions)


def run(made: Plan, command: str) -> None:
    """Write the artifacts that are not there yet, and the run's folder; `command` is how to run it again."""
    try:
        for role, each in made.productions.items():
            produce(each, partial(fill, role, made.writers[role]), {})
        runs.begin(made.config.store, made.config, command, made.files)
    except OSError as error:
        raise BadSetting(
            f"store: '{made.config.store}' cannot be written ({error}); make room or name another store"
        ) from error


def fill(
    role: str, write: Callable[[Path], object], _: Mapping[str, Path], folders: Mapping[str, Path]
) -> dict[str, float]:
    """One artifact; there is nothing to measure."""
    write(folders[role])
    return {}


def digest_of(chosen: Sequence[Prompt]) -> str:
    """sha256 of the prompts, ids included."""
    lines = [json.dumps([prompt.id, prompt.text, dict(prompt.metadata)], sort_keys=True) for prompt in chosen]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
