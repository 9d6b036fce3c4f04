"""The train state between rounds: what an optimizer needs to go on as if it had never stopped.

A folder with the optimizer's moments (and the frozen start policy) as safetensors, read through torch.distributed.checkpoint so
that each rank reads its shards alone, and `state.json`, written last. Weights and their averages are in the policy artifact
that was written with it, and the state refuses any other. See docs/decisions/train-state.md.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mdiff_core.artifacts import write_durably
from mdiff_core.errors import BadArtifact, Damaged
from mdiff_core.train.shard import whole

STATE = "state.json"
FORMAT = 1
FILE_BYTES = 4 * 2**30
"""About the size of a file; also what rank 0 holds in memory while it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The numbers of a state; its tensors stay in the files."""

    policy: str = ""
    """Checksum of the policy written with it; empty before the first step."""
    steps: int = 0
    """Optimizer steps taken: where schedule, Adam's bias correction and EMA stand."""
    position: int = 0
    """Rows drawn so far from a data set that is sampled (`train.batch`)."""
    scaler: dict[str, Any] | None = None
    """Of fp16."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 by name."""


def empty_state(folder: Path) -> None:
    """The state before the first step."""
    _seal(folder, TrainState())


def write(folder: Path, state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    """Save on rank 0; all ranks call, with the same names in the same order. `files` is filled in here."""
    pending: dict[str, Tensor] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="state") as pool:
        written: list[tuple[str, Future[str]]] = []
        for name, tensor in tensors.items():
            full = whole(tensor)
            if full is not None:
                pending[name] = full
            if sum(part.nbytes for part in pending.values()) >= FILE_BYTES:
                written.append(_flush(folder, len(written), pending, pool))
        if pending:
            written.append(_flush(folder, len(written), pending, pool))
        files = {name: digest.result() for name, digest in written}
    if dist.get_rank() == 0:
        _seal(folder, TrainState(**{**asdict(state), "files": files}))


def read(folder: Path, verify: bool = True) -> TrainState:
    """The numbers; BadArtifact when the folder is no finished state or, with `verify`, a file is not as written."""
    path = folder / STATE
    try:
        found = json.loads(path.read_bytes())
        if found.pop("format") != FORMAT:
            raise BadArtifact(f"{path}: not of format {FORMAT}; use the mdiff that wrote it")
        state = TrainState(**found)
    except FileNotFoundError:
        raise BadArtifact(
            f"{folder}: no {STATE}, so this is not a finished train state; run the update again"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{path} cannot be read ({error})", path, "run the update that wrote it again") from error
    wrong = [name for name in state.files if not (folder / name).is_file()]
    if verify and not wrong:
        with ThreadPoolExecutor(4) as pool:
            digests = zip(state.files, pool.map(_sha256, (folder / name for name in state.files)), strict=True)
            wrong = [name for name, digest in digests if state.files[name] != digest]
    for name in wrong:
        raise Damaged(f"{folder / name}: missing or changed since it was written", folder / name)
    return state


def names(folder: Path, state: TrainState) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the state, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for file in state.files:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
        except SafetensorError as error:
            raise Damaged(f"{folder / file}: not a safetensors file ({error})", folder / file) from error
    return found


def load(folder: Path, state: TrainState, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `into`, each rank its own shards; BadArtifact unless they are the state's, name by name."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as read_shards

    stored = names(folder, state)
    odd = sorted(set(stored) ^ set(into)) or sorted(name for name in stored if stored[name] != tuple(into[name].shape))
    if odd:
        raise BadArtifact(f"{folder}: train state of another model or method, see {odd[0]}; start from an empty state")
    if into:
        reader = HuggingFaceStorageReader(str(folder))
        with warnings.catch_warnings():
            # Each rank reads by itself, from files that all have; that this was meant is what it warns about.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            read_shards(dict(into), storage_reader=reader, no_dist=True)


def _flush(folder: Path, number: int, pending: dict[str, Tensor], pool: ThreadPoolExecutor) -> tuple[str, Future[str]]:
    """Write and forget; `pool` syncs and digests. One metadata key at most, as several would be written in any order."""
    path = folder / f"state-{number:05d}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(pending, path, metadata={"format": "pt"})
    pending.clear()
    return path.name, pool.submit(_sealed, path)


def _seal(folder: Path, state: TrainState) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / STATE, json.dumps({"format": FORMAT, **asdict(state)}, indent=1).encode())


def _sealed(path: Path) -> str:
    """Put the file on the disk for good; its sha256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _sha256(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
