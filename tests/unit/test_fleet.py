"""The fleet: order, exactly once, restarts, time-outs, endings."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from mdiff_core import policies
from mdiff_core.errors import BadArtifact, BadSetting, EngineFailed
from mdiff_core.fleet import Fleet, progress
from mdiff_core.fleet.actor import EngineActor, pack, unpack
from mdiff_core.fleet.fleet import AHEAD, IN_FLIGHT, _Job, _share, _Slot
from mdiff_core.options import Choice
from mdiff_core.settings import Model, Rollout
from mdiff_core.types import Condition, Prompt, Request, SamplingPlan, Trajectory
from tests.flaky_engine import register

ROOT = Path(__file__).parents[2]
PLAN = SamplingPlan(
    width=8, height=8, frames=1, steps=1, guidance=1.0, negative="", kernel="ode", kernel_options={}, sde_steps=()
)  # fmt: skip
MODEL = Model(path="no/model", family=Choice(name="sd3"), dtype="float32")


@pytest.fixture(scope="module")
def given_ray() -> Iterator[None]:
    """A Ray that belongs to somebody else, whose workers know the flaky engine."""
    import ray

    register()
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    workers = {"worker_process_setup_hook": register, "env_vars": {"PYTHONPATH": str(ROOT)}}
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=4, runtime_env=workers, **quiet)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    policies.base_version(folder, base="no/model", base_digest="0" * 64)
    return folder


def batches(count: int, metadata: Mapping[int, Mapping[str, str]] = MappingProxyType({})) -> list[list[Request]]:
    """Two samples each; `metadata` by batch is for the flaky engine."""

    def request(number: int) -> Request:
        prompt = Prompt(id=f"p{number}", text=f"text {number % 3}", metadata=metadata.get(number, {}))
        seeds = (100 * number, 100 * number + 1)
        return Request(prompt=prompt, group=f"g{number}", indices=(0, 1), seeds=seeds, plan=PLAN)

    return [[request(number)] for number in range(count)]


def rollout(
    engines: int = 1, *, keep: bool = True, restarts: int = 2, timeout: float = 60.0, **options: Any
) -> Rollout:
    return Rollout(
        group_size=2, engine=Choice(name="flaky", options=options), engines=engines, keep_engines=keep,
        restarts=restarts, timeout_s=timeout,
    )  # fmt: skip


def drawn(fleet: Fleet, asked: list[list[Request]]) -> tuple[list[Trajectory], set[int]]:
    """Everything, and the engines' process ids, with the promises that hold whatever happens: order and exactly once."""
    found: list[Trajectory] = []
    conditions: dict[str, Condition] = {}
    for position, (number, trajectories, fresh) in enumerate(fleet.stream(asked)):
        assert number == position
        assert [t.seed for t in trajectories] == [seed for request in asked[number] for seed in request.seeds]
        conditions.update(fresh)
        found += trajectories
    assert len({t.sample for t in found}) == len(found) == 2 * len(asked)
    assert {t.condition for t in found} == set(conditions)
    return found, {int(condition["pid"]) for condition in conditions.values()}


def test_kept_engines_serve_the_next_fleet_and_others_end(given_ray: None, policy: Path) -> None:
    def pids(keep: bool) -> set[int]:
        with Fleet(rollout(keep=keep), MODEL, policy) as fleet:
            return drawn(fleet, batches(3))[1]

    assert pids(keep=True) == pids(keep=True)
    (alone,) = pids(keep=False)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{alone}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{alone}").exists()


def test_one_fleet_serves_several_streams(given_ray: None, policy: Path, tmp_path: Path) -> None:
    """The engine of a round's first wave draws its next ones, without sending conditions again; one that dies there is replaced."""
    asked = batches(6, {4: {"deed": "die", "mark": str(tmp_path / "die")}})
    seeds: list[int] = []
    sent: list[list[int]] = []
    with Fleet(rollout(restarts=1), MODEL, policy) as fleet:
        for wave in (asked[:3], [], asked[3:4], asked[4:]):
            sent.append([])
            for _, trajectories, fresh in fleet.stream(wave):
                seeds += [t.seed for t in trajectories]
                sent[-1] += [int(condition["pid"]) for condition in fresh.values()]
        assert fleet.metrics["images"] == 12 and fleet.metrics["restarts"] == 1
    assert seeds == [seed for (request,) in asked for seed in request.seeds]
    first, *between, last = sent
    assert len(first) == 3 and between == [[], []] and set(last).isdisjoint(first)


