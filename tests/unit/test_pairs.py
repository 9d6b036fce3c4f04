"""Rows are the steps that were taken, joined by name, split into whole groups, and the same every time."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mdiff_core import pairs, tables
from mdiff_core.errors import BadArtifact, BadSetting
from mdiff_core.jobs import PairJob
from mdiff_core.settings import Advantage
from mdiff_core.stages import pair
from mdiff_core.tables import writing
from mdiff_core.types import Prompt, Scored, Trajectory

SIZE, T = 4, 5


def drawn(number: int, *, steps: Sequence[int] = (1, 2), recorded: Sequence[int] | None = None) -> Trajectory:
    """Latent before step k of sample n is n + k / 10 throughout."""
    recorded = sorted({j for k in steps for j in (k, k + 1)}) if recorded is None else recorded
    values = torch.tensor([number + k / 10 for k in recorded])
    return Trajectory(
        sample=f"g{number // SIZE}/{number % SIZE}",
        group=f"g{number // SIZE}",
        index=number % SIZE,
        prompt=Prompt(id="p", text="a cat", metadata={}),
        seed=number,
        policy="v0",
        weights="w",
        condition=f"c{number // SIZE}",
        negative="n",
        guidance=4.5,
        sigmas=torch.linspace(1, 0, T + 1),
        sde_steps=tuple(steps),
        latent_steps=tuple(recorded),
        latents=values.reshape(-1, 1, 1, 1).expand(-1, 2, 3, 3),
        log_probs=torch.tensor([-number - k / 10 for k in steps]),
        clean=torch.full((2, 3, 3), number + 0.5),
        frames=np.zeros((1, 2, 2, 3), np.uint8),
    )


def judged(row: Trajectory, total: float, *, kept: bool = True, in_baseline: bool = True, **rewards: float) -> Scored:
    return Scored(
        sample=row.sample,
        group=row.group,
        rewards=rewards or {"r": total},
        total=total,
        error="",
        kept=kept,
        in_baseline=in_baseline,
        reason="" if kept else "duplicates: same",
    )


def a_job(**options: Any) -> PairJob:
    base: dict[str, Any] = {
        "rows": "transitions",
        "combine": "sum",
        "weights": (1.0,),
        "rewards": ("r",),
        "advantage": Advantage(),
        "updates": 1,
        "seed": 0,
        "round": 0,
    }
    return PairJob(**(base | options))


def run(
    folder: Path, rows: Sequence[Trajectory], scores: Sequence[Scored], job: PairJob, shard_bytes: int = 1
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Through files, several shards; the rows of each optimizer step."""
    with tables.trajectory_writer(folder / "in", shard_bytes=shard_bytes) as writer:
        for number, row in enumerate(rows):
            writer.add(row)
            if number % 3 == 2:
                writer.flush()
    with tables.condition_writer(folder / "in") as conditions:
        for key in sorted({row.condition for row in rows} | {"n"}):
            conditions.add(key, {"embeds": torch.zeros(2)})
    tables.write_scores(folder / "scores", scores)
    (folder / "out").mkdir(exist_ok=True)
    metrics = pair.run(job, folder / "in", folder / "scores", folder / "out")
    found = [tables.RowTable(folder / "out", u) for u in range(tables.RowTable.updates(folder / "out"))]
    return [table.take(np.arange(len(table))) for table in found], metrics


def test_a_transition_is_the_step_that_was_taken(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(8)]
    (found,), metrics = run(tmp_path, rows, [judged(row, float(i % 4)) for i, row in enumerate(rows)], a_job())
    assert metrics["pair/rows"] == 16 == len(found["sample"])
    sigmas = np.linspace(1, 0, T + 1, dtype=np.float32)
    for i in range(16):
        number, k = i // 2, 1 + i % 2
        assert (found["sample"][i], found["group"][i]) == (rows[number].sample, rows[number].group)
        assert (found["condition"][i], found["negative"][i]) == (rows[number].condition, "n")
        assert found["step"][i] == k
        assert (found["sigma"][i], found["sigma_next"][i]) == (sigmas[k], sigmas[k + 1])
        assert found["sigma_ceiling"][i] == sigmas[1]
        assert (found["x"][i] == np.float32(number + k / 10)).all()
        assert (found["x_next"][i] == np.float32(number + (k + 1) / 10)).all()
        assert found["log_prob"][i] == np.float32(-number - k / 10)
        assert found["guidance"][i] == 4.5
        # rewards 0..3 in each group: mean 1.5, population std sqrt(1.25)
        assert found["advantage"][i] == pytest.approx((number % 4 - 1.5) / (1.25**0.5 + 1e-4), rel=1e-6)
    assert found["x"].shape == (16, 2, 3, 3) and found["x"].dtype == np.float32


