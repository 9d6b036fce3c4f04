"""Writing `<name>-NNNNN.arrow`, Arrow IPC files, a record batch at a time."""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from mdiff_core.errors import BadSetting
from mdiff_core.tables import digests
from mdiff_core.tables.columns import Column, encode
from mdiff_core.tables.schemas import NAME, VERSION, Schema

BATCH_BYTES = 32 * 2**20
"""About the size of a record batch: what a writer holds in memory and a reader touches at once."""

SHARD_BYTES = 256 * 2**20
"""About the size of a file, so that a reader never has more than this mapped per table."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, quota or limit on file size that is used up."""


@contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turns the error of a full disk (or quota, or file limit) into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise BadSetting(
            f"{path}: the disk is full while this table is written ({free / 2**20:.1f} MiB free;"
            f" {os.strerror(error.errno)}); free some space or set `store` to a larger disk, and run again"
        ) from error


def temporary(path: Path) -> Path:
    """Name of a file that is not whole yet."""
    return path.with_name(path.name + ".tmp")


class ShardWriter:
    """Writes one table; its files get their names together, on leaving the `with` block without an error.

    Until then they are `.tmp` files, and on an error they are removed, so no torn or half table can be read. A batch
    goes to disk while the caller makes the next, so what is passed to `write` must not change until
    `write` has returned once more.
    """

    def __init__(self, folder: Path, stem: str, schema: Schema, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._stem, self._schema, self._shard_bytes = folder, stem, schema, shard_bytes
        self._paths: list[Path] = []
        self._arrow: pa.Schema | None = None
        self._sink: pa.OSFile | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mdiff-table")
        self._writing: Future[None] | None = None
        self._syncing: list[Future[None]] = []

    def write(self, columns: Mapping[str, Column]) -> None:
        """Append one record batch; the first of a new shape or a full shard starts the next file."""
        encoded = [encode(name, column) for name, column in columns.items()]
        schema = pa.schema(
            [field for field, _ in encoded],
            metadata={
                NAME: self._schema.name.encode(),
                VERSION: self._schema.version.encode(),
                digests.KEY: digests.METHOD,
            },
        )
        self._schema.check(schema.names, str(self._folder / self._stem))
        batch = pa.RecordBatch.from_arrays([array for _, array in encoded], schema=schema)
        self._finish_batch()
        if self._sink is None or self._sink.tell() >= self._shard_bytes or self._changed(schema):
            self._end_shard()
            self._start_shard(schema)
        self._writing = self._threads.submit(_append, self._writer, batch, self._paths[-1])

    def _changed(self, schema: pa.Schema) -> bool:
        if self._arrow is None or schema.equals(self._arrow, check_metadata=True):
            return False
        if self._schema.one_shape:
            raise BadSetting(
                f"{self._folder / self._stem}: rows of different shapes or types in one {self._schema.name} table"
                f" ({_differing(self._arrow, schema)}); use one sampling plan and one type of engine a round"
            )
        return True

    def _start_shard(self, schema: pa.Schema) -> None:
        path = self._folder / f"{self._stem}-{len(self._paths):05d}.arrow"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._paths.append(path)
        with full_disk_explained(path):
            self._sink = pa.OSFile(str(temporary(path)), "wb")
            self._writer = pa.ipc.new_file(self._sink, schema)
        self._arrow = schema

    def _finish_batch(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _end_shard(self) -> None:
        if self._sink is None or self._writer is None:
            return
        with full_disk_explained(self._paths[-1]):
            self._writer.close()
            self._sink.close()
        self._sink = self._writer = None
        self._syncing.append(self._threads.submit(_sync, self._paths[-1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish_batch()
                self._end_shard()
                for syncing in self._syncing:
                    syncing.result()
                for path in self._paths:
                    os.rename(temporary(path), path)
        finally:
            self._abandon()

    def _abandon(self) -> None:
        self._threads.shutdown(wait=True)
        if self._sink is not None:
            with suppress(OSError):  # the error that brought us here is the one to report
                self._sink.close()
        for path in self._paths:
            temporary(path).unlink(missing_ok=True)


def _append(writer: pa.RecordBatchFileWriter, batch: pa.RecordBatch, path: Path) -> None:
    with full_disk_explained(path):
        writer.write_batch(batch, custom_metadata=digests.of(batch))


def _sync(path: Path) -> None:
    with full_disk_explained(path), open(temporary(path), "rb") as file:
        os.fsync(file.fileno())


def _differing(first: pa.Schema, second: pa.Schema) -> str:
    pairs = zip(first, second, strict=True)
    return ", ".join(f"{a.name}: {a.type} and {b.type}" for a, b in pairs if not a.equals(b, check_metadata=True))
