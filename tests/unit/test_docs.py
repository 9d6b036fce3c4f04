"""The documents are true: their links lead somewhere, what they name exists, and their example works as written."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mdiff_core import config, registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [target.partition("#")[0] for target in targets if not re.match(r"https?://|#", target)]
    assert not [target for target in local if not (page.parent / target).exists()]


@each_page
def test_make_targets_exist(page: Path) -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), flags=re.MULTILINE)) <= known


@each_page
def test_recipes_exist(page: Path) -> None:
    named = re.findall(r"(?:--recipe|mdiff_core\.config) ([a-z]\w+)", page.read_text())
    assert set(named) <= set(config.RECIPES)


def test_the_file_map_names_what_is_there() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    first, *others = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    paths = [first, *others]
    assert paths
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "mdiff_core" / path).exists()]
    assert not missing


def test_the_changelog_names_every_plug_in_and_recipe() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    slots = ("kernel", "window", "filter", "reward", "loss")
    shipped = [
        name for slot in slots for name, where in registry.REGISTRY[slot].items() if where.startswith("mdiff_core.")
    ]
    assert not [name for name in (*shipped, *config.RECIPES) if f"`{name}`" not in text]


@pytest.mark.parametrize(
    ("page", "slot", "name", "needed", "printed"),
    [
        (
            "adding-a-plug-in.md",
            "reward",
            "redness",
            ["tests/contracts/test_rewards.py", "tests/reward_servers.py", "tests/tiny_rewards.py"],
            '"margin": 60',
        ),
        (
            "adding-a-loss.md",
            "loss",
            "rwr",
            ["tests/contracts/test_losses.py", "tests/toy_policies.py"],
            '"temperature": 0.5',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_example_plug_in_works_as_written(
    tmp_path: Path, page: str, slot: str, name: str, needed: list[str], printed: str
) -> None:
    """In a copy: the file and the registry line from the page, the page's commands, and the linter over the file."""
    code, line = blocks(ROOT / "docs" / page, "python")
    (commands,) = blocks(ROOT / "docs" / page, "bash")
    assert len(code.splitlines()) <= 40
    shutil.copytree(ROOT / "mdiff_core", tmp_path / "mdiff_core", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "contracts").mkdir(parents=True)
    for file in ("pyproject.toml", *needed):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    (tmp_path / re.findall(r"`(mdiff_core/\w+/\w+\.py)`", (ROOT / "docs" / page).read_text())[0]).write_text(code)
    table = tmp_path / "mdiff_core" / "registry.py"
    table.write_text(table.read_text().replace(f'    "{slot}": {{\n', f'    "{slot}": {{\n{line}'))
    contract, settings = [run(shlex.split(command), tmp_path) for command in commands.splitlines()]
    assert " passed" in contract
    assert printed in settings
    run(["python", "-m", "ruff", "check", "--no-cache", "mdiff_core/registry.py", "mdiff_core"], tmp_path)


def run(command: list[str], folder: Path) -> str:
    """What the command prints, with this Python in place of the environment's."""
    assert command[0] in ("python", ".venv/bin/python")
    done = subprocess.run([sys.executable, *command[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
