"""Rewards in processes of their own: order, restarts, time limits, and what becomes of samples whose scorer hangs or dies."""

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mdiff_core import own_code, scoring
from mdiff_core.errors import BadSetting, MissingReward, RewardUnavailable
from mdiff_core.fleet import RewardPool, local_ray
from mdiff_core.fleet.pool import KEPT
from mdiff_core.scoring import Sheet
from mdiff_core.settings import RewardTerm, Score
from mdiff_core.types import Shot
from tests.unit.test_score import sample


@pytest.fixture(scope="module", autouse=True)
def ray_for_all() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(own_code.ALLOWED, "tests.own_rewards")


def settings(*, workers: int = 1, function: str = "misbehaving", **changes: Any) -> Score:
    arguments = changes.pop("arguments", {})
    options = {"function": f"tests.own_rewards:{function}", "arguments": arguments}
    term = RewardTerm(name="python", options=options)
    return Score(rewards=(term,), workers=workers, **{"batch": 4, "backoff_s": 0.0, **changes})


def score(asked: Score, count: int = 24) -> tuple[Sheet, dict[str, float]]:
    with RewardPool(asked) as pool:
        return scoring.score([sample(i) for i in range(count)], asked, pool), pool.metrics


def totals(sheet: Sheet) -> list[float]:
    return [row.total for row in sheet.scored]


def test_scores_are_those_of_one_process_in_order() -> None:
    sheet, metrics = score(settings(workers=2))
    assert totals(sheet) == list(range(24))
    assert sheet.scored == scoring.score([sample(i) for i in range(24)], settings(workers=0)).scored
    assert (metrics["workers"], metrics["restarts"]) == (2, 0)
    assert metrics["busy_s"] >= 0 and metrics["idle_s"] > 0


def test_workers_share_the_batches() -> None:
    """Eight batches of half a second each, on two processes that only sleep."""
    asked = settings(workers=2, arguments={"slow": 0.5}, batch=2)
    with RewardPool(asked) as pool:
        list(pool.stream([[scoring.shot(sample(i))] for i in range(2)]))  # both are up
        started = time.monotonic()
        found = list(pool.stream(scoring.cut(map(scoring.shot, map(sample, range(16))), asked)))
        took = time.monotonic() - started
        assert pool.metrics["busy_s"] >= 5.0
    assert len(found) == 8 and took < 3.5


@pytest.mark.parametrize("deed", ["hang", "die", "raise"])
def test_a_scorer_that_recovers_costs_no_score(deed: str, tmp_path: Path) -> None:
    arguments = {"deed": deed, "at": 9, "mark": str(tmp_path / "mark")}
    sheet, metrics = score(settings(arguments=arguments, timeout_s=3.0))
    assert totals(sheet) == list(range(24))
    assert metrics["restarts"] == (0 if deed == "raise" else 1)


@pytest.mark.parametrize(
    ("deed", "why"),
    [("hang", "gave no answer within 2 s"), ("die", "died"), ("raise", "RuntimeError: the scorer broke")],
)
def test_a_scorer_that_does_not_recover_masks_its_batch_or_stops_the_stage(deed: str, why: str) -> None:
    arguments, kind = {"deed": deed, "at": 9}, MissingReward if deed == "raise" else RewardUnavailable
    with pytest.raises(kind, match=rf"sample 'g2/.*reward python: .*{why}.*score.on_missing=mask"):
        score(settings(arguments=arguments, timeout_s=2.0, attempts=2))
    sheet, _ = score(settings(arguments=arguments, timeout_s=2.0, attempts=2, on_missing="mask"))
    lost = [9] if deed == "raise" else [8, 9, 10, 11]
    assert [i for i, total in enumerate(totals(sheet)) if math.isnan(total)] == lost
    assert [total for i, total in enumerate(totals(sheet)) if i not in lost] == [i for i in range(24) if i not in lost]
    assert sheet.metrics["reward/python/missing"] == sheet.metrics["reward/missing"] == len(lost)
    assert all(why in sheet.scored[i].error and not sheet.scored[i].kept for i in lost)


def test_a_process_that_starts_has_no_batch_yet() -> None:
    """Else one that its first batch kills could be taken for one that cannot start, and that is nobody's to mask."""
    with RewardPool(settings()) as pool:
        for i in range(6):
            pool.submit([scoring.shot(sample(i))])
            starting = [worker for worker in pool._workers if any(job is None for _, job in worker.tasks)]
            assert all(len(worker.tasks) == 1 for worker in starting) and (starting or i)
        assert len(list(pool.rest())) == 6


def test_a_scorer_that_only_dies_stops_the_round_early() -> None:
    asked = settings(workers=1, arguments={"deed": "die", "at": 0}, attempts=1, breaker=2, batch=1, on_missing="mask")
    dark = [sample(i, value=0) for i in range(30)]
    with pytest.raises(RewardUnavailable, match="gave no score in 2 batches in a row"), RewardPool(asked) as pool:
        scoring.score(dark, asked, pool)


def test_a_wrong_setting_is_not_masked() -> None:
    with pytest.raises(BadSetting, match="has no function 'absent'"):
        score(settings(function="absent", on_missing="mask"))


def test_no_more_batches_are_under_way_than_bounded() -> None:
    asked = settings(workers=1, arguments={"slow": 0.05}, batch=1)
    with RewardPool(asked) as pool:
        for i in range(30):
            pool.submit([scoring.shot(sample(i))])
            assert sum(job.measured is None for job in pool._queue) <= 8
        found: list[Shot] = [batch[0] for batch, _ in pool.rest()]
    assert [one.sample for one in found] == [sample(i).sample for i in range(30)]


def scorers(keep: bool, count: int = 24, **arguments: Any) -> set[int]:
    """Process ids of those who scored."""
    asked = settings(workers=1, function="process", keep_workers=keep, arguments=arguments, attempts=1)
    return {int(total) for total in totals(score(asked, count)[0])}


def test_a_kept_worker_scores_for_the_next_pool_of_its_settings() -> None:
    """One of other settings ends it."""
    first = scorers(keep=True)
    assert scorers(keep=True) == first and len(first) == 1
    assert not wait_for_end(first, seconds=0.2)
    assert scorers(keep=False, name="other") != first
    assert wait_for_end(first) and not kept_workers()


def test_a_kept_worker_that_died_meanwhile_is_replaced() -> None:
    first = scorers(keep=True)
    os.kill(first.copy().pop(), signal.SIGKILL)
    assert scorers(keep=True) != first


def test_no_worker_is_kept_after_an_error() -> None:
    first = scorers(keep=True, name="x")
    with pytest.raises(MissingReward):
        scorers(keep=True, fail=True)
    assert wait_for_end(first)
    assert not kept_workers()


def wait_for_end(processes: set[int], seconds: float = 5.0) -> bool:
    """Whether they are gone within so many seconds."""
    until = time.monotonic() + seconds
    while any(psutil.pid_exists(number) for number in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def kept_workers() -> list[str]:
    return [found["name"] for found in ray.util.list_named_actors(all_namespaces=True) if found["namespace"] == KEPT]
