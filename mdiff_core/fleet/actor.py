"""What runs inside an engine's process, and how a policy gets there."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core.contracts import Engine, Kernel
from mdiff_core.options import Choice
from mdiff_core.policies import Weights, open_policy
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, Request, Trajectory

Files = dict[str, np.ndarray]
"""Bytes of a folder's files by relative path."""


class EngineActor:
    """An engine with what it was made from; everything it is told and answers travels through Ray."""

    def __init__(self, rollout: str, model: str, threads: int) -> None:
        """Settings as JSON. `threads` CPU threads, where no GPU does the work; 0 leaves the number as it is."""
        self._settings = Rollout.from_json(rollout), Model.from_json(model)
        self._threads = threads
        self._engine: Engine | None = None
        self._copy: Path | None = None

    def load(self, policy: str, weights: Weights, files: Files | None) -> str:
        """Make the engine if need be and give it the policy, from the folder `policy` or from `files` of it."""
        folder = Path(policy) if files is None else self._unpack(files)
        if self._engine is None:
            self._engine = make_engine(*self._settings, threads=self._threads)
        return self._engine.load(open_policy(folder), weights)

    def generate(self, requests: Sequence[Request]) -> tuple[list[Trajectory], dict[str, Condition]]:
        """One batch, with the conditions that this engine has not sent since it loaded the policy."""
        assert self._engine is not None
        trajectories: list[Trajectory] = []
        conditions: dict[str, Condition] = {}
        for trajectory, fresh in self._engine.generate(requests):
            trajectories.append(trajectory)
            conditions.update(fresh)
        return trajectories, conditions

    def close(self) -> None:
        """End the engine and what it started."""
        if self._engine is not None:
            self._engine.close()
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)

    def _unpack(self, files: Files) -> Path:
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        self._copy = Path(tempfile.mkdtemp(prefix="mdiff-policy-"))
        unpack(files, self._copy)
        return self._copy


def make_engine(rollout: Rollout, model: Model, *, threads: int = 0) -> Engine:
    """The recipe's engine in this process: on the GPU that Ray gave it, or on the CPU."""
    import torch

    from mdiff_core import registry

    if threads:
        torch.set_num_threads(threads)
    engine: Engine = registry.make(
        "engine",
        rollout.engine,
        family=registry.make("family", model.family),
        model=model.path,
        dtype=vars(torch)[model.dtype],
        device=torch.device("cuda" if rollout.gpus_per_engine else "cpu"),
        kernels=make_kernel,
    )
    return engine


def make_kernel(name: str, options: Mapping[str, Any]) -> Kernel:
    """A kernel by registry name."""
    from mdiff_core import registry

    kernel: Kernel = registry.make("kernel", Choice(name=name, options=dict(options)))
    return kernel


def pack(folder: Path) -> Files:
    """All files of a folder, for machines that do not see it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): np.fromfile(path, np.uint8) for path in paths}


def unpack(files: Files, folder: Path) -> None:
    """The files of `pack` below another folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data.tofile(folder / name)
