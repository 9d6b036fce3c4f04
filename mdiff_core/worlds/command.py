"""What the worlds' command lines share: arguments that are checked as they are read, and errors in one sentence."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdiff_core.errors import BadSetting, MdiffError


def parser(world: str, doc: str | None, excluded: str) -> argparse.ArgumentParser:
    """Of a world that writes prompt files and captioned image folders."""
    made = argparse.ArgumentParser(prog=f"python -m mdiff_core.worlds.{world}", description=doc)
    made.add_argument("what", choices=("prompts", "images"), help="a prompt file, or a captioned image folder")
    made.add_argument("--count", type=count, required=True)
    made.add_argument("--seed", type=seed, required=True)
    made.add_argument("--out", type=Path, required=True, help="prompts: a .jsonl file; images: a folder")
    made.add_argument("--exclude", type=Path, help=f"prompt file whose {excluded} must not appear")
    made.add_argument("--mislabelled", type=share, default=0.0, help="images: share of captions that are wrong")
    return made


def count(text: str) -> int:
    """A whole number from 1."""
    return whole(text, 1)


def seed(text: str) -> int:
    """A whole number from 0."""
    return whole(text, 0)


def whole(text: str, least: int) -> int:
    """A whole number that is not below `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least}")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; give a number from 0 to 1")
    return value


def metadata_in(path: Path, key: str) -> list[dict[str, Any]]:
    """Each line's metadata of a prompt or caption file; BadSetting for a line without `key` in it."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            metadata: dict[str, Any] = json.loads(line)["metadata"]
            metadata[key]
        except (ValueError, KeyError, TypeError):
            raise BadSetting(
                f"--exclude: {path}:{number}: not a prompt of this world, with '{key}' in its metadata; name one of its prompt files"
            ) from None
        found.append(metadata)
    return found


def run(main: Callable[[], None]) -> int:
    """Exit code: 0, or 1 after one sentence on stderr."""
    try:
        main()
    except (MdiffError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
