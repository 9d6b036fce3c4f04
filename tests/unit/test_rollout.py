"""The rollout stage, and the inspection that evaluation shares with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdiff_core import generation, policies, prompts, seeds, tables
from mdiff_core.errors import BadArtifact, BadSetting, EngineFailed
from mdiff_core.fleet import Inside
from mdiff_core.generation import Inspector, batched, check_seeds
from mdiff_core.jobs import RolloutJob, ScoreJob
from mdiff_core.options import Choice
from mdiff_core.settings import Model, RewardTerm, Rollout, Sampling, Score
from mdiff_core.stages import rollout, score
from mdiff_core.types import PolicyVersion, Prompt, Request, SamplingPlan, Trajectory
from tests.policies_made import base_policy, lora_policy

WORDS = ("one red circle", "two blue squares", "three green stars", "a white triangle", "two red circles")


def job(model: Path, *, round: int = 0, kernel: str = "flow_sde", guidance: float = 2.0, **changes: Any) -> RolloutJob:
    settings: dict[str, Any] = {
        "group_size": 3,
        "batch": 4,
        "engines": 0,
        "keep_engines": True,
        "engine": Choice(name="diffusers", options={"threads": 1}),
    }
    return RolloutJob(
        model=Model(path=str(model), family=Choice(name="sd3", options={"max_sequence_length": 16}), dtype="float32"),
        sampling=Sampling(
            width=64, height=64, steps=4, guidance=guidance, kernel=Choice(name=kernel),
            window=Choice(name="window", options={"size": 2, "lo": 0, "hi": 4}),
        ),
        rollout=Rollout(**{**settings, **changes}), prompts_per_round=2, seed=7, round=round,
    )  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    prompts.write(
        folder / "train.jsonl", [Prompt(id=f"p{i}", text=text, metadata={"n": i}) for i, text in enumerate(WORDS)]
    )
    return folder


@pytest.fixture(scope="module")
def base(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    return base_policy(tmp_path_factory.mktemp("base"), tiny_sd3)


@pytest.fixture(autouse=True)
def own_threads() -> Any:
    """One for every test, as the engine option `threads` says: it is set when an engine is made, and engines are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(folder: Path) -> list[Trajectory]:
    return list(tables.read_trajectories(folder))


def test_a_round_is_drawn_and_written(tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path) -> None:
    metrics = rollout.run(job(tiny_sd3), asked, base.path, tmp_path)
    found = rows(tmp_path)
    groups = dict(prompts.draw(prompts.read(asked / "train.jsonl"), per_round=2, round=0, seed=7))
    assert [t.sample for t in found] == [f"{group}/{index}" for group in groups for index in range(3)]
    for trajectory in found:
        assert trajectory.prompt == groups[trajectory.group]
        assert trajectory.seed == seeds.derive(7, 0, trajectory.prompt.id, trajectory.group, trajectory.index)
        assert trajectory.policy == base.version and trajectory.weights == base.checksum
    assert len({t.seed for t in found}) == 6
    assert len({t.sde_steps for t in found}) == 1
    conditions = tables.read_conditions(tmp_path)
    assert set(conditions) == {t.condition for t in found} | {t.negative for t in found}
    assert metrics["rollout/images"] == 6 and metrics["rollout/policy"] == base.version
    assert metrics["rollout/groups"] == 2 and metrics["rollout/trained_steps"] == list(found[0].sde_steps)


