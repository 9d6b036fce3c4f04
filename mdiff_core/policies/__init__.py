"""The weight artifact: what a training round leaves, an engine loads and a registry keeps."""

from mdiff_core.policies.artifact import (
    Adapter,
    Averages,
    Weights,
    adapter_of,
    base_version,
    check_base,
    checksum_of,
    has,
    held,
    open_policy,
    tensors,
    weight_file,
    write_full,
    write_lora,
)
from mdiff_core.policies.merge import apply_to, load_full
from mdiff_core.policies.shelf import latest, publish

__all__ = [
    "Adapter",
    "Averages",
    "Weights",
    "adapter_of",
    "apply_to",
    "base_version",
    "check_base",
    "checksum_of",
    "has",
    "held",
    "latest",
    "load_full",
    "open_policy",
    "publish",
    "tensors",
    "weight_file",
    "write_full",
    "write_lora",
]
