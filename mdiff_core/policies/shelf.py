"""Published policies by name: `<registry>/<name>/<version>/` and a pointer to the latest."""

import json
from pathlib import Path

import fsspec

from mdiff_core.artifacts import MANIFEST, is_local, write_durably
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.policies.artifact import POLICY, open_policy

LATEST = "latest.json"


def publish(registry_uri: str, name: str, folder: Path) -> str:
    """Copy a policy to `<registry>/<name>/<version>` (folder or fsspec URI), make it `latest` and return that address.

    Its JSON goes last and `latest` after it, so a reader sees a whole version or none. A version is published once;
    again is a no-op.
    """
    if not name or name.strip(".") == "" or "/" in name:
        raise BadSetting(f"policy name '{name}' must be one folder name without '/'; choose another name")
    policy = open_policy(folder)
    registry = str(registry_uri).rstrip("/")
    fs, target = fsspec.url_to_fs(f"{registry}/{name}/{policy.version}")
    sealed = (folder / POLICY).read_bytes()
    if not fs.exists(f"{target}/{POLICY}"):
        for file in json.loads(sealed)["files"]:
            fs.makedirs(f"{target}/{file}".rpartition("/")[0], exist_ok=True)
            fs.put_file(str(folder / file), f"{target}/{file}")
        for file in [last for last in (POLICY, MANIFEST) if (folder / last).is_file()]:
            _put(f"{registry}/{name}/{policy.version}/{file}", (folder / file).read_bytes())
    elif fs.cat_file(f"{target}/{POLICY}") != sealed:
        raise BadArtifact(f"{target} is already published with other content; publish under another name than '{name}'")
    _put(f"{registry}/{name}/{LATEST}", json.dumps({"version": policy.version}).encode())
    return f"{registry}/{name}/{policy.version}"


def latest(registry_uri: str, name: str) -> str:
    """Address of the version of `name` that was published last; BadSetting when there is none."""
    registry = str(registry_uri).rstrip("/")
    fs, pointer = fsspec.url_to_fs(f"{registry}/{name}/{LATEST}")
    try:
        version = json.loads(fs.cat_file(pointer))["version"]
    except FileNotFoundError:
        raise BadSetting(f"policy '{name}' was never published to {registry_uri}; publish it or name another") from None
    return f"{registry}/{name}/{version}"


def _put(uri: str, data: bytes) -> None:
    """Whole or not at all: a put is that on object stores, a rename on a disk."""
    fs, path = fsspec.url_to_fs(uri)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if is_local(uri):
        write_durably(Path(path), data)
    else:
        fs.pipe_file(path, data)
