"""What a run starts from: its name, its first artifacts and its folder, here and on an object store."""

import json
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdiff_core import config, policies, prompts, runs
from mdiff_core.artifacts import read_manifest
from mdiff_core.errors import BadSetting
from mdiff_core.observe import metrics
from mdiff_core.stages import plan
from tests.policies_made import base_policy, lora_policy

ROOT = Path(__file__).parents[2]
RECIPE = "shapes_flow_grpo"


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their files from there."""
    monkeypatch.chdir(ROOT)


def planned(store: str | Path, *overrides: str, start: Path | None = None) -> plan.Plan:
    config = plan.settings(RECIPE, [f"store={store}", *overrides])
    return plan.plan(config, plan.opened(config, start))


def key(made: plan.Plan, role: str) -> str:
    return made.files[role].rpartition("/")[2]


def test_planning_writes_nothing_and_running_writes_what_the_first_round_reads(tmp_path: Path) -> None:
    made = planned(tmp_path)
    assert not list(tmp_path.iterdir())
    plan.run(made, "the command")
    assert all(read_manifest(uri).stage == role for role, uri in made.files.items())
    held_out = prompts.read(Path(made.files["prompts"]) / "held_out.jsonl")
    assert held_out == prompts.read(made.config.prompts.held_out)
    assert policies.open_policy(Path(made.files["policy"])).kind == "base"
    with runs.opened(str(tmp_path), made.config.name) as folder:
        found = metrics.read_run(folder)
        assert (found["command"], found["files"], found["config"]["recipe"]) == ("the command", made.files, RECIPE)
        assert metrics.read(folder) == []


def test_equal_runs_share_name_and_artifacts_and_others_do_not(tmp_path: Path) -> None:
    one, same = planned(tmp_path / "one"), planned(tmp_path / "two", "rounds=9")
    assert one.config.name == same.config.name
    assert all(key(one, role) == key(same, role) for role in one.files)
    other = planned(tmp_path / "one", "train.lr=0.5")
    assert other.config.name != one.config.name and other.files == one.files
    shorter = tmp_path / "prompts.jsonl"
    shorter.write_text("".join(Path(one.config.prompts.train).read_text().splitlines(keepends=True)[:3]))
    fewer = planned(tmp_path / "one", f"prompts.train={shorter}")
    assert fewer.config.name != one.config.name
    assert [role for role in one.files if key(one, role) != key(fewer, role)] == ["prompts"]


def test_a_model_trained_anew_in_the_same_place_is_another_one(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "assets/shapes_sd3", model)
    before = planned(tmp_path / "store", f"model.path={model}")
    weights = bytearray((model / "transformer/diffusion_pytorch_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "transformer/diffusion_pytorch_model.safetensors").write_bytes(weights)
    after = planned(tmp_path / "store", f"model.path={model}")
    assert key(before, "policy") != key(after, "policy") and before.config.name != after.config.name


def test_a_name_belongs_to_the_run_that_took_it(tmp_path: Path) -> None:
    plan.run(planned(tmp_path, "name=mine"), "")
    plan.run(planned(tmp_path, "name=mine", "rounds=7"), "")
    with pytest.raises(
        BadSetting, match=r"name: 'mine' in .* is a run of recipe 'shapes_flow_grpo' with settings \w{8}, and"
    ):
        planned(tmp_path, "name=mine", "seed=4")
    run_file = tmp_path / "runs/mine/run.json"
    found = json.loads(run_file.read_text())
    run_file.write_text(json.dumps(found | {"files": found["files"] | {"policy": "elsewhere/policy/0123"}}))
    with pytest.raises(BadSetting, match="name: 'mine'"):
        planned(tmp_path, "name=mine")


def test_starting_from_a_policy_takes_it_over_whole(tmp_path: Path) -> None:
    first = planned(tmp_path / "one")
    plan.run(first, "")
    second = planned(tmp_path / "two", start=Path(first.files["policy"]))
    assert key(second, "policy") != key(first, "policy")
    plan.run(second, "")
    taken, given = (policies.open_policy(Path(made.files["policy"])) for made in (second, first))
    assert (taken.checksum, taken.version) == (given.checksum, given.version)


def test_an_object_store_does_as_well(tmp_path: Path) -> None:
    store = f"memory://{uuid.uuid4().hex}"
    made = planned(store)
    plan.run(made, "")
    assert all(uri.startswith(store) and read_manifest(uri) for uri in made.files.values())
    assert made.config.name == planned(tmp_path).config.name
    with runs.opened(store, made.config.name) as folder:
        (folder / metrics.FILE).write_text('{"kind": "round", "round": 1}\n')
    with runs.opened(store, made.config.name) as folder:
        assert [found["round"] for found in metrics.read(folder)] == [1]
        assert metrics.read_run(folder)["name"] == made.config.name
    with pytest.raises(BadSetting, match="is a run of recipe"):
        planned(store, f"name={made.config.name}", "seed=1")


def tuned(folder: Path, *, alpha: float = 4.0) -> Path:
    model = ROOT / "assets/shapes_sd3"
    return lora_policy(folder, model, base_policy(folder.with_name("base"), model), alpha=alpha).path


def test_a_policy_of_another_model_is_no_start(tmp_path: Path) -> None:
    """Of the same architecture: only the weights tell them apart."""
    start, words = tuned(tmp_path / "lora"), config.recipe("shapes_ocr")
    with pytest.raises(
        BadSetting, match=r"start_policy: policy .* was trained from .*shapes_sd3, whose weights .* set model\.path"
    ):
        plan.opened(words, start)


def test_a_lora_to_start_from_fits_the_recipe_and_the_model(tmp_path: Path) -> None:
    """Found out without loading either: layers and their shapes from the heads of the model's files."""
    start = tuned(tmp_path / "lora")
    fits = ["train.lora.rank=4", "train.lora.alpha=4"]
    assert planned(tmp_path / "store", *fits, start=start).files
    for changes, said in [
        (["train.lora.alpha=8"], "is a LoRA of alpha 4, and train.lora.alpha is 8; make the two equal"),
        (
            ['train.lora.targets=["attn.to_q"]'],
            "layers, and train.lora.targets 5 of the model, see transformer_blocks.0",
        ),
    ]:
        with pytest.raises(BadSetting, match=rf"^start_policy: .*{said}"):
            planned(tmp_path / "store", *fits, *changes, start=start)
    wide = tmp_path / "wide"
    shutil.copytree(ROOT / "assets/shapes_sd3", wide)
    path = wide / "transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    name = "transformer_blocks.0.attn.to_q.weight"
    save_file(weights | {name: torch.cat([weights[name]] * 2)}, path)
    content = json.loads((start / "policy.json").read_text())
    (start / "policy.json").write_text(json.dumps(content | {"base_weights": ""}))  # as of a base from the hub
    with pytest.raises(
        BadSetting, match=r"adapts transformer_blocks\.0\.attn\.to_q as a weight \(\d+, \d+\), and the model's is"
    ):
        planned(tmp_path / "store", *fits, f"model.path={wide}", start=start)


def test_a_layer_that_the_model_lacks_is_named_before_anything_is_made() -> None:
    with pytest.raises(
        BadSetting, match=r"train.lora.targets: 'attn.to_qq' matches no linear layer .* did you mean 'attn.to_q'"
    ):
        plan.settings(RECIPE, ['train.lora.targets=["attn.to_qq"]'])


BEGIN = """
import sys
from mdiff_core import config, runs
runs.begin(sys.argv[1], config.load("shapes_flow_grpo", ["name=mine"]), "", {})
print("begun", flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_begun_again_starts_its_metrics_anew_unless_another_process_is_in_it(tmp_path: Path) -> None:
    def begun() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BEGIN, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout and process.stdout.readline() == "begun\n"
        return process

    file = tmp_path / "runs/mine" / metrics.FILE
    first = begun()
    file.write_text('{"kind": "round", "round": 1}\n')
    second = begun()
    assert [found["round"] for found in metrics.read(file.parent)] == [1]
    first.communicate()
    second.kill()
    second.communicate()
    begun().communicate()
    assert metrics.read(file.parent) == []