def test_dead_hung_and_failing_engines_are_replaced_and_nothing_is_lost(
    given_ray: None, policy: Path, tmp_path: Path
) -> None:
    with Fleet(rollout(), MODEL, policy) as fleet:
        undisturbed, _ = drawn(fleet, batches(8))
    deeds = {
        number: {"deed": deed, "mark": str(tmp_path / deed)} for number, deed in ((1, "die"), (4, "hang"), (6, "error"))
    }
    with Fleet(rollout(restarts=3, timeout=1.0), MODEL, policy) as fleet:
        found, _ = drawn(fleet, batches(8, deeds))
        assert fleet.metrics["restarts"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {"die", "hang", "error"}
    assert all(torch.equal(a.clean, b.clean) for a, b in zip(found, undisturbed, strict=True))


@pytest.mark.parametrize(("deed", "kind", "words"), [
    ("refuse", BadSetting, "cannot be drawn"),
    ("fault", TypeError, "slip of the pen"),
    ("error", EngineFailed, r"engine 0 failed \(RuntimeError: the device fell over\) while drawing batch 1, after 0 restarts"),
    ("die", EngineFailed, r"engine 0 died .* batch [01], after 0 restarts \(rollout\.restarts\)"),
])  # fmt: skip
def test_the_stage_ends_when_no_restart_is_left_or_would_help(
    given_ray: None, policy: Path, deed: str, kind: type[Exception], words: str
) -> None:
    restarts = 0 if kind is EngineFailed else 2
    with pytest.raises(kind, match=words), Fleet(rollout(restarts=restarts), MODEL, policy) as fleet:
        drawn(fleet, batches(2, {1: {"deed": deed}}))


def test_an_engine_with_other_weights_is_refused(given_ray: None, policy: Path) -> None:
    settings = rollout(wrong_checksum=True)
    with pytest.raises(EngineFailed, match="loaded weights another"), Fleet(settings, MODEL, policy) as fleet:
        drawn(fleet, batches(1))


def test_batches_come_in_order_though_engines_differ_in_speed(given_ray: None, policy: Path) -> None:
    with Fleet(rollout(2, keep=False), MODEL, policy) as fleet:
        found, pids = drawn(fleet, batches(12, {0: {"deed": "slow"}}))
        metrics = fleet.metrics
    assert {t.weights for t in found} == {policies.open_policy(policy).checksum}
    assert len(pids) <= 2
    assert metrics["images"] == 24 and metrics["restarts"] == 0
    assert metrics["images_per_s"] == pytest.approx(24 / metrics["seconds"])


def test_the_given_ray_stays(given_ray: None, policy: Path) -> None:
    import ray

    with Fleet(rollout(), MODEL, policy):
        pass
    assert ray.is_initialized()


def test_few_batches_are_out_at_a_time(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(rollout(2), MODEL, policy)
    slots = [_Slot(number=number, actor=None, shared=False) for number in range(2)]
    monkeypatch.setattr(fleet, "_slots", slots)
    monkeypatch.setattr(fleet, "_send", lambda slot, batch: slot.jobs.append(_Job(batch=batch, ref=None)))
    fleet._waiting = waiting = deque(range(100))
    fleet._feed(AHEAD * 2)
    assert [[job.batch for job in slot.jobs] for slot in slots] == [[0, 2], [1, 3]]
    assert IN_FLIGHT == 2
    for _ in range(50):  # the first batch is slow, all others are back at once
        slots[1].jobs.clear()
        fleet._feed(AHEAD * 2)
    assert waiting[0] == AHEAD * 2


def test_progress_goes_to_the_log_now_and_then_where_there_is_no_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="mdiff.rollout")
    with progress.Progress(30) as shown:
        shown.add(10)
        assert not caplog.messages
        monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
        shown.add(10)
        monkeypatch.undo()
        shown.add(10)
    assert [message.split(",")[0] for message in caplog.messages] == ["20 of 30 images", "30 of 30 images"]
    assert all("images/s" in message and message.endswith("s left") for message in caplog.messages)


def test_a_policy_reaches_machines_that_do_not_see_its_folder(policy: Path, tmp_path: Path) -> None:
    files = pack(policy)
    unpack(files, tmp_path)
    assert policies.open_policy(tmp_path).checksum == policies.open_policy(policy).checksum
    register()
    actor = EngineActor(rollout().to_json(), MODEL.to_json(), 0)
    assert actor.load("/nowhere", "live", files) == policies.open_policy(policy).checksum
    actor.close()


def test_a_broken_policy_is_found_before_anything_starts(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("{}")
    with pytest.raises(BadArtifact):
        Fleet(rollout(), MODEL, tmp_path)


@pytest.mark.parametrize(("cpus", "engines", "share"), [
    ([2], 1, 2), ([2], 2, 1), ([2], 4, 0.5), ([8, 8], 1, 8), ([0, 4, 4], 3, 2), ([3], 2, 1),
])  # fmt: skip
def test_cpus_are_shared_out(cpus: list[int], engines: int, share: float) -> None:
    assert _share([{"Resources": {"CPU": float(cpu)} if cpu else {}} for cpu in cpus], engines) == share


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_outlives_a_driver_that_is_ended(policy: Path, tiny_sd3: Path, number: signal.Signals) -> None:
    """The fixture that looks for processes left behind is what is tested here."""
    script = textwrap.dedent(f"""
        from pathlib import Path
        from tests.unit.test_fleet import Choice, Fleet, Model, Rollout, batches
        model = Model(path={str(tiny_sd3)!r}, family=Choice(name="sd3"), dtype="float32")
        with Fleet(Rollout(group_size=2), model, Path({str(policy)!r})) as fleet:
            print("streaming", flush=True)
            for _ in fleet.stream(batches(1000)):
                pass
    """)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        while line := driver.stdout.readline():
            if line.strip() == "streaming":
                break
        time.sleep(1.0)
        driver.send_signal(number)
        assert driver.wait(timeout=60) != 0