def test_the_same_job_gives_the_same_bits_and_another_round_others(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    for name, number in (("a", 0), ("b", 0), ("c", 1)):
        rollout.run(job(tiny_sd3, round=number), asked, base.path, tmp_path / name)
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert all(
        torch.equal(x.latents, y.latents) and np.array_equal(x.frames, y.frames) for x, y in zip(a, b, strict=True)
    )
    assert not {t.seed for t in a} & {t.seed for t in c}
    assert not {t.group for t in a} & {t.group for t in c}


def test_the_weights_that_draw_are_chosen_and_named_with_their_checksum(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    policy = lora_policy(tmp_path / "policy", tiny_sd3, base, ema=True)
    live = job(tiny_sd3)
    averaged = live.model_copy(update={"rollout": live.rollout.model_copy(update={"weights": "ema"})})
    named = {}
    for name, one, start in (("live", live, policy), ("ema", averaged, policy), ("first", averaged, base)):
        metrics = rollout.run(one, asked, start.path, tmp_path / name)
        named[name] = metrics["rollout/weights"], metrics["rollout/weights_checksum"]
        assert {t.weights for t in rows(tmp_path / name)} == {named[name][1]}
    assert named["live"] == ("live", policies.checksum_of(policy))
    assert named["ema"] == ("ema", policies.checksum_of(policy, "ema"))
    assert named["first"] == ("live", base.checksum)  # the base has no average yet
    assert not torch.equal(rows(tmp_path / "live")[0].clean, rows(tmp_path / "ema")[0].clean)


def test_a_kernel_without_noise_has_no_trained_steps(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    rollout.run(job(tiny_sd3, kernel="ode", guidance=1.0), asked, base.path, tmp_path)
    assert all(t.sde_steps == () and t.log_probs.shape == (0,) and t.negative == "" for t in rows(tmp_path))


def test_a_policy_of_another_base_is_refused(tiny_sd3: Path, asked: Path, tmp_path: Path) -> None:
    policies.base_version(tmp_path / "policy", base="elsewhere", base_digest="f" * 64)
    with pytest.raises(BadArtifact, match=r"base digest ffffffffffff.*model\.path"):
        rollout.run(job(tiny_sd3), asked, tmp_path / "policy", tmp_path / "out")


def test_a_failed_rollout_leaves_no_table(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Inside):
        def stream(self, batches: Any) -> Any:
            yield from super().stream(batches[:-1])

    monkeypatch.setattr(generation, "engines", Cut)
    with pytest.raises(EngineFailed, match=r"2 samples never came, such as 'r00000-"):
        rollout.run(job(tiny_sd3), asked, base.path, tmp_path)
    assert not list(tmp_path.iterdir())


def test_through_ray_it_is_the_same_to_the_bit(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    import ray

    policy = lora_policy(tmp_path / "policy", tiny_sd3, base)
    rollout.run(job(tiny_sd3), asked, policy.path, tmp_path / "inline")
    metrics = rollout.run(job(tiny_sd3, engines=1, keep_engines=False), asked, policy.path, tmp_path / "ray")
    assert not ray.is_initialized()
    assert metrics["rollout/restarts"] == 0 and metrics["rollout/start_seconds"] > 0
    for a, b in zip(rows(tmp_path / "inline"), rows(tmp_path / "ray"), strict=True):
        assert a.sample == b.sample and torch.equal(a.latents, b.latents) and torch.equal(a.log_probs, b.log_probs)
        assert np.array_equal(a.frames, b.frames)


def test_scores_that_come_during_the_rollout_are_those_that_come_after(
    tiny_sd3: Path, asked: Path, base: PolicyVersion, tmp_path: Path
) -> None:
    """The rewards run in another process while samples are drawn, in two waves; the score stage then takes theirs."""
    (_, dropped), *_ = prompts.draw(prompts.read(asked / "train.jsonl"), per_round=4, round=0, seed=7)
    others = [n for n in range(len(WORDS)) if n != dropped.metadata["n"]]
    filters = (Choice(name="duplicates"), Choice(name="metadata", options={"key": "n", "values": others}))
    after = Score(rewards=(RewardTerm(name="jpeg_compressibility"),), filters=filters, batch=2)
    during = after.model_copy(update={"stream": True, "workers": 1})
    task = job(tiny_sd3, batch=3).model_copy(update={"score": during, "prompts_per_round": 4, "groups": 2})
    metrics = rollout.run(task, asked, base.path, tmp_path / "drawn")
    assert metrics["rollout/score_workers"] == 1 and metrics["rollout/score_restarts"] == 0
    assert metrics["rollout/score_busy_s"] > 0 and metrics["rollout/score_idle_s"] > 0
    assert metrics["rollout/score_wait_s"] >= 0 and metrics["rollout/waves"] == 2
    told = [score.run(ScoreJob(score=s), tmp_path / "drawn", tmp_path / str(s.stream)) for s in (during, after)]
    assert tables.read_scores(tmp_path / "True") == tables.read_scores(tmp_path / "False")
    assert {k: v for k, v in told[1].items() if k != "reward/seconds"} == told[0]


PLAN = SamplingPlan(
    width=8, height=8, frames=1, steps=2, guidance=1.0, negative="", kernel="flow_sde", kernel_options={}, sde_steps=(0,)
)  # fmt: skip
SIGMAS = torch.tensor([1.0, 0.5, 0.0])
POLICY = PolicyVersion(
    path=Path(), version="v", parent="", kind="base", base="b", base_digest="d", checksum="c", targets=()
)  # fmt: skip


def request(group: str, *seed: int) -> Request:
    prompt = Prompt(id="p", text="text", metadata={})
    return Request(prompt=prompt, group=group, indices=tuple(range(len(seed))), seeds=seed, plan=PLAN)


def trajectory(group: str, index: int, seed: int) -> Trajectory:
    latents = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(seed))
    return Trajectory(
        sample=f"{group}/{index}", group=group, index=index, prompt=request(group).prompt, seed=seed, policy="v", weights="c",
        condition="k", negative="", guidance=1.0, sigmas=SIGMAS, sde_steps=(0,), latent_steps=(0, 1), latents=latents,
        log_probs=torch.zeros(1), clean=latents[1] * 2, frames=np.zeros((1, 8, 8, 3), np.uint8),
    )  # fmt: skip


def inspector() -> Inspector:
    return Inspector([request("a", 1, 2), request("b", 3)], SIGMAS, POLICY)


def test_what_was_asked_for_passes() -> None:
    checks = inspector()
    for sample in (trajectory("b", 0, 3), trajectory("a", 0, 1), trajectory("a", 1, 2)):
        checks.check(sample)
    checks.add_condition("k")
    checks.finish()


NAN = torch.full((1,), float("nan"))


@pytest.mark.parametrize(("change", "words"), [
    ({"seed": 9}, "seed 9, asked for was 1"),
    ({"policy": "u"}, "policy u"),
    ({"weights": "x"}, "weights x"),
    ({"index": 1}, "index 1"),
    ({"group": "b"}, "group b"),
    ({"guidance": 2.0}, "guidance 2.0"),
    ({"sde_steps": (1,)}, "sde_steps"),
    ({"latent_steps": (0, 2)}, "latent_steps"),
    ({"prompt": Prompt(id="q", text="text", metadata={})}, "prompt q"),
    ({"sigmas": torch.nextafter(SIGMAS, torch.ones(3))}, "drawn with sigmas"),
    ({"sigmas": SIGMAS.double()}, "float64"),
    ({"log_probs": NAN}, "log_probs hold numbers that are not finite"),
    ({"latents": torch.full((2, 1, 2, 2), float("inf"))}, "latents hold"),
    ({"clean": NAN.expand(1, 2, 2)}, "clean hold"),
    ({"latents": torch.zeros(1, 1, 2, 2)}, "latents have shape"),
    ({"log_probs": torch.zeros(2)}, "log_probs have shape"),
    ({"frames": np.zeros((1, 8, 4, 3), np.uint8)}, "frames have shape"),
    ({"sample": "c/0"}, "nobody asked"),
])  # fmt: skip
def test_anything_else_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        inspector().check(replace(trajectory("a", 0, 1), **change))


@pytest.mark.parametrize(("second", "words"), [
    (lambda first: first, "came twice"),
    (lambda first: replace(trajectory("a", 1, 2), clean=first.clean), "very latent of 'a/0'"),
])  # fmt: skip
def test_a_sample_is_itself_and_alone(second: Callable[[Trajectory], Trajectory], words: str) -> None:
    checks, first = inspector(), trajectory("a", 0, 1)
    checks.check(first)
    with pytest.raises(EngineFailed, match=words):
        checks.check(second(first))


def test_what_never_came_is_noticed() -> None:
    checks = inspector()
    checks.check(trajectory("a", 0, 1))
    with pytest.raises(EngineFailed, match="2 samples never came, such as 'a/1'"):
        checks.finish()
    checks.check(trajectory("a", 1, 2))
    checks.check(trajectory("b", 0, 3))
    with pytest.raises(EngineFailed, match="1 conditions never came, such as 'k'"):
        checks.finish()


def test_batches_are_cut_by_count_and_keep_groups_together() -> None:
    cut = list(batched([request("a", 1, 2, 3), request("b", 4, 5, 6)], 4))
    assert [[(r.group, r.indices, r.seeds) for r in batch] for batch in cut] == [
        [("a", (0, 1, 2), (1, 2, 3)), ("b", (0,), (4,))],
        [("b", (1, 2), (5, 6))],
    ]


def test_equal_seeds_are_refused() -> None:
    with pytest.raises(BadSetting, match=r"seed: samples 'b/0' and 'a/1' have the same seed 2"):
        check_seeds([request("a", 1, 2), request("b", 2)])
