"""Runs of the real workflows, as small as they can be, in processes of their own."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from mdiff_core.worlds import shapes

ROOT = Path(__file__).parents[2]
PYFLYTE = (sys.executable, "-m", "flytekit.clis.sdk_in_container.pyflyte")
SECONDS = 240.0
"""Longest any command here may take, on a machine that does something else as well."""

SMALL = (
    "prompts.per_round=2",
    "rollout.group_size=3",
    "rollout.batch=6",
    "sampling.steps=3",
    'sampling.window={"name": "all"}',
    "train.lora.rank=2",
    "train.updates_per_round=2",
    "train.lr=1e-3",
    "train.microbatch=4",
    "train.eps=1e-4",  # so that what rounds a gradient near 0 differently does not move the weight by all of lr
    "evaluate.prompts=2",
    "evaluate.samples=1",
    "evaluate.steps=2",
)
"""Two groups of three samples a round, two optimizer steps, evaluations of two pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a command."""

    code: int
    said: str
    """Stdout and stderr as they came."""

    def lines(self, start: str) -> list[str]:
        """Those that begin with `start`."""
        return [line for line in self.said.splitlines() if line.startswith(start)]

    @property
    def checksum(self) -> str:
        """Of the policy that the run published."""
        (found,) = re.findall(r"^checksum (\w{64})$", self.said, flags=re.MULTILINE)
        return found


def call(
    command: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT, largest_file: int | None = None
) -> Ended:
    """Run to the end in a process group of its own, which does not outlive this call."""
    quiet = {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    limit = resource.RLIM_INFINITY if largest_file is None else largest_file
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **quiet, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)),
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        end(process)
    return Ended(code=process.returncode, said=said)


def end(process: subprocess.Popen[str]) -> None:
    """The whole group, whatever state it is in."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def post_train(store: Path, *overrides: str, rounds: int = 2, recipe: str = "shapes_flow_grpo") -> list[str]:
    """Arguments of pyflyte for a small run into `store`."""
    chosen = json.dumps([*SMALL, f"store={store}", *overrides])
    workflow = ["run", "workflows/post_train.py", "post_train"]
    return ["-c", "flyte.config", *workflow, "--recipe", recipe, "--rounds", str(rounds), "--overrides", chosen]


def sft(store: Path, images: Path, *overrides: str, rounds: int = 1) -> list[str]:
    """Arguments of pyflyte for a small fine-tuning into `store` on pictures made into `images`."""
    if not images.exists():
        shapes.main(["images", "--count", "8", "--seed", "1", "--out", str(images)])
    data = ("model.path=assets/shapes_sd3", f"data.captions={images / 'captions.jsonl'}")
    small = ("train.updates_per_round=2", "train.batch=4", "train.microbatch=2")
    small += ("evaluate.prompts=2", "evaluate.samples=1", "evaluate.steps=2")
    chosen = json.dumps([f"store={store}", *data, *small, *overrides])
    workflow = ["run", "workflows/sft.py", "sft", "--recipe", "shapes_sft"]
    return ["-c", "flyte.config", *workflow, "--rounds", str(rounds), "--overrides", chosen]


def invoke(arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """pyflyte in this very process: the same command line, without the seconds that imports take."""
    from click.testing import CliRunner
    from flytekit.clis.sdk_in_container.pyflyte import main

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("COLUMNS", "400")
        result = CliRunner().invoke(main, list(arguments), env=dict(environment))
    return Ended(code=result.exit_code, said=result.output)


def manifests(store: Path) -> dict[str, int]:
    """Every finished artifact (`<role>/<key>`) and when it was finished."""
    found = store.glob("*/*/manifest.json")
    return {f"{path.parent.parent.name}/{path.parent.name}": path.stat().st_mtime_ns for path in found}


@pytest.fixture(scope="session")
def ray_address() -> Iterator[Mapping[str, str]]:
    """The environment that joins one Ray for all tests: starting one takes longer than most of them."""
    code = (
        "import sys, ray; from mdiff_core.fleet import local_ray\n"
        "with local_ray():\n"
        "    print(ray.get_runtime_context().gcs_address, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"[\w.]+:\d+", address), address
        yield {"RAY_ADDRESS": address}
        process.stdin.close()  # lets it shut Ray down
        process.wait(timeout=30)
    finally:
        end(process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An undisturbed run of two rounds."""

    store: Path
    ended: Ended

    def artifact(self, role: str, round: int) -> Path:
        """The finished artifact of a stage in round `round` from 0; that of a job without a round by what it read."""
        for path in (self.store / role).glob("*/manifest.json"):
            manifest = json.loads(path.read_text())
            read = manifest["inputs"].get("trajectories")
            if manifest["job"].get("round") == round or (read and self.of_round(read, round)):
                return path.parent
        raise LookupError(f"{role} of round {round}")

    def of_round(self, key: str, round: int) -> bool:
        """Whether the trajectories are that round's."""
        manifest = json.loads((self.store / "trajectories" / key[:24] / "manifest.json").read_text())
        return bool(manifest["job"]["round"] == round)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """By the command as a user types it, Ray and all."""
    store = tmp_path_factory.mktemp("undisturbed")
    ended = call([*PYFLYTE, *post_train(store)], {})
    assert ended.code == 0, ended.said
    return Finished(store=store, ended=ended)
