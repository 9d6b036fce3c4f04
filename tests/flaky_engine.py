"""An engine that draws nothing but numbers and misbehaves on request, for tests of the fleet around it."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdiff_core import seeds
from mdiff_core.errors import BadSetting
from mdiff_core.options import Options
from mdiff_core.registry import REGISTRY
from mdiff_core.sampler import condition_key
from mdiff_core.types import Condition, PolicyVersion, Request, Trajectory


class FlakyOptions(Options):
    """What to do wrong from the start."""

    wrong_checksum: bool = False


class FlakyEngine:
    """Obeys `deed` in a prompt's metadata: die, hang, slow, error, fault or refuse; once only if `mark` is a file's path."""

    Options = FlakyOptions
    batches_at_once = 1

    def __init__(self, options: FlakyOptions, **parts: Any) -> None:
        self._options = options
        self._policy: PolicyVersion | None = None
        self._sent: set[str] = set()

    def load(self, policy: PolicyVersion, weights: str = "live") -> str:
        self._policy = policy
        self._sent.clear()
        return "another" if self._options.wrong_checksum else policy.checksum

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[Trajectory, Mapping[str, Condition]]]:
        assert self._policy is not None
        for request in requests:
            for index, seed in zip(request.indices, request.seeds, strict=True):
                sample, key = f"{request.group}/{index}", condition_key(request.prompt.text)
                misbehave(request.prompt.metadata)
                x = torch.randn(2, 3, generator=seeds.generator(seed))
                fresh = {} if key in self._sent else {key: {"pid": torch.tensor([os.getpid()])}}
                self._sent.add(key)
                yield (
                    Trajectory(
                        sample=sample, group=request.group, index=index, prompt=request.prompt, seed=seed,
                        policy=self._policy.version, weights=self._policy.checksum, condition=key, negative="",
                        guidance=1.0, sigmas=torch.tensor([1.0, 0.0]), sde_steps=(), latent_steps=(),
                        latents=torch.zeros(0, 2, 3), log_probs=torch.zeros(0), clean=x,
                        frames=np.zeros((1, 8, 8, 3), np.uint8),
                    ),
                    fresh,
                )  # fmt: skip

    def close(self) -> None:
        self._sent.clear()


def misbehave(metadata: Mapping[str, Any]) -> None:
    """As the metadata say."""
    deed, mark = metadata.get("deed", ""), metadata.get("mark", "")
    if mark:
        if Path(mark).exists():
            return
        Path(mark).write_text(deed)
    match deed:
        case "die":
            os._exit(3)
        case "hang":
            time.sleep(3600)
        case "slow":
            time.sleep(1.0)
        case "error":
            raise RuntimeError("the device fell over")
        case "fault":
            raise TypeError("a slip of the pen")
        case "refuse":
            raise BadSetting("rollout: this cannot be drawn")


def register() -> None:
    """Make it known in this process."""
    REGISTRY["engine"]["flaky"] = "tests.flaky_engine:FlakyEngine"
