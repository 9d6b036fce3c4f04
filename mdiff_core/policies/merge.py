"""A policy's weights into a model that is at hand."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mdiff_core.errors import BadArtifact
from mdiff_core.policies.artifact import Weights, adapter_of, checksum_of, tensors
from mdiff_core.types import PolicyVersion

_ORIGINALS: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""Base weights (on the CPU) that `apply_to` has overwritten, by transformer and parameter name."""


@torch.no_grad()
def apply_to(transformer: nn.Module, policy: PolicyVersion, weights: Weights = "live") -> str:
    """Give a base transformer the policy's weights, in place of those of an earlier call; returns `checksum_of` them.

    A LoRA is merged: W + alpha / rank * B @ A, computed in float32 and rounded once to W's dtype. BadArtifact when a
    name or shape does not match the transformer, which is then left as it was before the call.
    """
    found = tensors(policy, weights)
    parameters = dict(transformer.named_parameters())
    if policy.kind == "lora":
        _check_targets(policy, parameters, found)
    elif policy.kind == "full":
        _check_names(policy, parameters, found)
    originals = _ORIGINALS.setdefault(transformer, {})
    for name, original in originals.items():
        parameters[name].copy_(original)
    changed = [f"{target}.weight" for target in policy.targets] if policy.kind == "lora" else list(found)
    originals.update({name: parameters[name].to("cpu", copy=True) for name in changed if name not in originals})
    if policy.kind == "full":
        load_full(parameters, found)
        return checksum_of(policy, weights)
    scale = adapter_of(policy).scale if policy.targets else 0.0
    for target in policy.targets:
        weight = parameters[f"{target}.weight"]
        a, b = (found[f"{target}.lora_{side}.weight"].to(weight.device, torch.float32) for side in "AB")
        weight.copy_(torch.add(weight.float(), b @ a, alpha=scale))  # rounded as SGLang does it, so that bits compare
    return checksum_of(policy, weights)


@torch.no_grad()
def load_full(parameters: Mapping[str, nn.Parameter], found: Mapping[str, Tensor]) -> None:
    """Copy full weights into a transformer's parameters, name by name, in the parameters' dtype."""
    for name, value in found.items():
        parameters[name].copy_(value)


def _check_targets(policy: PolicyVersion, parameters: Mapping[str, nn.Parameter], found: Mapping[str, Tensor]) -> None:
    missing = [target for target in policy.targets if f"{target}.weight" not in parameters]
    if missing:
        raise BadArtifact(
            f"policy {policy.version}: {len(missing)} of {len(policy.targets)} LoRA targets are not layers of this "
            f"model, such as {missing[0]}; use the base it was trained from ({policy.base})"
        )
    for target in policy.targets:
        rows, columns = found[f"{target}.lora_B.weight"].shape[0], found[f"{target}.lora_A.weight"].shape[1]
        if parameters[f"{target}.weight"].shape != (rows, columns):
            shape = tuple(parameters[f"{target}.weight"].shape)
            raise BadArtifact(
                f"policy {policy.version}: LoRA of {target} is for a weight {(rows, columns)}, the model's is {shape}"
            )


def _check_names(policy: PolicyVersion, parameters: Mapping[str, nn.Parameter], found: Mapping[str, Tensor]) -> None:
    odd = sorted(set(found) ^ set(parameters)) or sorted(n for n in found if found[n].shape != parameters[n].shape)
    if odd:
        raise BadArtifact(
            f"policy {policy.version}: {len(odd)} weights do not match the model's names and shapes, such as {odd[0]}"
        )
