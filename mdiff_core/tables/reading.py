"""Reading `<name>-NNNNN.arrow`, Arrow IPC files, through memory maps."""

import math
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from mdiff_core.errors import BadArtifact
from mdiff_core.tables.columns import as_numpy, as_tensor, number_type, shape_of
from mdiff_core.tables.schemas import NAME, VERSION, Schema


class Shard:
    """One file, memory-mapped. Its arrays share the map and keep it alive; writing to them stays private."""

    def __init__(self, path: Path, schemas: Mapping[str, Schema]) -> None:
        try:
            with open(path, "rb") as file:
                # a private writable map: torch warns about read-only arrays, and nobody can change the file through it
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            buffer = pa.py_buffer(self._map)
            reader = pa.ipc.open_file(pa.BufferReader(buffer))
        except (OSError, ValueError) as error:
            raise BadArtifact(f"{path}: not a whole Arrow file ({error}); run its stage again") from error
        self._base = buffer.address
        found = reader.schema.metadata or {}
        self.table, version = found.get(NAME, b"none").decode(), found.get(VERSION, b"none").decode()
        if self.table not in schemas or schemas[self.table].version != version:
            known = " or ".join(f"'{schema.name}' version '{schema.version}'" for schema in schemas.values())
            raise BadArtifact(
                f"{path}: holds table '{self.table}' version '{version}', not {known}; run its stage again"
            )
        schemas[self.table].check(reader.schema.names, str(path))
        self._reader = reader

    def batches(self) -> Iterator["Batch"]:
        """In order. Not kept here: a cycle would hold the map until the garbage collector runs."""
        return (Batch(self, self._reader.get_batch(i)) for i in range(self._reader.num_record_batches))

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
    """A record batch of a shard: columns as arrays and tensors on its memory map."""

    def __init__(self, shard: Shard, batch: pa.RecordBatch) -> None:
        self._shard, self._batch = shard, batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return list(self._batch.schema.names)

    def text(self, name: str) -> list[str]:
        """A text column."""
        texts: list[str] = self._batch.column(name).to_pylist()
        return texts

    def numpy(self, name: str) -> np.ndarray:
        """[N] numbers or [N, *shape] tensors, zero-copy (bfloat16: a float32 copy)."""
        field = self._batch.schema.field(name)
        return as_numpy(field, self._raw(field))

    def tensor(self, name: str) -> Tensor:
        """[N] or [N, *shape] in the type that was written, zero-copy."""
        field = self._batch.schema.field(name)
        return as_tensor(field, self._raw(field))

    def column(self, name: str) -> np.ndarray | list[str]:
        """A column as what it is."""
        return self.text(name) if self.is_text(name) else self.numpy(name)

    def is_text(self, name: str) -> bool:
        """Whether the column holds text."""
        return bool(pa.types.is_string(self._batch.schema.field(name).type))

    def _raw(self, field: pa.Field) -> np.ndarray:
        return self._shard.numbers(self._batch.column(field.name), number_type(field), shape_of(field))


def paths_of(folder: Path, stem: str) -> list[Path]:
    """The table's files in order; BadArtifact when there is none or one is missing between others."""
    pattern = re.compile(re.escape(stem) + r"-(\d{5})\.arrow")
    found = {int(match[1]): path for path in folder.glob(f"{stem}-*.arrow") if (match := pattern.fullmatch(path.name))}
    if not found:
        raise BadArtifact(f"{folder}: no {stem}-*.arrow, so the table is not there; run the stage that writes it")
    for number in range(max(found) + 1):
        if number not in found:
            raise BadArtifact(f"{folder}: {stem}-{number:05d}.arrow is missing; run the stage that writes it again")
    return [found[number] for number in sorted(found)]


def batches(folder: Path, stem: str, schema: Schema) -> Iterator[Batch]:
    """The table's record batches, to be gone through in order; no more than two files are mapped at a time."""
    for path in paths_of(folder, stem):
        shard = Shard(path, {schema.name: schema})
        shard.expect_sequential_reads()
        yield from shard.batches()
