"""What every registered family must do; a new one needs a tiny model in `MODELS`."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from mdiff_core import registry
from mdiff_core.contracts import Family, Served
from mdiff_core.errors import BadSetting
from mdiff_core.options import Choice, Options
from mdiff_core.types import Condition

CPU = torch.device("cpu")
SIZE = 64
MODELS = {"sd3": ("tiny_sd3", {"max_sequence_length": 16})}
"""Family to the fixture that makes a tiny model of it, and the options that go with it."""


@pytest.fixture(params=sorted(registry.REGISTRY["family"]))
def named(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """(family, path of a tiny model)."""
    assert request.param in MODELS, f"add a tiny model of family '{request.param}' to MODELS"
    fixture, options = MODELS[request.param]
    folder: Path = request.getfixturevalue(fixture)
    return registry.make("family", Choice(name=request.param, options=options)), str(folder)


def network(family: Any, model: str) -> nn.Module:
    found: nn.Module = family.transformer(model, torch.float32, CPU)
    return found


def stacked(conditions: list[Condition]) -> Condition:
    return {key: torch.stack([condition[key] for condition in conditions]) for key in conditions[0]}


def test_it_is_a_family_with_strict_options(named: tuple[Any, str]) -> None:
    family, _ = named
    assert isinstance(family, Family)
    assert issubclass(family.Options, Options)
    with pytest.raises(ValidationError):
        family.Options.from_json('{"no_such_option": 1}')


def test_sizes_are_checked_and_a_nearest_one_offered(named: tuple[Any, str]) -> None:
    family, model = named
    family.check(model, width=SIZE, height=SIZE, frames=1)
    with pytest.raises(BadSetting, match=r"sampling\.width: 63 .*nearest valid size is \d+") as caught:
        family.check(model, width=SIZE - 1, height=SIZE, frames=1)
    nearest = re.search(r"size is (\d+)", str(caught.value))
    assert nearest is not None
    family.check(model, width=int(nearest[1]), height=SIZE, frames=1)


def test_the_digest_is_a_sha256_and_stable(named: tuple[Any, str]) -> None:
    family, model = named
    assert re.fullmatch(r"[0-9a-f]{64}", family.digest(model))
    assert family.digest(model) == family.digest(model)


def test_the_transformer_is_frozen_and_made_of_blocks(named: tuple[Any, str]) -> None:
    family, model = named
    transformer = network(family, model)
    assert not transformer.training and not any(weight.requires_grad for weight in transformer.parameters())
    modules = set(transformer.modules())
    blocks = family.blocks(transformer)
    assert blocks and all(block in modules for block in blocks)


def test_every_lora_target_is_a_linear_layer_somewhere(named: tuple[Any, str]) -> None:
    family, model = named
    layers = dict(network(family, model).named_modules())
    for target in family.lora_targets:
        found = [layer for name, layer in layers.items() if name == target or name.endswith(f".{target}")]
        assert found and all(isinstance(layer, nn.Linear) for layer in found), target


def test_sigmas_fall_to_zero_in_float32(named: tuple[Any, str]) -> None:
    family, model = named
    for steps in (1, 7):
        sigmas = family.sigmas(model, steps=steps, width=SIZE, height=SIZE)
        assert sigmas.shape == (steps + 1,) and sigmas.dtype is torch.float32
        assert 0 < sigmas[0] <= 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())


def test_velocity_is_float32_shaped_as_x_and_follows_time_and_text(named: tuple[Any, str]) -> None:
    family, model = named
    transformer, codec = network(family, model), family.decoder(model, torch.float32, CPU)
    one, two = family.encoder(model, torch.float32, CPU)(["a red circle", "two blue squares"])
    x = torch.randn(
        2, *codec.latent_shape(width=SIZE, height=SIZE, frames=1), generator=torch.Generator().manual_seed(0)
    )
    sigma = torch.tensor([0.9, 0.3])

    def velocity(condition: Condition, at: torch.Tensor = sigma) -> torch.Tensor:
        with torch.no_grad():
            v: torch.Tensor = family.velocity(transformer, x, at, condition)
        return v

    v = velocity(stacked([one, two]))
    assert v.shape == x.shape and v.dtype is torch.float32
    assert not torch.allclose(v, velocity(stacked([two, one])))
    assert not torch.allclose(v, velocity(stacked([one, two]), sigma.flip(0)))
    x2 = x.clone().requires_grad_()
    family.velocity(transformer, x2, sigma, stacked([one, two])).sum().backward()
    assert x2.grad is not None and bool(torch.isfinite(x2.grad).all())


def test_conditions_are_rows_on_the_cpu_of_their_own_memory(named: tuple[Any, str]) -> None:
    family, model = named
    encode = family.encoder(model, torch.float32, CPU)
    first, second, empty = encode(["a red circle", "two blue squares", ""])
    assert first.keys() == second.keys() == empty.keys()
    for key, value in first.items():
        assert value.shape == second[key].shape and value.device == CPU
        assert value.untyped_storage().nbytes() == value.nbytes
    assert torch.equal(encode(["a red circle"])[0][key], encode(["a red circle"])[0][key])


def test_the_codec_gives_frames_for_latents_and_back(named: tuple[Any, str]) -> None:
    family, model = named
    codec = family.decoder(model, torch.float32, CPU)
    shape = codec.latent_shape(width=SIZE, height=SIZE // 2, frames=1)
    frames = codec.decode(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
    assert frames.shape == (3, 1, SIZE // 2, SIZE, 3) and frames.dtype == np.uint8
    latents = codec.encode(frames)
    assert latents.shape == (3, *shape) and latents.dtype is torch.float32 and latents.device == CPU


def test_a_family_that_sglang_serves_says_how(named: tuple[Any, str]) -> None:
    """By its own names for what a text becomes; each is a tensor that its encoder makes."""
    family, model = named
    if not isinstance(family, Served):
        return
    serving = family.serving()
    assert serving.model_id and serving.text_encoders > 0
    (condition,) = family.encoder(model, torch.float32, CPU)(["a red circle"])
    assert set(serving.conditions.values()) == set(condition)


@pytest.mark.parametrize(
    ("length", "told"), [(256, {}), (77, {"max_sequence_length": 77}), (16, {"max_sequence_length": 16})]
)
def test_sglang_cuts_an_sd3s_texts_as_the_pipeline_does(length: int, told: dict[str, int]) -> None:
    """A length is CLIP's too once SGLang is told it, and CLIP has 77 positions: SD3's own 256 must not be told."""
    family = registry.make("family", Choice(name="sd3", options={"max_sequence_length": length}))
    assert family.serving().sampling_params == told


def test_a_length_that_sglang_cannot_give_t5_alone_is_refused() -> None:
    family = registry.make("family", Choice(name="sd3", options={"max_sequence_length": 128}))
    with pytest.raises(BadSetting, match=r"max_sequence_length: 128.*use 256, or 77 at most"):
        family.serving()