def test_a_clean_row_is_the_sample(tmp_path: Path) -> None:
    rows = [drawn(i, steps=()) for i in range(4)]
    (found,), _ = run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job(rows="clean"))
    assert found["sample"] == [row.sample for row in rows]
    assert [float(x.ravel()[0]) for x in found["x0"]] == [0.5, 1.5, 2.5, 3.5]
    assert len(set(found["seed"].tolist())) == 4


def test_a_sample_is_joined_to_its_advantage_and_keeps_its_schedule(tmp_path: Path) -> None:
    rows = [drawn(i, steps=()) for i in range(8)]
    (found,), _ = run(tmp_path, rows, [judged(row, float(i % 4)) for i, row in enumerate(rows)], a_job(rows="samples"))
    assert found["sample"] == [row.sample for row in rows]
    assert (found["x0"][:, 0, 0, 0] == np.arange(8) + 0.5).all()
    assert (found["sigmas"] == np.linspace(1, 0, T + 1, dtype=np.float32)).all()
    assert found["advantage"][:4] == pytest.approx([-1.3415, -0.4472, 0.4472, 1.3415], abs=2e-4)


@pytest.mark.parametrize("order", [range(12), [7, 0, 11, 2, 4, 9, 1, 3, 10, 5, 8, 6]], ids=["in order", "mixed"])
def test_preferences_are_the_best_and_worst_of_each_group(tmp_path: Path, order: Sequence[int]) -> None:
    rows = [drawn(i, steps=()) for i in order]
    rewards = [3, 1, 4, 1, 5, 5, 5, 5, 0, 2, 7, 1]  # best and worst of g0: 2 and one of 1, 3; g1: nobody; g2: 10 and 8
    scores = [judged(drawn(i), float(reward)) for i, reward in enumerate(rewards)]
    steps, metrics = run(tmp_path, rows, scores, a_job(rows="preferences", updates=2))
    pairs_found = {
        found["sample"][i]: (found["better"][i, 0, 0, 0], found["worse"][i, 0, 0, 0])
        for found in steps
        for i in range(len(found["sample"]))
    }
    assert set(pairs_found) == {"g0/2", "g2/2"}
    assert pairs_found["g0/2"] in {(2.5, 1.5), (2.5, 3.5)} and pairs_found["g2/2"] == (10.5, 8.5)
    assert [len(found["sample"]) for found in steps] == [1, 1]
    assert (metrics["pair/samples"], metrics["pair/rows"], metrics["pair/groups"]) == (4, 2, 2)
    assert all((found["advantage"] > 0).all() and found["sigmas"].shape == (1, T + 1) for found in steps)


def test_preferences_do_not_depend_on_the_order_of_scores() -> None:
    samples, credit = [f"s{i}" for i in range(6)], [1.0, 0.0, 1.0, 0.0, 1.0, 0.5]
    chosen = pairs.extremes(samples, ["g"] * 6, credit)
    assert len(chosen) == 2 and chosen == pairs.extremes(samples[::-1], ["g"] * 6, credit[::-1])


def test_preferences_of_groups_without_better_and_worse_are_nothing_to_train_on(tmp_path: Path) -> None:
    rows = [drawn(i, steps=()) for i in range(8)]
    with pytest.raises(BadSetting, match=r"all 8 samples were dropped \(as good as their group 8\)"):
        run(tmp_path, rows, [judged(row, 1.0) for row in rows], a_job(rows="preferences"))


