"""What every test may use, and what none may leave behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

if TYPE_CHECKING:
    from mdiff_core.contracts import Engine

MARK = "MDIFF_TEST_SESSION"
os.environ[MARK] = str(os.getpid())  # inherited by whatever a test starts, however far it wanders off
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("RAY_ADDRESS", None)

# How fast a machine is just now is no property of the code under test.
hypothesis.settings.register_profile("any_load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any_load")

SECONDS_TO_END = 60.0
"""A worker of Ray's that is still importing notices only afterwards that its raylet is gone."""


@pytest.fixture(autouse=True)
def no_process_survives() -> Iterator[None]:
    """Fail a test after which a process that it started is still there."""
    before = {process.pid for process in _marked()}
    yield
    deadline = time.monotonic() + SECONDS_TO_END
    while strays := [process for process in _marked() if _is_stray(process, before)]:
        if time.monotonic() > deadline:
            pytest.fail(f"left running: {[_describe(process) for process in strays]}")
        time.sleep(0.1)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Stable Diffusion 3 of the shapes world's size, in diffusers' layout."""
    import torch

    from mdiff_core.worlds import tiny_sd3

    folder = tmp_path_factory.mktemp("tiny_sd3")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = tiny_sd3.pipeline()
        pipe.vae.register_to_config(scaling_factor=1.5, shift_factor=0.1)  # as a trained one: neither 1 nor 0
        tiny_sd3.save(pipe, folder)
    return folder


@pytest.fixture(scope="session")
def sglang_engine(tiny_sd3: Path) -> "Iterator[Engine]":
    """An engine with a real SGLang server of the tiny SD3, for every test that is marked so: it takes long to start."""
    from mdiff_core.fleet.actor import make_engine
    from mdiff_core.options import Choice
    from mdiff_core.settings import Model, Rollout

    family = Choice(name="sd3", options={"max_sequence_length": 16})
    model = Model(path=str(tiny_sd3), family=family, dtype="float32")
    engine = make_engine(Rollout(group_size=1, engine=Choice(name="sglang")), model)
    yield engine
    engine.close()


def _marked() -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has_mark(process)]


def _has_mark(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK] and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


HELPERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Python's and torch's for shared memory: one for each process that ever needs it, ended with it."""


def _is_stray(process: psutil.Process, before: set[int]) -> bool:
    """Neither there before the test, nor a child of such (a fixture's own), nor a helper."""
    try:
        lineage = {process.pid, *(parent.pid for parent in process.parents())} - {os.getpid()}
        command = " ".join(process.cmdline())
        return not lineage & before and not any(helper in command for helper in HELPERS)
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (just ended)"
