"""Family sd3 against diffusers' own StableDiffusion3Pipeline."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mdiff_core.errors import BadSetting
from mdiff_core.families.sd3 import SD3, SD3Options
from mdiff_core.kernels.flow_sde import FlowSDE, FlowSDEOptions
from mdiff_core.kernels.ode import ODE, ODEOptions
from mdiff_core.sampler import Sampler
from mdiff_core.types import Condition, Conditioning

CPU = torch.device("cpu")
FP32 = torch.float32
TEXTS = ["a red circle", "two blue squares and a green triangle", ""]


@pytest.fixture(scope="module")
def family() -> SD3:
    return SD3(SD3Options(max_sequence_length=16))


@pytest.fixture(scope="module")
def pipeline(tiny_sd3: Path) -> Iterator[Any]:
    from diffusers import StableDiffusion3Pipeline

    loaded = StableDiffusion3Pipeline.from_pretrained(tiny_sd3, torch_dtype=FP32)
    loaded.set_progress_bar_config(disable=True)
    yield loaded


@pytest.fixture(scope="module")
def transformer(family: SD3, tiny_sd3: Path) -> nn.Module:
    return family.transformer(str(tiny_sd3), FP32, CPU)


def stacked(conditions: list[Condition]) -> Condition:
    return {key: torch.stack([condition[key] for condition in conditions]) for key in conditions[0]}


def test_conditions_are_the_pipelines(family: SD3, pipeline: Any, tiny_sd3: Path) -> None:
    encode = family.encoder(str(tiny_sd3), FP32, CPU)
    ours = stacked(encode(TEXTS))
    embeds, _, pooled, _ = pipeline.encode_prompt(
        TEXTS, None, None, do_classifier_free_guidance=False, max_sequence_length=16
    )
    assert torch.equal(ours["encoder_hidden_states"], embeds)
    assert torch.equal(ours["pooled_projections"], pooled)
    assert ours["encoder_hidden_states"].shape[1] == 32  # 16 of CLIP's tokens, 16 of T5's


def test_a_condition_does_not_depend_on_its_batch(family: SD3, tiny_sd3: Path) -> None:
    encode = family.encoder(str(tiny_sd3), FP32, CPU)
    together, alone = encode(TEXTS), encode(TEXTS[1:2])
    for key, value in alone[0].items():
        # a matrix product may be blocked differently for another batch size
        torch.testing.assert_close(together[1][key], value, rtol=1e-5, atol=1e-5)
        assert value.untyped_storage().nbytes() == value.nbytes


def test_without_t5_its_place_holds_zeros(family: SD3, pipeline: Any, tiny_sd3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_sd3, model)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "text_encoder_3": [None, None]}))
    states = family.encoder(str(model), FP32, CPU)(TEXTS[:1])[0]["encoder_hidden_states"]
    embeds, _, _, _ = pipeline.encode_prompt(
        TEXTS[:1], None, None, do_classifier_free_guidance=False, max_sequence_length=16
    )
    assert torch.equal(states[:16], embeds[0, :16])
    assert not states[16:].any()


def test_sigmas_are_the_models_schedulers(family: SD3, pipeline: Any, tiny_sd3: Path) -> None:
    for steps in (1, 4, 10, 28):
        pipeline.scheduler.set_timesteps(steps)
        ours = family.sigmas(str(tiny_sd3), steps=steps, width=64, height=64)
        assert torch.equal(ours, pipeline.scheduler.sigmas)


def test_a_scheduler_of_another_kind_is_refused(family: SD3, tiny_sd3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_sd3, model)
    path = model / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dynamic_shifting": True}))
    with pytest.raises(BadSetting, match=r"model\.path .*use_dynamic_shifting"):
        family.sigmas(str(model), steps=4, width=64, height=64)


def test_the_time_reaches_the_transformer_in_float32(family: SD3) -> None:
    seen: dict[str, Any] = {}

    class Spy(nn.Module):
        dtype = torch.bfloat16

        def forward(self, **inputs: Any) -> tuple[torch.Tensor]:
            seen.update(inputs)
            return (inputs["hidden_states"],)

    sigma = torch.tensor([0.9601293])
    v = family.velocity(Spy(), torch.zeros(1, 16, 8, 8), sigma, {"pooled_projections": torch.zeros(1, 4)})
    assert seen["timestep"].dtype is FP32 and torch.equal(seen["timestep"], sigma * 1000)
    assert seen["hidden_states"].dtype is seen["pooled_projections"].dtype is torch.bfloat16
    assert v.dtype is FP32


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_ode_images_are_the_pipelines(
    family: SD3, pipeline: Any, transformer: nn.Module, tiny_sd3: Path, guidance: float
) -> None:
    noise = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    encode, codec = family.encoder(str(tiny_sd3), FP32, CPU), family.decoder(str(tiny_sd3), FP32, CPU)
    negative = stacked(encode(["a blue star", "a blue star"])) if guidance > 1 else {}
    conditioning = Conditioning(positive=stacked(encode(TEXTS[:2])), negative=negative, guidance=guidance)
    sampler = Sampler(family=family, transformer=transformer, kernel=FlowSDE(FlowSDEOptions()), ode=ODE(ODEOptions()))
    sigmas = family.sigmas(str(tiny_sd3), steps=6, width=64, height=64)
    clean = sampler.draw(sigmas, (), conditioning, noise[None]).clean

    def theirs(kind: str) -> Any:
        return pipeline(
            prompt=TEXTS[:2], negative_prompt=["a blue star"] * 2, guidance_scale=guidance, latents=noise.clone(),
            num_inference_steps=6, max_sequence_length=16, output_type=kind, height=64, width=64,
        ).images  # fmt: skip

    # six Euler steps of the same float32 numbers, once as x + v dt of mine and once of diffusers'
    torch.testing.assert_close(clean, theirs("latent"), rtol=1e-4, atol=1e-4)
    assert np.abs(codec.decode(clean)[:, 0].astype(int) - np.stack(theirs("pil")).astype(int)).max() <= 1


def test_decode_then_encode_keep_scale_and_shape(family: SD3, pipeline: Any, tiny_sd3: Path) -> None:
    codec = family.decoder(str(tiny_sd3), FP32, CPU)
    frames = np.random.default_rng(0).integers(0, 256, (2, 1, 64, 64, 3), dtype=np.uint8)
    latents = codec.encode(frames)
    assert latents.shape == (2, *codec.latent_shape(width=64, height=64, frames=1)) and latents.dtype is FP32
    pixels = pipeline.image_processor.preprocess([frame[0].astype(np.float32) / 255 for frame in frames])
    vae = pipeline.vae
    expected = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)  # x/127.5 - 1 against 2(x/255) - 1
    assert codec.decode(latents).shape == frames.shape and codec.decode(latents).dtype == np.uint8


def test_sizes(family: SD3, tiny_sd3: Path) -> None:
    family.check(str(tiny_sd3), width=64, height=32, frames=1)
    with pytest.raises(BadSetting, match=r"sampling\.width: 60 .*nearest valid size is 64"):
        family.check(str(tiny_sd3), width=60, height=64, frames=1)
    with pytest.raises(BadSetting, match=r"sampling\.height: 128 .*up to 64.*nearest valid size is 64"):
        family.check(str(tiny_sd3), width=64, height=128, frames=1)
    with pytest.raises(BadSetting, match=r"sampling\.frames: 9"):
        family.check(str(tiny_sd3), width=64, height=64, frames=9)


def test_sizes_of_a_model_not_on_disk_are_the_published_ones(family: SD3) -> None:
    family.check("stabilityai/stable-diffusion-3.5-medium", width=512, height=512, frames=1)
    with pytest.raises(BadSetting, match=r"sampling\.height: 520 .*nearest valid size is 512"):
        family.check("stabilityai/stable-diffusion-3.5-medium", width=512, height=520, frames=1)


def test_digest_is_of_the_architecture(family: SD3, tiny_sd3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_sd3, model)
    path = model / "transformer/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "_diffusers_version": "9", "_name_or_path": "elsewhere"}, indent=7))
    assert family.digest(str(model)) == family.digest(str(tiny_sd3))
    path.write_text(json.dumps({**config, "num_layers": config["num_layers"] + 1}))
    assert family.digest(str(model)) != family.digest(str(tiny_sd3))


def test_digest_of_a_hub_id_comes_from_the_hubs_cache(
    family: SD3, tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the revision that the id names."""
    from huggingface_hub import constants

    config = json.loads((tiny_sd3 / "transformer/config.json").read_text())
    (tmp_path / "models--someone--sd3/refs").mkdir(parents=True)
    for revision, commit, layers in (("main", "0" * 40, 0), ("v2", "1" * 40, 1)):
        snapshot = tmp_path / f"models--someone--sd3/snapshots/{commit}/transformer"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**config, "num_layers": config["num_layers"] + layers}))
        (tmp_path / "models--someone--sd3/refs" / revision).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert family.digest("someone/sd3") == family.digest(str(tiny_sd3)) == family.digest(f"someone/sd3@{'0' * 40}")
    assert family.digest("someone/sd3@v2") == family.digest(f"someone/sd3@{'1' * 40}") != family.digest("someone/sd3")


