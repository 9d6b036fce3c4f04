"""A function of yours as a reward."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field, JsonValue

from mdiff_core import frames as pictures
from mdiff_core import own_code
from mdiff_core.errors import RewardFailed
from mdiff_core.options import Options
from mdiff_core.types import Prompt


class PythonOptions(Options):
    """Which function."""

    function: str
    """module:function, called as f(frames [B, F, H, W, 3] uint8, prompts, **arguments); returns B numbers. The module must be allowed by
    the environment variable MDIFF_MODULES."""
    arguments: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of the function."""
    groupwise: bool = False
    """Each call gets one whole group, whose samples the function may compare."""


class Python:
    """What the function returns, as it is."""

    Options = PythonOptions

    def __init__(self, options: PythonOptions) -> None:
        self.options = options
        self.groupwise = options.groupwise

    def check(self, prompt: Prompt) -> None:
        """BadSetting when there is no such function; any prompt will do."""
        _ = self._function

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """[B] for frames [B, F, H, W, 3] uint8; RewardFailed for anything else, and for what is not B numbers."""
        pictures.check("python", frames, prompts)
        found = np.asarray(self._function(frames, list(prompts), **self.options.arguments))
        if found.shape != (len(frames),) or found.dtype.kind not in "fiub":
            raise RewardFailed(
                f"python: {self.options.function} returned {found.dtype} {found.shape} for {len(frames)} samples; "
                "it must return one number each"
            )
        return found.astype(np.float64)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return own_code.function(self.options.function)
