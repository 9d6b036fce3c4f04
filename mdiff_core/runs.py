"""A run's folder, `<store>/runs/<name>`: whose it is, and how to write to it wherever the store is."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import fsspec

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
    """Write `run.json` and start the metrics anew: what an earlier attempt finished is found again and told again."""
    with opened(store, config.name) as folder:
        metrics.write_run(folder, name=config.name, config=config.model_dump(mode="json"), command=command, files=files)
        (folder / metrics.FILE).write_text("")
