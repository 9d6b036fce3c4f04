"""A reward that can be gamed raises the alarm by the time it matters; one that says what its gold says does not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mdiff_core.observe import metrics, report
from tests.workflows.conftest import Ended, invoke

FLAT = {"name": "jpeg_compressibility"}
"""Rewards pictures for having nothing on them: the tiny model learns that within two rounds."""
SHAPES = {"name": "shapes"}
"""Whether the picture shows what was asked for."""
SMOOTH = {"name": "python", "options": {"function": "tests.own_rewards:smoothness"}}
"""What the flat reward is about, measured in another way."""


def trained(store: Path, gold: Mapping[str, Any], ray: Mapping[str, str]) -> tuple[Path, Ended]:
    """Two rounds on the flat reward; the run's folder."""
    chosen = [
        f"store={store}",
        "name=run",
        f"score.rewards={json.dumps([FLAT])}",
        f"evaluate.gold={json.dumps([gold])}",
        "rollout.group_size=8",
        "rollout.batch=32",
        "train.lr=0.006",  # two rounds are to be enough
        "evaluate.prompts=24",
        "evaluate.samples=6",
    ]
    arguments = ["--recipe", "shapes_flow_grpo", "--rounds", "2", "--overrides", json.dumps(chosen)]
    command = ["-c", "flyte.config", "run", "workflows/post_train.py", "post_train", *arguments]
    ended = invoke(command, {**ray, "MDIFF_MODULES": "tests.own_rewards"})
    assert ended.code == 0, ended.said
    return store / "runs" / "run", ended


def test_a_gamed_reward_raises_the_alarm(
    ray_address: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ended = trained(tmp_path / "store", SHAPES, ray_address)
    first, *_, last = [r for r in metrics.read(folder) if r["kind"] == "evaluation"]
    assert last[metrics.EVALUATED] > first[metrics.EVALUATED], "or there is nothing to be suspicious of"
    assert (first["evaluate/alarm"], last["evaluate/alarm"]) == (0, 1)
    assert "while gold 'shapes' fell" in last[metrics.ALARM]
    assert "ALARM: the reward rose" in ended.lines("evaluation after round 2")[0]
    assert "<b>Alarm.</b>" in (folder / report.FILE).read_text()
    capsys.readouterr()
    assert report.main(["check", str(folder), "--gain", "0"]) == 1
    assert "while gold 'shapes' fell" in capsys.readouterr().err


def test_an_honest_reward_does_not(
    ray_address: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run, bit for bit, beside a gold reward that rises with it."""
    folder, ended = trained(tmp_path / "store", SMOOTH, ray_address)
    first, *_, last = [r for r in metrics.read(folder) if r["kind"] == "evaluation"]
    assert last[metrics.EVALUATED] > first[metrics.EVALUATED]
    assert last["evaluate/gold/python/mean"] > first["evaluate/gold/python/mean"]
    assert last["evaluate/alarm"] == 0 and last[metrics.ALARM] == "" and "ALARM" not in ended.said
    assert report.main(["check", str(folder), "--gain", "0"]) == 0
    assert capsys.readouterr().out.startswith("demo ok: reward")
