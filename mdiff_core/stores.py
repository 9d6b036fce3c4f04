"""Where artifacts live: a folder or an object store, found usable before anything is made."""

import os
import re
from pathlib import Path

import fsspec

from mdiff_core.errors import BadSetting


def settled(store: str) -> str:
    """The store's address, absolute if it is a folder; BadSetting when nothing can be written there, or nobody answers."""
    found = settled_address(store)
    return reachable(found) if "://" in found else found


def settled_address(store: str) -> str:
    """Absolute if it is a folder that one may write to."""
    protocol, separator, _ = store.partition("://")
    try:
        if "\0" in store:
            raise ValueError("a zero byte in it")
        if separator and protocol != "file":
            return store
        folder = Path(store.removeprefix("file://")).expanduser().absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        raise BadSetting(f"store: '{store}' is no folder or URI that can be used ({error}); name another") from error
    if re.match(r"[a-z0-9]+:/", store) and not separator:
        raise BadSetting(
            f"store: '{store}' has one slash after its colon, where a URI has two; write {protocol.replace(':/', '://', 1)}"
        )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BadSetting(
            f"store: '{store}' cannot be written, as {there} is no folder that one may write to; name another"
        )
    return str(folder)


def reachable(store: str) -> str:
    """The URI itself; BadSetting when its object store does not answer."""
    try:
        fs, root = fsspec.url_to_fs(store)
        fs.exists(root)
    except Exception as error:
        raise BadSetting(
            f"store: '{store}' cannot be reached ({said(error)}); set the credentials and endpoint of that store, or name another"
        ) from error
    return store


def said(error: BaseException) -> str:
    """The first line of what was at the root of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).rpartition("Original exception:")[2]  # Flyte's way to name a cause
    return next((line.strip() for line in text.splitlines() if line.strip()), "") or type(error).__name__
