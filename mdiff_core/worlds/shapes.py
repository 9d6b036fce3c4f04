"""A tiny world of coloured shapes: caption, image and right answer all come from one seed.

Writes prompt files and captioned image sets: `python -m mdiff_core.worlds.shapes {prompts,images} --help`.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core.errors import BadSetting
from mdiff_core.worlds import command

SIZE = 64
"""Pixels along each side of an image."""
BACKGROUND = (24, 26, 34)
COLOURS = {
    "red": (225, 45, 45),
    "green": (45, 180, 80),
    "blue": (55, 100, 235),
    "yellow": (245, 210, 40),
    "purple": (165, 65, 205),
}
SHAPES = {"circle": np.pi, "square": 1.8**2, "triangle": 1.3**2 * 0.75 * 3**0.5}
"""Area of each shape at radius 1."""
COUNTS = ("a", "two", "three", "four")
RELATIONS = {"left of": (1, 0), "right of": (-1, 0), "above": (0, 1), "below": (0, -1)}
"""Direction (x, y down) from the first object to the second."""
VOCABULARY = (
    *(*COUNTS, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES)),
    *("and", "left", "right", "of", "above", "below"),
)
"""Every word a caption can hold."""

MOST_OBJECTS = 5
REACH = 1.3
"""An object of radius r lies within REACH * r of its centre."""
GAP = 3.0
"""Pixels kept free between objects, so that blur does not join them."""
RADII = {1: (8.0, 11.0), 2: (7.0, 9.5), 3: (6.5, 8.5), 4: (6.0, 7.5), 5: (6.0, 7.0)}
"""Range of the radius by the number of objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """`count` objects of one kind."""

    count: int
    colour: str
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a caption says: one or two phrases, and how the first lies to the second."""

    phrases: tuple[Phrase, ...]
    relation: str
    """A key of RELATIONS, or empty when position does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object; x, y (down) and radius in pixels."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A content laid out on the canvas."""

    content: Content
    items: tuple[Item, ...]


def caption(content: Content) -> str:
    """The sentence; different contents never share one."""
    nouns = [f"{COUNTS[p.count - 1]} {p.colour} {p.shape}{'s' if p.count > 1 else ''}" for p in content.phrases]
    return f" {content.relation or 'and'} ".join(nouns)


def metadata(content: Content) -> dict[str, Any]:
    """JSON-able form that travels with the prompt; `content_of` reads it back."""
    return {"phrases": [asdict(phrase) for phrase in content.phrases], "relation": content.relation}


def content_of(meta: Mapping[str, Any]) -> Content:
    """Read `metadata` back; BadSetting names what is missing or unknown."""
    try:
        phrases = tuple(Phrase(count=p["count"], colour=p["colour"], shape=p["shape"]) for p in meta["phrases"])
        relation = meta["relation"]
    except (KeyError, TypeError) as error:
        hint = "write prompts with mdiff_core.worlds.shapes"
        raise BadSetting(f"metadata: not of the shapes world ({error!r}); {hint}") from error
    for p in phrases:
        if p.colour not in COLOURS or p.shape not in SHAPES or p.count not in range(1, len(COUNTS) + 1):
            known = f"1..{len(COUNTS)} of {', '.join(COLOURS)} and {', '.join(SHAPES)}"
            raise BadSetting(f"metadata: {p} is not drawn here; known: {known}")
    if len({(p.colour, p.shape) for p in phrases}) != len(phrases) or not 1 <= len(phrases) <= 2:
        raise BadSetting(f"metadata: {len(phrases)} phrases; give one or two, of different kinds")
    if relation and (relation not in RELATIONS or [p.count for p in phrases] != [1, 1]):
        raise BadSetting(
            f"metadata: relation '{relation}' is none of {', '.join(RELATIONS)} between two single objects"
        )
    return Content(phrases=phrases, relation=relation)


def meaning(content: Content) -> str:
    """Equal for captions that ask for the same picture, such as `a and b` and `b and a`, or `a above b` and `b below a`."""
    forward, backward = [(c.relation, *c.phrases) for c in (content, _turned(content))]
    return min(repr(forward), repr(backward))


def _turned(content: Content) -> Content:
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above", "": ""}
    return Content(phrases=content.phrases[::-1], relation=opposite[content.relation])


def draw_content(rng: np.random.Generator) -> Content:
    """A random content: one phrase (1 in 4), two counted phrases (2 in 4) or two related objects (1 in 4)."""
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    first, second = (kinds[i] for i in rng.choice(len(kinds), 2, replace=False))
    form = rng.integers(4)
    if form == 0:
        return Content(phrases=(_phrase(int(rng.integers(1, len(COUNTS) + 1)), first),), relation="")
    if form == 1:
        return Content(phrases=(_phrase(1, first), _phrase(1, second)), relation=str(rng.choice(list(RELATIONS))))
    count = int(rng.integers(1, len(COUNTS) + 1))
    other = int(rng.integers(1, MOST_OBJECTS - count + 1))
    return Content(phrases=(_phrase(count, first), _phrase(other, second)), relation="")


def _phrase(count: int, kind: tuple[str, str]) -> Phrase:
    return Phrase(count=count, colour=kind[0], shape=kind[1])


def lay_out(content: Content, rng: np.random.Generator) -> Scene:
    """Random sizes and places: objects apart from each other, inside the canvas, related as the content says."""
    kinds = [phrase for phrase in content.phrases for _ in range(phrase.count)]
    low, high = RADII[len(kinds)]
    while True:
        radii = rng.uniform(low, high, len(kinds))
        centres = _places(radii, rng)
        if len(centres) == len(kinds) and _related(content.relation, centres):
            break
    items = tuple(
        Item(colour=kind.colour, shape=kind.shape, x=float(x), y=float(y), radius=float(r))
        for kind, (x, y), r in zip(kinds, centres, radii, strict=True)
    )
    return Scene(content=content, items=items)


