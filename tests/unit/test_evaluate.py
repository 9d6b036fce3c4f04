"""The evaluation stage: fixed noise, held-out prompts, rewards."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdiff_core import prompts, tables
from mdiff_core.errors import BadSetting
from mdiff_core.jobs import EvaluateJob
from mdiff_core.options import Choice
from mdiff_core.settings import Evaluate, Model, PromptSet, RewardTerm, Rollout, Sampling, Score
from mdiff_core.stages import evaluate
from mdiff_core.types import PolicyVersion, Prompt, Trajectory
from tests.policies_made import base_policy, lora_policy

WORDS = ("one red circle", "two blue squares", "three green stars")


def job(model: Path, **changes: Any) -> EvaluateJob:
    return EvaluateJob(
        model=Model(path=str(model), family=Choice(name="sd3", options={"max_sequence_length": 16}), dtype="float32"),
        sampling=Sampling(width=64, height=64, steps=8, guidance=1.0, kernel=Choice(name="flow_sde")),
        rollout=Rollout(group_size=5, batch=3, engines=0, keep_engines=True),
        score=Score(rewards=(RewardTerm(name="jpeg_compressibility"),), filters=(Choice(name="no_spread"),)),
        evaluate=Evaluate(**{"prompts": 2, "samples": 2, "steps": 3, "guidance": 2.0, **changes}), seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    prompts.write(
        folder / "held_out.jsonl", [Prompt(id=f"p{i}", text=text, metadata={}) for i, text in enumerate(WORDS)]
    )
    return folder


@pytest.fixture(scope="module")
def base(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return base_policy(tmp_path_factory.mktemp("base"), tiny_sd3)


def rows(folder: Path) -> list[Trajectory]:
    return list(tables.read_trajectories(folder))


def test_the_first_held_out_prompts_are_drawn_and_scored(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    metrics = evaluate.run(job(tiny_sd3), asked, base.path, tmp_path)
    found, scored = rows(tmp_path), tables.read_scores(tmp_path)
    assert [t.sample for t in found] == ["evaluate-p0/0", "evaluate-p0/1", "evaluate-p1/0", "evaluate-p1/1"]
    assert all(t.sde_steps == () and len(t.sigmas) == 4 and t.guidance == 2.0 for t in found)
    assert [row.sample for row in scored] == [t.sample for t in found] and all(row.kept for row in scored)
    assert metrics["reward/mean"] == pytest.approx(np.mean([row.total for row in scored]))
    assert metrics["reward/jpeg_compressibility/mean"] == pytest.approx(metrics["reward/mean"])
    assert metrics["evaluate/images"] == 4 and metrics["evaluate/policy"] == base.version


def test_the_noise_is_the_same_for_every_policy(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    policy = lora_policy(tmp_path / "policy", tiny_sd3, base, ema=True)
    evaluate.run(job(tiny_sd3), asked, base.path, tmp_path / "a")
    evaluate.run(job(tiny_sd3), asked, policy.path, tmp_path / "b")
    evaluate.run(job(tiny_sd3, weights="ema"), asked, policy.path, tmp_path / "c")
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert [t.seed for t in a] == [t.seed for t in b] == [t.seed for t in c]
    assert not any(np.array_equal(x.frames, y.frames) for x, y in zip(a, b, strict=True))
    assert not any(np.array_equal(x.frames, y.frames) for x, y in zip(b, c, strict=True))


def test_more_prompts_than_there_are(tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"evaluate\.prompts: 4, but there are 3 held-out prompts; use 3 at most"):
        evaluate.run(job(tiny_sd3, prompts=4), asked, base.path, tmp_path)


def test_gold_sets_size_and_diversity(tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path) -> None:
    """Two sets of two prompts, at a size of their own; a prompt's choice of rewards is not gold's."""
    folder = tmp_path / "prompts"
    shutil.copytree(asked, folder)
    chosen = [
        Prompt(id=f"p{i}", text=text, metadata={"rewards": ["jpeg_compressibility"]}) for i, text in enumerate(WORDS)
    ]
    prompts.write(folder / prompts.set_file("chosen"), chosen)
    changes = {
        "width": 48, "height": 32, "gold": (RewardTerm(name="jpeg_incompressibility"),),
        "sets": (PromptSet(name="chosen", prompts="", count=2),),
    }  # fmt: skip
    metrics = evaluate.run(job(tiny_sd3, **changes), folder, base.path, tmp_path / "out")
    found = rows(tmp_path / "out")
    assert [t.group for t in found[::2]] == [
        *(f"evaluate-p{i}" for i in (0, 1)),
        *(f"evaluate-chosen-p{i}" for i in (0, 1)),
    ]
    assert len({t.seed for t in found}) == 8 and found[0].frames.shape == (1, 32, 48, 3)
    kilobytes = [row.rewards["jpeg_incompressibility"] for row in tables.read_scores(tmp_path / "out" / evaluate.GOLD)]
    assert metrics["gold/jpeg_incompressibility/mean"] == pytest.approx(np.mean(kilobytes[:4]))
    assert metrics["sets/chosen/gold/jpeg_incompressibility/mean"] == pytest.approx(np.mean(kilobytes[4:]))
    assert metrics["reward/mean"] == pytest.approx(-np.mean(kilobytes[:4]) / 500)
    assert metrics["sets/chosen/reward/mean"] == pytest.approx(-np.mean(kilobytes[4:]) / 500)
    assert metrics["samples"] == metrics["sets/chosen/samples"] == 4 and metrics["evaluate/images"] == 8
    assert 0 < metrics["diversity"] < 1 and metrics["diversity"] != metrics["sets/chosen/diversity"]
    alone = evaluate.run(job(tiny_sd3, samples=1), asked, base.path, tmp_path / "alone")
    assert "diversity" not in alone
