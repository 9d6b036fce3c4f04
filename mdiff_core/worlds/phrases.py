"""Prompt files for real text-to-image models, from templates: pictures that hold a written text, and pictures of anything.

`python -m mdiff_core.worlds.phrases {ocr,general} --help` writes one.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mdiff_core import seeds
from mdiff_core.errors import BadSetting

SURFACES = (
    "A chalkboard outside a small cafe that reads {text}",
    "A hand-painted wooden sign nailed to a fence, saying {text}",
    "A neon sign glowing {text} above a rainy street at night",
    "A birthday cake with {text} written in icing",
    "A paperback novel on a desk, its title {text} in bold letters",
    "A white t-shirt on a hanger printed with {text}",
    "An old enamel plate on a brick wall with the words {text}",
    "A concert poster taped to a lamp post announcing {text}",
    "A label on a glass jar of jam that says {text}",
    "A museum banner hanging between columns reading {text}",
    "A fridge covered in magnets that spell {text}",
    "A city bus with {text} on its destination display",
    "A note in blue ink on yellow paper: {text}",
    "A stone archway with {text} carved into it",
    "A coffee cup with {text} on its sleeve",
    "A hot-air balloon with {text} across its envelope",
)
FIRST = (
    "Open",
    "Fresh",
    "Last",
    "Quiet",
    "Golden",
    "North",
    "Slow",
    "Early",
    "Wild",
    "Lucky",
    "Silver",
    "Second",
    "Blue",
    "Summer",
)
SECOND = (
    "Bread",
    "Harbour",
    "Garden",
    "Ticket",
    "Lantern",
    "Kitchen",
    "Orchard",
    "Letters",
    "Signal",
    "Market",
    "River",
    "Library",
)
SUBJECTS = (
    *(
        "a red fox",
        "two old friends",
        "a lighthouse keeper",
        "a paper boat",
        "a violinist",
        "a snow leopard",
        "a robot gardener",
    ),
    *(
        "a steam train",
        "a bowl of ripe figs",
        "a child with a kite",
        "a glass castle",
        "a street market",
        "a sleeping cat",
    ),
    *(
        "a mountain village",
        "an astronaut",
        "a field of tulips",
        "a wooden bridge",
        "a potter at the wheel",
        "a humpback whale",
    ),
)
PLACES = (
    *(
        "at dawn",
        "in heavy rain",
        "under a starry sky",
        "on a crowded square",
        "beside a frozen lake",
        "in a sunlit kitchen",
    ),
    *(
        "at the edge of a cliff",
        "in an autumn forest",
        "during a sandstorm",
        "seen from above",
        "in thick fog",
        "at golden hour",
    ),
)
STYLES = (
    *(
        "photograph, 35 mm",
        "watercolour on rough paper",
        "oil painting",
        "isometric 3d render",
        "ink drawing",
        "studio photograph",
    ),
    *(
        "woodcut print",
        "soft pastel",
        "cinematic still",
        "children's book illustration",
        "macro photograph",
        "pixel art",
    ),
)


def ocr() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (prompt, metadata); `text` is what must be readable in the picture, quoted in the prompt."""
    for surface, first, second in itertools.product(SURFACES, FIRST, SECOND):
        text = f"{first} {second}"
        yield surface.format(text=f'"{text}"'), {"text": text}


def general() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every (prompt, metadata) without a text in the picture."""
    for subject, place, style in itertools.product(SUBJECTS, PLACES, STYLES):
        yield f"{subject[0].upper()}{subject[1:]} {place}, {style}", {}


KINDS = {"ocr": ocr, "general": general}


def choose(kind: str, count: int, seed: int, without: frozenset[str]) -> list[tuple[str, dict[str, Any]]]:
    """`count` different prompts in an order of the seed's, none of `without`; BadSetting when there are not as many."""
    left = [line for line in KINDS[kind]() if line[0] not in without]
    if count > len(left):
        raise BadSetting(f"count: {count} prompts asked for and {len(left)} left; ask for fewer or exclude less")
    return sorted(left, key=lambda line: seeds.derive("phrases", seed, line[0]))[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mdiff_core.worlds.phrases", description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--exclude", type=Path, help="prompt file whose prompts must not appear")
    asked = parser.parse_args(arguments)
    lines = asked.exclude.read_text(encoding="utf-8").splitlines() if asked.exclude else []
    chosen = choose(asked.kind, asked.count, asked.seed, frozenset(json.loads(line)["input"] for line in lines))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"input": prompt, "metadata": metadata}) + "\n" for prompt, metadata in chosen)
    asked.out.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{asked.count} {asked.kind} prompts -> {asked.out}\n")


if __name__ == "__main__":
    main()
