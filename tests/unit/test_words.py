"""The world of words: one seed is one world, and the real OCR engine reads all of it."""

import json
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from mdiff_core import prompts
from mdiff_core.errors import BadSetting
from mdiff_core.rewards.ocr import Ocr, OcrOptions
from mdiff_core.types import Prompt
from mdiff_core.worlds import command, shapes, words


def test_the_engine_reads_what_is_drawn_and_not_another_word() -> None:
    """60 words; rendering differs a little between versions of FreeType, so one letter may be off."""
    drawn = list(islice(words.scenes(0), 60))
    frames = np.stack([image for _, image in drawn])[:, None]
    asked = [Prompt(id=c.text, text=words.caption(c), metadata=words.metadata(c)) for c, _ in drawn]
    reward = Ocr(OcrOptions(side=128, threads=2))
    scores = reward(frames, asked)
    assert (scores == 1.0).mean() > 0.95
    assert reward(frames, asked[1:] + asked[:1]).mean() < 0.4
    plain = [Prompt(id=p.id, text=p.text, metadata={}) for p in asked]
    assert np.array_equal(reward(frames, plain), scores), "the caption's quotes say the same"


def test_equal_seeds_are_equal_worlds_and_words_stay_inside() -> None:
    first, again, other = (list(islice(words.scenes(seed), 20)) for seed in (3, 3, 4))
    assert [c for c, _ in first] == [c for c, _ in again] != [c for c, _ in other]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
    for content, image in first:
        ink = (image != np.array(words.PAPER, np.uint8)).any(axis=2)
        assert image.shape == (64, 64, 3) and ink.any(), content
        assert not ink[0].any() and not ink[-1].any() and not ink[:, 0].any() and not ink[:, -1].any(), content


def test_files_hold_other_words_than_those_excluded(tmp_path: Path) -> None:
    words.main(["prompts", "--count", "30", "--seed", "99", "--out", str(tmp_path / "held_out.jsonl")])
    exclude = ["--exclude", str(tmp_path / "held_out.jsonl")]
    words.main(["prompts", "--count", "50", "--seed", "1", "--out", str(tmp_path / "train.jsonl"), *exclude])
    words.main(["images", "--count", "8", "--seed", "7", "--out", str(tmp_path / "images"), *exclude])
    held_out, train = (words.words_in(tmp_path / f"{name}.jsonl") for name in ("held_out", "train"))
    captions = (tmp_path / "images" / "captions.jsonl").read_text().splitlines()
    assert (len(held_out), len(train), len(captions)) == (30, 50, 8)
    assert not held_out & (train | {json.loads(line)["metadata"]["text"] for line in captions})
    assert Image.open(tmp_path / "images" / json.loads(captions[0])["image"]).size == (64, 64)
    assert len(prompts.read(tmp_path / "train.jsonl")) == 50


def test_wrong_captions_leave_the_pictures_as_they_are(tmp_path: Path) -> None:
    for share in ("0", "0.5", "1"):
        words.main(["images", "--count", "40", "--seed", "7", "--mislabelled", share, "--out", str(tmp_path / share)])
    lines = {share: (tmp_path / share / "captions.jsonl").read_text().splitlines() for share in ("0", "0.5", "1")}
    wrong = {share: sum(a != b for a, b in zip(lines["0"], lines[share], strict=True)) for share in ("0.5", "1")}
    assert 8 < wrong["0.5"] < 32 and wrong["1"] == 40
    for path in (tmp_path / "0").glob("*.png"):
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()
    with pytest.raises(SystemExit):
        words.main(["images", "--count", "1", "--seed", "7", "--mislabelled", "1.1", "--out", str(tmp_path / "x")])


def test_more_words_than_there_are() -> None:
    known = words.words()
    assert len(set(known)) == len(known)
    with pytest.raises(BadSetting, match=rf"count: {len(known) + 1} asked for and {len(known)} words left"):
        words.contents(len(known) + 1, 0)


@pytest.mark.parametrize("world", [words, shapes])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prompts", "--count", "-5"], "argument --count: '-5' is not a whole number from 1"),
        (["images", "--count", "0"], "argument --count: '0' is not a whole number from 1"),
        (["images", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0"),
        (["images", "--mislabelled", "abc"], "argument --mislabelled: abc is no share; give a number from 0 to 1"),
        (["prompts", "--mislabelled", "0.5"], "--mislabelled: prompts have no pictures"),
        (["prompts", "--exclude", "nowhere"], "No such file or directory: 'nowhere'"),
        (["prompts", "--exclude", "pyproject.toml"], "--exclude: pyproject.toml:1: not a prompt of this world"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_leaves_nothing(
    world: ModuleType, arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = [arguments[0], "--count", "2", "--seed", "1", "--out", str(out), *arguments[1:]]
    try:
        code = command.run(lambda: world.main(given))
    except SystemExit as exit:  # argparse's
        code = exit.code
    assert code != 0 and says in capsys.readouterr().err
    assert not out.exists()
