"""Drawing a round wave by wave, until enough groups pass the filters."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mdiff_core import config, generation, jobs, prompts, tables
from mdiff_core.errors import EngineFailed
from mdiff_core.fleet import Inside
from mdiff_core.jobs import RolloutJob, ScoreJob
from mdiff_core.options import Choice
from mdiff_core.panel import Panel
from mdiff_core.settings import RewardTerm, Score
from mdiff_core.stages import rollout, score
from mdiff_core.types import Measured, PolicyVersion, Prompt, Shot, Trajectory
from tests.policies_made import base_policy
from tests.unit.test_rollout import job as plain_job
from tests.unit.test_rollout import rows

WANTED, MOST, SIZE = 2, 6, 2
"""Groups that are to train, groups that may be drawn, and samples of each."""


class Pool:
    """A reward pool in this process, whose answers all come at once, or as late as they may."""

    late = False

    def __init__(self, settings: Score) -> None:
        self._panel, self._done = Panel(settings), list[tuple[Sequence[Shot], Measured]]()
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, batch: Sequence[Shot]) -> None:
        self._done.append((batch, self._panel.measure(batch)))

    def finished(self) -> Iterator[tuple[Sequence[Shot], Measured]]:
        return iter(()) if self.late else self.rest()

    def rest(self) -> Iterator[tuple[Sequence[Shot], Measured]]:
        done, self._done = self._done, []
        yield from done


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rollout, "RewardPool", Pool)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    found = [Prompt(id=f"p{i}", text=f"{i + 1} red circles", metadata={"n": i}) for i in range(8)]
    prompts.write(folder / "train.jsonl", found)
    return folder


@pytest.fixture(scope="module")
def base(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return base_policy(tmp_path_factory.mktemp("base"), tiny_sd3)


def positions(asked: Path) -> list[int]:
    """The field `n` of the round's prompts, in the order in which they are drawn."""
    found = prompts.draw(prompts.read(asked / "train.jsonl"), per_round=MOST, round=0, seed=7)
    return [prompt.metadata["n"] for _, prompt in found]


def judge(*filters: Choice) -> Score:
    return Score(
        rewards=(RewardTerm(name="jpeg_compressibility"),), filters=filters, batch=3, workers=1, stream=True
    )  # fmt: skip


def passing(asked: Path, places: Sequence[int]) -> Score:
    """Only the groups that are drawn at these places pass."""
    values = [positions(asked)[place] for place in places] or ["none"]
    return judge(Choice(name="metadata", options={"key": "n", "values": values}))


def job(model: Path, settings: Score | None, *, batch: int = SIZE) -> RolloutJob:
    """With settings in waves, without all at once."""
    made = plain_job(model, group_size=SIZE, batch=batch)
    changes = {"prompts_per_round": MOST, "groups": WANTED if settings else 0, "score": settings}
    return made.model_copy(update=changes)


