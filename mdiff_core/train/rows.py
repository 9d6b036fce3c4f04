"""From the pairs artifact to micro-batches on the device: which rows, by which rank, in what order, read ahead."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdiff_core import seeds
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import UpdateJob
from mdiff_core.tables import RowTable, read_conditions
from mdiff_core.types import CleanRows, Condition, Conditioning, Rows, Transitions

CACHE_BYTES = 2 * 2**30
"""Of conditions kept on a GPU."""
AHEAD = 2
"""Micro-batches read before they are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The rows of one optimizer step, over all ranks."""

    table: RowTable
    rows: np.ndarray
    """[N] int64 row numbers."""
    noise: tuple[int | str, ...]
    """What makes a row's randomness differ from that of its other visits."""

    def share(self, rank: int, world: int) -> np.ndarray:
        """Row numbers of one rank; contiguous, and fewer on the last ranks when N does not divide."""
        each = math.ceil(len(self.rows) / world)
        return self.rows[rank * each : (rank + 1) * each]

    def microbatches(self, size: int, world: int) -> int:
        """Forward passes of every rank, also of those whose rows end early: collectives need all ranks."""
        return math.ceil(len(self.share(0, world)) / size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows of one forward pass, on the device."""

    rows: Rows
    weight: Tensor
    """[B] float32: 1, or 0 for the row that a rank without rows takes part with."""
    names: tuple[str, ...]
    """[B] sample ids, for messages."""
    last: bool
    """Whether the optimizer step follows."""


def plan(pairs: Path, job: UpdateJob, position: int, kind: str) -> list[Step]:
    """The round's optimizer steps: every table once an epoch, or `train.batch` rows a step drawn from the one table."""
    tables = [RowTable(pairs, update) for update in range(RowTable.updates(pairs))]
    odd = sorted({table.kind for table in tables} - {kind})
    if odd:
        raise BadSetting(
            f"loss: '{job.loss.name}' trains on {kind} rows, but {pairs} holds {odd[0]}; choose another loss"
        )
    train = job.train
    if train.batch == 0:
        return [
            Step(table=table, rows=np.arange(len(table)), noise=("round", job.round, epoch))
            for epoch in range(train.epochs)
            for table in tables
            if len(table)
        ]
    if len(tables) != 1 or len(tables[0]) == 0:
        raise BadSetting(
            f"train.batch: {train.batch} draws from one table, {pairs} has {len(tables)}; set train.batch=0"
        )
    steps = train.epochs * train.updates_per_round
    starts = range(position, position + steps * train.batch, train.batch)
    return [_drawn(tables[0], start, train.batch, job.seed) for start in starts]


def _drawn(table: RowTable, start: int, batch: int, seed: int) -> Step:
    """Positions start..start+batch of the endless stream of shuffled passes over the table; a function of its arguments."""
    size = len(table)
    positions = np.arange(start, start + batch)
    orders = {
        int(epoch): torch.randperm(size, generator=seeds.generator(seed, "rows", int(epoch))).numpy()
        for epoch in np.unique(positions // size)
    }
    rows = np.array([orders[int(position) // size][int(position) % size] for position in positions], dtype=np.int64)
    return Step(table=table, rows=np.sort(rows), noise=("draw", start))


class Conditions:
    """The conditions of a pairs folder, each sent to the device once."""

    def __init__(self, folder: Path, device: torch.device, *, exact: bool) -> None:
        """`exact` computes in float32, which tensors recorded in less are converted to."""
        self._all, self._device, self._exact = read_conditions(folder), device, exact
        self._sent: dict[str, Condition] = {}
        self._bytes = 0

    def stacked(self, keys: Sequence[str]) -> Condition:
        """Batch first, one per key; empty for no keys. BadArtifact names a key that is not in the folder."""
        found = [self._one(key) for key in keys]
        return {name: torch.stack([one[name] for one in found]) for name in (found[0] if found else {})}

    def _one(self, key: str) -> Condition:
        if key in self._sent:
            return self._sent[key]
        if key not in self._all:
            raise BadArtifact(f"pairs: no condition '{key}' though a row names it; run the pair stage again")
        sent = {name: self._send(value) for name, value in self._all[key].items()}
        if self._device.type != "cpu":
            if self._bytes > CACHE_BYTES:
                self._sent.clear()
                self._bytes = 0
            self._sent[key] = sent
            self._bytes += sum(value.nbytes for value in sent.values())
        return sent

    def _send(self, value: Tensor) -> Tensor:
        sent = to_device(value, self._device)
        return sent.float() if self._exact and sent.is_floating_point() else sent


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Without waiting for the GPU, by way of pinned memory."""
    return value if device.type == "cpu" else value.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Micro-batches of this rank."""

    conditions: Conditions
    device: torch.device
    size: int
    """Most rows in one."""
    rank: int
    world: int

    def microbatches(self, step: Step) -> Iterator[Microbatch]:
        """Read by another thread, a little ahead of the model; the same number on every rank."""
        items = self._read(step)
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as pool:
            ahead: deque[Future[Microbatch | None]] = deque(pool.submit(next, items, None) for _ in range(AHEAD))
            while (found := ahead.popleft().result()) is not None:
                ahead.append(pool.submit(next, items, None))
                yield found

    def _read(self, step: Step) -> Iterator[Microbatch]:
        own = step.share(self.rank, self.world)
        count = step.microbatches(self.size, self.world)
        for number in range(count):
            rows = own[number * self.size : (number + 1) * self.size]
            filled = rows if len(rows) else step.rows[:1]
            columns = step.table.take(filled)
            weight = torch.full((len(filled),), float(len(rows) > 0))
            yield Microbatch(
                rows=self._rows(step, columns),
                weight=to_device(weight, self.device),
                names=tuple(columns["sample"]),
                last=number == count - 1,
            )

    def _rows(self, step: Step, columns: Mapping[str, Any]) -> Rows:
        if step.table.kind == "clean":
            fresh = [seeds.derive(int(seed), *step.noise) for seed in columns["seed"]]
            return CleanRows(
                x0=self._numbers(columns["x0"]),
                advantage=self._numbers(columns["advantage"]),
                conditioning=self._conditioning(columns),
                seed=torch.tensor(fresh, dtype=torch.int64),
            )
        numbers = ("x", "x_next", "sigma", "sigma_next", "sigma_ceiling", "log_prob", "advantage")
        return Transitions(
            **{name: self._numbers(columns[name]) for name in numbers},
            conditioning=self._conditioning(columns),
            seed=torch.from_numpy(np.array(columns["seed"], dtype=np.int64)),
        )

    def _conditioning(self, columns: Mapping[str, Any]) -> Conditioning:
        guidance = {float(value) for value in columns["guidance"]}
        if len(guidance) != 1 or len({bool(key) for key in columns["negative"]}) != 1:
            raise BadArtifact(f"pairs: rows of guidance {sorted(guidance)} in one step; draw a round with one guidance")
        negative = columns["negative"] if columns["negative"][0] else []
        return Conditioning(
            positive=self.conditions.stacked(columns["condition"]),
            negative=self.conditions.stacked(negative),
            guidance=guidance.pop(),
        )

    def _numbers(self, column: np.ndarray) -> Tensor:
        """As float32 on the device; copied, because the column may be a view of a read-only file."""
        return to_device(torch.from_numpy(np.array(column)), self.device).float()
