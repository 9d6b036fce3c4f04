"""The engine in the stage's own process: the same samples as from one on Ray, the same endings."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdiff_core import policies, registry
from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.fleet import Fleet, Inside, engines
from mdiff_core.fleet.inside import _kept, close_kept
from mdiff_core.settings import Rollout
from tests.flaky_engine import FlakyEngine, register
from tests.unit.test_fleet import MODEL, batches, drawn, rollout


@pytest.fixture(autouse=True)
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flaky engine is known, needs no model, and none is left behind."""
    register()
    monkeypatch.setattr(
        registry, "make", lambda kind, choice, **parts: FlakyEngine(FlakyEngine.Options(**choice.options))
    )
    yield
    close_kept()


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    policies.base_version(tmp_path / "policy", base="no/model", base_digest="0" * 64)
    return tmp_path / "policy"


def inside(**options: object) -> Rollout:
    return rollout(**options).model_copy(update={"engines": 0})  # type: ignore[arg-type]


def test_the_setting_says_where_engines_are(policy: Path) -> None:
    assert type(engines(inside(), MODEL, policy)) is Inside
    assert type(engines(rollout(), MODEL, policy)) is Fleet


def test_it_draws_here_everything_once_and_in_order(policy: Path) -> None:
    with Inside(inside(), MODEL, policy) as fleet:
        found, pids = drawn(fleet, batches(5))
    assert pids == {os.getpid()}
    assert fleet.metrics["images"] == len(found) == 10
    assert fleet.metrics.keys() == Fleet(rollout(), MODEL, policy).metrics.keys()


def test_a_kept_engine_serves_the_next_stage_and_one_of_other_settings_ends(policy: Path) -> None:
    def engine(**options: object) -> object:
        with Inside(inside(**options), MODEL, policy) as fleet:
            return fleet._engine

    first = engine(keep=True)
    assert engine(keep=True) is first
    assert engine(keep=False) is first
    assert not _kept
    assert engine(keep=True) is not first


@pytest.mark.parametrize(("deed", "kind", "words"), [
    ("refuse", BadSetting, "cannot be drawn"),
    ("fault", TypeError, "slip of the pen"),
    ("error", EngineFailed, r"RuntimeError: the device fell over\) while drawing batch 1"),
])  # fmt: skip
def test_what_fails_is_told_and_no_engine_is_kept(policy: Path, deed: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), Inside(inside(), MODEL, policy) as fleet:
        drawn(fleet, batches(2, {1: {"deed": deed}}))
    assert not _kept


def test_an_engine_with_other_weights_is_refused(policy: Path) -> None:
    with (
        pytest.raises(EngineFailed, match="loaded weights another"),
        Inside(inside(wrong_checksum=True), MODEL, policy),
    ):
        pass
