"""Laws of the tiny SD3: real classes, one token a word, and conditions that keep captions apart."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import AutoTokenizer

from mdiff_core.errors import BadSetting
from mdiff_core.worlds import shapes, tiny_sd3, tiny_text, verify, words

SHIPPED = Path(__file__).parents[2] / "assets" / "shapes_sd3"


@pytest.fixture(scope="module")
def pipe(tiny_sd3: Path) -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline.from_pretrained(tiny_sd3)


def encode(pipe: StableDiffusion3Pipeline, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        tokens, _, pooled, _ = pipe.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=tiny_text.TEXT_LENGTH
        )
    return tokens, pooled


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2", "tokenizer_3"])
def test_every_word_is_one_token(tiny_sd3: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_sd3 / name)
    ids = [tokenizer(word, add_special_tokens=False).input_ids for word in shapes.VOCABULARY]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(ids)
    long = "four purple triangles and a yellow square left of"
    assert len(tokenizer(long, add_special_tokens=False).input_ids) == len(long.split())
    assert tokenizer.model_max_length == 16
    assert tokenizer("").input_ids == tokenizer(" ").input_ids  # engines differ in what they send for nothing


def test_tokenizers_do_not_depend_on_chance() -> None:
    one, two = tiny_text.clip_tokenizer(), tiny_text.clip_tokenizer()
    assert one.get_vocab() == two.get_vocab()
    assert tiny_text.byte_pairs(("aa", "ab")) == [("a", "a</w>"), ("a", "b</w>")]


def test_a_drawn_word_is_told_letter_by_letter() -> None:
    """So that a word never seen is made of letters seen; the longest caption fits."""
    clip, t5 = tiny_text.clip_tokenizer(tiny_text.WORDS), tiny_text.t5_tokenizer(tiny_text.WORDS)
    for content in (*words.contents(200, 0), words.Content(text="red", ink="red")):
        text, ink = content.text, content.ink
        told = clip.convert_ids_to_tokens(clip(words.caption(content)).input_ids)
        letters = [*text[:-1], text[-1] + "</w>", '"</w>']
        assert told[:-1] == ["<|startoftext|>", '"</w>', *letters, "i", "n</w>", *ink[:-1], ink[-1] + "</w>"]
        assert t5.convert_ids_to_tokens(t5(words.caption(content)).input_ids) == [
            '▁"',
            *text,
            '"',
            "▁in",
            f"▁{ink}",
            "</s>",
        ]
        assert len(told) <= tiny_text.TEXT_LENGTH


def test_captions_have_different_conditions(pipe: StableDiffusion3Pipeline) -> None:
    captions = ["", *(shapes.caption(content) for content in shapes.contents(300, 0))]
    tokens, pooled = encode(pipe, captions)
    assert tokens.shape == (301, 32, tiny_text.T5_WIDTH) and pooled.shape == (301, 2 * tiny_text.CLIP_WIDTH)
    for condition in (tokens[:, :16], tokens[:, 16:], pooled):
        flat = condition.flatten(1)
        apart = torch.cdist(flat, flat) / flat.std() / flat.shape[1] ** 0.5
        assert apart.fill_diagonal_(1).min() > 0.05
    assert 0.5 < tokens.std() < 2 and 0.5 < pooled.std() < 2


def test_the_order_of_words_is_told(pipe: StableDiffusion3Pipeline) -> None:
    tokens, pooled = encode(
        pipe,
        [
            "a red circle left of a blue square",
            "a blue square left of a red circle",
            "a red square left of a blue circle",
        ],
    )
    for condition in (tokens[:, :16], tokens[:, 16:], pooled):
        flat = condition.flatten(1)
        similar = torch.corrcoef(flat)
        assert similar.fill_diagonal_(0).max() < 0.998


def test_it_opens_as_float32_and_draws(pipe: StableDiffusion3Pipeline) -> None:
    parts = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
    assert {weight.dtype for part in parts for weight in part.parameters()} == {torch.float32}
    drawn = pipe(
        ["two red circles"], num_inference_steps=2, guidance_scale=4.5, height=64, width=64, max_sequence_length=16,
        output_type="np", generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip
    assert drawn.shape == (1, 64, 64, 3) and np.isfinite(drawn).all()


def test_the_same_seed_builds_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_sd3, "POOL", 8)
    monkeypatch.setattr(tiny_sd3, "BATCH", 2)
    for name in ("one", "two"):
        tiny_sd3.main(["build", "--seed", "3", "--out", str(tmp_path / name), "--vae-steps", "2", "--least", "0"])
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) > 15
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_a_vae_that_draws_blank_paper_is_not_built_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_sd3, "POOL", 8)
    monkeypatch.setattr(tiny_sd3, "BATCH", 2)
    monkeypatch.setattr(tiny_sd3, "NEW", 8)
    asked = ["build", "--world", "words", "--model", str(SHIPPED), "--seed", "3", "--vae-steps", "1"]
    with pytest.raises(BadSetting, match=r"--vae-steps: after 1 the VAE gives back 0\.000 .* less than --least 0\.8"):
        tiny_sd3.main([*asked, "--out", str(tmp_path / "words")])
    assert not (tmp_path / "words").exists()


class Fading:
    """In a VAE's place: loses a share of whatever stands out from the paper."""

    def __init__(self, lost: float) -> None:
        self.lost = lost

    def encode(self, images: torch.Tensor) -> SimpleNamespace:
        latent = images + (images[..., :1, :1] - images) * self.lost
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latent))

    def decode(self, latent: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=latent)