def same(a: Sequence[Trajectory], b: Sequence[Trajectory]) -> bool:
    """To the bit."""
    return [t.sample for t in a] == [t.sample for t in b] and all(
        x.seed == y.seed and torch.equal(x.latents, y.latents) and torch.equal(x.log_probs, y.log_probs)
        and torch.equal(x.clean, y.clean) and np.array_equal(x.frames, y.frames)
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


@pytest.fixture(scope="module")
def all_at_once(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path_factory: pytest.TempPathFactory
) -> list[Trajectory]:
    """Every group that may be drawn."""
    out = tmp_path_factory.mktemp("all")
    metrics = rollout.run(job(tiny_sd3, None), asked, base.path, out)
    assert (metrics["rollout/waves"], metrics["rollout/groups"]) == (1, MOST)
    return rows(out)


@pytest.mark.parametrize(("places", "ends"), [
    ((0, 1), (1, 2, 0)),
    ((0, 2), (2, 4, 0)),  # half passed, so two are drawn for the one that lacks
    ((1, 4), (3, 6, 0)),
    ((3, 5), (2, 6, 0)),  # none passed, so all that is left is drawn
    ((0, 2, 3), (2, 4, 0)),  # one more than lacked: the surplus does not train
    ((3,), (2, 6, 1)),
    ((), (2, 6, 2)),
])  # fmt: skip
def test_waves_go_on_until_enough_groups_pass_or_none_is_left(
    places: tuple[int, ...], ends: tuple[int, int, int],
    tiny_sd3: Path, asked: Path, base: PolicyVersion, all_at_once: list[Trajectory], tmp_path: Path,
) -> None:  # fmt: skip
    """What is drawn is the beginning of what would be drawn at once, to the bit, and the score stage agrees on what passes.

    `ends` are waves, groups drawn, and groups that lack.
    """
    (waves, groups, short), settings = ends, passing(asked, places)
    metrics = rollout.run(job(tiny_sd3, settings), asked, base.path, tmp_path / "drawn")
    assert (metrics["rollout/waves"], metrics["rollout/groups"]) == (waves, groups)
    assert metrics["rollout/images"] == groups * SIZE and metrics["rollout/score_wait_s"] >= 0
    assert same(rows(tmp_path / "drawn"), all_at_once[: groups * SIZE])
    told = {}
    for name in (True, False):
        judging = ScoreJob(score=settings.model_copy(update={"stream": name, "workers": 0}), groups=WANTED)
        told[name] = score.run(judging, tmp_path / "drawn", tmp_path / str(name))
        assert told[name]["score/short_groups"] == short and told[name]["score/kept_groups"] == WANTED - short
    assert tables.read_scores(tmp_path / "True") == tables.read_scores(tmp_path / "False")


def test_groups_without_spread_are_made_up_for(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, all_at_once: list[Trajectory], tmp_path: Path
) -> None:
    """The bar is set so that two of six groups have spread; waves end with the second of them, or a wave's end after it."""
    with tables.trajectory_writer(tmp_path / "all") as writer:
        for row in all_at_once:
            writer.add(row)
    found = list(score.scored_now(judge().model_copy(update={"workers": 0}), tmp_path / "all")[0].scored)
    spreads = [abs(found[i].total - found[i + 1].total) for i in range(0, MOST * SIZE, SIZE)]
    bar = sorted(spreads)[-3]
    last = max(place for place, spread in enumerate(spreads) if spread > bar)
    settings = judge(Choice(name="no_spread", options={"at_most": bar}))
    metrics = rollout.run(job(tiny_sd3, settings), asked, base.path, tmp_path / "drawn")
    assert metrics["rollout/groups"] > last
    told = score.run(ScoreJob(score=settings, groups=WANTED), tmp_path / "drawn", tmp_path / "scores")
    assert told["score/kept_groups"] == WANTED and told["score/short_groups"] == 0


def test_timing_decides_nothing(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that come at once and scores that come at the very last end in the same tables, as does a second time."""
    for name, late in (("a", False), ("b", True), ("c", False)):
        monkeypatch.setattr(Pool, "late", late)
        rollout.run(job(tiny_sd3, passing(asked, (0, 2))), asked, base.path, tmp_path / name)
    for name in "bc":
        assert same(rows(tmp_path / "a"), rows(tmp_path / name))
        assert tables.read_scores(tmp_path / "a") == tables.read_scores(tmp_path / name)


def test_a_wave_ends_where_a_batch_does(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:  # fmt: skip
    """Two groups fill no batches of three, but three groups do; a sample's batch decides its last bits."""
    rollout.run(job(tiny_sd3, None, batch=3), asked, base.path, tmp_path / "all")
    metrics = rollout.run(job(tiny_sd3, passing(asked, (0, 1)), batch=3), asked, base.path, tmp_path / "waves")
    assert (metrics["rollout/waves"], metrics["rollout/groups"]) == (1, 3)
    assert same(rows(tmp_path / "waves"), rows(tmp_path / "all")[: 3 * SIZE])


def test_a_later_wave_that_fails_leaves_no_table(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Inside):
        streams = 0

        def stream(self, batches: Any) -> Any:
            self.streams += 1
            yield from super().stream(batches[: 3 - self.streams])

    monkeypatch.setattr(generation, "engines", Cut)
    with pytest.raises(EngineFailed, match=r"2 samples never came, such as 'r00000-00003"):
        rollout.run(job(tiny_sd3, passing(asked, (0,))), asked, base.path, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_waves_are_for_scores_that_come_during_the_rollout() -> None:
    more = ["prompts.per_round=4", "prompts.oversample=2.5"]
    found = jobs.rollout_job(config.load("shapes_flow_grpo", more), 0)
    assert (found.prompts_per_round, found.groups) == (10, 0)
    streamed = config.load("shapes_flow_grpo", [*more, "score.stream=true", "score.workers=1"])
    assert (jobs.rollout_job(streamed, 0).groups, jobs.score_job(streamed).groups) == (4, 4)
    streamed = config.load("shapes_flow_grpo", ["score.stream=true", "score.workers=1"])
    assert jobs.rollout_job(streamed, 0).groups == 0


def waves_of(passes: Sequence[bool], wanted: int, step: int) -> list[int]:
    """Sizes of the waves when these groups pass."""
    sizes: list[int] = []
    while more := rollout.top_up(
        drawn=sum(sizes), kept=sum(passes[: sum(sizes)]), wanted=wanted, most=len(passes), step=step
    ):
        sizes.append(more)
    return sizes


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_waves_meet_the_target_exactly_when_all_at_once_would(passes: list[bool], data: st.DataObject) -> None:
    wanted, step = data.draw(st.integers(1, len(passes))), data.draw(st.integers(1, 5))
    sizes = waves_of(passes, wanted, step)
    drawn = sum(sizes)
    assert min(wanted, len(passes)) <= sizes[0] < wanted + step and min(sizes) >= 1
    assert drawn <= len(passes)
    assert sum(passes[:drawn]) >= wanted or drawn == len(passes)
    assert all(end % step == 0 or end == len(passes) for end in np.cumsum(sizes))
    assert sum(passes[: drawn - sizes[-1]]) < wanted  # the last wave was needed


@pytest.mark.parametrize(("rate", "saved"), [(0.9, 0.4), (0.7, 0.25), (0.55, 0.05)])
def test_waves_draw_less_than_a_factor_that_is_safe(rate: float, saved: float) -> None:
    """48 groups of at most 96, as the published recipes would have it; shares saved are half of or more of what is there to save."""
    rng = np.random.default_rng(0)
    drawn = [sum(waves_of((rng.random(96) < rate).tolist(), 48, 1)) for _ in range(200)]
    assert 1 - np.mean(drawn) / 96 > saved
