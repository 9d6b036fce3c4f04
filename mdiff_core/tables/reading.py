"""Reading `<name>-NNNNN.arrow`, Arrow IPC files, through memory maps."""

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from mdiff_core.errors import BadArtifact, Damaged
from mdiff_core.tables import digests
from mdiff_core.tables.columns import as_numpy, as_tensor, number_type, shape_of
from mdiff_core.tables.schemas import NAME, VERSION, Schema

UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, NotImplementedError),
    *(OverflowError, MemoryError, struct.error, pa.ArrowException),
)
"""What Arrow and numpy raise at bytes that are not what they should be."""


@contextmanager
def read_from(path: Path, what: str) -> Iterator[None]:
    """Turns what Arrow raises into the sentence that this part of the file cannot be read."""
    try:
        yield
    except BadArtifact:
        raise
    except UNREADABLE as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if isinstance(error, MemoryError) or getattr(error, "errno", None):  # the machine's fault, not the file's
            raise BadArtifact(f"{path}: {what} ({said}); see to that, and run again") from error
        raise damage(path, f"{what} ({said})") from error


def damage(path: Path, what: str) -> Damaged:
    """The error for a file that cannot be used."""
    return Damaged(f"{path}: {what}", path)


class Shard:
    """One file, memory-mapped. Its arrays share the map and keep it alive; writing to them stays private."""

    def __init__(self, path: Path, schemas: Mapping[str, Schema]) -> None:
        with read_from(path, "not a whole Arrow file"):
            with open(path, "rb") as file:
                # a private writable map: torch warns about read-only arrays, and nobody can change the file through it
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            buffer = pa.py_buffer(self._map)
            self._reader = pa.ipc.open_file(pa.BufferReader(buffer))
            found, names = self._reader.schema.metadata or {}, self._reader.schema.names
            self.table, version = found.get(NAME, b"none").decode(), found.get(VERSION, b"none").decode()
        self._base, self.path, self._digested = buffer.address, path, digests.KEY in found
        if self.table not in schemas or schemas[self.table].version != version:
            known = " or ".join(f"'{schema.name}' version '{schema.version}'" for schema in schemas.values())
            raise damage(path, f"holds table '{self.table}' version '{version}', not {known}")
        try:
            schemas[self.table].check(names, str(path))
        except BadArtifact as error:
            raise Damaged(str(error).removesuffix("; run its stage again"), path) from None

    def batches(self) -> Iterator["Batch"]:
        """In order. Not kept here: a cycle would hold the map until the garbage collector runs."""
        return (self._batch(i) for i in range(self._reader.num_record_batches))

    def _batch(self, number: int) -> "Batch":
        with read_from(self.path, f"record batch {number} cannot be read"):
            batch, written = self._reader.get_batch_with_custom_metadata(number)
            batch.validate()
            return Batch(self, batch, dict(written or {}) if self._digested else None)

    def numbers(self, array: pa.Array, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The column's numbers as [N, *shape], zero-copy."""
        whole = (len(array), *shape)
        if 0 in whole:
            return np.empty(whole, dtype)
        offset = array.buffers()[-1].address - self._base
        return np.frombuffer(self._map, dtype, math.prod(whole), offset).reshape(whole)

    def expect_sequential_reads(self) -> None:
        """Tell the kernel to read ahead, but not into what lies between, such as the frames that nobody looks at."""
        self._map.madvise(mmap.MADV_SEQUENTIAL)


class Batch:
    """A record batch of a shard: columns as arrays and tensors on its memory map, each compared with its digest at first sight."""

    def __init__(self, shard: Shard, batch: pa.RecordBatch, written: Mapping[bytes, bytes] | None) -> None:
        """`written` is None for a file that has no digests."""
        self._shard, self._batch, self._written = shard, batch, written
        self._whole = set[str]()

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._batch.schema.names)

    def text(self, name: str) -> list[str]:
        """A text column."""
        self._compare(name)
        with self._reading(name):
            texts: list[str] = self._batch.column(name).to_pylist()
            return texts

    def numpy(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """[N] numbers or [N, *shape] tensors, zero-copy (bfloat16: a float32 copy); of all rows or of these, by position."""
        self._compare(name, rows)
        with self._reading(name):
            field = self._batch.schema.field(name)
            found = as_numpy(field, self._raw(field))
            return found if rows is None else found[rows]

    def tensor(self, name: str, *, compare: bool = True) -> Tensor:
        """[N] or [N, *shape] in the type that was written, zero-copy; not `compare` does not look at it yet."""
        if compare:
            self._compare(name)
        with self._reading(name):
            field = self._batch.schema.field(name)
            return as_tensor(field, self._raw(field))

    def column(self, name: str) -> np.ndarray | list[str]:
        """A column as what it is."""
        return self.text(name) if self.is_text(name) else self.numpy(name)

    def is_text(self, name: str) -> bool:
        """Whether the column holds text."""
        return bool(pa.types.is_string(self._batch.schema.field(name).type))

    def is_small(self, name: str) -> bool:
        """Whether the column holds texts or plain numbers, not tensors."""
        return shape_of(self._batch.schema.field(name)) == ()

    def _reading(self, name: str) -> AbstractContextManager[None]:
        return read_from(self._shard.path, f"column '{name}' cannot be read")

    def _raw(self, field: pa.Field) -> np.ndarray:
        return self._shard.numbers(self._batch.column(field.name), number_type(field), shape_of(field))

    def _compare(self, name: str, rows: slice | np.ndarray | None = None) -> None:
        """Damaged unless the column, or these rows of it, are as they were written."""
        if self._written is None or name in self._whole:
            return
        with self._reading(name):
            chosen = None if rows is None else np.arange(len(self))[rows].tolist()
            field, array = self._batch.schema.field(name), self._batch.column(name)
            wrong = digests.damaged(field, array, self._written, chosen)
        if wrong:
            raise damage(self._shard.path, f"column '{name}' is not as it was written, the file was changed or damaged")
        if rows is None:
            self._whole.add(name)


def paths_of(folder: Path, stem: str) -> list[Path]:
    """The table's files in order; BadArtifact when there is none or one is missing between others."""
    pattern = re.compile(re.escape(stem) + r"-(\d{5})\.arrow")
    found = {int(match[1]): path for path in folder.glob(f"{stem}-*.arrow") if (match := pattern.fullmatch(path.name))}
    if not found:
        raise BadArtifact(f"{folder}: no {stem}-*.arrow, so the table is not there; run the stage that writes it")
    for number in range(max(found) + 1):
        if number not in found:
            missing = folder / f"{stem}-{number:05d}.arrow"
            raise Damaged(f"{folder}: {missing.name} is missing", missing)
    return [found[number] for number in sorted(found)]


def batches(folder: Path, stem: str, schema: Schema) -> Iterator[Batch]:
    """The table's record batches, to be gone through in order; no more than two files are mapped at a time."""
    for path in paths_of(folder, stem):
        shard = Shard(path, {schema.name: schema})
        shard.expect_sequential_reads()
        yield from shard.batches()