def test_steps_need_not_touch_or_be_recorded_alone(tmp_path: Path) -> None:
    rows = [drawn(i, steps=(0, 3), recorded=(0, 1, 2, 3, 4, 5)) for i in range(4)]
    (found,), _ = run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job())
    assert found["step"].tolist() == [0, 3] * 4
    assert found["x"][:, 0, 0, 0].tolist() == pytest.approx([i + k / 10 for i in range(4) for k in (0, 3)])
    assert found["x_next"][:, 0, 0, 0].tolist() == pytest.approx([i + k / 10 for i in range(4) for k in (1, 4)])


def test_a_slow_disk_gets_every_row_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written while later ones are made, in memory that is used again."""
    append = writing._append

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        append(*arguments)

    monkeypatch.setattr(writing, "_append", slowly)
    rows = [drawn(i) for i in range(24)]
    (found,), _ = run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job())
    assert found["x"][:, 0, 0, 0].tolist() == pytest.approx([i + k / 10 for i in range(24) for k in (1, 2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_latents_keep_their_values(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = [replace(row, latents=row.latents.to(dtype)) for row in map(drawn, range(4))]
    (found,), _ = run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job())
    expected = torch.stack([row.latents[:2] for row in rows]).flatten(0, 1).float().numpy()
    assert np.array_equal(found["x"].astype(np.float32), expected)


def test_scores_are_joined_by_name(tmp_path: Path) -> None:
    """In any order, with any rows dropped, a sample's rows carry its own advantage and latents."""
    rows = [drawn(i) for i in range(12)]
    scores = [judged(row, float(i), kept=i % 3 != 0) for i, row in enumerate(rows)]
    straight, _ = run(tmp_path / "a", rows, scores, a_job())
    shuffled, _ = run(tmp_path / "b", rows[::-1], scores[5:] + scores[:5], a_job())

    def by_row(found: dict[str, Any]) -> dict[tuple[str, int], tuple[float, float, int]]:
        names = zip(found["sample"], found["step"].tolist(), strict=True)
        return dict(
            zip(names, zip(found["advantage"], found["x"][:, 0, 0, 0], found["seed"], strict=True), strict=True)
        )

    assert by_row(straight[0]) == by_row(shuffled[0])
    assert set(straight[0]["sample"]) == {row.sample for i, row in enumerate(rows) if i % 3 != 0}


def test_dropped_samples_count_in_the_baseline_as_told(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(4)]
    totals = [0.0, 1.0, 2.0, 9.0]
    for in_baseline, mean in [(True, 3.0), (False, 1.0)]:
        scores = [judged(row, total) for row, total in zip(rows, totals, strict=True)]
        scores[3] = judged(rows[3], 9.0, kept=False, in_baseline=in_baseline)
        job = a_job(advantage=Advantage(std="none"))
        (found,), _ = run(tmp_path / str(in_baseline), rows, scores, job)
        assert found["advantage"][::2].tolist() == [total - mean for total in totals[:3]]


def test_gdpo_takes_the_rewards_apart(tmp_path: Path) -> None:
    """Two rewards of very different scale weigh the same once each has its own group advantage."""
    rows = [drawn(i) for i in range(4)]
    scores = [judged(row, 0.0, a=float(i % 2), b=1000.0 * (i // 2)) for i, row in enumerate(rows)]
    job = a_job(combine="gdpo", rewards=("a", "b"), weights=(1.0, 2.0))
    (found,), _ = run(tmp_path, rows, scores, job)
    assert found["advantage"][::2].tolist() == pytest.approx([-2.9998, -1.0002, 1.0002, 2.9998], abs=1e-4)


def test_rows_have_seeds_of_their_own_by_name(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(4)]
    scores = [judged(row, float(i)) for i, row in enumerate(rows)]
    seeds = []
    for folder, job in [("a", a_job()), ("b", a_job()), ("c", a_job(round=1)), ("d", a_job(seed=1))]:
        (found,), _ = run(tmp_path / folder, rows, scores, job)
        seeds.append(found["seed"].tolist())
    assert seeds[0] == seeds[1]
    assert len({seed for run in seeds for seed in run}) == 24


def test_a_round_is_split_by_whole_groups(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(28)]
    scores = [judged(row, float(i)) for i, row in enumerate(rows)]
    found, metrics = run(tmp_path, rows, scores, a_job(updates=3))
    of = [Counter(step["group"]) for step in found]
    assert sum(of, Counter()) == {f"g{i}": 2 * SIZE for i in range(7)}
    assert not (of[0].keys() & of[1].keys()) and sorted(len(step) for step in of) == [2, 2, 3]
    assert (metrics["pair/updates"], metrics["pair/smallest_update"], metrics["pair/largest_update"]) == (3, 16, 24)
    other, _ = run(tmp_path / "again", rows, scores, a_job(updates=3, round=1))
    assert [set(step["group"]) for step in other] != [set(step["group"]) for step in found]


def test_fewer_groups_than_steps_make_fewer_steps(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(8)]
    found, metrics = run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job(updates=5))
    assert len(found) == metrics["pair/updates"] == 2


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 24), min_size=1), st.integers(1, 6), st.integers(0, 9))
def test_a_split_is_even_and_repeatable(groups: dict[str, int], updates: int, seed: int) -> None:
    """No step exceeds another by more than one group, and no step is empty while there are groups enough."""
    steps = pairs.split(groups, updates=updates, seed=seed, round=0)
    backwards = dict(reversed(groups.items()))
    assert steps == pairs.split(backwards, updates=updates, seed=seed, round=0)
    assert steps.keys() == groups.keys()
    loads = [sum(groups[group] for group in groups if steps[group] == step) for step in range(updates)]
    assert max(loads) - min(loads) <= max(groups.values())
    assert set(steps.values()) == set(range(min(updates, len(groups))))