@pytest.mark.parametrize(("model", "words"), [
    ("no/such-model", "hub did not give"), ("/no/such/folder", "no such folder"), ("nothing", "no such folder"),
    ("no/such-model@v1", "hub did not give"), ("someone/sd3@", "no such folder"),
])  # fmt: skip
def test_a_model_that_is_nowhere(family: SD3, model: str, words: str) -> None:
    with pytest.raises(BadSetting, match=rf"model\.path '{model}': .*{words}"):
        family.digest(model)


def test_a_folder_that_is_no_model(family: SD3, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"no vae/config\.json"):
        family.check(str(tmp_path), width=64, height=64, frames=1)


def test_weights_that_would_be_unpickled_are_refused(family: SD3, tiny_sd3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_sd3, model)
    (model / "transformer/diffusion_pytorch_model.safetensors").unlink()
    torch.save({}, model / "transformer/diffusion_pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        family.transformer(str(model), FP32, CPU)


def test_lora_targets_are_layers_of_every_block(transformer: nn.Module, family: SD3) -> None:
    names = [name for name, _ in transformer.named_modules() if name.endswith(SD3.lora_targets)]
    blocks = len(family.blocks(transformer))
    assert len(names) == len(SD3.lora_targets) * blocks - 1  # the last block has no to_add_out


def test_the_transformer_is_frozen_and_in_eval_mode(transformer: nn.Module) -> None:
    assert not transformer.training
    assert not any(parameter.requires_grad for parameter in transformer.parameters())
