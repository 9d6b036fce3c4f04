"""The transformer in training: base and start policy put together, sharded, with the views that a loss asks for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mdiff_core import hub, policies
from mdiff_core.contracts import Family
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import UpdateJob
from mdiff_core.policy import View
from mdiff_core.train import lora, shard
from mdiff_core.train.precision import COMPUTE, STORED
from mdiff_core.types import Frozen, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A sharded transformer and what is trained of it."""

    transformer: nn.Module
    parameters: dict[str, nn.Parameter]
    """Trained weights by artifact name: float32, sharded."""
    copies: Mapping[Frozen, dict[str, nn.Parameter]]
    """Weights of the policies the loss needs that are not the base, likewise."""
    targets: tuple[str, ...]
    """Adapted modules; empty for full fine-tuning."""
    live: View
    frozen: Mapping[Frozen, View]
    """Of the policies that the loss needs besides the live one."""


def build(
    job: UpdateJob, family: Family, policy: PolicyVersion, mesh: DeviceMesh, needs: frozenset[Frozen]
) -> TrainedModel:
    """Load the base, put the start policy on it and shard both. BadSetting when recipe and policy do not fit."""
    policies.check_base(policy, family.digest(job.model.path), hub.fingerprint(job.model.path, hub.TRAINED))
    check_start(job, policy)
    return (
        _lora(job, family, policy, mesh, needs)
        if job.train.method == "lora"
        else _full(job, family, policy, mesh, needs)
    )


def check_start(job: UpdateJob, policy: PolicyVersion) -> None:
    """Refuse to continue a policy with a recipe that would train something else."""
    train = job.train
    if policy.kind not in ("base", train.method):
        raise BadSetting(
            f"train.method: '{train.method}' cannot continue policy {policy.version}, which is of kind {policy.kind}; "
            f"set train.method='{policy.kind}' or start from a base policy"
        )
    if policy.kind == "lora":
        adapter = policies.adapter_of(policy)
        for field, ours, its in (("rank", train.lora.rank, adapter.rank), ("alpha", train.lora.alpha, adapter.alpha)):
            if ours != its:
                raise BadSetting(
                    f"train.lora.{field}: {ours}, but the start policy {policy.version} has {its}; "
                    f"set train.lora.{field}={its} or start from a base policy"
                )


def _lora(
    job: UpdateJob, family: Family, policy: PolicyVersion, mesh: DeviceMesh, needs: frozenset[Frozen]
) -> TrainedModel:
    transformer = _base(job, family, mesh)
    targets = lora.targets_of(transformer, job.train.lora.targets or family.lora_targets)
    if policy.kind == "lora" and set(policy.targets) != set(targets):
        odd = sorted(set(policy.targets) ^ set(targets))[0]
        raise BadSetting(
            f"train.lora.targets: the recipe adapts {len(targets)} layers, the start policy {policy.version} "
            f"{len(policy.targets)}, see {odd}; name the same targets or start from a base policy"
        )
    copied = sorted(needs - {"reference"})
    lora.inject(transformer, job.train.lora, targets, (lora.LIVE, *copied))
    parameters = lora.parameters_of(transformer, targets)
    if policy.kind == "lora":
        _check_shapes(policy, parameters, found := policies.tensors(policy))
        lora.load(parameters, found)
    else:
        lora.start(parameters, job.train.lora, job.seed)
    for name in copied:
        lora.load(lora.parameters_of(transformer, targets, name), own_weights(job, policy, name) or parameters)
    _shard(job, family, transformer, mesh, trained=True)
    frozen: dict[Frozen, View] = {}
    for name in copied:
        frozen[name] = _within(transformer, partial(lora.using, transformer, name))
    if "reference" in needs:
        frozen["reference"] = _within(transformer, partial(lora.off, transformer))
    return TrainedModel(
        transformer=transformer,
        parameters=lora.parameters_of(transformer, targets),
        copies={name: lora.parameters_of(transformer, targets, name) for name in copied},
        targets=targets,
        live=partial(shard.opened, transformer),
        frozen=frozen,
    )


def _full(
    job: UpdateJob, family: Family, policy: PolicyVersion, mesh: DeviceMesh, needs: frozenset[Frozen]
) -> TrainedModel:
    device = shard.device_of(mesh)
    transformer = family.transformer(job.model.path, torch.float32, device)
    _start_full(transformer, policy, policies.tensors(policy))
    transformer.requires_grad_(True)
    _shard(job, family, transformer, mesh, trained=True)
    frozen: dict[Frozen, View] = {}
    copies: dict[Frozen, dict[str, nn.Parameter]] = {}
    if "reference" in needs:
        reference = _base(job, family, mesh)
        _shard(job, family, reference, mesh, trained=False)
        frozen["reference"] = partial(shard.opened, reference)
    for name in sorted(needs - {"reference"}):
        copy = family.transformer(job.model.path, torch.float32, device)
        _start_full(copy, policy, own_weights(job, policy, name) or policies.tensors(policy))
        _shard(job, family, copy, mesh, trained=False)
        frozen[name] = partial(shard.opened, copy)
        copies[name] = dict(copy.named_parameters())
    return TrainedModel(
        transformer=transformer,
        parameters=dict(transformer.named_parameters()),
        copies=copies,
        targets=(),
        live=partial(shard.opened, transformer),
        frozen=frozen,
    )


def _base(job: UpdateJob, family: Family, mesh: DeviceMesh) -> nn.Module:
    """The frozen base as engines hold it (`model.dtype`), then in what training computes in."""
    transformer = family.transformer(job.model.path, STORED[job.model.dtype], shard.device_of(mesh))
    return transformer.to(COMPUTE[job.train.precision]).requires_grad_(False)


def _shard(job: UpdateJob, family: Family, transformer: nn.Module, mesh: DeviceMesh, *, trained: bool) -> None:
    blocks = family.blocks(transformer)
    if trained and job.train.checkpointing:
        shard.recompute(blocks)
    shard.shard(transformer, blocks, mesh, COMPUTE[job.train.precision])


def own_weights(job: UpdateJob, policy: PolicyVersion, name: Frozen) -> Mapping[str, Tensor]:
    """What the policy itself holds of an average that the recipe keeps; empty when it starts now, at the live weights."""
    if name == "ema" and job.train.ema and policies.has(policy, "ema"):
        return policies.tensors(policy, "ema")
    if name == "old" and job.train.old and policies.has(policy, "old"):
        return policies.tensors(policy, "old")
    return {}


def _start_full(transformer: nn.Module, policy: PolicyVersion, found: Mapping[str, Tensor]) -> None:
    if policy.kind == "full":
        parameters = dict(transformer.named_parameters())
        _check_shapes(policy, parameters, found)
        policies.load_full(parameters, found)


def _check_shapes(policy: PolicyVersion, parameters: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    odd = sorted(set(found) ^ set(parameters)) or sorted(n for n in found if found[n].shape != parameters[n].shape)
    if odd:
        raise BadArtifact(
            f"policy {policy.version}: {odd[0]} is not as in this model; use the base it was trained from"
        )


def _within(transformer: nn.Module, switch: View) -> View:
    @contextmanager
    def view() -> Iterator[nn.Module]:
        with shard.opened(transformer), switch() as switched:
            yield switched

    return view
