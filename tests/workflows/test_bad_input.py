"""What is wrong is said in one sentence at the end of the output, with exit code 1 or 2, and leaves nothing behind."""

import json
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.workflows.conftest import PYFLYTE, ROOT, Ended, Finished, call, invoke, post_train


def refused(arguments: list[str], store: Path, environment: Mapping[str, str]) -> str:
    """The last words of a command that fails: one line, unless click itself refuses; nothing may be in the store."""
    ended = invoke(arguments, environment)
    assert ended.code in (1, 2), ended.said
    assert ended.code == 2 or [line[:7] for line in ended.said.splitlines()[:-1]] == ["Running"], ended.said
    assert not store.exists() or not list(store.iterdir())
    return last_words(ended)


def last_words(ended: Ended) -> str:
    """The end of the output, with line breaks and frames of the terminal taken out; as long as the names of all recipes."""
    return " ".join(ended.said.replace("│", " ").split())[-2000:]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.lrr=1", "train.lrr: no such setting; did you mean 'train.lr'?"),
        ("train.lr=fast", 'train.lr: "fast" is not a number; give a number'),
        (
            'sampling.window={"name": "window", "options": {"size": 3, "lo": 0, "hi": 2}}',
            "sampling.window.options.size: 3 steps do not fit in [0, 2)",
        ),
        ("rollout.group_size=1", "rollout.group_size: 1 sample has no spread"),
        ("sampling.height=70", "sampling.height: 70 is not a multiple of"),
        ("prompts.train=nowhere.jsonl", "prompts.train: 'nowhere.jsonl' cannot be read"),
        ("model.path=nowhere", "model.path 'nowhere': no such folder"),
        (
            "hardware.rollout.accelerator=H1000",
            "hardware.rollout.accelerator: 'H1000' is not one that Flyte knows; did you mean 'H100'?",
        ),
        ("score.rewards.0.name=ocrr", "score.rewards.0.name: 'ocrr' is not a known reward; did you mean 'ocr'?"),
    ],
)
def test_overrides(override: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(post_train(tmp_path / "store", override), tmp_path / "store", {})


def test_rounds_0(tmp_path: Path) -> None:
    said = refused(post_train(tmp_path / "store", rounds=0), tmp_path / "store", {})
    assert "rounds: 0 is out of range; it should be greater than or equal to 1" in said


def test_unknown_recipe(tmp_path: Path) -> None:
    said = refused(post_train(tmp_path / "store", recipe="shapes_flow_gpo"), tmp_path / "store", {})
    assert "'--recipe': 'shapes_flow_gpo' is not one of" in said and "'shapes_flow_grpo'" in said


def test_a_recipe_of_the_other_workflow(tmp_path: Path) -> None:
    said = refused(post_train(tmp_path / "store", "evaluate.steps=2", recipe="shapes_sft"), tmp_path / "store", {})
    assert "recipe: 'shapes_sft' has algorithm 'sft'; run it with workflow sft" in said


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "prompts: '{path}' does not exist; give a path or URI of one that does"),
        ("", "'{path}' has no prompts; write one a line"),
        ('{"input": "a red circle"}\nnot json\n', "{path}:2: not JSON"),
        ('{"input": "", "metadata": {}}\n', "{path}:1: `input` is ''; it must be the prompt's text"),
        ('{"metadata": {}}\n', "{path}:1: `input` is None; it must be the prompt's text"),
    ],
)
def test_prompt_files(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    arguments = [*post_train(tmp_path / "store"), "--prompts", str(path)]
    assert sentence.format(path=path) in refused(arguments, tmp_path / "store", {})


def test_start_policies(finished: Finished, tmp_path: Path) -> None:
    good = finished.artifact("policy", 1)
    changed, unfinished, base = tmp_path / "changed", tmp_path / "unfinished", tmp_path / "base"
    for folder in (changed, unfinished):
        shutil.copytree(good, folder)
    weights = bytearray((changed / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "adapter_model.safetensors").write_bytes(weights)
    (unfinished / "policy.json").unlink()
    shutil.copytree(ROOT / "assets/shapes_sd3", base)
    config = json.loads((base / "transformer/config.json").read_text())
    (base / "transformer/config.json").write_text(json.dumps(config | {"qk_norm": "rms_norm_other"}))
    cases = {
        changed: (
            "evaluate.steps=2",
            f"start_policy: {changed}/adapter_model.safetensors: its sha256 is not the one in policy.json",
        ),
        unfinished: ("evaluate.steps=2", f"start_policy: {unfinished}: no policy.json"),
        tmp_path / "nowhere": ("evaluate.steps=2", f"start_policy: '{tmp_path}/nowhere' does not exist"),
        good: (f"model.path={base}", "was trained from assets/shapes_sd3 (base digest "),
    }
    (tmp_path / "same").symlink_to(good)
    cases[tmp_path / "same"] = ("train.lora.rank=7", "is a LoRA of rank 2, and train.lora.rank is 7")
    for start, (override, sentence) in cases.items():
        arguments = [*post_train(tmp_path / "store", override), "--start_policy", str(start)]
        assert sentence in refused(arguments, tmp_path / "store", {})


def test_a_folder_of_another_recipe(finished: Finished) -> None:
    (folder,) = (finished.store / "runs").glob("shapes_flow_grpo-*")
    before = {path: path.stat().st_mtime_ns for path in finished.store.rglob("*")}
    ended = invoke(post_train(finished.store, f"name={folder.name}", "train.lr=0.5"), {})
    assert ended.code == 1
    assert (
        f"name: '{folder.name}' in {finished.store} is a run of recipe 'shapes_flow_grpo' with settings "
        in last_words(ended)
    )
    assert before == {path: path.stat().st_mtime_ns for path in finished.store.rglob("*")}


def test_a_full_disk(ray_address: Mapping[str, str], tmp_path: Path) -> None:
    """A limit on the size of files stands in for it; the errors differ in their number only."""
    ended = call([*PYFLYTE, *post_train(tmp_path, "evaluate.prompts=8")], ray_address, largest_file=100_000)
    assert ended.code == 1, ended.said
    said = last_words(ended)
    assert "-00000.arrow: the disk is full while this table is written" in said
    assert "set `store` to a larger disk" in said
    assert not list(tmp_path.glob("evaluation/*/manifest.json"))


def test_in_a_process_of_its_own_it_takes_ten_seconds_at_most(tmp_path: Path) -> None:
    """Of CPU time, as the machine may be doing something else as well; all of it is spent on imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = call([*PYFLYTE, *post_train(tmp_path / "store", "train.lrr=1")], {})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.code == 1
    assert last_words(ended).endswith("train.lrr: no such setting; did you mean 'train.lr'?")
    assert not (tmp_path / "store").exists()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
