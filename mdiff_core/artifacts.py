"""Stages meet only through artifacts: folders whose address is the digest of what made them.

`<store>/<stage>/<key>/` holds the files and, written last, `manifest.json`. A key is the sha256 of the stage's
version, its job and the keys of its inputs, so a re-run, a relaunch or another run with the same settings finds
the finished artifact, and a folder without a manifest is never mistaken for one. Local folders appear by one
rename; on object stores the manifest is the last upload.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from mdiff_core import workspaces
from mdiff_core.errors import BadArtifact, Damaged

MANIFEST = "manifest.json"
SET_ASIDE = "manifest.damaged.json"
"""What the manifest of an artifact is called that turned out to be damaged, and so is none any more."""
AGAIN = "run the same command again, which makes it anew (on a cluster with --overwrite-cache)"
SMALL = 2**20
"""Bytes up to which a file's digest is in the manifest. Larger ones are tables and weights, which have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of a finished artifact."""

    stage: str
    key: str
    inputs: Mapping[str, str]
    """Role to key of the artifact read."""
    job: Mapping[str, Any]
    sizes: Mapping[str, int]
    """Bytes per file, by relative path."""
    metrics: Mapping[str, Any]
    seconds: float
    """Wall-clock seconds the stage took; not part of the key."""
    finished: float = 0.0
    """Seconds since 1970; not part of the key."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of every small file, by relative path."""

    def to_json(self) -> str:
        """Indented: people read it."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def key_of(stage: str, version: str, job_json: str, inputs: Mapping[str, str]) -> str:
    """64 hex digits naming the result before it exists."""
    text = json.dumps([stage, version, job_json, sorted(inputs.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(uri: str) -> Manifest:
    """Manifest of the artifact at `uri` (folder or fsspec URI); BadArtifact when missing, broken, a file is short or a small one,
    on this machine, is changed."""
    fs, root = fsspec.url_to_fs(str(uri))
    try:
        found = json.loads(fs.cat_file(f"{root}/{MANIFEST}"))
        manifest = Manifest(**found)
        if not all(isinstance(part, dict) for part in (manifest.sizes, manifest.metrics, manifest.sha256)):
            raise TypeError("sizes, metrics and sha256 are not objects")
    except FileNotFoundError:
        raise BadArtifact(
            f"{uri}: no {MANIFEST}, so this is not a finished artifact; run the stage that makes it again"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise BadArtifact(f"{uri}/{MANIFEST} cannot be read ({error}); {AGAIN}") from error
    for name, size in manifest.sizes.items():
        if not fs.exists(f"{root}/{name}") or fs.size(f"{root}/{name}") != size:
            raise BadArtifact(f"{uri}/{name}: missing or not the {size} bytes its manifest says; {AGAIN}")
    for name, digest in manifest.sha256.items() if is_local(uri) else ():
        if hashlib.sha256(Path(root, name).read_bytes()).hexdigest() != digest:
            raise BadArtifact(f"{uri}/{name}: changed since it was written; {AGAIN}")
    return manifest


def address(store: str, stage: str, key: str) -> str:
    """Where the artifact with `key` is, or will be."""
    return f"{store.rstrip('/')}/{stage}/{key[:24]}"


def find(uri: str) -> Manifest | None:
    """The finished artifact's manifest, or None when it has to be made (absent, or left broken)."""
    try:
        return read_manifest(uri)
    except BadArtifact:
        return None


def is_local(uri: str) -> bool:
    """Whether the artifact is a folder of this machine."""
    return "://" not in uri or uri.startswith("file://")


@contextmanager
def workspace(uri: str) -> Iterator[Path]:
    """An empty folder to fill; beside its final place when that is local, so that finishing is one rename.

    Left as it is when the body raises (partial output stays readable) and cleared by the next attempt.
    """
    if is_local(uri):
        with workspaces.beside(local_path(uri)) as partial:
            yield partial
        return
    with tempfile.TemporaryDirectory(prefix="mdiff-") as folder_name:
        yield Path(folder_name)


def finish(folder: Path, uri: str, manifest: Manifest) -> None:
    """Publish a filled workspace at `uri`; the manifest is what makes it exist."""
    if not is_local(uri):
        fs, root = fsspec.url_to_fs(uri)
        for name in manifest.sizes:
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            fs.put_file(str(folder / name), f"{root}/{name}")
        fs.pipe_file(f"{root}/{MANIFEST}", manifest.to_json().encode())
        return
    write_durably(folder / MANIFEST, manifest.to_json().encode())
    workspaces.put_in_place(folder, local_path(uri))


