"""A tiny world of drawn words, which a real OCR engine can judge: caption, image and right answer all come from one seed.

Writes prompt files and captioned image sets: `python -m mdiff_core.worlds.words {prompts,images} --help`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mdiff_core.errors import BadSetting
from mdiff_core.worlds import command

SIZE = 64
"""Pixels along each side of an image."""
PAPER = (236, 234, 226)
INKS = {"black": (28, 28, 34), "red": (190, 30, 40), "green": (20, 120, 60), "blue": (30, 70, 190)}
VOWELS = "aeou"
CONSONANTS = "bcdfghknprstvxyz"
"""PP-OCR misreads i, j, l and q now and then, and m and w are wider than PITCH."""
PATTERN = (CONSONANTS, VOWELS, CONSONANTS, VOWELS)
"""What each letter of a word may be."""
LETTERS = (3, 4)
"""Lengths of drawn words."""
FONT_SIZE = 22
PITCH = 16
"""Pixels from the middle of a letter to the next."""
CELL = 8
"""Words stand at multiples of this many pixels, a latent's side, so that a letter has the same latents wherever it stands."""
LINE = 24
"""Pixels that a line of text takes, from the highest to the lowest letter."""
BASE = 18
"""Pixels from the top of a line to the foot of an x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a caption says."""

    text: str
    ink: str


def words() -> list[str]:
    """Every drawn word: all that can be said of consonant, vowel, consonant and perhaps a vowel, in a fixed order."""
    return ["".join(letters) for length in LETTERS for letters in product(*PATTERN[:length])]


def caption(content: Content) -> str:
    """What a model is asked for; different contents never share one."""
    return f'"{content.text}" in {content.ink}'


def metadata(content: Content) -> dict[str, Any]:
    """What travels with the prompt; the `ocr` rewards read `text`."""
    return {"text": content.text, "ink": content.ink}


def draw_content(rng: np.random.Generator, without: frozenset[str] = frozenset()) -> Content:
    """A random word, none of `without`, of a random length and ink."""
    while True:
        text = "".join(str(rng.choice(list(letters))) for letters in PATTERN[: rng.choice(LETTERS)])
        if text not in without:
            return Content(text=text, ink=str(rng.choice(list(INKS))))


def render(content: Content, rng: np.random.Generator) -> np.ndarray:
    """The image, [SIZE, SIZE, 3] uint8: the word somewhere on it, each letter in the middle of its place."""
    image = Image.new("RGB", (SIZE, SIZE), PAPER)
    pen, font = ImageDraw.Draw(image), _font()
    left = CELL * int(rng.integers((SIZE - PITCH * len(content.text)) // CELL + 1))
    top = CELL * int(rng.integers((SIZE - LINE) // CELL + 1))
    for index, letter in enumerate(content.text):
        middle = left + PITCH * index + PITCH // 2
        pen.text((middle, top + BASE), letter, INKS[content.ink], font, anchor="ms")
    return np.asarray(image)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_SIZE)


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
    return frozenset(metadata["text"] for metadata in command.metadata_in(path, "text"))


def line_of(content: Content, **extra: str) -> str:
    """One line of a prompt file."""
    return json.dumps({**extra, "input": caption(content), "metadata": metadata(content)}) + "\n"


def write_prompts(path: Path, chosen: Sequence[Content]) -> None:
    """A JSONL prompt file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line_of(content) for content in chosen), encoding="utf-8")


def write_images(folder: Path, count: int, seed: int, without: frozenset[str], mislabelled: float = 0.0) -> None:
    """`count` PNG files and captions.jsonl, whose `image` is relative to it; the pictures do not depend on `mislabelled`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "captions.jsonl").open("w", encoding="utf-8") as captions:
        for index, (content, image) in zip(range(count), scenes(seed, without=without), strict=False):
            name = f"{index:05d}.png"
            Image.fromarray(image).save(folder / name)
            captions.write(line_of(_labelled(content, (seed, 2, index), mislabelled, without), image=name))


def _labelled(content: Content, seed: tuple[int, ...], mislabelled: float, without: frozenset[str]) -> Content:
    """What the caption says: the drawn content or, by a share of `mislabelled`, a random one, as captions on the web do."""
    rng = np.random.default_rng(seed)
    return draw_content(rng, without) if rng.random() < mislabelled else content


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    args = command.parser("words", __doc__, "words").parse_args(argv)
    if args.what == "prompts" and args.mislabelled:
        raise BadSetting("--mislabelled: prompts have no pictures that they could be wrong about; leave it out")
    without = words_in(args.exclude) if args.exclude else frozenset[str]()
    if args.what == "prompts":
        write_prompts(args.out, contents(args.count, args.seed, without=without))
    else:
        write_images(args.out, args.count, args.seed, without, args.mislabelled)
    sys.stdout.write(f"{args.count} {args.what} -> {args.out}\n")


if __name__ == "__main__":
    sys.exit(command.run(main))
