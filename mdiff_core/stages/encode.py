"""Turn captioned images or clips into clean rows: supervised fine-tuning's stand-in for rollout, score and pair."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from PIL import Image, ImageOps

from mdiff_core import registry, seeds, tables
from mdiff_core.contracts import LatentCodec, TextEncoder
from mdiff_core.errors import BadSetting
from mdiff_core.jobs import EncodeJob
from mdiff_core.sampler import condition_key

VERSION = "1"
READERS = 4
"""Threads that read and resize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """A line of the captions file."""

    number: int
    source: str
    """Path or URI of an image, an animated one, or a folder of frames."""
    text: str


def run(job: EncodeJob, out: Path) -> dict[str, float]:
    """Writes all rows as optimizer step 0, and `conditions`; metrics `encode/*`.

    A share of `data.uncond_fraction` has the negative text for its caption. BadSetting names the line that is wrong.
    """
    captions = read_captions(job.data.captions)
    encoder, codec = parts(job)
    texts = [text_of(job, caption) for caption in captions]
    known: set[str] = set()
    with (
        tables.condition_writer(out) as conditions,
        tables.row_writer(out, 0, "clean") as rows,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for start, frames in batches(job, captions, pool):
            stop = start + len(frames)
            fresh = {condition_key(text): text for text in texts[start:stop] if condition_key(text) not in known}
            if fresh:
                for key, condition in zip(fresh, encoder(list(fresh.values())), strict=True):
                    conditions.add(key, condition)
            known.update(fresh)
            rows.add_batch(columns(job, captions[start:stop], texts[start:stop], codec.encode(frames).numpy()))
    dropped = sum(text != caption.text for text, caption in zip(texts, captions, strict=True))
    counts = {"encode/rows": len(captions), "encode/texts": len(known), "encode/unconditioned": dropped}
    return {name: float(value) for name, value in counts.items()}


def read_captions(uri: str) -> list[Caption]:
    """The lines of a JSONL file with `input` and `image` or `video` (relative to the file); a path or an fsspec URI."""
    fs, path = fsspec.url_to_fs(uri)
    try:
        lines = fs.cat_file(path).decode().splitlines()
    except OSError as error:
        raise BadSetting(
            f"data.captions: '{uri}' cannot be read ({type(error).__name__}); give a JSONL file"
        ) from error
    except UnicodeDecodeError as error:
        raise BadSetting(f"data.captions: '{uri}' is not UTF-8; save it as UTF-8") from error
    folder = uri.rpartition("/")[0] or "."
    found = [caption(line, number, uri, folder) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadSetting(
            f"data.captions: '{uri}' has no lines; write one object with `image` or `video`, and `input`, a line"
        )
    return found


def caption(line: str, number: int, uri: str, folder: str) -> Caption:
    """One line; BadSetting with file and line when it is not an object with a text and one source."""
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise BadSetting(f"data.captions: {uri}:{number} is not JSON ({error}); write one object a line") from error
    found = fields if isinstance(fields, dict) else {}
    sources = [found[name] for name in ("image", "video") if isinstance(found.get(name), str)]
    for name, there in (("input", isinstance(found.get("input"), str)), ("image", len(sources) == 1)):
        if not there:
            raise BadSetting(
                f"data.captions: {uri}:{number} has no text `{name}`; give `input`, and one of `image` and `video`"
            )
    return Caption(number=number, source=f"{folder}/{sources[0]}", text=found["input"])


def parts(job: EncodeJob) -> tuple[TextEncoder, LatentCodec]:
    """Text side in the model's dtype, VAE in float32, on a GPU where there is one."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = registry.make("family", job.model.family)
    encoder: TextEncoder = family.encoder(job.model.path, vars(torch)[job.model.dtype], device)
    codec: LatentCodec = family.decoder(job.model.path, torch.float32, device)
    return encoder, codec


def text_of(job: EncodeJob, caption: Caption) -> str:
    """The caption, or now and then the negative text, decided by seed and line alone."""
    share = seeds.derive(job.seed, "uncond", caption.number) / 2**62
    return job.negative if share < job.data.uncond_fraction else caption.text


def batches(job: EncodeJob, captions: Sequence[Caption], pool: ThreadPoolExecutor) -> Iterator[tuple[int, np.ndarray]]:
    """(first line's position, frames [B, F, H, W, 3] uint8), the next batch being read meanwhile."""
    starts = range(0, len(captions), job.batch)
    ahead = [pool.submit(clip, job, caption) for caption in captions[: job.batch]]
    for start in starts:
        waiting, stop = ahead, start + job.batch
        ahead = [pool.submit(clip, job, caption) for caption in captions[stop : stop + job.batch]]
        yield start, np.stack([future.result() for future in waiting])


def clip(job: EncodeJob, caption: Caption) -> np.ndarray:
    """[F, H, W, 3] uint8: frames at even distances, the middle of each in the wanted proportions, resized."""
    where = f"data.captions: {job.data.captions}:{caption.number}"
    try:
        found = list(frames_of(caption.source, partial(spread, job, where)))
    except OSError as error:
        raise BadSetting(
            f"{where}: '{caption.source}' cannot be read ({type(error).__name__}); repair or remove the line"
        ) from error
    size = (job.width, job.height)
    return np.stack([np.asarray(ImageOps.fit(one, size, Image.Resampling.LANCZOS)) for one in found])


def spread(job: EncodeJob, where: str, there: int) -> list[int]:
    """Which of the frames that are there are taken; BadSetting when they are too few."""
    if there < job.frames:
        raise BadSetting(
            f"{where}: has {there} frames and sampling.frames is {job.frames}; lower that, or remove the line"
        )
    return [round(position) for position in np.linspace(0, there - 1, job.frames)]


def frames_of(source: str, choose: Callable[[int], list[int]]) -> Iterator[Image.Image]:
    """The chosen frames, upright and in RGB: of a folder's files by name, of an animation, or the one of an image."""
    fs, path = fsspec.url_to_fs(source)
    if fs.isdir(path):
        names = sorted(fs.ls(path, detail=False))
        for number in choose(len(names)):
            with fs.open(names[number], "rb") as file, Image.open(file) as image:
                yield ImageOps.exif_transpose(image).convert("RGB")
        return
    with fs.open(path, "rb") as file, Image.open(file) as image:
        for number in choose(getattr(image, "n_frames", 1)):  # which only formats that may be animated have
            image.seek(number)
            yield ImageOps.exif_transpose(image).convert("RGB")


def columns(job: EncodeJob, captions: Sequence[Caption], texts: Sequence[str], x0: np.ndarray) -> dict[str, Any]:
    """Clean rows as tables.RowWriter takes them."""
    samples = [f"image-{caption.number:08d}" for caption in captions]
    return {
        "sample": samples,
        "group": samples,
        "x0": x0,
        "advantage": np.ones(len(x0), np.float32),
        "condition": [condition_key(text) for text in texts],
        "negative": [""] * len(x0),
        "guidance": np.ones(len(x0), np.float32),
        "seed": np.array([seeds.derive(job.seed, "encode", sample) for sample in samples], np.int64),
    }
