"""The weight artifact: what a training round leaves and an engine loads.

A folder with safetensors and `policy.json` (written last: version, parent, base, kind, targets, sha256 per file).
A LoRA is in PEFT's layout, so that other tools read it too. Tensors have the names of the plain transformer:
`<module>.lora_A.weight` and `<module>.lora_B.weight` for a LoRA, the parameter's own name for full weights.
Nothing in it says when or where it was made, so equal runs leave equal bytes; nothing in it is unpickled.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mdiff_core.artifacts import write_durably
from mdiff_core.errors import BadArtifact, Damaged
from mdiff_core.policies.checksums import checksum, sha256_of
from mdiff_core.types import PolicyVersion

POLICY = "policy.json"
FORMAT = 1
FETCH = "fetch the policy again"
PEFT_PREFIX = "base_model.model."
FILES = {
    "base": (),
    "lora": ("adapter_model.safetensors", "adapter_config.json"),
    "full": ("model.safetensors",),
}
"""What each kind holds; once more below `ema/` and `old/` when the policy has those averages."""

Weights = Literal["live", "ema", "old"]
Averages = Mapping[Literal["ema", "old"], Mapping[str, Tensor]]
"""Tensors of the sets of weights beside the live one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Size of a LoRA: the update of a weight is alpha / rank * B @ A."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Factor before B @ A."""
        return self.alpha / self.rank


def base_version(folder: Path, *, base: str, base_digest: str, base_weights: str = "") -> PolicyVersion:
    """Write the policy that a run starts from: the base model, no weights of its own; `base_weights` is their fingerprint, if known."""
    policy = PolicyVersion(
        path=folder,
        version=f"00000-{(base_weights or base_digest)[:8]}",
        parent="",
        kind="base",
        base=base,
        base_digest=base_digest,
        base_weights=base_weights,
        checksum=checksum({}, base_digest),
        targets=(),
    )
    return _seal(policy, {})


def write_lora(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    averages: Averages,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    parent: PolicyVersion,
    version: str,
) -> PolicyVersion:
    """Write a LoRA; its version is `<version>-<8 digits of its checksum>`. `targets` are full module names."""
    config = {
        "base_model_name_or_path": None,  # policy.json names it; equal weights have equal files wherever their base lies
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": None,
    }
    for below, weights in _branches(folder, tensors, averages):
        _check_pairs(folder, weights, targets)
        _save(below / "adapter_model.safetensors", {PEFT_PREFIX + name: value for name, value in weights.items()})
        write_durably(below / "adapter_config.json", json.dumps(config, indent=1).encode())
    return _next(folder, parent, version, kind="lora", targets=tuple(sorted(targets)), averages=averages)


def write_full(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    averages: Averages,
    parent: PolicyVersion,
    version: str,
) -> PolicyVersion:
    """Write every weight; its version is `<version>-<8 digits of its checksum>`."""
    for below, weights in _branches(folder, tensors, averages):
        _save(below / "model.safetensors", weights)
    return _next(folder, parent, version, kind="full", targets=(), averages=averages)


def open_policy(folder: Path, verify: bool = True) -> PolicyVersion:
    """The policy in `folder`; with `verify` every file's sha256 is compared. BadArtifact says what is wrong."""
    found = _read_json(folder / POLICY)
    if found.get("format") != FORMAT:
        raise BadArtifact(
            f"{folder / POLICY}: format {found.get('format')} is not {FORMAT}; use the mdiff that wrote it"
        )
    try:
        files: dict[str, str] = dict(found["files"])
        fields = ("version", "parent", "kind", "base", "base_digest", "checksum")
        policy = PolicyVersion(
            path=folder,
            targets=tuple(found["targets"]),
            base_weights=str(found.get("base_weights", "")),
            **{name: str(found[name]) for name in fields},
        )
        known = FILES[policy.kind]
    except (KeyError, TypeError, ValueError) as error:
        raise BadArtifact(f"{folder / POLICY}: {error} is missing or unknown; write the policy again") from error
    if found.get("target_count") != len(policy.targets):
        raise BadArtifact(f"{folder / POLICY}: target_count is not {len(policy.targets)}; write the policy again")
    averages = {name.partition("/")[0] for name in files if "/" in name}
    if averages - {"ema", "old"} or set(files) != {*known, *(f"{one}/{name}" for one in averages for name in known)}:
        raise BadArtifact(f"{folder / POLICY}: lists {sorted(files)}, but a {policy.kind} policy holds {sorted(known)}")
    for name in files:
        if not (folder / name).is_file():
            raise Damaged(f"{folder / name}: missing, though {POLICY} lists it", folder / name, FETCH)
    if verify:
        _verify(policy, files)
    return policy


