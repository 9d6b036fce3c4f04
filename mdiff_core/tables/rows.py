"""The table a round is trained on: `rows-UUU-NNNNN.arrow` holds the rows of its optimizer step U."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.tables.columns import Column
from mdiff_core.tables.reading import Batch, Shard, paths_of
from mdiff_core.tables.schemas import Schema
from mdiff_core.tables.writing import SHARD_BYTES, ShardWriter

_SHARED = ("sample", "group", "advantage", "condition", "negative", "guidance", "seed")

KINDS = {
    "transitions": Schema(
        name="transitions",
        version="1",
        columns=(*_SHARED, "step", "sigma", "sigma_next", "sigma_ceiling", "x", "x_next", "log_prob"),
        one_shape=True,
    ),
    "clean": Schema(name="clean", version="1", columns=(*_SHARED, "x0"), one_shape=True),
    "samples": Schema(name="samples", version="1", columns=(*_SHARED, "sigmas", "x0"), one_shape=True),
    "preferences": Schema(
        name="preferences", version="1", columns=(*_SHARED, "sigmas", "better", "worse"), one_shape=True
    ),
}
"""Kind of rows, as a loss names it, to their table."""


class RowWriter:
    """Appends rows; see `row_writer`."""

    def __init__(self, shards: ShardWriter) -> None:
        self._shards = shards
        self.rows = 0

    def add_batch(self, columns: Mapping[str, Column]) -> None:
        """Append N rows as one record batch, every column of the kind: texts, numbers [N], tensors [N, *shape].

        It is written while you make the next one, so its arrays must stay as they are until `add_batch` returns again.
        """
        sizes = {len(column) for column in columns.values()}
        if len(sizes) != 1:
            raise BadSetting(f"rows: columns of different lengths {sorted(sizes)}; give one value a row in each")
        self._shards.write(columns)
        self.rows += sizes.pop()


@contextmanager
def row_writer(folder: Path, update: int, kind: str, *, shard_bytes: int = SHARD_BYTES) -> Iterator[RowWriter]:
    """Writes the rows of optimizer step `update`, there once the block ends without an error."""
    with ShardWriter(folder, _stem(update), KINDS[kind], shard_bytes=shard_bytes) as shards:
        yield RowWriter(shards)


class RowTable:
    """The rows of one optimizer step, opened by all ranks; each takes its own part."""

    def __init__(self, folder: Path, update: int) -> None:
        shards = [Shard(path, KINDS) for path in paths_of(folder, _stem(update))]
        kinds = sorted({shard.table for shard in shards})
        if len(kinds) > 1:
            raise BadArtifact(f"{folder}: {_stem(update)} mixes {' and '.join(kinds)}; run the pair stage again")
        self.kind = kinds[0]
        self._batches = [batch for shard in shards for batch in shard.batches()]
        self._starts = np.cumsum([0, *(len(batch) for batch in self._batches)]).tolist()

    @staticmethod
    def updates(folder: Path) -> int:
        """Optimizer steps in the folder; BadArtifact when one is missing between others."""
        names = [re.match(r"rows-(\d{3,})-", path.name) for path in folder.glob("rows-*.arrow")]
        found = {int(match[1]) for match in names if match}
        if found != set(range(len(found))) or not found:
            raise BadArtifact(f"{folder}: rows of steps {sorted(found)}, not of 0, 1, ...; run the pair stage again")
        return len(found)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: np.ndarray) -> dict[str, Any]:
        """Rows of these numbers [n], in their order: lists of str and arrays [n, ...]; neighbours in a record batch are not copied.

        bfloat16 becomes an exact float32 copy. IndexError when there are no such rows.
        """
        if not len(rows) or rows.min() < 0 or rows.max() >= len(self):
            raise IndexError(f"rows {rows} of {len(self)}")
        if (np.diff(rows) < 0).any():
            order = np.argsort(rows, kind="stable")
            back = np.argsort(order)
            return {name: _picked(column, back) for name, column in self.take(rows[order]).items()}
        parts = list(self._parts(rows))
        names = KINDS[self.kind].columns
        return {name: self._small[name].take(rows) if name in self._small else _joined(name, parts) for name in names}

    @cached_property
    def _small(self) -> dict[str, "_Whole"]:
        """The columns of texts and plain numbers, read whole: a step draws its rows from all over the table."""
        first = self._batches[0]
        return {
            name: _Whole([batch.column(name) for batch in self._batches])
            for name in KINDS[self.kind].columns
            if first.is_small(name)
        }

    def _parts(self, rows: np.ndarray) -> Iterator[tuple[Batch, Any]]:
        """Each record batch with rows among those asked for, and how to index them in it."""
        cuts = np.searchsorted(rows, self._starts)
        for number, batch in enumerate(self._batches):
            if cuts[number] < cuts[number + 1]:
                inside = rows[cuts[number] : cuts[number + 1]] - self._starts[number]
                neighbours = inside[-1] - inside[0] == len(inside) - 1
                yield batch, slice(inside[0], inside[-1] + 1) if neighbours else inside


class _Whole:
    """A column of all record batches in memory."""

    def __init__(self, parts: list[np.ndarray | list[str]]) -> None:
        is_text = isinstance(parts[0], list)
        self._values = [text for part in parts for text in part] if is_text else np.concatenate(parts)

    def take(self, rows: np.ndarray) -> Any:
        return _picked(self._values, rows)


def _picked(column: Any, rows: np.ndarray) -> Any:
    return column[rows] if isinstance(column, np.ndarray) else [column[row] for row in rows.tolist()]


def _joined(name: str, parts: list[tuple[Batch, Any]]) -> np.ndarray:
    found = [batch.numpy(name, index) for batch, index in parts]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _stem(update: int) -> str:
    return f"rows-{update:03d}"
