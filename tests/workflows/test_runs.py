"""The workflows from end to end through Flyte's local execution."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from mdiff_core import policies
from mdiff_core.observe import metrics
from tests.workflows.conftest import PYFLYTE, SMALL, Ended, Finished, call, invoke, manifests, post_train, sft


def test_two_rounds(finished: Finished) -> None:
    said, store = finished.ended, finished.store
    rounds = said.lines("round ")
    assert [line.split(":")[0] for line in rounds] == ["round 1", "round 2"]
    for word in ("reward ", "kept ", "drift ", "loss ", "grad ", "rollout ", "score ", "pair ", "update "):
        assert all(word in line for line in rounds)
    assert [line.split(":")[0] for line in said.lines("evaluation ")] == [f"evaluation after round {n}" for n in (0, 2)]
    (folder,) = (store / "runs").iterdir()
    assert said.lines("report ") == [f"report {folder}/report.html"]
    assert "Traceback" not in said.said and "Calling ray.init" not in said.said and len(said.lines("starting Ray")) == 1
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    records = metrics.read(folder)
    assert [(r["kind"], r["round"]) for r in records] == [
        ("evaluation", 0),
        ("round", 1),
        ("round", 2),
        ("evaluation", 2),
    ]
    assert all(record["update/drift_max"] < 1e-5 for record in records if record["kind"] == "round")
    assert said.lines("reward ") == [
        f"reward {records[0][metrics.EVALUATED]:.4f} -> {records[-1][metrics.EVALUATED]:.4f}"
    ]


def test_the_policy_is_published_with_its_lineage(finished: Finished) -> None:
    (line,) = finished.ended.lines("policy ")
    policy = policies.open_policy(Path(line.removeprefix("policy ")))
    first, second = (policies.open_policy(finished.artifact("policy", n)) for n in (0, 1))
    assert (policy.checksum, policy.parent, first.parent) == (
        finished.ended.checksum,
        first.version,
        "00000-" + first.base_weights[:8],
    )
    assert policy.checksum == second.checksum != first.checksum
    assert policies.latest(f"{finished.store}/policies", Path(line).parent.name) == line.removeprefix("policy ")


def test_help_explains_each_input() -> None:
    for workflow, inputs in (("post_train", 6), ("sft", 5)):
        said = invoke(["run", f"workflows/{workflow}.py", workflow, "--help"], {}).said
        assert f"Usage: pyflyte run workflows/{workflow}.py {workflow}" in said
        told = [
            line for line in said.splitlines() if re.search(r"--\w+ +\S.* {2,}\w", line) and "inputs-file" not in line
        ]
        assert len(told) == inputs, said


def test_the_run_stops_at_its_target(finished: Finished, ray_address: Mapping[str, str]) -> None:
    """In the store of the finished run, so that all but an evaluation is there already; the rounds need two dynamics."""
    from workflows.post_train import CHUNK

    before = manifests(finished.store)
    arguments = post_train(finished.store, "target_reward=-1", "evaluate.every=1", rounds=CHUNK + 2)
    ended = invoke(arguments, ray_address)
    assert ended.code == 0, ended.said
    assert [line.split(":")[0] for line in ended.lines("round ")] == ["round 1"]
    assert [line.split(":")[0] for line in ended.lines("evaluation ")] == [
        f"evaluation after round {n}" for n in (0, 1)
    ]
    assert ended.checksum == policies.open_policy(finished.artifact("policy", 0)).checksum
    assert [name.partition("/")[0] for name in manifests(finished.store).keys() - before.keys()] == ["evaluation"]


def test_supervised_fine_tuning_on_two_processes(ray_address: Mapping[str, str], tmp_path: Path) -> None:
    ended = invoke(sft(tmp_path / "store", tmp_path / "images", "hardware.topology=1x2"), ray_address)
    assert ended.code == 0, ended.said
    (line,) = ended.lines("round 1: loss ")
    assert "encode " in line
    (published,) = ended.lines("policy ")
    policy = policies.open_policy(Path(published.removeprefix("policy ")))
    assert (policy.kind, policy.checksum) == ("full", ended.checksum)


def test_going_on_from_a_policy(finished: Finished, ray_address: Mapping[str, str], tmp_path: Path) -> None:
    start = finished.artifact("policy", 0)
    arguments = post_train(tmp_path, "prompts.per_round=1", "train.updates_per_round=1", rounds=1)
    ended = invoke([*arguments, "--start_policy", str(start)], ray_address)
    assert ended.code == 0, ended.said
    (published,) = ended.lines("policy ")
    policy = policies.open_policy(Path(published.removeprefix("policy ")))
    assert policy.parent == policies.open_policy(start).version


def test_a_policy_beside_its_base(finished: Finished, ray_address: Mapping[str, str]) -> None:
    """The base's evaluation is that of the run, found again; the policy's has the same numbers as when the run measured it."""
    (line,) = finished.ended.lines("policy ")
    before = manifests(finished.store)

    def compared(*overrides: str) -> Ended:
        chosen = json.dumps([*SMALL, f"store={finished.store}", *overrides])
        arguments = ["--recipe", "shapes_flow_grpo", "--policy", line.removeprefix("policy "), "--overrides", chosen]
        return invoke(["-c", "flyte.config", "run", "workflows/evaluate.py", "evaluate", *arguments], ray_address)

    ended = compared()
    assert ended.code == 0, ended.said
    run = finished.store / "runs" / Path(line.removeprefix("policy ")).parent.name
    first, last = (record for record in metrics.read(run) if record["kind"] == "evaluation")
    assert ended.lines("reward_mean ") == [
        f"reward_mean {first[metrics.EVALUATED]:.4f} -> {last[metrics.EVALUATED]:.4f}"
    ]
    new = [name.partition("/")[0] for name in manifests(finished.store).keys() - before.keys()]
    assert sorted(new) == ["evaluation", "policy"]
    further = '[{"name": "new", "prompts": "assets/shapes_prompts/held_out.jsonl", "count": 1}]'
    ended = compared(
        'evaluate.gold=[{"name": "jpeg_compressibility"}]', "evaluate.samples=2", f"evaluate.sets={further}"
    )
    assert ended.code == 0, ended.said
    for name in (
        "gold/jpeg_compressibility",
        "diversity",
        "sets/new/reward_mean",
        "sets/new/gold/jpeg_compressibility",
    ):
        assert len(ended.lines(f"{name} ")) == 1, ended.said
    (told,) = ended.lines("report ")
    page = Path(told.removeprefix("report ")).read_text()
    for folder in (finished.store / "runs").glob("evaluate-*"):
        shutil.rmtree(folder)  # others count the runs of this store
    assert "sets/new/reward" in page and "gold/jpeg_compressibility" in page and "Before and after" in page


@pytest.mark.sglang
def test_a_run_drawn_by_sglang(tmp_path: Path) -> None:
    """By the command as a user types it: the server stays up between stages and ends with the run."""
    chosen = ("rollout.engine.name=sglang", "sampling.guidance=2")
    ended = call([*PYFLYTE, *post_train(tmp_path, *chosen, rounds=1)], {})
    assert ended.code == 0, ended.said
    (folder,) = (tmp_path / "runs").iterdir()
    records = metrics.read(folder)
    assert [record["kind"] for record in records] == ["evaluation", "round", "evaluation"]
    assert records[1]["update/drift_max"] < 1e-5
    assert all(record.get("rollout/restarts", 0) == 0 for record in records)
