"""Low-rank adapters through PEFT: where they go, how they start, and how they are switched.

Outside this file a LoRA tensor is named `<module>.lora_A.weight` or `<module>.lora_B.weight`, as in the artifact.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mdiff_core import seeds
from mdiff_core.errors import BadSetting
from mdiff_core.registry import nearest
from mdiff_core.settings import Lora

LIVE = "live"
"""PEFT's name of the trained adapter; those beside it have the names of the policies they are."""


def targets_of(transformer: nn.Module, suffixes: Sequence[str]) -> tuple[str, ...]:
    """Full names of the linear layers that `suffixes` name, sorted; BadSetting when a suffix matches none."""
    layers = {name: module for name, module in transformer.named_modules() if name}
    found = set[str]()
    for suffix in suffixes:
        matched = [name for name in layers if name == suffix or name.endswith(f".{suffix}")]
        if not matched:
            endings = {name.rpartition(".")[2] for name in layers} | {".".join(name.split(".")[-2:]) for name in layers}
            raise BadSetting(
                f"train.lora.targets: '{suffix}' matches no layer of the model; {nearest(suffix, endings)}"
            )
        odd = [name for name in matched if not isinstance(layers[name], nn.Linear)]
        if odd:
            raise BadSetting(
                f"train.lora.targets: '{suffix}' matches {odd[0]}, which is not linear; name linear layers"
            )
        found.update(matched)
    return tuple(sorted(found))


def inject(transformer: nn.Module, lora: Lora, targets: Sequence[str], adapters: Sequence[str] = (LIVE,)) -> None:
    """Put float32 adapters around the target layers, in place: the live one trainable and active, all else frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets), lora_dropout=0.0, init_lora_weights=False
    )
    # PEFT draws first weights from the global generator, which are not used: see `start`.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        for adapter in adapters:
            inject_adapter_in_model(config, transformer, adapter_name=adapter)
    for layer in _layers(transformer):
        layer._active_adapter = [LIVE]
    live = f".lora_A.{LIVE}"
    placed = {name.removesuffix(live) for name, _ in transformer.named_modules() if name.endswith(live)}
    if placed != set(targets):
        odd = sorted(placed ^ set(targets))
        raise BadSetting(f"train.lora.targets: {len(placed)} layers were adapted, not {len(targets)}; see {odd[0]}")
    transformer.requires_grad_(False)
    for adapter in adapters:
        for parameter in parameters_of(transformer, targets, adapter).values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(adapter == LIVE)


def parameters_of(transformer: nn.Module, targets: Sequence[str], adapter: str = LIVE) -> dict[str, nn.Parameter]:
    """An adapter's weights by artifact name, A before B of each target."""
    modules = {target: transformer.get_submodule(target) for target in targets}
    return {
        f"{target}.lora_{side}.weight": modules[target].get_parameter(f"lora_{side}.{adapter}.weight")
        for target in targets
        for side in "AB"
    }


@torch.no_grad()
def start(parameters: Mapping[str, nn.Parameter], lora: Lora, seed: int) -> None:
    """First weights: A from (seed, name) alone, B zero. gaussian: std 1/rank; default: uniform within 1/sqrt(width)."""
    for name, parameter in parameters.items():
        if name.endswith("lora_B.weight"):
            parameter.zero_()
            continue
        generator = seeds.generator(seed, "lora", name)
        if lora.init == "gaussian":
            drawn = torch.randn(parameter.shape, generator=generator) / lora.rank
        else:
            drawn = (torch.rand(parameter.shape, generator=generator) * 2 - 1) / math.sqrt(parameter.shape[1])
        parameter.copy_(drawn)


@torch.no_grad()
def load(parameters: Mapping[str, nn.Parameter], found: Mapping[str, Tensor]) -> None:
    """Copy an artifact's tensors into an adapter; names and shapes were checked against the recipe before."""
    for name, parameter in parameters.items():
        parameter.copy_(found[name])


@contextmanager
def off(transformer: nn.Module) -> Iterator[nn.Module]:
    """The base alone. Sets PEFT's flag rather than calling its switch, which also toggles requires_grad under FSDP."""
    layers = _layers(transformer)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield transformer
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def using(transformer: nn.Module, adapter: str) -> Iterator[nn.Module]:
    """Another adapter in place of the live one; by PEFT's field, for the reason given in `off`."""
    layers = _layers(transformer)
    for layer in layers:
        layer._active_adapter = [adapter]
    try:
        yield transformer
    finally:
        for layer in layers:
            layer._active_adapter = [LIVE]


@contextmanager
def scaled(transformer: nn.Module, factor: float) -> Iterator[nn.Module]:
    """The live adapter `factor` times as strong."""
    layers = _layers(transformer)
    right = [layer.scaling[LIVE] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[LIVE] *= factor
        yield transformer
    finally:
        for layer, scale in zip(layers, right, strict=True):
            layer.scaling[LIVE] = scale


def _layers(transformer: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in transformer.modules() if isinstance(module, LoraLayer)]
