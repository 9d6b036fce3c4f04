"""The score stage: every sample gets its own rewards, and what goes wrong is said or masked, never a silent 0."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdiff_core import config, jobs, panel, registry, scoring, tables
from mdiff_core.contracts import Reward
from mdiff_core.errors import BadArtifact, BadSetting, MissingReward, PartlyFailed, RewardFailed, RewardUnavailable
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
    groupwise = False

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
        options = {"backoff_s": 0.0, **options}
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


@pytest.mark.parametrize(
    ("broken", "why"), [(nan_at, "nan is not a finite number"), (raises_at, "the judge did not answer")]
)
def test_a_missing_reward_is_an_error_by_default_that_names_the_sample(run: Any, broken: Any, why: str) -> None:
    with pytest.raises(MissingReward, match=rf"sample 'g1/1': reward bright: {why}; .*score.on_missing=mask"):
        run([sample(i) for i in range(8)], {"bright": Brightness(broken(5))}, batch=4)


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


WRONG: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "one short": (lambda frames: frames.mean((1, 2, 3, 4))[:-1], r"returned float64 \(\d,\) for \d samples"),
    "a column": (lambda frames: frames.mean((1, 2, 3, 4))[:, None], "it must return one number each"),
    "a number": (lambda frames: 1.0, r"returned float64 \(\) for"),
    "text": (lambda frames: ["0.5"] * len(frames), r"returned <U3 \(\d,\) for"),
    "none": (lambda frames: [None] * len(frames), r"returned object"),
    "infinite": (lambda frames: [np.inf] * len(frames), "inf is not a finite number"),
    "a bug": (lambda frames: [1 / 0], "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_an_error_or_masked_never_a_score(run: Any, kind: str) -> None:
    answer, why = WRONG[kind]
    samples, rewards = [sample(i) for i in range(4)], {"bright": Brightness(answer), "fine": Brightness()}
    with pytest.raises(MissingReward, match=why):
        run(samples, rewards)
    scored, metrics = run(samples, rewards, on_missing="mask")
    assert not any(row.kept or row.in_baseline for row in scored)
    assert all(math.isnan(row.total) and math.isnan(row.rewards["bright"]) for row in scored)
    assert metrics["reward/bright/missing"] == metrics["reward/missing"] == metrics["score/dropped/missing"] == 4
    assert metrics["reward/bright/retries"] == 2 and "reward/mean" not in metrics


def test_what_fails_is_asked_again_and_nothing_else(run: Any) -> None:
    """Sample 5 is dark twice, and then it is not."""
    tries: list[list[float]] = []

    def moody(frames: np.ndarray) -> np.ndarray:
        tries.append(frames.mean((1, 2, 3, 4)).tolist())
        return np.where((frames.mean((1, 2, 3, 4)) == 5) & (len(tries) < 3), np.nan, frames.mean((1, 2, 3, 4)))

    scored, metrics = run([sample(i) for i in range(4, 8)], {"bright": Brightness(moody)})
    assert tries == [[4, 5, 6, 7], [5], [5]]
    assert [row.total for row in scored] == [4, 5, 6, 7]
    assert metrics["reward/bright/retries"] == 2 and "reward/bright/missing" not in metrics


def test_pauses_double_and_heed_the_server(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(panel.time, "sleep", pauses.append)
    waits = iter([0.0, 7.0, 9999.0])

    def busy(frames: np.ndarray) -> np.ndarray:
        raise RewardUnavailable("busy", next(waits, 0.0))

    with pytest.raises(RewardUnavailable, match="bright: busy"):
        run([sample(0)], {"bright": Brightness(busy)}, backoff_s=1.0, attempts=4)
    assert pauses == [1.0, 7.0, panel.PATIENCE_SECONDS]


def test_who_cannot_be_asked_is_not_asked_for_each_sample(run: Any) -> None:
    calls: list[int] = []

    def down(frames: np.ndarray) -> np.ndarray:
        calls.append(len(frames))
        raise RewardUnavailable("down")

    run([sample(i) for i in range(8)], {"bright": Brightness(down)}, on_missing="mask", attempts=2, batch=4)
    assert calls == [4, 4, 4, 4]


def test_a_part_that_failed_is_asked_again_alone(run: Any) -> None:
    sizes: list[int] = []

    def partly(frames: np.ndarray) -> np.ndarray:
        sizes.append(len(frames))
        values = frames.mean((1, 2, 3, 4))
        if len(sizes) == 1:
            raise PartlyFailed(np.where(values < 2, values, np.nan).tolist(), ["" if v < 2 else "late" for v in values])
        return values

    scored, _ = run([sample(i) for i in range(4)], {"bright": Brightness(partly)})
    assert sizes == [4, 2] and [row.total for row in scored] == [0, 1, 2, 3]


@pytest.mark.parametrize("on_missing", ["raise", "mask"])
def test_a_reward_that_says_nothing_any_more_stops_the_round(run: Any, on_missing: str) -> None:
    reward = Brightness(lambda frames: [np.nan] * len(frames) if frames.max() >= 4 else frames.mean((1, 2, 3, 4)))
    samples = [sample(i) for i in range(40)]
    if on_missing == "raise":
        with pytest.raises(MissingReward):
            run(samples, {"bright": reward}, batch=4)
        return
    with pytest.raises(RewardFailed, match=r"'bright' gave no score in 3 batches in a row.*nan is not a finite number"):
        run(samples, {"bright": reward}, on_missing="mask", batch=4, attempts=1)
    assert reward.batches == [4, 4, 4, 4]
    scored, _ = run(samples, {"bright": reward}, on_missing="mask", batch=4, attempts=1, breaker=0)
    assert sum(row.kept for row in scored) == 4


def test_a_prompt_may_choose_its_rewards(run: Any) -> None:
    """Group 0 is judged by both, group 1 by the second alone: what was not asked is neither missing nor counted."""
    first, second = Brightness(), Brightness(lambda frames: frames.mean((1, 2, 3, 4)) * 10)
    samples = [sample(i, size=2) for i in range(4)]
    chosen = [
        replace(one, prompt=replace(one.prompt, metadata={"rewards": ["b"]})) if one.group == "g1" else one
        for one in samples
    ]
    scored, metrics = run(chosen, {"a": first, "b": second}, weights=[1.0, 2.0])
    assert [row.total for row in scored] == [0, 21, 40, 60]
    assert math.isnan(scored[2].rewards["a"]) and not scored[2].error and scored[2].kept
    assert (metrics["reward/a/mean"], metrics["reward/b/mean"], metrics["reward/missing"]) == (0.5, 15, 0)
    assert first.batches == [2] and second.batches == [4]
    scored, _ = run(chosen, {"a": Brightness(), "b": second}, combine="zscore")
    assert [row.total for row in scored[2:]] == pytest.approx(
        [(20 - 15) / (math.sqrt(125) + 1e-4), (30 - 15) / (math.sqrt(125) + 1e-4)]
    )


def test_a_groupwise_reward_gets_whole_groups(run: Any) -> None:
    reward = Brightness(lambda frames: frames.mean((1, 2, 3, 4)) - frames.mean())
    reward.groupwise = True
    scored, _ = run([sample(i) for i in range(10)], {"rank": reward, "bright": Brightness()}, batch=3)
    assert reward.batches == [4, 4, 2]
    assert [row.rewards["rank"] for row in scored] == [-1.5, -0.5, 0.5, 1.5] * 2 + [-0.5, 0.5]
    mixed = [sample(0), sample(4), sample(1)]
    with pytest.raises(BadArtifact, match="group 'g0' is not in one piece"):
        run(mixed, {"rank": reward}, batch=1)


def test_a_groupwise_reward_that_fails_fails_the_group(run: Any) -> None:
    reward = Brightness(raises_at(5))
    reward.groupwise = True
    scored, metrics = run([sample(i) for i in range(8)], {"rank": reward}, on_missing="mask")
    assert [row.kept for row in scored] == [True] * 4 + [False] * 4
    assert metrics["reward/rank/missing"] == 4 and reward.batches == [4, 4, 4, 4]


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


def test_more_groups_than_wanted_are_drawn_and_the_surplus_is_left_out(tmp_path: Path) -> None:
    """Five groups for three: one without spread is dropped, and of the four left the last does not train."""
    found = config.load("shapes_flow_grpo", ["prompts.per_round=3", "prompts.oversample=1.5"])
    assert jobs.rollout_job(found, 0).prompts_per_round == 5 and jobs.score_job(found).groups == 3
    assert jobs.score_job(config.load("shapes_flow_grpo")).groups == 0
    noise = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8, 3), np.uint8)
    samples = [replace(sample(i), frames=noise[0 if i < 4 else i]) for i in range(20)]
    with tables.trajectory_writer(tmp_path / "in") as writer:
        for row in samples:
            writer.add(row)
    settings = Score(rewards=(RewardTerm(name="jpeg_incompressibility"),), filters=(Choice(name="no_spread"),))
    metrics = score.run(ScoreJob(score=settings, groups=3), tmp_path / "in", tmp_path / "out")
    scored = tables.read_scores(tmp_path / "out")
    assert sorted({row.group for row in scored if row.kept}) == ["g1", "g2", "g3"]
    assert metrics["score/kept_groups"] == 3 and metrics["score/short_groups"] == 0
    assert metrics["score/dropped/no_spread"] == metrics["score/dropped/surplus"] == 4
    assert score.run(ScoreJob(score=settings, groups=5), tmp_path / "in", tmp_path / "2")["score/short_groups"] == 1


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
