"""The tables of a round's samples: trajectories, conditions, scores."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.tables.columns import Column
from mdiff_core.tables.reading import Batch, batches, paths_of
from mdiff_core.tables.schemas import Schema
from mdiff_core.tables.writing import BATCH_BYTES, SHARD_BYTES, ShardWriter, full_disk_explained, temporary
from mdiff_core.types import Condition, Prompt, Scored, Trajectory

TRAJECTORIES = Schema(
    name="trajectories",
    version="1",
    columns=(
        *("sample", "group", "index", "prompt", "text", "metadata", "seed", "policy", "weights"),
        *("condition", "negative", "guidance", "sigmas", "sde_steps", "latent_steps", "log_probs"),
        *("latents", "clean", "frames"),
    ),
)
CONDITIONS = Schema(name="conditions", version="1", columns=("key",), extra="tensor.")
SCORES = Schema(
    name="scores",
    version="1",
    columns=("sample", "group", "total", "error", "kept", "in_baseline", "reason"),
    extra="reward.",
)
TABLES = {schema.name: schema for schema in (TRAJECTORIES, CONDITIONS, SCORES)}


class TrajectoryWriter:
    """Gathers trajectories into record batches; see `trajectory_writer`."""

    def __init__(self, shards: ShardWriter) -> None:
        self._shards = shards
        self._waiting: list[Trajectory] = []
        self._bytes = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Append one; BadSetting when it is not shaped like the others."""
        shapes = _shapes(trajectory)
        self._shapes = self._shapes or shapes
        for name, shape in shapes.items():
            if shape != self._shapes[name]:
                raise BadSetting(
                    f"{trajectory.sample}: {name} has shape {shape}, the table's is {self._shapes[name]};"
                    " draw all samples of a round with one sampling plan"
                )
        self._waiting.append(trajectory)
        self._bytes += trajectory.frames.nbytes + trajectory.latents.nbytes + trajectory.clean.nbytes
        if self._bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._shards.write(_columns(self._waiting))
        self._waiting, self._bytes = [], 0


@contextmanager
def trajectory_writer(folder: Path, *, shard_bytes: int = SHARD_BYTES) -> Iterator[TrajectoryWriter]:
    """Writes `trajectories-NNNNN.arrow`, there once the block ends without an error; holds about 64 MiB at a time."""
    with ShardWriter(folder, TRAJECTORIES.name, TRAJECTORIES, shard_bytes=shard_bytes) as shards:
        writer = TrajectoryWriter(shards)
        yield writer
        writer.flush()


def _shapes(t: Trajectory) -> dict[str, tuple[int, ...]]:
    tensors = {"sigmas": t.sigmas, "log_probs": t.log_probs, "latents": t.latents, "clean": t.clean}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return shapes | {"frames": t.frames.shape, "sde_steps": (len(t.sde_steps),), "latent_steps": (len(t.latent_steps),)}


def _columns(rows: Sequence[Trajectory]) -> dict[str, Column]:
    return {
        "sample": [row.sample for row in rows],
        "group": [row.group for row in rows],
        "index": np.array([row.index for row in rows], np.int32),
        "prompt": [row.prompt.id for row in rows],
        "text": [row.prompt.text for row in rows],
        "metadata": [json.dumps(dict(row.prompt.metadata), ensure_ascii=False) for row in rows],
        "seed": np.array([row.seed for row in rows], np.int64),
        "policy": [row.policy for row in rows],
        "weights": [row.weights for row in rows],
        "condition": [row.condition for row in rows],
        "negative": [row.negative for row in rows],
        "guidance": np.array([row.guidance for row in rows], np.float64),
        "sigmas": torch.stack([row.sigmas for row in rows]),
        "sde_steps": np.array([row.sde_steps for row in rows], np.int32),
        "latent_steps": np.array([row.latent_steps for row in rows], np.int32),
        "log_probs": torch.stack([row.log_probs for row in rows]),
        "latents": torch.stack([row.latents for row in rows]),
        "clean": torch.stack([row.clean for row in rows]),
        "frames": np.stack([row.frames for row in rows]),
    }


def read_trajectories(folder: Path) -> Iterator[Trajectory]:
    """Every trajectory in the order written; tensors and frames lie on memory maps.

    `latents` and `clean` are read when looked at, and are not compared with what was written: `trajectory_batches` is for those.
    """
    for batch in batches(folder, TRAJECTORIES.name, TRAJECTORIES):
        yield from _trajectories(batch)


def _trajectories(batch: Batch) -> Iterator[Trajectory]:
    text = {name: batch.text(name) for name in batch.names if batch.is_text(name)}
    number = {name: batch.numpy(name) for name in ("index", "seed", "guidance", "sde_steps", "latent_steps", "frames")}
    tensor = {name: batch.tensor(name) for name in ("sigmas", "log_probs")}
    tensor |= {name: batch.tensor(name, compare=False) for name in ("latents", "clean")}
    for i in range(len(batch)):
        yield Trajectory(
            sample=text["sample"][i],
            group=text["group"][i],
            index=int(number["index"][i]),
            prompt=Prompt(id=text["prompt"][i], text=text["text"][i], metadata=json.loads(text["metadata"][i])),
            seed=int(number["seed"][i]),
            policy=text["policy"][i],
            weights=text["weights"][i],
            condition=text["condition"][i],
            negative=text["negative"][i],
            guidance=float(number["guidance"][i]),
            sigmas=tensor["sigmas"][i],
            sde_steps=tuple(number["sde_steps"][i].tolist()),
            latent_steps=tuple(number["latent_steps"][i].tolist()),
            latents=tensor["latents"][i],
            log_probs=tensor["log_probs"][i],
            clean=tensor["clean"][i],
            frames=number["frames"][i],
        )


