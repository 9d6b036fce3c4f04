"""A policy's weights into a running server: one interface, from files or from tensors, and the proof that they arrived.

The server answers 200 to a LoRA that matches no layer and skips parameters that it does not know, so each tensor's digest is
compared with what it then holds.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from mdiff_core.engines.sglang.server import Server
from mdiff_core.errors import BadSetting
from mdiff_core.policies import Adapter

MODULE = "transformer"
NICKNAME = "policy"
"""One for all policies: the server then forgets the last one."""
SECONDS = 1800.0
"""Longest that a delivery may take, tens of gigabytes included."""
BUCKET_BYTES = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Weights to deliver."""

    name: str
    """Of these very tensors."""
    tensors: Mapping[str, Tensor]
    """By the artifact's names."""
    adapter: Adapter | None
    """Size of the LoRA; None for full weights."""
    file: Path | None
    """Safetensors file that holds the full weights, where there is one."""


class Sync(Protocol):
    """A way into the server. A server gets either LoRAs or full weights in its life: a first LoRA renames its layers."""

    def deliver(self, update: Update) -> None:
        """In place of what the last delivery changed; EngineFailed unless every tensor arrived."""
        ...

    def withdraw(self) -> None:
        """Take the last LoRA out again; nothing when there was none."""
        ...


class FromFiles:
    """The server reads them: its own adapter loading for a LoRA, an update from disk for full weights."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._adapted = False

    def deliver(self, update: Update) -> None:
        folder = self._server.folder / "weights" / folder_name(update)
        folder.mkdir(parents=True, exist_ok=True)
        if update.adapter is None:
            deliver_folder(self._server, _full(folder, update))
        else:
            whole, strength = alpha_and_strength(update.adapter)
            file = folder / "adapter_model.safetensors"
            save_file({name: value.contiguous() for name, value in update.tensors.items()}, file)
            (folder / "adapter_config.json").write_text(json.dumps({"r": update.adapter.rank, "lora_alpha": whole}))
            body = {
                "lora_nickname": NICKNAME,
                "lora_path": str(file),
                "target": MODULE,
                "strength": strength,
                "merge_mode": "merge",
            }
            self._server.post("/v1/set_lora", body, SECONDS)
            self._adapted = True
        verify(self._server, update)

    def withdraw(self) -> None:
        if self._adapted:
            self._server.post("/v1/unmerge_lora_weights", {"target": MODULE}, SECONDS)
            self._adapted = False


class FromTensors:
    """They go through shared memory, or CUDA's between processes when they are on the server's GPU."""

    def __init__(self, server: Server, device: torch.device) -> None:
        self._server, self._device = server, device
        self._last: Update | None = None

    def deliver(self, update: Update) -> None:
        how: dict[str, Any] = {"load_format": "flattened_bucket", "target_modules": [MODULE]}
        if update.adapter is not None:
            how |= {
                "weight_update_mode": "lora_merge",
                "lora_rank": update.adapter.rank,
                "lora_alpha": update.adapter.alpha,
            }
        for bucket in buckets(update):
            shared = packed([(name, value.to(self._device).contiguous()) for name, value in bucket.items()])
            body = how | {"serialized_named_tensors": [serialized(shared)]}
            self._server.post("/update_weights_from_tensor", body, SECONDS)
            del shared  # not before the server has copied it
        self._last = update if update.adapter else None
        verify(self._server, update)

    def withdraw(self) -> None:
        if self._last is not None:  # W + 0 @ A is W to the bit, and the server offers no other way back
            nothing = {name: value * 0 if "lora_B" in name else value for name, value in self._last.tensors.items()}
            self.deliver(replace(self._last, tensors=nothing))
            self._last = None


def folder_name(update: Update) -> str:
    """Of these tensors at this scale: the server takes an adapter for the one it has when path and strength are the same."""
    adapter = update.adapter
    return update.name if adapter is None else f"{update.name}-{adapter.alpha:g}-{adapter.rank}"


def deliver_folder(server: Server, model: str) -> None:
    """Full weights from `<model>/transformer`, a folder or a hub id's snapshot."""
    server.post("/update_weights_from_disk", {"model_path": model, "target_modules": [MODULE]}, SECONDS)


def verify(server: Server, update: Update) -> None:
    """EngineFailed unless the server holds each of the tensors, and in a layer of that name."""
    expected = {held_as(name, update): digest(value) for name, value in update.tensors.items()}
    body = {"target_module": MODULE, "expected_named_tensors_sha256": expected}
    try:
        server.post("/update_weights_from_tensor_checker", body, SECONDS)
    except BadSetting as error:
        raise server.failed(f"not all {len(expected)} tensors of policy {update.name} arrived ({error})") from error


def held_as(name: str, update: Update) -> str:
    """The server's name of an artifact's tensor: a LoRA's two matrices are parameters of the layer itself."""
    return name.removesuffix(".weight") if update.adapter else name


def digest(value: Tensor) -> str:
    """sha256 as the server's checker makes it: of dtype, shape and bytes."""
    plain = value.detach().cpu().contiguous()
    found = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)!r}".encode())
    found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def alpha_and_strength(adapter: Adapter) -> tuple[int, float]:
    """The server cuts alpha to a whole number; the strength, which multiplies it, makes up for that."""
    whole = max(1, int(adapter.alpha))
    return whole, adapter.alpha / whole


def buckets(update: Update) -> Iterator[dict[str, Tensor]]:
    """Parts of at most BUCKET_BYTES, or of one layer; both halves of a layer's LoRA together."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in update.tensors.items():
        layer = name.partition(".lora_")[0] if update.adapter else name
        layers.setdefault(layer, {})[held_as(name, update)] = value
    part: dict[str, Tensor] = {}
    for tensors in layers.values():
        size = sum(value.nbytes for value in (*part.values(), *tensors.values()))
        if part and size > BUCKET_BYTES:
            yield part
            part = {}
        part |= tensors
    yield part


def packed(named: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """One flat tensor and where each of the named ones is in it."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named)
    return {MODULE: {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}}


def serialized(shared: dict[str, Any]) -> str:
    """A handle of its memory, as the server opens it; the tensor must stay until it has."""
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # descriptors only reach children
    return str(MultiprocessingSerializer.serialize(shared, output_str=True))


def _full(folder: Path, update: Update) -> str:
    """A folder that looks like a model's, with a link to the file."""
    (folder / MODULE).mkdir(exist_ok=True)
    target = folder / MODULE / "model.safetensors"
    if update.file is None:
        save_file({name: value.contiguous() for name, value in update.tensors.items()}, target)
    elif not target.exists():
        target.symlink_to(update.file.absolute())
    return str(folder)
