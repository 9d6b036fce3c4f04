"""From the pairs artifact to micro-batches on the device: which rows, by which rank, in what order, read ahead."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdiff_core import seeds
from mdiff_core.contracts import Loss
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import UpdateJob
from mdiff_core.tables import RowTable, read_conditions
from mdiff_core.types import CleanRows, Condition, Conditioning, Preferences, Rows, Samples, Transitions

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
    visits: np.ndarray
    """[N] int64: how often the row came before in this step, each time with another sigma of its sample's schedule."""
    noise: tuple[int | str, ...]
    """What makes a row's randomness another one than in other steps."""

    def share(self, rank: int, world: int) -> range:
        """Positions in `rows` of one rank; contiguous, and fewer on the last ranks when N does not divide."""
        each = math.ceil(len(self.rows) / world)
        return range(len(self.rows))[rank * each : (rank + 1) * each]

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


def plan(pairs: Path, job: UpdateJob, position: int, loss: Loss) -> list[Step]:
    """The round's optimizer steps: every table once an epoch, or `train.batch` rows a step drawn from the one table."""
    tables = [RowTable(pairs, update) for update in range(RowTable.updates(pairs))]
    odd = sorted({table.kind for table in tables} - {loss.rows})
    if odd:
        raise BadSetting(
            f"loss: '{job.loss.name}' trains on {loss.rows} rows, but {pairs} holds {odd[0]}; choose another loss"
        )
    train = job.train
    if train.batch == 0:
        return [
            step_of(table, np.arange(len(table)), ("round", job.round, epoch), loss)
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
    return [
        step_of(tables[0], _drawn(len(tables[0]), start, train.batch, job.seed), ("draw", start), loss)
        for start in starts
    ]


def step_of(table: RowTable, rows: np.ndarray, noise: tuple[int | str, ...], loss: Loss) -> Step:
    """A step with `rows`, each as often as the loss trains a sample of that schedule: int(steps * share), at least once."""
    share = loss.needs.timesteps
    visits = max(1, int((table.take(np.arange(1))["sigmas"].shape[1] - 1) * share)) if share else 1
    return Step(table=table, rows=np.tile(rows, visits), visits=np.repeat(np.arange(visits), len(rows)), noise=noise)


def _drawn(size: int, start: int, batch: int, seed: int) -> np.ndarray:
    """Positions start..start+batch of the endless stream of shuffled passes over `size` rows; a function of its arguments."""
    positions = np.arange(start, start + batch)
    orders = {
        int(epoch): torch.randperm(size, generator=seeds.generator(seed, "rows", int(epoch))).numpy()
        for epoch in np.unique(positions // size)
    }
    rows = np.array([orders[int(position) // size][int(position) % size] for position in positions], dtype=np.int64)
    return np.sort(rows)


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
            mine = own[number * self.size : (number + 1) * self.size]
            filled = mine or range(1)
            columns = step.table.take(step.rows[filled])
            weight = torch.full((len(filled),), float(len(mine) > 0))
            yield Microbatch(
                rows=self._rows(step, columns, step.visits[filled]),
                weight=to_device(weight, self.device),
                names=tuple(columns["sample"]),
                last=number == count - 1,
            )

    def _rows(self, step: Step, columns: Mapping[str, Any], visits: np.ndarray) -> Rows:
        makers: dict[str, Callable[[Step, Mapping[str, Any], np.ndarray], Rows]] = {
            "transitions": self._transitions,
            "clean": self._clean,
            "samples": self._noised,
            "preferences": self._noised,
        }
        make = makers[step.table.kind]
        return make(step, columns, visits)

    def _clean(self, step: Step, columns: Mapping[str, Any], visits: np.ndarray) -> CleanRows:
        fresh = [seeds.derive(int(seed), *step.noise) for seed in columns["seed"]]
        return CleanRows(
            x0=self._numbers(columns["x0"]),
            advantage=self._numbers(columns["advantage"]),
            conditioning=self._conditioning(columns),
            seed=torch.tensor(fresh, dtype=torch.int64),
        )

    def _noised(self, step: Step, columns: Mapping[str, Any], visits: np.ndarray) -> Samples | Preferences:
        """Each visit of a row has another sigma of its schedule, in an order drawn for the row, and another seed."""
        own = [seeds.derive(int(seed), *step.noise) for seed in columns["seed"]]
        fresh = [seeds.derive(seed, "visit", int(visit)) for seed, visit in zip(own, visits, strict=True)]
        shared: dict[str, Any] = {
            "sigma": self._numbers(visited(columns["sigmas"], own, visits)),
            "conditioning": self._conditioning(columns),
            "seed": torch.tensor(fresh, dtype=torch.int64),
        }
        if step.table.kind == "samples":
            return Samples(x0=self._numbers(columns["x0"]), advantage=self._numbers(columns["advantage"]), **shared)
        better, worse = (self._numbers(columns[name]) for name in ("better", "worse"))
        return Preferences(better=better, worse=worse, **shared)

    def _transitions(self, step: Step, columns: Mapping[str, Any], visits: np.ndarray) -> Transitions:
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


def visited(sigmas: np.ndarray, order_seeds: Sequence[int], visits: np.ndarray) -> np.ndarray:
    """[B] of the schedules [B, T+1], which end at 0: each row's visits go through its T sigmas in an order of its own."""
    steps = sigmas.shape[1] - 1
    orders = [torch.randperm(steps, generator=seeds.generator(seed, "timesteps")) for seed in order_seeds]
    picked: np.ndarray = sigmas[
        np.arange(len(visits)), [int(order[i]) for order, i in zip(orders, visits, strict=True)]
    ]
    return picked