def set_aside(folder: Path) -> None:
    """Make the artifact one that is not finished, so that it is made (or fetched) again; its files stay to be looked at."""
    with suppress(FileNotFoundError):
        os.rename(folder / MANIFEST, folder / SET_ASIDE)


def local_path(uri: str) -> Path:
    """Of a folder of this machine."""
    return Path(uri.removeprefix("file://")).absolute()


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder` except a manifest at its top, by POSIX relative path, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def digests_of(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """sha256 of the small ones of these files."""
    small = [name for name, size in sizes.items() if size <= SMALL and not name.endswith(".arrow")]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in small}


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync, through a temporary name, so that `path` is whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def localize(uri: str, cache: Path) -> Path:
    """A local folder with the artifact's files: itself when local, else downloaded once below `cache`."""
    if is_local(uri):
        return local_path(uri)
    manifest = read_manifest(uri)
    target = cache / manifest.key[:24]
    if find(str(target)) is None:
        fs, root = fsspec.url_to_fs(uri)
        with workspace(str(target)) as partial:
            for name in manifest.sizes:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{root}/{name}", str(partial / name))
            with workspaces.locked(cache):
                finish(partial, str(target), manifest)
        read_manifest(str(target))  # it came as it was sent
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """One stage's outputs, by role, before and after they exist. All share one key."""

    stage: str
    key: str
    job: str
    """Canonical JSON."""
    inputs: Mapping[str, str]
    """Role to key."""
    uris: Mapping[str, str]
    """Output role to address."""

    @property
    def done(self) -> bool:
        """Whether every output is finished, so that there is nothing to do."""
        return all(find(uri) is not None for uri in self.uris.values())

    @contextmanager
    def make(self) -> Iterator[dict[str, Path]]:
        """Empty folders by role; the caller writes into them and then calls `finish`."""
        with ExitStack() as stack:
            yield {role: stack.enter_context(workspace(uri)) for role, uri in self.uris.items()}

    def finish(self, folders: Mapping[str, Path], metrics: Mapping[str, Any], seconds: float) -> None:
        """Publish all outputs, each with the stage's metrics in its manifest; all or, if another process was first, none."""
        with ExitStack() as stack:
            first = next(iter(self.uris.values()))
            if is_local(first):
                stack.enter_context(workspaces.locked(local_path(first).parent))
                if self.done:
                    for folder in folders.values():
                        shutil.rmtree(folder)
                    return
            for role, uri in self.uris.items():
                finish(folders[role], uri, self._manifest(role, folders[role], metrics, seconds))

    def _manifest(self, role: str, folder: Path, metrics: Mapping[str, Any], seconds: float) -> Manifest:
        sizes = sizes_of(folder)
        return Manifest(
            stage=role,
            key=self.key,
            inputs=dict(self.inputs),
            job=json.loads(self.job),
            sizes=sizes,
            metrics=dict(metrics),
            seconds=seconds,
            finished=time.time(),
            sha256=digests_of(folder, sizes),
        )


def production(
    store: str, stage: str, version: str, job: str, inputs: Mapping[str, str], roles: tuple[str, ...] = ()
) -> Production:
    """What `stage` would make of `inputs` (role to artifact URI) with `job`; roles default to the stage's own name."""
    keys = {role: read_manifest(uri).key for role, uri in inputs.items()}
    key = key_of(stage, version, job, keys)
    uris = {role: address(store, role, key) for role in roles or (stage,)}
    return Production(stage=stage, key=key, job=job, inputs=keys, uris=uris)


def produce(
    made: Production,
    run: Callable[[Mapping[str, Path], Mapping[str, Path]], Mapping[str, Any]],
    inputs: Mapping[str, Path],
) -> Mapping[str, str]:
    """Run a single-process stage unless its outputs are there: run(inputs, folders) -> metrics. Returns role to URI."""
    if not made.done:
        started = time.monotonic()
        with made.make() as folders:
            with damage_told(inputs.values()):
                metrics = run(inputs, folders)
            made.finish(folders, metrics, time.monotonic() - started)
    return made.uris


@contextmanager
def damage_told(inputs: Iterable[Path]) -> Iterator[None]:
    """An input of these that turns out to be damaged is set aside, and the error says what follows."""
    try:
        yield
    except Damaged as error:
        for folder in inputs:
            if error.path.is_relative_to(folder):
                set_aside(folder)
                raise BadArtifact(f"{error.what}; it no longer counts as finished, so {AGAIN}") from error
        raise
