"""Ceilings that ruff has no rule for: how long a file may get, and what no file may be called."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUG_INS = ("families", "kernels", "engines", "rewards", "losses", "recipes")
SOURCES = sorted(
    path for folder in ("mdiff_core", "tasks", "workflows", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def ceiling(path: Path) -> int:
    """Most lines that the file may have."""
    folder, *rest = path.relative_to(ROOT).parts
    by_folder = {"workflows": 120, "tasks": 100}
    return by_folder.get(folder, 200 if rest[0] in PLUG_INS else 300)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= ceiling(path), f"{lines} lines, at most {ceiling(path)}: split it where its reader would"


def test_no_file_is_a_drawer_for_everything() -> None:
    assert not [path for path in SOURCES if path.stem in ("utils", "util", "helpers", "helper", "common", "misc")]


def test_the_packages_that_flyte_loads_have_an_init_and_the_root_has_none() -> None:
    assert all((ROOT / folder / "__init__.py").is_file() for folder in ("mdiff_core", "tasks", "workflows"))
    assert not (ROOT / "__init__.py").exists()
