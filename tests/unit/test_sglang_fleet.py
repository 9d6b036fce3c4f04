"""SGLang engines under Ray, with a stand-in server: faults, restarts, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdiff_core.errors import EngineFailed
from mdiff_core.fleet import Fleet
from mdiff_core.options import Choice
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Prompt, Request, SamplingPlan
from tests.fake_sglang import install
from tests.policies_made import base_policy

ROOT = Path(__file__).parents[2]
MODEL = Model(
    path=str(ROOT / "assets/shapes_sd3"),
    family=Choice(name="sd3", options={"max_sequence_length": 16}),
    dtype="float32",
)
PLAN = SamplingPlan(
    width=64, height=64, frames=1, steps=4, guidance=4.5, negative="", kernel="flow_sde", kernel_options={}, sde_steps=(1,)
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of logs, the policy and the deed that the fake obeys."""
    folder = tmp_path_factory.mktemp("fleet")
    base_policy(folder / "policy", Path(MODEL.path))
    return folder


@pytest.fixture(scope="module")
def given_ray(folder: Path) -> Iterator[None]:
    """A Ray whose workers start the fake."""
    import ray

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    found = {"PYTHONPATH": str(ROOT), "FAKE_SGLANG_DEED": str(folder / "deed"), "TMPDIR": str(folder)}
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(
        address="local", num_cpus=4, runtime_env={"worker_process_setup_hook": install, "env_vars": found}, **quiet
    )
    yield
    ray.shutdown()


def batches(count: int) -> list[list[Request]]:
    """Two samples each."""

    def request(n: int) -> Request:
        prompt = Prompt(id=f"p{n}", text=f"text {n % 3}", metadata={})
        return Request(prompt=prompt, group=f"g{n}", indices=(0, 1), seeds=(2 * n, 2 * n + 1), plan=PLAN)

    return [[request(n)] for n in range(count)]


def rollout(engines: int = 1, restarts: int = 2, keep: bool = False, **options: Any) -> Rollout:
    return Rollout(
        group_size=2,
        engine=Choice(name="sglang", options=options),
        engines=engines,
        restarts=restarts,
        keep_engines=keep,
    )


def test_a_wrong_answer_is_drawn_again_by_another_server(given_ray: None, folder: Path) -> None:
    asked = batches(8)
    with Fleet(rollout(2), MODEL, folder / "policy") as fleet:
        stream = fleet.stream(asked)
        found = list(next(stream)[1])
        (folder / "deed").write_text("swapped")
        for _, trajectories, _ in stream:
            found += trajectories
        assert fleet.metrics["restarts"] == 1
    assert [t.seed for t in found] == [seed for batch in asked for request in batch for seed in request.seeds]


def test_when_no_server_comes_up_the_error_shows_the_log(given_ray: None, folder: Path) -> None:
    (folder / "deed").write_text("die at start")
    started = time.monotonic()
    with (
        pytest.raises(EngineFailed, match="after 1 restarts") as caught,
        Fleet(rollout(2, restarts=1), MODEL, folder / "policy") as fleet,
    ):
        list(fleet.stream(batches(2)))
    (folder / "deed").unlink()
    assert "server.log ends with:\nthe fake is starting\ncannot load the model: no such file" in str(caught.value)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "starting"), (signal.SIGTERM, "streaming"), (signal.SIGKILL, "streaming")],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_no_server_outlives_a_driver_that_is_ended(folder: Path, number: signal.Signals, moment: str) -> None:
    """The fixture that looks for processes left behind is what is tested here."""
    script = textwrap.dedent(f"""
        import os
        from pathlib import Path
        from tests.unit.test_sglang_fleet import Fleet, MODEL, batches, install, rollout
        import ray
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                 runtime_env={{"worker_process_setup_hook": install, "env_vars": dict(PYTHONPATH={str(ROOT)!r})}})
        with Fleet(rollout(), MODEL, Path({str(folder / "policy")!r})) as fleet:
            print("starting", flush=True)
            for _ in fleet.stream(batches(100_000)):
                print("streaming", flush=True)
    """)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
        "FAKE_SGLANG_DEED": str(folder / "no deed"), "TMPDIR": str(folder),
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        while line := driver.stdout.readline():
            if line.strip() == moment:
                break
        time.sleep(1.0)
        driver.send_signal(number)
        driver.stdout.close()
        assert driver.wait(timeout=60) != 0
