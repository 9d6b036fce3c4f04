"""How damage to a table is found: beside each record batch stand the digests of its columns, compared when a column is looked at.

XXH3 rather than a cryptographic hash: it is against disks and cables, not against people, and keeps up with memory.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from mdiff_core.tables.columns import DTYPE, number_type, shape_of

KEY, METHOD = b"mdiff.digest", b"xxh3_64"
"""In a file's schema metadata; files without it are older than digests and are read as they are."""
BYTES = 8
"""Of one digest."""


def of(batch: pa.RecordBatch) -> dict[bytes, bytes]:
    """Digests of each column: one a row of tensors, so that a few rows can be compared alone, else one of the whole column."""
    found = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        seed = seed_of(field)
        found[field.name.encode()] = b"".join(xxh3_64_digest(piece, seed) for piece in pieces(field, array))
    return found


def damaged(
    field: pa.Field, array: pa.Array, written: Mapping[bytes, bytes], rows: Sequence[int] | None = None
) -> bool:
    """Whether the column, or these rows of one of tensors, is not as it was written; raises what numpy does at broken bytes."""
    expected, seed = written.get(field.name.encode(), b""), seed_of(field)
    by_row = shape_of(field) != ()
    if array.null_count or len(expected) != BYTES * (len(array) if by_row else 1):
        return True
    chosen = rows if by_row and rows is not None else range(len(expected) // BYTES)
    there = pieces(field, array, chosen)
    return any(
        xxh3_64_digest(piece, seed) != expected[BYTES * i : BYTES * (i + 1)]
        for i, piece in zip(chosen, there, strict=True)
    )


def seed_of(field: pa.Field) -> int:
    """So that a column with another's name, type or shape is a changed one."""
    meaning = (field.metadata or {}).get(DTYPE, b"").decode(errors="replace")
    return int(xxh3_64_intdigest(f"{field.name} {field.type} {meaning}".encode()))


def pieces(field: pa.Field, array: pa.Array, rows: Sequence[int] | None = None) -> Iterator[memoryview | bytes]:
    """What is digested: the bytes of these rows of tensors (all if None), of all numbers, or the ends and letters of all texts."""
    buffers, count = array.buffers(), len(array)
    if pa.types.is_string(field.type):
        ends = memoryview(buffers[1] or b"")[: 4 * (count + 1)]
        letters = memoryview(buffers[2] or b"")[: np.frombuffer(ends, np.int32)[-1] if count else 0]
        yield b"".join([ends, letters])
        return
    numbers = memoryview(buffers[-1] or b"")
    size = number_type(field).itemsize * int(np.prod(shape_of(field), dtype=np.int64))
    if not shape_of(field):
        yield numbers[: size * count]
        return
    for row in range(count) if rows is None else rows:
        yield numbers[size * row : size * (row + 1)]
