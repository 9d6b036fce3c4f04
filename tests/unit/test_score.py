"""The score stage: every sample gets its own rewards, and what goes wrong is said or masked, never a silent 0."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdiff_core import registry, scoring, tables
from mdiff_core.contracts import Reward
from mdiff_core.errors import BadArtifact, BadSetting, MissingReward, RewardFailed
from mdiff_core.jobs import ScoreJob
from mdiff_core.options import Choice
from mdiff_core.settings import RewardTerm, Score
from mdiff_core.stages import score
from mdiff_core.types import Prompt, Scored, Trajectory


def sample(number: int, *, value: int | None = None, size: int = 4) -> Trajectory:
    """A picture whose pixels are all `value` (its number unless given), in group number // size."""
    return Trajectory(
        sample=f"g{number // size}/{number % size}",
        group=f"g{number // size}",
        index=number % size,
        prompt=Prompt(id=f"p{number // size}", text="a cat", metadata={"easy": number < size}),
        seed=number,
        policy="v0",
        weights="w",
        condition="c",
        negative="",
        guidance=1.0,
        sigmas=torch.tensor([1.0, 0.0]),
        sde_steps=(),
        latent_steps=(),
        latents=torch.zeros(0, 1, 2, 2),
        log_probs=torch.zeros(0),
        clean=torch.zeros(1, 2, 2),
        frames=np.full((1, 8, 8, 3), number if value is None else value, np.uint8),
    )


class Brightness:
    """Mean pixel; the options hook lets a test break it."""

    Options = registry.find("reward", "jpeg_compressibility").Options

    def __init__(self, answer: Callable[[np.ndarray], Any] = lambda frames: frames.mean((1, 2, 3, 4))) -> None:
        self.answer = answer
        self.batches: list[int] = []

    def check(self, prompt: Prompt) -> None:
        """Any."""

    def __call__(self, frames: np.ndarray, prompts: Sequence[Prompt]) -> Any:
        self.batches.append(len(frames))
        return self.answer(frames)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Scored], dict[str, float]]]:
    """Score `samples` with stand-ins for rewards, through files."""

    def go(
        samples: Sequence[Trajectory], rewards: Mapping[str, Reward], **options: Any
    ) -> tuple[list[Scored], dict[str, float]]:
        make = registry.make
        monkeypatch.setattr(
            registry, "make", lambda slot, choice: rewards[choice.name] if slot == "reward" else make(slot, choice)
        )
        with tables.trajectory_writer(tmp_path / "in") as writer:
            for row in samples:
                writer.add(row)
        weights = options.pop("weights", [1.0] * len(rewards))
        terms = tuple(RewardTerm(name=name, weight=w) for name, w in zip(rewards, weights, strict=True))
        job = ScoreJob(score=Score(rewards=terms, **options))
        metrics = score.run(job, tmp_path / "in", tmp_path / "out")
        return tables.read_scores(tmp_path / "out"), metrics

    return go


def test_each_sample_gets_its_own_reward_in_batches(run: Any) -> None:
    reward = Brightness()
    scored, metrics = run([sample(i) for i in range(10)], {"bright": reward}, batch=4)
    assert reward.batches == [4, 4, 2]
    assert [(row.sample, row.group, row.total) for row in scored] == [
        (f"g{i // 4}/{i % 4}", f"g{i // 4}", float(i)) for i in range(10)
    ]
    assert all(row.kept and row.in_baseline and not row.reason and not row.error for row in scored)
    assert metrics["reward/mean"] == 4.5 and metrics["reward/bright/mean"] == 4.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(8.25))
    assert (metrics["reward/min"], metrics["reward/max"], metrics["reward/missing"]) == (0, 9, 0)
    assert (metrics["score/samples"], metrics["score/groups"], metrics["score/kept_groups"]) == (10, 3, 3)


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        ("sum", [2 * 0 + 10 * 1, 2 * 2 + 10 * 3]),
        ("gdpo", [10, 34]),
        # both rewards are two values, so their z-scores are -+ std / (std + 1e-4) with std 1
        ("zscore", [-12 / 1.0001, 12 / 1.0001]),
    ],
)
def test_rewards_are_combined(run: Any, combine: str, expected: list[float]) -> None:
    rewards = {"a": Brightness(), "b": Brightness(lambda frames: frames.mean((1, 2, 3, 4)) + 1)}
    scored, metrics = run(
        [sample(0, value=0), sample(1, value=2)], rewards, combine=combine, weights=[2.0, 10.0], batch=1
    )
    assert [row.total for row in scored] == pytest.approx(expected, rel=1e-12)
    assert [dict(row.rewards) for row in scored] == [{"a": 0, "b": 1}, {"a": 2, "b": 3}]
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"]) == (1, 2)


def nan_at(bad: int) -> Callable[[np.ndarray], np.ndarray]:
    def answer(frames: np.ndarray) -> np.ndarray:
        values = frames.mean((1, 2, 3, 4))
        return np.where(values == bad, np.nan, values)

    return answer