def _places(radii: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Centres one after another, fewer than asked when the canvas is full."""
    centres: list[np.ndarray] = []
    for index, radius in enumerate(radii):
        spots = rng.uniform(REACH * radius, SIZE - REACH * radius, (40, 2))
        for centre, other in zip(centres, radii[:index], strict=True):
            spots = spots[np.hypot(*(spots - centre).T) > REACH * (radius + other) + GAP]
        if not len(spots):
            break
        centres.append(spots[0])
    return centres


def _related(relation: str, centres: Sequence[np.ndarray]) -> bool:
    """Clearly so: within 39 degrees of the direction, where the verifier asks for 45."""
    if not relation:
        return True
    along = np.asarray(RELATIONS[relation]) @ (centres[1] - centres[0])
    distance = np.hypot(*(centres[1] - centres[0]))
    return bool(along > 0.78 * distance)


def coverage(item: Item, rows: slice = slice(SIZE), columns: slice = slice(SIZE)) -> np.ndarray:
    """Share of each pixel of a window that the object covers, [h, w] float64 in 0..1, from its signed distance."""
    y, x = np.ogrid[rows, columns]
    dx, dy, r = np.abs(x + 0.5 - item.x), y + 0.5 - item.y, item.radius
    if item.shape == "circle":
        distance = np.hypot(dx, dy) - r
    elif item.shape == "square":
        distance = np.maximum(dx, np.abs(dy)) - 0.9 * r
    else:  # an upright triangle of equal sides, circumradius REACH * r
        distance = np.maximum(dy, (np.sqrt(3) * dx - dy) / 2) - REACH * r / 2
    return np.asarray(np.clip(0.5 - distance, 0.0, 1.0))


def render(scene: Scene) -> np.ndarray:
    """The image, [SIZE, SIZE, 3] uint8."""
    image = np.broadcast_to(np.asarray(BACKGROUND, np.float64), (SIZE, SIZE, 3))
    for item in scene.items:
        share = coverage(item)[..., None]
        image = image * (1 - share) + share * np.asarray(COLOURS[item.colour])
    return np.asarray(np.rint(image), np.uint8)


def scene_of(seed: int, index: int) -> Scene:
    """Scene number `index` of the endless series that `seed` names; equal arguments give equal scenes."""
    rng = np.random.default_rng((seed, index))
    return lay_out(draw_content(rng), rng)


def scenes(seed: int, *, without: frozenset[str] = frozenset()) -> Iterator[Scene]:
    """The series of `seed`, leaving out every scene whose `meaning` is in `without`."""
    index = 0
    while True:
        scene = scene_of(seed, index)
        index += 1
        if meaning(scene.content) not in without:
            yield scene


def contents(count: int, seed: int, *, without: frozenset[str] = frozenset()) -> list[Content]:
    """`count` contents of different meaning, none in `without`; BadSetting when the world has not that many."""
    taken, picked = set(without), list[Content]()
    rng = np.random.default_rng((seed, 1, 1))
    for _ in range(50 * count + 20_000):
        if len(picked) == count:
            return picked
        content = draw_content(rng)
        if meaning(content) not in taken:
            taken.add(meaning(content))
            picked.append(content)
    raise BadSetting(f"count: {count} asked for, {len(picked)} found that differ; ask for fewer or exclude less")


def meanings_in(path: Path) -> frozenset[str]:
    """The meanings of a prompt or caption file."""
    return frozenset(meaning(content_of(metadata)) for metadata in command.metadata_in(path, "phrases"))


def line_of(content: Content, **extra: str) -> str:
    """One line of a prompt file."""
    return json.dumps({**extra, "input": caption(content), "metadata": metadata(content)}) + "\n"


def write_prompts(path: Path, chosen: Sequence[Content]) -> None:
    """A JSONL prompt file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line_of(content) for content in chosen), encoding="utf-8")


def write_images(folder: Path, count: int, seed: int, without: frozenset[str], mislabelled: float = 0.0) -> None:
    """`count` PNG files and captions.jsonl, whose `image` is relative to it; the pictures do not depend on `mislabelled`."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "captions.jsonl").open("w", encoding="utf-8") as captions:
        for index, scene in zip(range(count), scenes(seed, without=without), strict=False):
            name = f"{index:05d}.png"
            Image.fromarray(render(scene)).save(folder / name)
            captions.write(line_of(_labelled(scene, (seed, 2, index), mislabelled, without), image=name))


def _labelled(scene: Scene, seed: tuple[int, ...], mislabelled: float, without: frozenset[str]) -> Content:
    """What the caption says: the scene's content or, by a share of `mislabelled`, a random one, as captions on the web do."""
    rng = np.random.default_rng(seed)
    if rng.random() >= mislabelled:
        return scene.content
    return next(other for other in iter(lambda: draw_content(rng), None) if meaning(other) not in without)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    args = command.parser("shapes", __doc__, "meanings").parse_args(argv)
    if args.what == "prompts" and args.mislabelled:
        raise BadSetting("--mislabelled: prompts have no pictures that they could be wrong about; leave it out")
    without = meanings_in(args.exclude) if args.exclude else frozenset[str]()
    if args.what == "prompts":
        write_prompts(args.out, contents(args.count, args.seed, without=without))
    else:
        write_images(args.out, args.count, args.seed, without, args.mislabelled)
    sys.stdout.write(f"{args.count} {args.what} -> {args.out}\n")


if __name__ == "__main__":
    sys.exit(command.run(main))
