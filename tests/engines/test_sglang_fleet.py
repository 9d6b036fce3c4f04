"""Two real SGLang servers under Ray, one killed and one stopped in the middle of a round."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdiff_core import generation, policies, seeds
from mdiff_core.fleet import Fleet
from mdiff_core.options import Choice
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Prompt, Request, SamplingPlan
from tests.conftest import MARK
from tests.policies_made import FAMILY, base_policy, lora_policy

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
GROUPS, SAMPLES = 24, 4
PLAN = SamplingPlan(
    width=64, height=64, frames=1, steps=5, guidance=1.0, negative="", kernel="flow_sde", kernel_options={}, sde_steps=(1, 2)
)  # fmt: skip


@pytest.fixture(scope="module")
def given_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    found = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path_factory.mktemp("logs"))}
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, runtime_env={"env_vars": found}, **quiet)
    yield
    ray.shutdown()


def servers() -> set[int]:
    """First processes of the SGLang servers that this test session started."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            ours = process.environ().get(MARK) == os.environ[MARK]
            if (
                ours
                and "mdiff_core.engines.sglang.serve" in command
                and "mdiff_core.engines.sglang.guard" not in command
            ):
                found.add(process.pid)
    return found


def test_a_round_survives_a_killed_and_a_stopped_server(given_ray: None, tiny_sd3: Path, tmp_path: Path) -> None:
    """Every sample once, each as the inspection of a stage wants it, and both restarts counted; then nothing is left."""
    import ray

    base = base_policy(tmp_path / "base", tiny_sd3)
    policy = lora_policy(tmp_path / "lora", tiny_sd3, base)
    others = servers()
    engine = Choice(name="sglang", options={"answer_seconds": 20.0})
    rollout = Rollout(group_size=SAMPLES, engine=engine, engines=2, restarts=2, batch=SAMPLES)
    family = Choice(name="sd3", options={"max_sequence_length": 16})
    model = Model(path=str(tiny_sd3), family=family, dtype="float32")
    asked = [
        Request(
            prompt=Prompt(id=f"p{n}", text=f"text {n % 5}", metadata={}), group=f"g{n}", indices=tuple(range(SAMPLES)),
            seeds=tuple(seeds.derive(n, index) for index in range(SAMPLES)), plan=PLAN,
        )
        for n in range(GROUPS)
    ]  # fmt: skip
    inspector = generation.Inspector(asked, FAMILY.sigmas(str(tiny_sd3), steps=5, width=64, height=64), policy)
    with Fleet(rollout, model, policy.path) as fleet:
        ray.wait([slot.jobs[0].ref for slot in fleet._slots], num_returns=2, timeout=300)  # both are up
        for number, trajectories, conditions in fleet.stream(list(generation.batched(asked, SAMPLES))):
            for key in conditions:
                inspector.add_condition(key)
            for trajectory in trajectories:
                inspector.check(trajectory)
            if number == 0:
                ours = sorted(servers() - others)
                for pid, fault in zip(ours, (signal.SIGKILL, signal.SIGSTOP), strict=False):
                    os.killpg(pid, fault)
        inspector.finish()
        metrics = fleet.metrics
    assert metrics["images"] == GROUPS * SAMPLES
    assert metrics["restarts"] == 2
    assert policies.open_policy(policy.path).checksum == policy.checksum
    deadline = time.monotonic() + 30
    while (
        servers() - others and time.monotonic() < deadline
    ):  # the one that was starting again takes its guard some seconds
        time.sleep(0.2)
    assert not servers() - others
