"""Policies for tests: the base, and LoRAs with weights that matter."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mdiff_core import hub, policies
from mdiff_core.families.sd3 import SD3, SD3Options
from mdiff_core.types import PolicyVersion

FAMILY = SD3(SD3Options(max_sequence_length=16))


def base_policy(folder: Path, model: Path) -> PolicyVersion:
    """The base of a tiny SD3."""
    weights = hub.fingerprint(str(model), hub.TRAINED)
    return policies.base_version(folder, base=str(model), base_digest=FAMILY.digest(str(model)), base_weights=weights)


def lora_policy(
    folder: Path, model: Path, parent: PolicyVersion, *, seed: int = 0, ema: bool = False, alpha: float = 4.0
) -> PolicyVersion:
    """A LoRA on every target of a tiny SD3, strong enough to show."""
    transformer = FAMILY.transformer(str(model), torch.float32, torch.device("cpu"))
    layers = {name: layer for name, layer in transformer.named_modules() if name.endswith(SD3.lora_targets)}
    generator = torch.Generator().manual_seed(seed)

    def weights(names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = {}
        for name in names:
            rows, columns = layers[name].weight.shape
            found[f"{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator) / columns**0.5
            found[f"{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 4
        return found

    return policies.write_lora(
        folder, tensors=weights(list(layers)), averages={"ema": weights(list(layers))} if ema else {}, rank=4, alpha=alpha,
        targets=list(layers), parent=parent, version="00001",
    )  # fmt: skip
