"""The Makefile looks at the run that it started."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKES = {
    "pyflyte": "echo 'run mine: 2 rounds'; echo 'policy runs/policies/mine/1'; echo 'report runs/runs/mine/report.html'; exit ${FAIL:-0}",
    "python": 'echo "checked $*"',
}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("fail", ["0", "3"])
def test_the_demo_checks_the_folder_that_its_run_names(tmp_path: Path, fail: str) -> None:
    """And nothing when the run fails."""
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
    command = ["make", "--silent", "-o", ".venv/up-to-date", "demo", "BIN=bin"]
    environment = {**os.environ, "FAIL": fail}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    checked = "checked -m mdiff_core.observe.report check runs/runs/mine --gain 0.10"
    assert (done.returncode == 0) == (fail == "0") == (checked in done.stdout), done.stdout + done.stderr
    assert not list((tmp_path / "build").iterdir())
