"""Looks at images of the shapes world and says how far they show what was asked for.

Pixels are told apart by the direction of their colour from the background, which blur keeps; touching pixels of one
colour are a blob; a blob's shape is the one that, drawn with its area and centre, overlaps it best. Half of the score
is partial credit, the squared Dice overlap of the objects asked for and found; the other half is for getting it exactly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage

from mdiff_core.worlds.shapes import BACKGROUND, COLOURS, RELATIONS, SHAPES, SIZE, Content, Item, content_of, coverage

COVERED = 0.5
"""A pixel belongs to an object from this share of its colour on."""
ALIKE = 0.94
"""Least cosine between a pixel's and a colour's direction from the background."""
VISIBLE = 70.0
"""Distance from the background (RGB, 0..255) from which a pixel is no background."""
LEAST_AREA = 24
"""Pixels; a smaller blob is clutter."""
MOST_SIDE = 40
"""Pixels; a larger blob is no object."""
RIM = 2
"""Pixels around a blob that may hold its soft edge."""
LEAST_OVERLAP = 0.68
"""Intersection over union with the best fitting shape, below which a blob has no shape."""
PARDONED = 24
"""Pixels of clutter that cost nothing."""
OBJECT_AREA = 150
"""Every so many pixels of further clutter count as one object too many."""
COLOUR_CREDIT, SHAPE_CREDIT = 0.4, 0.2
"""What an object of the right colour or the right shape alone is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One coloured patch; x, y of its centre in pixels, y down."""

    colour: str
    shape: str
    """Empty when it looks like none of SHAPES."""
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is on one image."""

    blobs: tuple[Blob, ...]
    clutter: int
    """Pixels that are neither background nor part of a blob."""


def look(images: np.ndarray) -> list[Seen]:
    """Find the objects of images [N, SIZE, SIZE, 3] uint8; ValueError for another shape or type."""
    if images.ndim != 4 or images.shape[1:] != (SIZE, SIZE, 3) or images.dtype != np.uint8:
        raise ValueError(f"images: {images.dtype} {images.shape} is not uint8 [N, {SIZE}, {SIZE}, 3]")
    shares, colours, visible = _segment(images)
    plane = np.zeros((3, 3, 3, 3), bool)
    plane[1, 1] = ndimage.generate_binary_structure(2, 1)  # neighbours within one colour of one image only
    labels, found = ndimage.label(colours[:, None] == np.arange(len(COLOURS))[:, None, None], structure=plane)
    areas = np.bincount(labels.ravel(), minlength=found + 1)
    areas[0] = 0
    places = ndimage.find_objects(labels)
    blobs: list[list[Blob]] = [[] for _ in images]
    clutter = visible.sum((1, 2))
    for label in np.flatnonzero(areas >= LEAST_AREA):
        image, colour, rows, columns = places[label - 1]
        if max(rows.stop - rows.start, columns.stop - columns.start) > MOST_SIDE:
            continue
        rows, columns = (slice(max(0, side.start - RIM), side.stop + RIM) for side in (rows, columns))
        own = labels[image.start, colour.start, rows, columns] == label
        free = own | (colours[image.start, rows, columns] < 0)
        share = shares[image.start, rows, columns, colour.start] * free
        blobs[image.start].append(_blob(share, rows, columns, list(COLOURS)[colour.start]))
        clutter[image.start] -= areas[label]
    return [Seen(blobs=tuple(b), clutter=int(c)) for b, c in zip(blobs, clutter, strict=True)]


