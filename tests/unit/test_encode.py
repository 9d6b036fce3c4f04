"""The encode stage: captioned images to clean rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mdiff_core import tables
from mdiff_core.errors import BadSetting
from mdiff_core.jobs import EncodeJob
from mdiff_core.options import Choice
from mdiff_core.sampler import condition_key
from mdiff_core.settings import Data, Model
from mdiff_core.stages import encode
from tests.policies_made import FAMILY

CPU = torch.device("cpu")


def job(model: Path, captions: Path, *, uncond: float = 0.0, batch: int = 3, height: int = 64) -> EncodeJob:
    return EncodeJob(
        model=Model(path=str(model), family=Choice(name="sd3", options={"max_sequence_length": 16}), dtype="float32"),
        data=Data(captions=str(captions), uncond_fraction=uncond), width=64, height=height, negative="", batch=batch, seed=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven images of four texts: photographs' sizes, one grey, one with transparency."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (folder / "pictures").mkdir()
    lines = []
    for number in range(7):
        size = [(64, 64), (100, 80), (64, 128)][number % 3]
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        mode = {4: "L", 5: "RGBA"}.get(number, "RGB")
        Image.fromarray(pixels).convert(mode).save(folder / f"pictures/{number}.png")
        lines.append(json.dumps({"image": f"pictures/{number}.png", "input": f"text {number % 4}", "metadata": {}}))
    path = folder / "captions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def table(folder: Path) -> dict[str, Any]:
    found = tables.RowTable(folder, 0)
    assert found.kind == "clean"
    return found.take(np.arange(len(found)))


def test_every_image_is_a_row(tiny_sd3: Path, captions: Path, tmp_path: Path) -> None:
    metrics = encode.run(job(tiny_sd3, captions), tmp_path)
    rows = table(tmp_path)
    assert tables.RowTable.updates(tmp_path) == 1
    assert len(set(rows["sample"])) == len(set(rows["seed"].tolist())) == 7
    assert rows["group"] == rows["sample"]
    assert (rows["advantage"] == 1).all() and (rows["guidance"] == 1).all() and set(rows["negative"]) == {""}
    assert rows["condition"] == [condition_key(f"text {number % 4}") for number in range(7)]
    assert set(tables.read_conditions(tmp_path)) == set(rows["condition"])
    assert metrics == {"encode/rows": 7, "encode/texts": 4, "encode/unconditioned": 0}


def test_a_row_is_the_vaes_latent_of_the_image(tiny_sd3: Path, captions: Path, tmp_path: Path) -> None:
    encode.run(job(tiny_sd3, captions), tmp_path)
    pixels = np.asarray(Image.open(captions.parent / "pictures/0.png"))
    expected = FAMILY.decoder(str(tiny_sd3), torch.float32, CPU).encode(pixels[None, None])[0]
    # alone instead of in a batch of three
    torch.testing.assert_close(torch.from_numpy(table(tmp_path)["x0"][0]), expected, rtol=1e-4, atol=1e-5)


def test_rows_do_not_depend_on_the_batch(tiny_sd3: Path, captions: Path, tmp_path: Path) -> None:
    for batch in (2, 7):
        encode.run(job(tiny_sd3, captions, batch=batch, uncond=0.4), tmp_path / str(batch))
    two, seven = table(tmp_path / "2"), table(tmp_path / "7")
    np.testing.assert_allclose(two["x0"], seven["x0"], rtol=1e-4, atol=1e-4)
    assert two["condition"] == seven["condition"] and (two["seed"] == seven["seed"]).all()


def test_the_middle_is_kept(tmp_path: Path) -> None:
    wide = np.zeros((32, 128, 3), np.uint8)
    wide[:, 32:96] = 200
    Image.fromarray(wide).save(tmp_path / "wide.png")
    wanted = job(Path("no/model"), tmp_path / "captions.jsonl", height=32)
    line = encode.Caption(number=1, source=str(tmp_path / "wide.png"), text="")
    assert (encode.clip(wanted, line) == 200).all()
    same = np.random.default_rng(1).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    Image.fromarray(same).save(tmp_path / "same.png")
    assert np.array_equal(
        encode.clip(wanted, encode.Caption(number=1, source=str(tmp_path / "same.png"), text="")), same[None]
    )


@pytest.mark.parametrize("form", ["folder", "clip.png", "clip.webp"])
def test_a_clip_gives_frames_at_even_distances(tmp_path: Path, form: str) -> None:
    shades = [Image.new("RGB", (96, 48), (20 * number,) * 3) for number in range(9)]
    if form == "folder":
        (tmp_path / form).mkdir()
        for number, shade in enumerate(shades):
            shade.save(tmp_path / form / f"{number:05d}.png")
    else:
        shades[0].save(tmp_path / form, save_all=True, append_images=shades[1:], lossless=True)
    line = encode.Caption(number=3, source=str(tmp_path / form), text="")
    wanted = job(Path("no/model"), tmp_path / "captions.jsonl", height=32)
    for frames, numbers in ((1, [0]), (3, [0, 4, 8]), (5, [0, 2, 4, 6, 8])):
        found = encode.clip(wanted.model_copy(update={"frames": frames}), line)
        assert found.shape == (frames, 32, 64, 3)
        assert found[:, 0, 0, 0].tolist() == [20 * number for number in numbers]
    with pytest.raises(BadSetting, match=r"captions\.jsonl:3: has 9 frames and sampling\.frames is 10; lower that"):
        encode.clip(wanted.model_copy(update={"frames": 10}), line)


def test_a_clip_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Codec:
        def encode(self, frames: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(frames).float().mean((2, 3)).transpose(1, 2)  # [B, 3, F]

    monkeypatch.setattr(encode, "parts", lambda _: (lambda texts: [{"e": torch.zeros(1)} for _ in texts], Codec()))
    shades = [Image.new("RGB", (64, 64), (10 * number, 0, 0)) for number in range(4)]
    shades[0].save(tmp_path / "clip.webp", save_all=True, append_images=shades[1:], lossless=True)
    (tmp_path / "captions.jsonl").write_text(json.dumps({"video": "clip.webp", "input": "it gets redder"}) + "\n")
    wanted = job(Path("no/model"), tmp_path / "captions.jsonl").model_copy(update={"frames": 4})
    encode.run(wanted, tmp_path / "out")
    assert table(tmp_path / "out")["x0"][0, 0].tolist() == [0, 10, 20, 30]


def test_a_share_of_captions_is_dropped(tmp_path: Path) -> None:
    wanted = job(Path("no/model"), tmp_path / "captions.jsonl", uncond=0.25)
    texts = [encode.text_of(wanted, encode.Caption(number=number, source="", text="some")) for number in range(4000)]
    assert texts.count("") / 4000 == pytest.approx(0.25, abs=0.03)  # 4 standard deviations
    assert set(texts) == {"", "some"}


@pytest.mark.parametrize(("content", "words"), [
    ("", "has no lines"),
    ('{"image": "a.png", "input": "x"}\nnot json', r"captions\.jsonl:2 is not JSON"),
    ('{"image": "a.png"}', r"captions\.jsonl:1 has no text `input`"),
    ('{"input": "x"}', r"captions\.jsonl:1 has no text `image`"),
    ('{"input": "x", "image": "a.png", "video": "a.webp"}', r"captions\.jsonl:1 .* one of `image` and `video`"),
    ('["a.png"]', r"captions\.jsonl:1 has no text `input`"),
    ('{"image": "gone.png", "input": "x"}', r"captions\.jsonl:1: '.*gone\.png' cannot be read"),
])  # fmt: skip
def test_bad_captions_name_their_line(tiny_sd3: Path, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "captions.jsonl").write_text(content)
    with pytest.raises(BadSetting, match=rf"data\.captions: .*{words}"):
        encode.run(job(tiny_sd3, tmp_path / "captions.jsonl"), tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_missing_file_is_a_sentence(tiny_sd3: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"data\.captions: .*cannot be read"):
        encode.run(job(tiny_sd3, tmp_path / "captions.jsonl"), tmp_path / "out")
