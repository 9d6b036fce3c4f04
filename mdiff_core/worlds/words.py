"""A tiny world of drawn words, which a real OCR engine can judge: caption, image and right answer all come from one seed.

Writes prompt files and captioned image sets: `python -m mdiff_core.worlds.words {prompts,images} --help`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mdiff_core.errors import BadSetting

SIZE = 64
"""Pixels along each side of an image."""
PAPER = (236, 234, 226)
INKS = {"black": (28, 28, 34), "red": (190, 30, 40), "green": (20, 120, 60), "blue": (30, 70, 190)}
FRAME = ("the", "word", "in")
"""Words of a caption that are always there; the drawn word stands in quotes."""
ALPHABET = "abcdefghkmnoprstuvwxyz"
"""Letters of drawn words. PP-OCR misread 4 of 300 words drawn with i, j, l and q as well, and none of 300 drawn without."""
VOWELS = "aeou"
LETTERS = (3, 4)
"""Lengths of drawn words."""
HEIGHTS = (20, 26)
"""Range of the font's size in pixels, both ends included; four wide letters of the largest still fit."""
MARGIN = 4
"""Pixels that stay free at the edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a caption says."""

    text: str
    ink: str


def words() -> list[str]:
    """Every drawn word: all that can be said of consonant, vowel, consonant and perhaps a vowel, in a fixed order."""
    consonants = [letter for letter in ALPHABET if letter not in VOWELS]
    short = [a + b + c for a in consonants for b in VOWELS for c in consonants]
    return short + [word + vowel for word in short for vowel in VOWELS]


def caption(content: Content) -> str:
    """The sentence; different contents never share one."""
    return f'the word "{content.text}" in {content.ink}'


def metadata(content: Content) -> dict[str, Any]:
    """What travels with the prompt; the `ocr` rewards read `text`."""
    return {"text": content.text, "ink": content.ink}


def draw_content(rng: np.random.Generator, without: frozenset[str] = frozenset()) -> Content:
    """A random word, none of `without`, of a random length and ink."""
    known = words()
    while True:
        length = rng.choice(LETTERS)
        text = str(rng.choice([word for word in known if len(word) == length]))
        if text not in without:
            return Content(text=text, ink=str(rng.choice(list(INKS))))


def render(content: Content, rng: np.random.Generator) -> np.ndarray:
    """The image, [SIZE, SIZE, 3] uint8: the word somewhere on it, in a random size, whole."""
    image = Image.new("RGB", (SIZE, SIZE), PAPER)
    pen = ImageDraw.Draw(image)
    size = int(rng.integers(HEIGHTS[0], HEIGHTS[1] + 1))
    while True:
        font = ImageFont.load_default(size)
        left, top, right, bottom = pen.textbbox((0, 0), content.text, font)
        if right - left <= SIZE - 2 * MARGIN:
            break
        size -= 1  # the widest words fit in the smaller sizes only
    x = rng.integers(MARGIN, SIZE - MARGIN - int(right - left) + 1) - left
    y = rng.integers(MARGIN, SIZE - MARGIN - int(bottom - top) + 1) - top
    pen.text((x, y), content.text, INKS[content.ink], font)
    return np.asarray(image)


def scenes(seed: int, *, without: frozenset[str] = frozenset()) -> Iterator[tuple[Content, np.ndarray]]:
    """The endless series that `seed` names, without the words in `without`."""
    index = 0
    while True:
        rng = np.random.default_rng((seed, index))
        content = draw_content(rng, without)
        yield content, render(content, rng)
        index += 1


def contents(count: int, seed: int, *, without: frozenset[str] = frozenset()) -> list[Content]:
    """`count` contents of different words, none in `without`; BadSetting when the world has not that many."""
    left = [word for word in words() if word not in without]
    if count > len(left):
        raise BadSetting(f"count: {count} asked for and {len(left)} words left; ask for fewer or exclude less")
    rng = np.random.default_rng((seed, 1, 1))
    order = rng.permutation(len(left))[:count]
    return [Content(text=left[i], ink=str(rng.choice(list(INKS)))) for i in order]


def words_in(path: Path) -> frozenset[str]:
    """The drawn words of a prompt or caption file."""
    return frozenset(json.loads(line)["metadata"]["text"] for line in path.read_text(encoding="utf-8").splitlines())


def line_of(content: Content, **extra: str) -> str:
    """One line of a prompt file."""
    return json.dumps({**extra, "input": caption(content), "metadata": metadata(content)}) + "\n"


def write_prompts(path: Path, chosen: Sequence[Content]) -> None:
    """A JSONL prompt file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line_of(content) for content in chosen), encoding="utf-8")


def write_images(folder: Path, count: int, seed: int, without: frozenset[str]) -> None:
    """`count` PNG files and captions.jsonl, whose `image` is relative to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "captions.jsonl").open("w", encoding="utf-8") as captions:
        for index, (content, image) in zip(range(count), scenes(seed, without=without), strict=False):
            name = f"{index:05d}.png"
            Image.fromarray(image).save(folder / name)
            captions.write(line_of(content, image=name))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mdiff_core.worlds.words", description=__doc__)
    parser.add_argument("what", choices=("prompts", "images"), help="a prompt file, or a captioned image folder")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="prompts: a .jsonl file; images: a folder")
    parser.add_argument("--exclude", type=Path, help="prompt file whose words must not appear")
    args = parser.parse_args(argv)
    without = words_in(args.exclude) if args.exclude else frozenset[str]()
    if args.what == "prompts":
        write_prompts(args.out, contents(args.count, args.seed, without=without))
    else:
        write_images(args.out, args.count, args.seed, without)
    sys.stdout.write(f"{args.count} {args.what} -> {args.out}\n")


if __name__ == "__main__":
    main()