@pytest.mark.parametrize("name", ["shapes", "words"])
def test_a_picture_is_given_back_when_little_of_it_is_lost(name: str) -> None:
    world = tiny_text.WORLDS[name]
    images = tiny_sd3.pixels(5, 16, world)
    shares = [tiny_sd3.given_back(Fading(lost), images, world) for lost in (0.0, 0.25, 0.35, 1.0)]
    assert shares == [1, 1, 0, 0]


def test_words_are_trained_for_their_ink() -> None:
    """To draw nothing but paper costs the words VAE over five times what it would cost if all pixels counted alike."""
    pool = tiny_sd3.pixels(5, 64, tiny_text.WORDS)
    there = tiny_sd3._stands_out(pool, tiny_text.WORDS)
    assert there.median() == 0 and (there == 0).all(1).float().mean() > 0.8
    weight = 1 + tiny_text.WORDS.ink * there.abs().amax(1, keepdim=True)
    assert (weight * there.abs()).mean() > 5 * there.abs().mean() and tiny_text.SHAPES.ink == 0


def test_words_start_from_the_shipped_shapes() -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng():
        words_pipe, shapes_pipe = (tiny_sd3.start(world, SHIPPED) for world in (tiny_text.WORDS, tiny_text.SHAPES))
    for part, kind in (("vae", AutoencoderKL), ("transformer", SD3Transformer2DModel)):
        shipped = kind.from_pretrained(SHIPPED, subfolder=part).state_dict()
        begun, new = getattr(words_pipe, part).state_dict(), getattr(shapes_pipe, part).state_dict()
        assert all(torch.equal(begun[key], shipped[key]) for key in shipped)
        assert begun.keys() == new.keys() and not all(torch.equal(new[key], shipped[key]) for key in shipped)


def test_scale_and_shift_make_latents_standard() -> None:
    torch.manual_seed(0)
    vae = tiny_sd3.autoencoder()
    pool = tiny_sd3.pixels(0, 16)
    tiny_sd3.standardise(vae, pool)
    with torch.no_grad():
        latents = (vae.encode(pool).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    assert latents.mean().abs() < 1e-3 and latents.std() == pytest.approx(1, abs=1e-3)


def test_the_shipped_vae_keeps_scenes() -> None:
    vae = AutoencoderKL.from_pretrained(SHIPPED, subfolder="vae")
    scenes = [shapes.scene_of(77, index) for index in range(32)]
    x = torch.from_numpy(np.stack([shapes.render(scene) for scene in scenes])).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(x).latent_dist.mode()
        y = vae.decode(latents).sample
    images = ((y.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert verify.score(images, [shapes.metadata(scene.content) for scene in scenes]).mean() >= 0.95
    scaled = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert scaled.mean().abs() < 0.1 and scaled.std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["shapes_sd3", "words_sd3"])
def test_the_shipped_models_are_small_and_of_this_code(name: str) -> None:
    shipped = SHIPPED.with_name(name)
    assert sum(path.stat().st_size for path in shipped.rglob("*") if path.is_file()) <= 10e6
    config = json.loads((shipped / "transformer" / "config.json").read_text())
    made = json.loads(json.dumps(dict(tiny_sd3.transformer().config)))
    assert {key: config[key] for key in made if key[0] != "_"} == {key: made[key] for key in made if key[0] != "_"}


def test_the_shipped_vae_keeps_words() -> None:
    vae = AutoencoderKL.from_pretrained(SHIPPED.with_name("words_sd3"), subfolder="vae")
    images = tiny_sd3.pixels(77, 32, tiny_text.WORDS)
    assert tiny_sd3.given_back(vae, images, tiny_text.WORDS) >= 0.95


def test_the_shipped_words_are_this_code_s_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED.with_name("words_sd3") / "tokenizer")
    made = tiny_text.clip_tokenizer(tiny_text.WORDS)
    text = words.caption(words.Content(text="susa", ink="black"))
    assert tokenizer(text).input_ids == made(text).input_ids
