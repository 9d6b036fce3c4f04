"""Where a base model is: a folder in diffusers' layout or a hub id, and its JSON files without its weights."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch

from mdiff_core.errors import BadSetting

TRAINED = "transformer"
"""The part of a model that policies are weights of."""
ENDS = 2**20
"""Bytes of each end of a weight file that tell it from others."""


def source(model: str) -> tuple[str, str | None]:
    """(folder or hub id, revision): `owner/name@revision` names a branch, tag or commit of the hub; a folder has none."""
    name, at, revision = model.rpartition("@")
    return (model, None) if not at or Path(model).is_dir() else (name, revision)


def config_on_disk(model: str, name: str) -> dict[str, Any] | None:
    """`name` (such as vae/config.json) of a local folder or the hub's local cache; None for a hub id that is not on disk."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        path = Path(model) / name
        if not path.is_file():
            raise BadSetting(f"model.path '{model}': no {name} in it; give a model in diffusers' layout")
        return cast(dict[str, Any], json.loads(path.read_text()))
    owner_name, revision = source(model)
    if owner_name.count("/") != 1 or owner_name.startswith((".", "/", "~")) or revision == "":
        raise BadSetting(
            f"model.path '{model}': no such folder, and not a hub id; give a folder, owner/name or owner/name@revision"
        )
    cached = try_to_load_from_cache(owner_name, name, revision=revision)
    return cast(dict[str, Any], json.loads(Path(cached).read_text())) if isinstance(cached, str) else None


def config(model: str, name: str) -> dict[str, Any]:
    """The same, fetched from the hub when it is not on disk; BadSetting when the hub does not give it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    found = config_on_disk(model, name)
    if found is not None:
        return found
    try:
        owner_name, revision = source(model)
        path = hf_hub_download(owner_name, name, revision=revision)
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise BadSetting(
            f"model.path '{model}': no such folder here, and the hub did not give {name} ({str(error).splitlines()[0]}); "
            "give a folder, a hub id, or the token that a gated model needs"
        ) from error
    return cast(dict[str, Any], json.loads(Path(path).read_text()))


def shapes(model: str, part: str) -> dict[str, tuple[int, ...]] | None:
    """Shape of each of a part's weights by name, from the heads of its files; None unless the model is a folder with safetensors."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    for path in sorted((Path(model) / part).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
        except SafetensorError as error:
            raise BadSetting(
                f"model.path '{model}': {path} is no whole safetensors file ({error}); fetch the model again"
            ) from error
    return found or None


def fingerprint(model: str, part: str = "") -> str:
    """sha256 of name, size and both ends of each weight file of a model folder, or of one part of it: a model trained anew in the same
    place, or another of the same architecture, has another one. Empty for a hub id."""
    found, root = hashlib.sha256(), Path(model) / part
    paths = sorted(root.rglob("*.safetensors")) if Path(model).is_dir() else []
    for path in paths:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(f"{path.relative_to(root)} {size}\n".encode())
            for start in (0, max(0, size - ENDS)):
                file.seek(start)
                found.update(file.read(ENDS))
    return found.hexdigest() if paths else ""


def load(kind: Any, model: str, part: str, **dtype: torch.dtype) -> Any:
    """A frozen part of the model, from safetensors alone: nothing is unpickled, and none of the model's own code runs."""
    where, revision = source(model)
    found = kind.from_pretrained(where, subfolder=part, revision=revision, use_safetensors=True, **dtype)
    return found.eval().requires_grad_(False)


def tokenizer(kind: Any, model: str, part: str) -> Any:
    """A tokenizer of the model."""
    where, revision = source(model)
    return kind.from_pretrained(where, subfolder=part, revision=revision)


def copy_without(model: str, out: Path, part: str) -> None:
    """The model as a folder, fetched from the hub when it is an id, but for one part; weights as safetensors only."""
    from huggingface_hub import snapshot_download

    kept = ["*.json", "*.safetensors", "*.txt", "*.model"]
    where, revision = source(model)
    if not Path(where).is_dir():
        where = snapshot_download(where, revision=revision, allow_patterns=kept, ignore_patterns=f"{part}/*")
    shutil.copytree(where, out, ignore=lambda folder, _: [part] if Path(folder) == Path(where) else [])


def save(part: Any, folder: Path) -> None:
    """Write a part of a model, its weights as safetensors."""
    part.save_pretrained(folder, safe_serialization=True)


def weights(where: str) -> dict[str, torch.Tensor]:
    """Tensors of one file by name, on the CPU: a path, or owner/name/file on the hub; safetensors, or a checkpoint of torch.

    BadSetting when there is no such file, or when it holds more than tensors, which would have to be unpickled.
    """
    from pickle import UnpicklingError

    from safetensors.torch import load_file

    path = file(where)
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise BadSetting(
            f"'{where}': not a checkpoint of tensors alone ({str(error).splitlines()[0]}); save its tensors as safetensors"
        ) from error
    found = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise BadSetting(f"'{where}': holds no tensors by name; save a state dict")
    return found


def file(where: str) -> Path:
    """The file on this machine: a path, or owner/name/file on the hub; BadSetting when there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    if Path(where).is_file():
        return Path(where)
    owner, _, rest = where.partition("/")
    name, _, inside = rest.partition("/")
    if not inside or owner.startswith((".", "~")) or not owner:
        raise BadSetting(f"'{where}': no such file, and not one on the hub; give a path or owner/name/file")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", inside))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise BadSetting(
            f"'{where}': no such file here, and the hub did not give it ({str(error).splitlines()[0]}); give a path or a token"
        ) from error


def open_model(kind: Any, model: str, **asked: Any) -> Any:
    """`kind.from_pretrained` of a folder or hub id; BadSetting when there is none. Code of the model's own never runs."""
    try:
        return kind.from_pretrained(model, **asked)
    except (OSError, ValueError) as error:
        raise BadSetting(
            f"'{model}': cannot be opened as {kind.__name__} ({str(error).strip().splitlines()[0]}); give a folder or hub id that can"
        ) from error