def trajectory_batches(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """These columns, some dozen rows at a time: lists of str and arrays [N, ...] on the memory map.

    bfloat16 becomes an exact float32 copy.
    """
    for name in columns:
        if name not in TRAJECTORIES.columns:
            raise KeyError(f"trajectories have no column '{name}'; they have {', '.join(TRAJECTORIES.columns)}")
    for batch in batches(folder, TRAJECTORIES.name, TRAJECTORIES):
        yield {name: batch.column(name) for name in columns}


def count(folder: Path, name: str) -> int:
    """Rows of the table `trajectories`, `conditions` or `scores`."""
    return sum(len(batch) for batch in batches(folder, name, TABLES[name]))


class ConditionWriter:
    """Writes each condition once; see `condition_writer`."""

    def __init__(self, shards: ShardWriter) -> None:
        self._shards = shards
        self._keys = set[str]()

    def add(self, key: str, condition: Condition) -> None:
        """Append the condition of a text, unless its key was added before."""
        if key not in self._keys:
            self._keys.add(key)
            tensors = {f"tensor.{name}": torch.stack([value]) for name, value in condition.items()}
            self._shards.write({"key": [key], **tensors})


@contextmanager
def condition_writer(folder: Path) -> Iterator[ConditionWriter]:
    """Writes `conditions-NNNNN.arrow`, there once the block ends without an error; a new file where shapes change."""
    with ShardWriter(folder, CONDITIONS.name, CONDITIONS) as shards:
        yield ConditionWriter(shards)


def read_conditions(folder: Path, keys: Sequence[str] | None = None) -> dict[str, Condition]:
    """Conditions by key, all or the named ones, on memory maps; BadArtifact names a key that is not there."""
    wanted = None if keys is None else set(keys)
    found: dict[str, Condition] = {}
    for batch in batches(folder, CONDITIONS.name, CONDITIONS):
        for i, key in enumerate(batch.text("key")):
            if wanted is None or key in wanted:
                names = [name for name in batch.names if name != "key"]
                found[key] = {name.removeprefix("tensor."): batch.tensor(name)[i] for name in names}
    missing = sorted((wanted or set()) - found.keys())
    if missing:
        raise BadArtifact(f"{folder}: no condition '{missing[0]}' ({len(missing)} missing); run the rollout again")
    return found


def copy_conditions(source: Path, target: Path) -> None:
    """The same conditions in another folder: hard links where the disk allows, copies elsewhere.

    Compared with what was written first: a link to a damaged file could not be made anew.
    """
    for batch in batches(source, CONDITIONS.name, CONDITIONS):
        for name in batch.names:
            batch.column(name)
    for path in paths_of(source, CONDITIONS.name):
        try:
            os.link(path, target / path.name)
        except OSError:
            whole = target / path.name
            with full_disk_explained(whole):
                shutil.copyfile(path, temporary(whole))
                os.rename(temporary(whole), whole)


def write_scores(folder: Path, scores: Sequence[Scored]) -> None:
    """Writes `scores-00000.arrow`; BadSetting unless every sample has the same rewards."""
    names = tuple(scores[0].rewards) if scores else ()
    for row in scores:
        if tuple(row.rewards) != names:
            raise BadSetting(f"{row.sample}: rewards {tuple(row.rewards)}, others have {names}; score all alike")
    columns: dict[str, Column] = {
        "sample": [row.sample for row in scores],
        "group": [row.group for row in scores],
        "total": np.array([row.total for row in scores], np.float64),
        "error": [row.error for row in scores],
        "kept": np.array([row.kept for row in scores], np.bool_),
        "in_baseline": np.array([row.in_baseline for row in scores], np.bool_),
        "reason": [row.reason for row in scores],
    }
    for name in names:
        columns[f"reward.{name}"] = np.array([row.rewards[name] for row in scores], np.float64)
    with ShardWriter(folder, SCORES.name, SCORES) as shards:
        shards.write(columns)


def read_scores(folder: Path) -> list[Scored]:
    """Every score, in the order written."""
    return [row for batch in batches(folder, SCORES.name, SCORES) for row in _scores(batch)]


def _scores(batch: Batch) -> Iterator[Scored]:
    columns: Mapping[str, list[Any]] = {
        name: batch.text(name) if batch.is_text(name) else batch.numpy(name).tolist() for name in batch.names
    }
    rewards = [name for name in batch.names if name.startswith("reward.")]
    for i in range(len(batch)):
        yield Scored(
            rewards={name.removeprefix("reward."): columns[name][i] for name in rewards},
            **{name: columns[name][i] for name in SCORES.columns},
        )