def adapter_of(policy: PolicyVersion) -> Adapter:
    """Rank and alpha of a LoRA policy."""
    path = policy.path / "adapter_config.json"
    config = _read_json(path)
    try:
        return Adapter(rank=int(config["r"]), alpha=float(config["lora_alpha"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadArtifact(f"{path}: r and lora_alpha must be numbers ({error}); write the policy again") from error


def tensors(policy: PolicyVersion, weights: Weights = "live") -> dict[str, Tensor]:
    """The policy's own tensors on the CPU, in the dtype they were written in; empty for a base."""
    if policy.kind == "base":
        return {}
    path = weight_file(policy, weights)
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path}: not a safetensors file ({error})", path, FETCH) from error
    if policy.kind == "full":
        return found
    bare = {name.removeprefix(PEFT_PREFIX): value for name, value in found.items()}
    _check_pairs(policy.path, bare, policy.targets)
    return bare


def has(policy: PolicyVersion, weights: Weights) -> bool:
    """Whether the policy holds this set of weights; live ones it always does."""
    return weights == "live" or (policy.kind != "base" and _place(policy, weights).is_file())


def held(policy: PolicyVersion, weights: Weights) -> Weights:
    """The set asked for, or the live one of a policy that was made without it, where every average starts."""
    return weights if has(policy, weights) else "live"


def checksum_of(policy: PolicyVersion, weights: Weights = "live") -> str:
    """sha256 over one set of weights; the policy's own checksum when there is no other."""
    files: dict[str, str] = _read_json(policy.path / POLICY)["files"]
    below = "" if weights == "live" else f"{weights}/"
    own = {name.removeprefix(below): digest for name, digest in files.items() if name.startswith(below)}
    return checksum({name: digest for name, digest in own.items() if "/" not in name}, policy.base_digest)


def weight_file(policy: PolicyVersion, weights: Weights = "live") -> Path:
    """The safetensors file of a policy that is not a base."""
    path = _place(policy, weights)
    if not path.is_file():
        raise BadArtifact(
            f"{path}: policy {policy.version} has no {weights} weights; use its live ones, or set train.{weights} and train it again"
        )
    return path


def check_base(policy: PolicyVersion, base_digest: str, base_weights: str = "") -> None:
    """BadArtifact when the policy was trained from another base model than the one at hand, by architecture or, where both are known,
    by the weights' fingerprint."""
    if policy.base_digest != base_digest:
        raise BadArtifact(
            f"policy {policy.version} was trained from {policy.base} (base digest {policy.base_digest[:12]}), but the "
            f"recipe's model has digest {base_digest[:12]}; set model.path to that base or start from another policy"
        )
    if policy.base_weights and base_weights and policy.base_weights != base_weights:
        raise BadArtifact(
            f"policy {policy.version} was trained from {policy.base}, whose weights (fingerprint {policy.base_weights[:12]}) are not those "
            f"of the recipe's model ({base_weights[:12]}); set model.path to that base, name its recipe, or use another policy"
        )


def _place(policy: PolicyVersion, weights: Weights) -> Path:
    return policy.path / ("" if weights == "live" else weights) / FILES[policy.kind][0]


def _branches(folder: Path, live: Mapping[str, Tensor], averages: Averages) -> list[tuple[Path, Mapping[str, Tensor]]]:
    """Folder and tensors of the live weights and of the averages."""
    branches = [(folder, live)] + [(folder / name, weights) for name, weights in averages.items()]
    for below, _ in branches:
        below.mkdir(parents=True, exist_ok=True)
    return branches


def _save(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Names sorted and no metadata but the format, so that equal tensors are equal files; on disk when it returns."""
    save_file({name: weights[name].contiguous() for name in sorted(weights)}, path, metadata={"format": "pt"})
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _next(
    folder: Path, parent: PolicyVersion, version: str, *, kind: str, targets: tuple[str, ...], averages: Averages
) -> PolicyVersion:
    names = [*FILES[kind], *(f"{one}/{name}" for one in averages for name in FILES[kind])]
    files = {name: sha256_of(folder / name) for name in names}
    digest = checksum(files, parent.base_digest)
    label = f"{version}-{digest[:8]}"
    made = replace(
        parent, path=folder, version=label, parent=parent.version, kind=kind, checksum=digest, targets=targets
    )
    return _seal(made, files)


def _seal(policy: PolicyVersion, files: Mapping[str, str]) -> PolicyVersion:
    """Write `policy.json`, which makes the folder a policy."""
    content = {
        "format": FORMAT,
        "version": policy.version,
        "parent": policy.parent,
        "kind": policy.kind,
        "base": policy.base,
        "base_digest": policy.base_digest,
        "base_weights": policy.base_weights,
        "checksum": policy.checksum,
        "files": dict(files),
        "target_count": len(policy.targets),
        "targets": list(policy.targets),
    }
    policy.path.mkdir(parents=True, exist_ok=True)
    write_durably(policy.path / POLICY, json.dumps(content, indent=1).encode())
    return policy


def _verify(policy: PolicyVersion, files: Mapping[str, str]) -> None:
    for name, digest in files.items():
        if sha256_of(policy.path / name) != digest:
            raise Damaged(
                f"{policy.path / name}: its sha256 is not the one in {POLICY}, so the file was changed or cut",
                policy.path / name,
                FETCH,
            )
    if policy.checksum != checksum(files, policy.base_digest):
        raise Damaged(
            f"{policy.path / POLICY}: checksum does not follow from the files' sha256", policy.path / POLICY, FETCH
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BadArtifact(f"{path.parent}: no {path.name}, so no finished policy; name a folder that has one") from None
    except ValueError as error:
        raise Damaged(f"{path}: not JSON ({error})", path, FETCH) from error
    if not isinstance(found, dict):
        raise BadArtifact(f"{path}: not a JSON object; write the policy again")
    return found


def _check_pairs(where: Path, weights: Mapping[str, Tensor], targets: Sequence[str]) -> None:
    expected = {f"{target}.lora_{side}.weight" for target in targets for side in "AB"}
    if expected != set(weights) or not targets:
        odd = sorted(expected ^ set(weights))[:3]
        raise BadArtifact(
            f"{where}: {len(weights)} LoRA tensors for {len(targets)} targets, not one A and B each; see {odd}"
        )
