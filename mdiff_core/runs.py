"""A run's folder, `<store>/runs/<name>`: whose it is, and how to write to it wherever the store is."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from mdiff_core import workspaces
from mdiff_core.artifacts import is_local
from mdiff_core.config import digest
from mdiff_core.errors import BadSetting
from mdiff_core.observe import metrics, report
from mdiff_core.settings import RunConfig

FILES = (metrics.RUN_FILE, metrics.FILE, report.FILE)


def address(store: str, name: str) -> str:
    """Of the folder."""
    return f"{store.rstrip('/')}/runs/{name}"


@contextmanager
def opened(store: str, name: str) -> Iterator[Path]:
    """The folder on this machine; one on an object store is fetched, and written back when the body ends well."""
    uri = address(store, name)
    if is_local(uri):
        folder = Path(uri.removeprefix("file://"))
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    fs, root = fsspec.url_to_fs(uri)
    with tempfile.TemporaryDirectory(prefix="mdiff-run-") as here:
        folder = Path(here)
        for file in FILES:
            if fs.exists(f"{root}/{file}"):
                fs.get_file(f"{root}/{file}", str(folder / file))
        yield folder
        for file in FILES:
            if (folder / file).exists():
                fs.put_file(str(folder / file), f"{root}/{file}")


def check_owner(store: str, config: RunConfig, inputs: Mapping[str, str]) -> None:
    """BadSetting when the folder holds a run of another recipe, other settings or other inputs (role to address)."""
    fs, root = fsspec.url_to_fs(address(store, config.name))
    if not fs.exists(f"{root}/{metrics.RUN_FILE}"):
        return
    with opened(store, config.name) as folder:
        found = metrics.read_run(folder)
    theirs = digest(found["config"], {role: found["files"].get(role, "") for role in inputs})
    ours = digest(config.model_dump(mode="json"), inputs)
    if theirs != ours:
        raise BadSetting(
            f"name: '{config.name}' in {store} is a run of recipe '{found['config']['recipe']}' with settings {theirs}, and this one "
            f"is of '{config.recipe}' with settings {ours}; choose another name or store, or delete {address(store, config.name)}"
        )


def begin(store: str, config: RunConfig, command: str, files: Mapping[str, str]) -> None:
    """Write `run.json` and start the metrics anew: what an earlier attempt finished is found again and told again.

    A process that runs the same at this moment keeps what it has told; the two then tell the rest together.
    """
    with opened(store, config.name) as folder:
        alone = claim(folder)
        metrics.write_run(folder, name=config.name, config=config.model_dump(mode="json"), command=command, files=files)
        if alone or not (folder / metrics.FILE).exists():
            (folder / metrics.FILE).write_text("")


_CLAIMED: dict[Path, int] = {}
"""Handles of the run folders that this process writes to, each with a shared lock that ends with the process."""


def claim(folder: Path) -> bool:
    """Whether no other living process on this machine has begun the run in `folder`; this one has from now on."""
    if folder in _CLAIMED:
        os.close(_CLAIMED.pop(folder))
    handle = _CLAIMED[folder] = os.open(folder, os.O_RDONLY)
    alone = workspaces.take(handle)
    with suppress(OSError):  # no locks here
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return alone