@pytest.mark.parametrize(("recorded", "step"), [((1, 2), 3), ((2, 3), 1), ((0, 5), 1)])
def test_a_missing_latent_is_named(tmp_path: Path, recorded: tuple[int, ...], step: int) -> None:
    rows = [drawn(i, recorded=recorded) for i in range(4)]
    with pytest.raises(BadArtifact, match=rf"g0/0: latent before step {step} is needed and was not recorded"):
        run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job())
    assert not list((tmp_path / "out").glob("rows*"))


def test_no_trained_step_is_an_error(tmp_path: Path) -> None:
    rows = [drawn(i, steps=()) for i in range(4)]
    with pytest.raises(BadArtifact, match="no trained step"):
        run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job())


def test_trajectories_and_scores_must_be_of_the_same_samples(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(4)]
    scores = [judged(row, float(i)) for i, row in enumerate(rows)]
    elsewhere = [*scores[:3], replace(scores[3], group="g9")]
    unscored = "trajectories: sample '{}' of group 'g0' is there twice or has no score of that group"
    cases = [
        (rows, scores[:3], unscored.format("g0/3")),
        (rows, elsewhere, unscored.format("g0/3")),
        ([*rows, rows[1]], scores, unscored.format("g0/1")),
        (rows[:3], scores, "scores: sample 'g0/3' has no trajectory"),
        (rows, [*scores, scores[1]], "scores: sample 'g0/1' is there twice"),
    ]
    for number, (drawn_rows, judged_rows, says) in enumerate(cases):
        with pytest.raises(BadArtifact, match=says):
            run(tmp_path / str(number), drawn_rows, judged_rows, a_job())
        assert list((tmp_path / str(number) / "out").iterdir()) == []


def test_nothing_left_to_train_is_a_sentence(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(4)]
    scores = [judged(row, 1.0, kept=False) for row in rows]
    with pytest.raises(BadSetting, match=r"round 4 has nothing to train on, all 4 .* \(duplicates 4\); loosen"):
        run(tmp_path, rows, scores, a_job(round=3))


def test_conditions_travel_with_the_rows(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(8)]
    run(tmp_path, rows, [judged(row, float(i)) for i, row in enumerate(rows)], a_job())
    assert set(tables.read_conditions(tmp_path / "out")) == {"c0", "c1", "n"}


def test_the_files_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    rows = [drawn(i) for i in range(8)]
    scores = [judged(row, float(i)) for i, row in enumerate(rows)]
    for folder in ("a", "b"):
        run(tmp_path / folder, rows, scores, a_job(updates=2))
    names = sorted(path.name for path in (tmp_path / "a/out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b/out").iterdir())
    assert all((tmp_path / "a/out" / n).read_bytes() == (tmp_path / "b/out" / n).read_bytes() for n in names)