def _segment(images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per pixel: the share of each colour [N, h, w, colour] in 0..1, the colour's index or -1, and whether it is visible."""
    away = images.astype(np.float32) - np.asarray(BACKGROUND, np.float32)
    palette = np.asarray(list(COLOURS.values()), np.float32) - np.asarray(BACKGROUND, np.float32)
    length = np.linalg.norm(palette, axis=1)
    distance = np.sqrt(np.square(away).sum(-1))
    along = away @ (palette / length[:, None]).T
    best = along.argmax(-1)
    reach = np.take_along_axis(along, best[..., None], -1)[..., 0]
    alike = reach >= ALIKE * distance
    coloured = alike & (reach >= COVERED * length[best])
    return np.clip(along / length, 0, 1), np.where(coloured, best, -1), coloured | (~alike & (distance > VISIBLE))


def _blob(share: np.ndarray, rows: slice, columns: slice, colour: str) -> Blob:
    """Name the shape that, with the same area and centre, overlaps the blob's share of each pixel [h, w] best."""
    area = share.sum()
    x = float(share.sum(0) @ (np.arange(share.shape[1]) + 0.5) / area + columns.start)
    y = float(share.sum(1) @ (np.arange(share.shape[0]) + 0.5) / area + rows.start)
    best, most = "", LEAST_OVERLAP
    for shape, unit in SHAPES.items():
        ideal = coverage(
            Item(colour=colour, shape=shape, x=x, y=y, radius=float(np.sqrt(area / unit))),
            slice(rows.start, rows.start + share.shape[0]),
            slice(columns.start, columns.start + share.shape[1]),
        )
        overlap = np.minimum(share, ideal).sum() / np.maximum(share, ideal).sum()
        if overlap >= most:
            best, most = shape, overlap
    return Blob(colour=colour, shape=best, x=x, y=y)


def score(images: np.ndarray, metadatas: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """How well each image shows its content, float64 [N] in 0..1; 1 means exactly. images [N, SIZE, SIZE, 3] uint8."""
    wanted = [content_of(meta) for meta in metadatas]
    pairs = zip(wanted, look(images), strict=True)
    return np.asarray([agreement(content, seen) for content, seen in pairs], np.float64)


def exact(images: np.ndarray, metadatas: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Whether each image shows exactly its content, bool [N]: the accuracy behind the score."""
    return np.asarray(score(images, metadatas) == 1.0)


def agreement(content: Content, seen: Seen) -> float:
    """Score of what was seen; a wrong relation halves the partial credit, and clutter counts as further objects."""
    wanted = Counter({(p.colour, p.shape): p.count for p in content.phrases})
    found = Counter((blob.colour, blob.shape) for blob in seen.blobs)
    extra = max(0, seen.clutter - PARDONED) / OBJECT_AREA
    dice = 2 * _matched(wanted, found) / (wanted.total() + found.total() + extra)
    partial = dice**2 * (1 + _relation(content, seen)) / 2
    return (partial + float(partial == 1.0)) / 2


def _matched(wanted: Counter[tuple[str, str]], found: Counter[tuple[str, str]]) -> float:
    """Objects found of those wanted: whole ones first, then those of the right colour alone, then of the right shape alone."""
    whole = wanted & found
    missing, spare = list((wanted - whole).elements()), list((found - whole).elements())
    credit = float(whole.total())
    for part, worth in ((0, COLOUR_CREDIT), (1, SHAPE_CREDIT)):
        for kind in list(missing):
            twin = next((other for other in spare if other[part] == kind[part]), None)
            if twin is not None:
                missing.remove(kind)
                spare.remove(twin)
                credit += worth
    return credit


def _relation(content: Content, seen: Seen) -> float:
    """1 within 45 degrees of the asked direction, falling to 0 at a right angle; 1 when none is asked, 0 when one is not there."""
    if not content.relation:
        return 1.0
    first, second = ((p.colour, p.shape) for p in content.phrases)
    places = {(blob.colour, blob.shape): (blob.x, blob.y) for blob in seen.blobs}
    if first not in places or second not in places:
        return 0.0
    step = np.subtract(places[second], places[first])
    along, length = float(step @ np.asarray(RELATIONS[content.relation])), float(np.hypot(*step))
    return min(1.0, max(0.0, np.sqrt(2) * along / length)) if length else 0.0
