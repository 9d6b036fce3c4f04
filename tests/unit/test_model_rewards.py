"""Rewards with networks: the numbers of the library's own plain calls, from weights as they are published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from mdiff_core import hub
from mdiff_core.clip import Clip
from mdiff_core.errors import BadSetting
from mdiff_core.options import Choice
from mdiff_core.registry import make
from mdiff_core.rewards.image_reward import MEAN, STD
from mdiff_core.types import Prompt
from mdiff_core.vision import ModelOptions
from mdiff_core.worlds import shapes
from tests import tiny_rewards

TEXTS = ["one red circle", "two blue squares", "one red circle", "three green stars"]
PROMPTS = [Prompt(id=f"p{i}", text=text, metadata={}) for i, text in enumerate(TEXTS)]
FRAMES = np.stack([shapes.render(shapes.scene_of(0, i)) for i in range(4)])[:, None]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_rewards.clip(tmp_path_factory.mktemp("clip"))


def reward(name: str, **options: Any) -> Any:
    return make("reward", Choice(name=name, options={"device": "cpu", **options}))


def plain_cosines(folder: Path, images: list[Image.Image]) -> np.ndarray:
    """One sample at a time, as the library's examples do it."""
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    processor, found = CLIPImageProcessorPil.from_pretrained(folder), []
    for image, text in zip(images, TEXTS, strict=True):
        tokens = tokenizer([text], return_tensors="pt")
        with torch.no_grad():
            out = model(**tokens, pixel_values=processor([image], return_tensors="pt")["pixel_values"])
        found.append((out.logits_per_image / model.logit_scale.detach().exp()).item())
    return np.array(found)


def images(frames: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in frames[:, 0]]


def test_clip_is_the_librarys_cosine(clip: Path) -> None:
    wanted = plain_cosines(clip, images(FRAMES))
    assert len(set(wanted.round(4))) == 4, "pictures that are all alike to it would test nothing"
    # batches and single samples add up in another order
    assert reward("clip", model=str(clip), batch=3)(FRAMES, PROMPTS) == pytest.approx(wanted, abs=2e-6)


def test_pickscore_is_the_scaled_cosine_over_26(clip: Path) -> None:
    scale = CLIPModel.from_pretrained(clip).logit_scale.detach().exp().item()
    found = reward("pickscore", model=str(clip), processor=str(clip))(FRAMES, PROMPTS)
    assert found == pytest.approx(plain_cosines(clip, images(FRAMES)) * scale / 26, abs=2e-6)


def test_hps_reads_openclip_checkpoints_and_sees_the_whole_picture(clip: Path, tmp_path: Path) -> None:
    """Its weights differ from those in `clip`, which gives the architecture only."""
    other = CLIPModel.from_pretrained(clip)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(tmp_path)
    CLIPImageProcessorPil.from_pretrained(clip).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(clip).save_pretrained(tmp_path)
    weights = tiny_rewards.open_clip(tmp_path, other)
    wide = np.repeat(FRAMES, 2, axis=3)
    padded = [Image.new("RGB", (128, 128)) for _ in wide]
    for canvas, frame in zip(padded, wide[:, 0], strict=True):
        canvas.paste(Image.fromarray(frame), (0, 32))
    found = reward("hps", model=str(clip), weights=str(weights))(wide, PROMPTS)
    assert found == pytest.approx(plain_cosines(tmp_path, padded), abs=2e-6)
    with pytest.raises(BadSetting, match="not the weights of this model"):
        reward("hps", model=str(clip), weights=str(tiny_rewards.head(tmp_path, 24)[0]))(FRAMES, PROMPTS)


def test_hps_has_two_published_versions() -> None:
    files = {version: reward("hps", version=version).clip._weights for version in ("v2.0", "v2.1")}
    assert files == {"v2.0": "xswu/HPSv2/HPS_v2_compressed.pt", "v2.1": "xswu/HPSv2/HPS_v2.1_compressed.pt"}


def test_aesthetic_is_a_chain_of_affine_layers_on_the_pictures_vector(clip: Path, tmp_path: Path) -> None:
    path, state = tiny_rewards.head(tmp_path, 24)
    vectors = Clip(str(clip), str(clip), ModelOptions(device="cpu")).pictures(FRAMES[:, 0])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(4))
    for number in (0, 2, 4, 6, 7):
        vectors = vectors @ state[f"layers.{number}.weight"].T + state[f"layers.{number}.bias"]
    found = reward("aesthetic", model=str(clip), head=str(path))(FRAMES, PROMPTS)
    assert found == pytest.approx(vectors[:, 0].numpy(), abs=1e-5)


def test_image_reward_takes_published_names_and_sizes(tmp_path: Path) -> None:
    path, vision, text = tiny_rewards.image_reward(tmp_path)
    tokenizer = tiny_rewards.bert_tokenizer(tmp_path / "bert")
    tokens = AutoTokenizer.from_pretrained(tokenizer)(TEXTS, padding="max_length", max_length=35, return_tensors="pt")
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    pixels = CLIPImageProcessorPil(**size)(images(FRAMES), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        seen = vision(pixel_values=pixels).last_hidden_state
        asked = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        read = text(**asked, encoder_hidden_states=seen).last_hidden_state[:, 0]
    state = torch.load(path, weights_only=True)
    for number in (0, 2, 4, 6, 7):
        read = read @ state[f"mlp.layers.{number}.weight"].T + state[f"mlp.layers.{number}.bias"]
    found = reward("image_reward", weights=str(path), tokenizer=str(tokenizer), batch=3)(FRAMES, PROMPTS)
    assert len(set(found.round(4))) >= 3
    assert found == pytest.approx(((read[:, 0] - MEAN) / STD).numpy(), abs=1e-5)


def test_a_text_is_read_once_and_cut_to_what_the_model_takes(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = Clip(str(clip), str(clip), ModelOptions(device="cpu")), list[list[str]]()
    read = model._texts
    monkeypatch.setattr(model, "_texts", lambda texts: (asked.append(list(texts)), read(texts))[1])
    vectors = model.texts([*TEXTS, "red " * 400])
    assert asked == [[*dict.fromkeys(TEXTS), "red " * 400]]
    assert torch.equal(vectors[0], vectors[2]) and vectors.shape == (5, 24)


def test_weights_are_read_when_the_first_frame_comes() -> None:
    absent = reward("clip", model="no/such-model")
    absent.check(PROMPTS[0])
    with pytest.raises(BadSetting, match="'no/such-model': cannot be opened as"):
        absent(FRAMES, PROMPTS)
    with pytest.raises(BadSetting, match="no such file, and not one on the hub"):
        hub.weights("nowhere.pth")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A checkpoint that would run code on loading is refused before it does."""
    path = tmp_path / "evil.pth"
    torch.save({"state_dict": Touch(tmp_path / "touched")}, path)
    with pytest.raises(BadSetting, match="not a checkpoint of tensors alone"):
        hub.weights(str(path))
    assert not (tmp_path / "touched").exists()


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_gpu_that_is_not_there_is_said(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ModelOptions().place() == {"device": torch.device("cpu"), "dtype": torch.float32}
    with pytest.raises(BadSetting, match="there is no GPU here"):
        reward("clip", model=str(clip), device="cuda")(FRAMES, PROMPTS)
