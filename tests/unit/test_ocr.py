"""The OCR rewards read drawn text with the real engine; the wanted text comes from any kind of quotes."""

import unicodedata
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from mdiff_core import quotes
from mdiff_core.errors import BadSetting
from mdiff_core.rewards.ocr import Ocr, OcrFlowGRPO, OcrOptions
from mdiff_core.types import Prompt


def drawn(text: str, *, accent_at: float | None = None, size: int = 256, letters: int = 56) -> np.ndarray:
    """[size, size, 3] uint8; `accent_at` puts an acute accent that far along the text, which the font has none of."""
    image = Image.new("RGB", (size, size), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=letters)
    pen.text((size / 2, size / 2), text, "black", font, anchor="mm")
    if accent_at is not None:
        left, top, right, _ = pen.textbbox((size / 2, size / 2), text, font, anchor="mm")
        x = left + accent_at * (right - left)
        pen.line((x - 4, top + 10, x + 5, top - 3), "black", 5)
    return np.asarray(image)


def prompt(text: str, /, **metadata: Any) -> Prompt:
    return Prompt(id="p", text=text, metadata=metadata)


@pytest.fixture(scope="module")
def ocr() -> Ocr:
    return Ocr(OcrOptions(side=256, threads=2))


@pytest.fixture(scope="module")
def reference() -> Ocr:
    return OcrFlowGRPO(OcrOptions(side=256, threads=2))


def score(reward: Ocr, wanted: str, *images: np.ndarray) -> list[float]:
    return reward(np.stack(images)[:, None], [prompt("", text=wanted)] * len(images)).tolist()


@pytest.mark.parametrize("rule", ["ocr", "reference"])
def test_exact_text_is_1_a_wrong_letter_between_and_nothing_0(rule: str, request: pytest.FixtureRequest) -> None:
    reward = request.getfixturevalue(rule)
    whole, wrong, nothing = score(
        reward, "HARBOUR", drawn("HARBOUR"), drawn("HARBOXR"), np.zeros((256, 256, 3), np.uint8)
    )
    assert (whole, nothing) == (1.0, 0.0)
    assert wrong == pytest.approx(6 / 7)


def test_case_and_white_space_do_not_count(ocr: Ocr) -> None:
    assert score(ocr, " blue  SHEEP", drawn("Blue sheep", letters=40)) == [1.0]


def test_both_forms_of_an_accent_are_equal(ocr: Ocr) -> None:
    picture = drawn("cafe", accent_at=0.86, letters=72)
    forms = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    assert len(forms[0]) != len(forms[1])
    assert [score(ocr, form, picture) for form in forms] == [[1.0], [1.0]]
    assert score(ocr, "cafe", picture) == [pytest.approx(3 / 4)]


def test_text_beside_the_wanted_one_costs_unless_the_rule_is_the_reference(ocr: Ocr, reference: Ocr) -> None:
    picture = drawn("OPEN24", letters=48)
    assert score(ocr, "open", picture) == [pytest.approx(4 / 6)]
    assert score(reference, "open", picture) == [1.0]


def test_the_reference_counts_no_more_errors_than_there_are_letters(reference: Ocr) -> None:
    assert reference.rule("ab", "xyzxyzxyz") == 0.0
    assert reference.rule("abcd", "abxd") == 0.75


def test_a_frame_that_is_one_line_needs_no_search() -> None:
    strip = drawn("4827", size=96, letters=36)[24:72]
    assert score(Ocr(OcrOptions(detect=False, threads=1)), "4827", strip) == [1.0]


def test_a_video_is_the_mean_or_the_worst_of_some_frames() -> None:
    video = np.stack([drawn("HELLO"), drawn("HELLO"), drawn("HELXO"), drawn("HELLO")])[None]
    for how, value in {"mean": 0.95, "min": 0.8}.items():
        reward = Ocr(OcrOptions(side=256, over_frames=how))
        assert reward(video, [prompt("", text="hello")]) == pytest.approx([value])
    # of 4 frames, the middles of two halves are the second and the fourth
    assert Ocr(OcrOptions(side=256, frames=2, over_frames="min"))(video, [prompt("", text="hello")]) == [1.0]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('a sign: "OPEN"', ["OPEN"]),
        ("a sign: “OPEN”", ["OPEN"]),
        ("ein Schild: „OFFEN“", ["OFFEN"]),
        ("ein Schild: »OFFEN«", ["OFFEN"]),
        ("un panneau : « OUVERT »", ["OUVERT"]),
        ("看板「営業中」", ["営業中"]),
        ("a sign: 'OPEN'", ["OPEN"]),
        ("a sign: ‘OPEN’", ["OPEN"]),
        ("the dog's sign: \"it's open\"", ["it's open"]),
        ("the dogs' sign isn't there", []),
        ('"Bread" over "Cake"', ["Bread", "Cake"]),
        ("no quotes", []),
    ],
)
def test_quotes_of_every_kind(text: str, parts: list[str]) -> None:
    assert quotes.quoted(text) == parts


@pytest.mark.parametrize("text", ['a "sign', "a “sign", "a „sign”“ «x"])
def test_an_open_quote_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="does not close"):
        quotes.quoted(text)


def test_the_metadata_come_before_the_quotes() -> None:
    reward = Ocr(OcrOptions(key="words"))
    assert reward.wanted(prompt('a "b"', words="c")) == "c"
    assert reward.wanted(prompt('"Bread" over "Cake"')) == "Bread Cake"
    for bad in (prompt("a", words=3), prompt("a", words=" "), prompt("a"), prompt('a ""')):
        with pytest.raises(BadSetting):
            reward.check(bad)


@pytest.mark.parametrize(
    ("one", "other", "away"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)]
)
def test_distance(one: str, other: str, away: int) -> None:
    assert quotes.distance(one, other) == quotes.distance(other, one) == away
