"""The Dockerfiles agree with the pins and with what is in the repository. They are not built here."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {"rollout": "sglang", "train": "base", "score": "base"}
"""Image to the requirements it installs."""
IMAGES = sorted(REQUIREMENTS)


def steps(image: str) -> list[tuple[str, str]]:
    """(instruction, argument) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "images" / f"{image}.Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def arguments(image: str, instruction: str) -> list[str]:
    return [argument for name, argument in steps(image) if name == instruction]


def test_there_is_one_dockerfile_per_kind_of_machine() -> None:
    assert sorted(path.stem for path in (ROOT / "images").glob("*.Dockerfile")) == IMAGES


@pytest.mark.parametrize("image", IMAGES)
def test_the_base_is_pinned(image: str) -> None:
    (base,) = arguments(image, "FROM")
    tag = base.partition("@")[0].partition(":")[2]
    assert re.search(r"\d+\.\d+\.\d+", tag), f"{base}: the tag names no exact version"
    assert "latest" not in base and re.fullmatch(r"[^@]+(@sha256:[0-9a-f]{64})?", base)


@pytest.mark.parametrize("image", ["train", "score"])
def test_the_python_is_one_that_the_project_supports(image: str) -> None:
    (base,) = arguments(image, "FROM")
    version = base.removeprefix("python:").partition("-")[0]
    assert version in SpecifierSet(PROJECT["requires-python"])


def test_the_rollout_image_has_the_pinned_sglang() -> None:
    (base,) = arguments("rollout", "FROM")
    asked = next(r for r in map(Requirement, PROJECT["optional-dependencies"]["sglang"]) if r.name == "sglang")
    assert re.fullmatch(rf"lmsysorg/sglang:v{str(asked.specifier).removeprefix('==')}-cu130", base)
    pinned = (ROOT / "requirements" / "sglang.txt").read_text()
    assert f"\nsglang{asked.specifier} " in pinned
    assert re.search(r"\nnvidia-cudnn-cu13==", pinned), "torch's CUDA major must be the base image's"


def test_the_rollout_image_refuses_another_python() -> None:
    lowest, highest = re.findall(r"\d+\.\d+", PROJECT["requires-python"])
    bounds = [f"({version.replace('.', ', ')})" for version in (lowest, highest)]
    assert f"assert {bounds[0]} <= sys.version_info < {bounds[1]}" in " ".join(arguments("rollout", "RUN"))


@pytest.mark.parametrize("image", IMAGES)
def test_only_pinned_and_hashed_packages_are_installed(image: str) -> None:
    installs = re.findall(r"pip install ([^&]*)", " && ".join(arguments(image, "RUN")))
    files = [re.search(r"-r requirements/(\w+)\.txt\s*$", install) for install in installs]
    assert all("--require-hashes" in install for install in installs) and all(files)
    assert [found.group(1) for found in files if found][-1] == REQUIREMENTS[image]


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_installed_is_compared_with_the_pins(image: str) -> None:
    assert f"requirements/verify.py requirements/{REQUIREMENTS[image]}.txt" in " ".join(arguments(image, "RUN"))


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_is_there_and_is_the_whole_application(image: str) -> None:
    copied = [argument.split()[0] for argument in arguments(image, "COPY")]
    assert set(copied) == {"requirements", "mdiff_core", "tasks", "workflows", "assets"}
    assert all((ROOT / name).is_dir() for name in copied)
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert kept[0] == "*" and {f"!{name}" for name in copied} <= set(kept)


@pytest.mark.parametrize("image", IMAGES)
def test_requirements_come_before_code_so_that_a_code_change_rebuilds_little(image: str) -> None:
    order = [argument.split()[0] for argument in arguments(image, "COPY")]
    assert order[0] == "requirements"
