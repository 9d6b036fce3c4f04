"""The pinned requirements say what pyproject.toml asks for, agree with each other, and name no place."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = {"base": ("wandb",), "sglang": ("wandb", "sglang"), "dev": ("wandb", "sglang", "dev")}
"""Requirements file to the extras it holds beside the runtime."""


def requirements(name: str) -> list[Requirement]:
    lines = re.sub(r"#.*", "", (ROOT / "requirements" / f"{name}.txt").read_text()).replace("\\\n", " ").splitlines()
    return [Requirement(re.sub(r"--hash=\S+", "", line)) for line in lines if line.strip()]


def pins(name: str, python: str) -> dict[str, str]:
    """Package to version on Linux with that Python."""
    here = {"python_version": python, "python_full_version": f"{python}.7", "sys_platform": "linux"}
    here |= {"platform_machine": "x86_64", "platform_system": "Linux"}
    chosen = [r for r in requirements(name) if r.marker is None or Marker(str(r.marker)).evaluate(here)]
    found = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in chosen}
    assert len(found) == len(chosen), f"{name}.txt pins a package twice for Python {python}"
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("name", FILES)
def test_pins_meet_what_the_project_asks_for(name: str, python: str) -> None:
    asked = PROJECT["project"]["dependencies"]
    for extra in FILES[name]:
        asked = asked + PROJECT["project"]["optional-dependencies"][extra]
    pinned = pins(name, python)
    for requirement in map(Requirement, asked):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version and version in requirement.specifier, f"{requirement} is pinned to {version}; run `make lock`"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_package_has_one_version_in_every_file(python: str) -> None:
    base = pins("base", python)
    for name in ("sglang", "dev"):
        larger = pins(name, python)
        assert {package: larger.get(package) for package in base} == base


@pytest.mark.parametrize("name", [*FILES, "uv"])
def test_every_pin_is_exact_and_hashed_and_names_no_place(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    blocks = re.split(r"\n(?=\S)", text)
    assert all("--hash=sha256:" in block for block in blocks if not block.startswith("#"))
    assert all(re.fullmatch(r"==[^*]+", str(requirement.specifier)) for requirement in requirements(name))
    assert not re.search(r"https?:|file:|index-url|find-links|\s/\w+/", text)


def test_uv_is_the_version_that_the_project_names() -> None:
    (asked,) = map(Requirement, PROJECT["dependency-groups"]["uv"])
    assert [str(pinned) for pinned in requirements("uv")] == [str(asked)]


def verify(*files: Path | str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "requirements" / "verify.py"), *map(str, files)]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stdout


def test_this_environment_has_what_is_pinned() -> None:
    code, said = verify(ROOT / "requirements" / "dev.txt", ROOT / "requirements" / "uv.txt")
    assert code == 0, said
    assert re.findall(r"^ +(\d+) (?:mismatched|missing)$", said, flags=re.MULTILINE) == ["0", "0"]


def test_every_difference_from_the_pins_is_named(tmp_path: Path) -> None:
    """torch is there as 2.11.0+cu130 or +cpu; a marker that does not hold here asks for nothing."""
    torch = next(r for r in requirements("dev") if r.name == "torch")
    lines = [
        f"{torch} \\\n    --hash=sha256:0",
        "pytest==0.1",
        "no-such-package==1.0",
        "other==1.0 ; sys_platform == 'plan9'",
    ]
    (tmp_path / "some.txt").write_text("\n".join(lines))
    code, said = verify(tmp_path / "some.txt")
    assert code == 1
    for line in (
        r" 1 matched\n",
        r" 1 mismatched\n +pytest \S+, pinned ==0.1\n",
        r" 1 missing\n +no-such-package==1.0\n",
        r"\d+ extra\n",
    ):
        assert re.search(line, said), said
