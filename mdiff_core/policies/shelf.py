"""Published policies by name: `<registry>/<name>/<version>/` and a pointer to the latest."""

import json
import os
import shutil
from pathlib import Path

import fsspec

from mdiff_core.artifacts import MANIFEST, is_local, write_durably
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.policies.artifact import POLICY, open_policy
from mdiff_core.policies.checksums import is_sealed, sha256_of

LATEST = "latest.json"


def publish(registry_uri: str, name: str, folder: Path) -> str:
    """Copy a policy to `<registry>/<name>/<version>` (folder or fsspec URI), make it `latest` and return that address.

    Its JSON goes last and `latest` after it, so a reader sees a whole version or none. Again is a no-op, but for files that
    are missing or damaged there, which are written anew: told by sha256 in a folder, by size on an object store.
    """
    if not name or name.strip(".") == "" or "/" in name:
        raise BadSetting(f"policy name '{name}' must be one folder name without '/'; choose another name")
    policy = open_policy(folder)
    registry = str(registry_uri).rstrip("/")
    target = f"{registry}/{name}/{policy.version}"
    sealed = (folder / POLICY).read_bytes()
    if (there := _read(f"{target}/{POLICY}")) not in (b"", sealed) and is_sealed(there):
        raise BadArtifact(f"{target} is already published with other content; publish under another name than '{name}'")
    wrong = [file for file in json.loads(sealed)["files"] if not _same(folder / file, f"{target}/{file}")]
    for file in wrong:
        _copy(folder / file, f"{target}/{file}")
    for file in [last for last in (POLICY, MANIFEST) if (folder / last).is_file()]:
        if wrong or _read(f"{target}/{file}") != (folder / file).read_bytes():
            _put(f"{target}/{file}", (folder / file).read_bytes())
    _put(f"{registry}/{name}/{LATEST}", json.dumps({"version": policy.version}).encode())
    return target


def latest(registry_uri: str, name: str) -> str:
    """Address of the version of `name` that was published last; BadSetting when there is none."""
    registry = str(registry_uri).rstrip("/")
    fs, pointer = fsspec.url_to_fs(f"{registry}/{name}/{LATEST}")
    try:
        version = json.loads(fs.cat_file(pointer))["version"]
    except FileNotFoundError:
        raise BadSetting(f"policy '{name}' was never published to {registry_uri}; publish it or name another") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadArtifact(
            f"{registry}/{name}/{LATEST}: not a pointer to a version ({error!r}); publish the policy again, which writes it, "
            "or name the version's folder"
        ) from error
    return f"{registry}/{name}/{version}"


def _read(uri: str) -> bytes:
    """The file's bytes; none when it is not there."""
    fs, path = fsspec.url_to_fs(uri)
    try:
        found: bytes = fs.cat_file(path)
    except FileNotFoundError:
        return b""
    return found


def _same(ours: Path, uri: str) -> bool:
    """Whether the file there is ours, as far as can be told without fetching it."""
    fs, path = fsspec.url_to_fs(uri)
    if not fs.exists(path) or fs.size(path) != ours.stat().st_size:
        return False
    return not is_local(uri) or sha256_of(Path(path)) == sha256_of(ours)


def _copy(ours: Path, uri: str) -> None:
    """Whole or not at all, as in `_put`."""
    fs, path = fsspec.url_to_fs(uri)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if is_local(uri):
        shutil.copyfile(ours, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    else:
        fs.put_file(str(ours), path)


def _put(uri: str, data: bytes) -> None:
    """Whole or not at all: a put is that on object stores, a rename on a disk."""
    fs, path = fsspec.url_to_fs(uri)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if is_local(uri):
        write_durably(Path(path), data)
    else:
        fs.pipe_file(path, data)
