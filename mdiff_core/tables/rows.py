"""The table a round is trained on: `rows-UUU-NNNNN.arrow` holds the rows of its optimizer step U."""

import bisect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    """The rows of one optimizer step, opened by all ranks; each slices its own part."""

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

    def slice(self, start: int, stop: int) -> dict[str, Any]:
        """Rows start..stop: lists of str and arrays [n, ...]; zero-copy within a record batch, else a copy.

        bfloat16 becomes an exact float32 copy. IndexError when there are no such rows.
        """
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"rows {start}..{stop} of {len(self)}")
        parts = list(self._parts(start, stop))
        names = KINDS[self.kind].columns
        return {name: _joined([batch.column(name)[i:j] for batch, i, j in parts]) for name in names}

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Batch, int, int]]:
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            yield self._batches[number], start - first, end - first
            start, number = end, number + 1


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [text for part in parts for text in part]


def _stem(update: int) -> str:
    return f"rows-{update:03d}"
