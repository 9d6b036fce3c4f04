"""The Makefile looks at the run that it started."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

FAKES = {
    "pyflyte": "echo 'run mine: 2 rounds'; echo 'policy runs/policies/mine/1'; echo 'report runs/runs/mine/report.html'; exit ${FAIL:-0}",
    "python": 'echo "checked $*"',
}


def demo(tmp_path: Path, fail: str = "0", **variables: str) -> subprocess.CompletedProcess[str]:
    """`make demo` with a pyflyte that only names its run and exits with `fail`."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "runs/runs/shapes_flow_grpo-newer").mkdir(parents=True)
    for name, script in FAKES.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    for needed in (".venv/up-to-date", "pyproject.toml", "requirements/dev.txt", "requirements/uv.txt"):
        (tmp_path / needed).parent.mkdir(exist_ok=True)
        (tmp_path / needed).touch()
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "--silent", "-o", ".venv/up-to-date", "demo", "BIN=bin", *given]
    environment = {**os.environ, "FAIL": fail}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@needs_make
@pytest.mark.parametrize("fail", ["0", "3"])
def test_the_demo_checks_the_folder_that_its_run_names(tmp_path: Path, fail: str) -> None:
    """And nothing when the run fails."""
    done = demo(tmp_path, fail)
    checked = "checked -m mdiff_core.observe.report check runs/runs/mine --gain 0.10"
    assert (done.returncode == 0) == (fail == "0") == (checked in done.stdout), done.stdout + done.stderr
    assert not list((tmp_path / "build").iterdir())


@needs_make
@pytest.mark.parametrize("gain", ["abc", "", "0.1.2", "$(HOME)"])
def test_a_gain_that_is_no_number_is_refused_before_the_run(tmp_path: Path, gain: str) -> None:
    """Not minutes later, when the run is checked."""
    done = demo(tmp_path, GAIN=gain)
    assert done.returncode and not done.stdout
    assert "is not a number; give the least rise of the reward, such as 0.10" in done.stderr


@needs_make
@pytest.mark.parametrize("gain", ["-0.05", "0", ".2", "1.", "1e-1"])
def test_numbers_are_gains(tmp_path: Path, gain: str) -> None:
    assert f"check runs/runs/mine --gain {gain}\n" in demo(tmp_path, GAIN=gain).stdout