def raises_at(bad: int) -> Callable[[np.ndarray], np.ndarray]:
    def answer(frames: np.ndarray) -> np.ndarray:
        if (frames == bad).any():
            raise RewardFailed("the judge did not answer")
        return frames.mean((1, 2, 3, 4))

    return answer


def test_a_missing_reward_is_an_error_by_default(run: Any) -> None:
    with pytest.raises(MissingReward, match=r"sample 'g1/1': reward bright: nan.*score.on_missing=mask"):
        run([sample(i) for i in range(8)], {"bright": Brightness(nan_at(5))})
    with pytest.raises(RewardFailed, match="'bright' failed on samples 'g1/0' to 'g1/3': the judge did not answer"):
        run([sample(i) for i in range(8)], {"bright": Brightness(raises_at(5))}, batch=4)


@pytest.mark.parametrize("broken", [nan_at, raises_at])
def test_a_missing_reward_is_masked_alone(run: Any, broken: Any) -> None:
    """The other samples of its batch keep theirs, and it neither trains nor counts."""
    rewards = {"bright": Brightness(broken(5)), "fine": Brightness()}
    scored, metrics = run([sample(i) for i in range(8)], rewards, on_missing="mask")
    (bad,) = [row for row in scored if not row.kept]
    assert bad.sample == "g1/1" and not bad.in_baseline and bad.error.startswith("bright: ")
    assert bad.reason.startswith("missing: bright")
    assert math.isnan(bad.total) and math.isnan(bad.rewards["bright"]) and bad.rewards["fine"] == 5
    assert [row.total for row in scored if row.kept] == [0, 2, 4, 6, 8, 12, 14]
    assert (metrics["reward/missing"], metrics["score/dropped/missing"]) == (1, 1)
    assert metrics["reward/bright/mean"] == pytest.approx(23 / 7)


@pytest.mark.parametrize(
    "answer",
    [
        lambda frames: frames.mean((1, 2, 3, 4))[:-1],
        lambda frames: frames.mean((1, 2, 3, 4))[:, None],
        lambda frames: 1.0,
        lambda frames: ["a"] * len(frames),
    ],
)
@pytest.mark.parametrize("on_missing", ["raise", "mask"])
def test_a_wrong_answer_is_never_masked(run: Any, answer: Any, on_missing: str) -> None:
    with pytest.raises(RewardFailed, match=r"'bright' returned .* for 4 samples; it must return one number each"):
        run([sample(i) for i in range(4)], {"bright": Brightness(answer)}, on_missing=on_missing)


def test_a_bug_in_a_reward_is_never_masked(run: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        run([sample(0)], {"bright": Brightness(lambda frames: [1 / 0])}, on_missing="mask")


def test_filters_run_and_are_counted(run: Any) -> None:
    """Group 0 is easy and dropped by metadata; of group 1, one picture is there twice; group 2 has no spread."""
    samples = [sample(i) for i in range(4)] + [sample(4), sample(5, value=4), sample(6), sample(7)]
    samples += [sample(i, value=9) for i in range(8, 12)]
    chain = (
        Choice(name="metadata", options={"key": "easy", "values": [False]}),
        Choice(name="no_spread"),
        Choice(name="duplicates"),
    )
    scored, metrics = run(samples, {"bright": Brightness()}, filters=chain)
    assert [row.sample for row in scored if row.kept] == ["g1/0", "g1/2", "g1/3"]
    dropped = {name: metrics[f"score/dropped/{name}"] for name in ("metadata", "no_spread", "duplicates")}
    assert dropped == {"metadata": 4, "no_spread": 4, "duplicates": 1}
    assert (metrics["score/kept_samples"], metrics["score/kept_groups"], metrics["score/groups"]) == (3, 1, 3)
    assert metrics["reward/mean"] == np.mean([0, 1, 2, 3, 4, 4, 6, 7, 9, 9, 9, 9])


def test_the_batch_size_changes_nothing(run: Any) -> None:
    samples = [sample(i) for i in range(7)]
    whole, _ = run(samples, {"bright": Brightness()}, batch=64)
    parts, _ = run(samples, {"bright": Brightness()}, batch=3)
    assert whole == parts


def test_a_registered_reward_is_made_with_its_options() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), np.uint8)
    terms = tuple(RewardTerm(name="jpeg_incompressibility", options={"quality": q}) for q in (5, 100))
    low, high = (
        scoring.score([replace(sample(0), frames=noise)], Score(rewards=(term,))).scored[0].total for term in terms
    )
    assert low < high


def test_nothing_to_score(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="no samples to score"):
        scoring.score([], Score(rewards=(RewardTerm(name="jpeg_compressibility"),)))
    job = ScoreJob(score=Score(rewards=(RewardTerm(name="jpeg_compressibility"),)))
    with pytest.raises(BadArtifact, match=r"no trajectories-\*.arrow"):
        score.run(job, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
