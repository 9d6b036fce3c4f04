"""A reward that lives on a server of yours; the protocol is in docs/reward-servers.md."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field

from mdiff_core import calls
from mdiff_core import frames as pictures
from mdiff_core.calls import Server, ServerOptions
from mdiff_core.errors import PartlyFailed, RewardFailed
from mdiff_core.types import Prompt

PROTOCOL = "mdiff-reward/1"


class HttpOptions(ServerOptions):
    """How samples are sent."""

    batch: int = Field(default=16, ge=1)
    """Samples a request."""
    groupwise: bool = False
    """Each request holds one whole group, however large; the server may compare its samples."""


class Http:
    """What the server says of each sample, as it is."""

    Options = HttpOptions

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        self.groupwise = options.groupwise

    def check(self, prompt: Prompt) -> None:
        """Any prompt will do; what the server needs is not known here."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else, or as the server behaves."""
        pictures.check("http", frames, prompts)
        some = pictures.picked(frames, self.options.frames)
        size = len(some) if self.groupwise else self.options.batch
        parts = [list(zip(some[i : i + size], prompts[i : i + size], strict=True)) for i in range(0, len(some), size)]
        return calls.gathered(self.ask, parts, [len(part) for part in parts], self.options.parallel)

    def ask(self, part: Sequence[tuple[np.ndarray, Prompt]]) -> list[float]:
        """Scores of the samples of one request."""
        samples = [
            {"prompt": prompt.text, "metadata": dict(prompt.metadata), "frames": [calls.png(frame) for frame in frames]}
            for frames, prompt in part
        ]
        return self.scores(self._server.post({"protocol": PROTOCOL, "samples": samples}), len(part))

    def scores(self, answer: Any, count: int) -> list[float]:
        """The answer's numbers; PartlyFailed where it has null, RewardFailed when it is no answer."""
        found = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(found, list) or len(found) != count:
            raise RewardFailed(
                f"http: {self.options.url} answered {str(answer)[:80]!r} to {count} samples; see {PROTOCOL}"
            )
        reasons = answer.get("errors") or [""] * count
        values, whys = [], []
        for i, value in enumerate(found):
            right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            values.append(float(value) if right else math.nan)
            said = str(reasons[i]) if isinstance(reasons, list) and i < len(reasons) else ""
            whys.append("" if right else said or f"the server's score is {value!r}")
        if any(whys):
            raise PartlyFailed(values, whys)
        return values

    @cached_property
    def _server(self) -> Server:
        return Server("http", self.options, self.options.url)
