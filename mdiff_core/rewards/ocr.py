"""Whether the text that a prompt asks for can be read in the frame: PP-OCRv6 on ONNX, with the models that RapidOCR ships."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from pydantic import Field

from mdiff_core import frames as pictures
from mdiff_core import quotes
from mdiff_core.errors import BadSetting
from mdiff_core.frames import FrameOptions
from mdiff_core.types import Prompt

MODELS = {"Det.model_path": "PP-OCRv6_det_small.onnx", "Rec.model_path": "PP-OCRv6_rec_small.onnx"}
"""Named in full, so that no other version of the package can quietly fetch others."""


class OcrOptions(FrameOptions):
    """What is read, and how."""

    key: str = "text"
    """Metadata field with the wanted text; prompts without it are searched for quotes."""
    detect: bool = True
    """Look for text anywhere; false reads the whole frame as one line, ten times as fast, for frames that are one."""
    side: int = Field(default=512, ge=32)
    """The shorter side is scaled up to this before text is looked for, as small letters are missed."""
    threads: int = Field(default=0, ge=0)
    """Frames read at once, one CPU each; 0 takes all CPUs of the process."""


class Ocr:
    """1 - distance / length of the longer of wanted and read text: 1 for exactly the text, 0 for none of it.

    Compared without case and white space, in NFKC; several quoted parts are wanted in their order. Text beside the wanted one
    costs. In [0, 1].
    """

    Options = OcrOptions
    groupwise = False

    def __init__(self, options: OcrOptions) -> None:
        self.options = options

    def check(self, prompt: Prompt) -> None:
        """BadSetting when nothing says which text is wanted."""
        self.wanted(prompt)

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else."""
        return pictures.scores("ocr", frames, prompts, self.options, self.measure)

    def measure(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """Scores [N] of images [N, H, W, 3]."""
        read = self._pool.map(self.read, images)
        pairs = zip(map(self.wanted, prompts), read, strict=True)
        return np.array([self.rule(quotes.plain(wanted), quotes.plain(text)) for wanted, text in pairs])

    def wanted(self, prompt: Prompt) -> str:
        """The metadata's text, else what the prompt has in quotes."""
        text = prompt.metadata.get(self.options.key)
        if text is None:
            text = " ".join(quotes.quoted(prompt.text))
        if not isinstance(text, str):
            raise BadSetting(f"metadata field '{self.options.key}' is {text!r}; it must be the text to be seen")
        if not quotes.plain(text):
            raise BadSetting(
                f"prompt {prompt.text!r} wants no text to be seen; put it in quotes, or into metadata field '{self.options.key}'"
            )
        return text

    def rule(self, wanted: str, read: str) -> float:
        """Score of one frame."""
        return 1 - quotes.distance(wanted, read) / max(len(wanted), len(read))

    def read(self, image: np.ndarray) -> str:
        """All text of an image [H, W, 3], from top to bottom."""
        with self._reader() as reader:
            # the package expects OpenCV's order of channels
            found = reader(image[..., ::-1].copy(), use_det=self.options.detect, use_cls=False, use_rec=True)
        return "".join(found.txts or ())

    @contextmanager
    def _reader(self) -> Iterator[Any]:
        """One of the engines, for this thread alone."""
        reader = self._readers.get()
        try:
            yield reader
        finally:
            self._readers.put(reader)

    @cached_property
    def _threads(self) -> int:
        return self.options.threads or len(os.sched_getaffinity(0))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="ocr")

    @cached_property
    def _readers(self) -> "SimpleQueue[Any]":
        """An engine a thread, each on one CPU: a frame is too small to be shared by several."""
        import rapidocr

        folder = Path(rapidocr.__file__).parent / "models"
        settings: dict[str, Any] = {name: str(folder / file) for name, file in MODELS.items()}
        settings |= {"Global.log_level": "error", "Global.use_cls": False, "Det.limit_side_len": self.options.side}
        settings |= {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        readers = SimpleQueue[Any]()
        for _ in range(self._threads):
            readers.put(rapidocr.RapidOCR(params=settings))
        return readers


class OcrFlowGRPO(Ocr):
    """Flow-GRPO's rule (arXiv 2505.05470): 1 where the wanted text is part of what was read, else less by the share of wrong letters.

    1 - min(distance, length of the wanted) / length of the wanted, in [0, 1]; text beside the wanted one is free.
    """

    def rule(self, wanted: str, read: str) -> float:
        """Score of one frame."""
        away = 0 if wanted in read else quotes.distance(wanted, read)
        return 1 - min(away, len(wanted)) / len(wanted)
