"""Folders that are being filled, each beside the place it will have as `<name>.<8 digits>.partial`.

Whoever fills one holds a lock on it (flock, which the kernel gives up for a process that dies), so that runs side by side
leave each other's alone and what a dead one left is cleared. Where a disk knows no locks, nothing is cleared.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".partial"


@contextmanager
def beside(final: Path) -> Iterator[Path]:
    """An empty folder of one's own; left as it is when the body raises, so that what is in it can be read."""
    with locked(final.parent):
        clear_abandoned(final)
        partial = another_name(final)
        partial.mkdir()
        handle = os.open(partial, os.O_RDONLY)
        take(handle)
    try:
        yield partial
    finally:
        os.close(handle)


def put_in_place(folder: Path, final: Path) -> None:
    """Rename `folder` to `final`, instead of whatever is there; call it within `locked(final.parent)` where others may do the same."""
    before = another_name(final)
    with suppress(FileNotFoundError):
        os.rename(final, before)
    os.rename(folder, final)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone among the processes that lock this folder, which is made if need be; waits for its turn."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        take(handle, wait=True)
        yield
    finally:
        os.close(handle)


def clear_abandoned(final: Path) -> None:
    """Remove what nobody is filling any more of the folders that were to become `final`."""
    for path in final.parent.iterdir():
        if path.name.startswith(f"{final.name}.") and path.name.endswith(SUFFIX):
            with suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDONLY)
                if take(handle):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(handle)


def another_name(final: Path) -> Path:
    """That no other process takes."""
    return final.with_name(f"{final.name}.{secrets.token_hex(4)}{SUFFIX}")


def take(handle: int, *, wait: bool = False) -> bool:
    """Whether the lock of this open file or folder is ours now; it is until the handle is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another's, or no locks here
        return False
    return True
