"""What tells a policy's bytes from others."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_sealed(text: bytes) -> bool:
    """Whether this is a policy's JSON as `write_lora` and the like leave it, not a damaged one."""
    try:
        found = json.loads(text)
        return bool(found["checksum"] == checksum(found["files"], found["base_digest"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def checksum(files: Mapping[str, str], base_digest: str) -> str:
    """Of a set of weights: of its files' sha256 by name, or of the base when it has none."""
    parts = [f"{name}:{digest}" for name, digest in sorted(files.items())]
    return hashlib.sha256("\n".join(parts or [base_digest]).encode()).hexdigest()
