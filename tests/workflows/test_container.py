"""Tasks by the command that their containers run, each in a process of its own, with a local folder as blob store."""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core import dynamic_job_pb2, errors_pb2, literals_pb2
from flytekit import FlyteContextManager, PythonFunctionTask
from flytekit.configuration import SERIALIZED_CONTEXT_ENV_VAR, ImageConfig, SerializationSettings
from flytekit.core.type_engine import TypeEngine
from flytekit.core.utils import load_proto_from_file, write_proto_to_file
from flytekit.types.directory import FlyteDirectory
from google.protobuf.json_format import MessageToDict

from mdiff_core import config, jobs, policies
from mdiff_core.settings import RunConfig
from tests.workflows.conftest import ROOT, SMALL, Finished, call

ENTRYPOINT = Path(sys.executable).with_name("pyflyte-execute")
RESOLVER = "flytekit.core.python_auto_container.default_task_resolver"
IMAGES = {name: f"registry.example/mdiff-{name}:v1" for name in ("rollout", "train", "score")}
REGISTERED = SerializationSettings(
    image_config=ImageConfig.from_images(default_image=IMAGES["score"], m=IMAGES),
    project="mdiff",
    domain="development",
    version="1",
)
"""What registering puts into a dynamic's environment."""


def handle(folder: str | Path) -> FlyteDirectory:
    """What a task upstream would have handed on."""
    return FlyteDirectory(path=str(folder), remote_directory=False)


def execute(task: PythonFunctionTask, inputs: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Path:
    """Run the task's container command in `folder`; returns where its outputs.pb, futures.pb or error.pb is."""
    for part in ("cwd", "raw", "out", "checkpoints"):
        (folder / part).mkdir(parents=True)
    context, types = FlyteContextManager.current_context(), task.python_interface.inputs
    literals = TypeEngine.dict_to_literal_map(context, dict(inputs), types)
    write_proto_to_file(literals.to_flyte_idl(), str(folder / "inputs.pb"))
    command = [str(ENTRYPOINT), "--inputs", str(folder / "inputs.pb"), "--output-prefix", str(folder / "out")]
    command += ["--raw-output-data-prefix", str(folder / "raw"), "--checkpoint-path", str(folder / "checkpoints")]
    command += ["--prev-checkpoint", '""', "--resolver", RESOLVER, "--"]
    command += ["task-module", task.task_function.__module__, "task-name", task.task_function.__name__]
    registered = {SERIALIZED_CONTEXT_ENV_VAR: REGISTERED.serialized_context}
    ended = call(command, {**environment, **registered}, folder / "cwd")
    assert ended.code == 0, ended.said  # whatever the task did: the outcome is in the files
    return folder / "out"


def error(folder: Path) -> dict[str, Any]:
    """What error.pb says of a task that failed."""
    found = load_proto_from_file(errors_pb2.ErrorDocument, str(folder / "error.pb"))
    said: dict[str, Any] = MessageToDict(found)["error"]
    return said


def folders(out: Path) -> list[Path]:
    """The folders among the outputs of a task that succeeded."""
    assert not (out / "error.pb").exists(), error(out)
    found = load_proto_from_file(literals_pb2.LiteralMap, str(out / "outputs.pb")).literals
    return [Path(found[name].scalar.blob.uri) for name in sorted(found) if found[name].scalar.HasField("blob")]


@pytest.fixture(scope="module")
def run(finished: Finished) -> dict[str, Any]:
    """run.json of the finished run."""
    (path,) = finished.store.glob("runs/*/run.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def settings(run: dict[str, Any]) -> RunConfig:
    """Of the finished run, with the model where a process in another folder finds it."""
    run["config"]["model"]["path"] = str(ROOT / run["config"]["model"]["path"])
    return RunConfig.from_json(json.dumps(run["config"]))


@pytest.fixture(scope="module")
def executed(
    finished: Finished,
    run: dict[str, Any],
    settings: RunConfig,
    ray_address: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The tasks, two at a time: each reads what the finished run left and writes into a store of its own."""
    from tasks.pair import pair
    from tasks.plan import Recipe, plan
    from tasks.rollout import rollout
    from tasks.update import update_1x2
    from workflows.post_train import one_round

    base = tmp_path_factory.mktemp("containers")
    store = {"store": str(base / "store")}
    start = {role: handle(run["files"][role]) for role in ("prompts", "policy", "state")}
    drawn = {role: handle(finished.artifact(role, 0)) for role in ("trajectories", "scores", "pairs")}
    flat = {"algorithm": "rl", "recipe": Recipe("shapes_flow_grpo"), "seed": 0, "rounds": 1}
    flat |= {"prompts": None, "start_policy": None}
    paths = {f"prompts.{name}": getattr(settings.prompts, name) for name in ("train", "held_out")}
    absolute = [f"model.path={settings.model.path}", *(f"{name}={ROOT / path}" for name, path in paths.items())]
    big = config.load("sd35m_flow_grpo_ocr", ["name=big", f"store={base / 'big'}"])
    work: dict[str, tuple[PythonFunctionTask, dict[str, Any]]] = {
        "plan": (plan, {**flat, "overrides": [*SMALL, *absolute]}),
        "wrong": (plan, {**flat, "overrides": ["train.lrr=1"]}),
        "rollout": (
            rollout,
            {**store, "job": jobs.rollout_job(settings, 0).to_json(), **pick(start, "prompts", "policy")},
        ),
        "pair": (
            pair,
            {
                **store,
                "job": jobs.pair_job(settings, 0, "transitions").to_json(),
                **pick(drawn, "trajectories", "scores"),
            },
        ),
        "update": (
            update_1x2,
            {
                **store,
                "job": jobs.update_job(settings, 0).to_json(),
                **pick(drawn, "pairs"),
                **pick(start, "policy", "state"),
            },
        ),
        "round": (
            one_round,
            {
                "config": big.to_json(),
                "index": 0,
                "done": False,
                "inputs": [start["prompts"]],
                **pick(start, "policy", "state"),
            },
        ),
    }
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(execute, task, inputs, base / name, ray_address) for name, (task, inputs) in work.items()
        }
    return {name: future.result() for name, future in started.items()}


def pick(of: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Some of them."""
    return {name: of[name] for name in names}


def same_files(one: Path, other: Path, pattern: str) -> bool:
    """Whether both folders have the same such files, to the bit; and there are some."""
    names = [path.name for path in sorted(one.glob(pattern))]
    assert names == [path.name for path in sorted(other.glob(pattern))] != []
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_plan_puts_its_artifacts_below_the_raw_output_prefix(executed: dict[str, Path]) -> None:
    prompts, policy, state = folders(executed["plan"])
    raw = executed["plan"].parent / "raw"
    assert all(folder.is_relative_to(raw) for folder in (prompts, policy, state))
    assert policies.open_policy(policy).kind == "base"


def test_a_wrong_setting_is_not_worth_a_retry(executed: dict[str, Path]) -> None:
    said = error(executed["wrong"])
    assert "train.lrr: no such setting; did you mean 'train.lr'?" in said["message"]
    assert said.get("kind", "NON_RECOVERABLE") == "NON_RECOVERABLE"


def test_rollout_draws_what_the_local_run_drew(executed: dict[str, Path], finished: Finished) -> None:
    (made,) = folders(executed["rollout"])
    assert same_files(made, finished.artifact("trajectories", 0), "*.arrow")


def test_pair_makes_what_the_local_run_made(executed: dict[str, Path], finished: Finished) -> None:
    (made,) = folders(executed["pair"])
    assert same_files(made, finished.artifact("pairs", 0), "*.arrow")


def test_update_on_two_processes_gives_the_weights_of_one(executed: dict[str, Path], finished: Finished) -> None:
    made, _ = folders(executed["update"])
    two = policies.tensors(policies.open_policy(made))
    one = policies.tensors(policies.open_policy(finished.artifact("policy", 0)))
    assert two.keys() == one.keys() and two
    # fp32: the order of a sum over two ranks differs from that over one
    assert max((two[name] - one[name]).abs().max().item() for name in one) < 1e-6


def test_a_round_asks_for_the_machines_of_its_recipe(executed: dict[str, Path]) -> None:
    """The dynamic of a published recipe, compiled but not run."""
    out = executed["round"]
    assert not (out / "error.pb").exists(), error(out)
    found = MessageToDict(load_proto_from_file(dynamic_job_pb2.DynamicJobSpec, str(out / "futures.pb")))
    nodes = {node["taskNode"]["referenceId"]["name"]: node for node in found["nodes"] if "taskNode" in node}
    assert set(nodes) == {
        "tasks.rollout.rollout",
        "tasks.score.score",
        "tasks.pair.pair",
        "tasks.update.update_1x8",
        "tasks.record.record",
    }
    update = nodes["tasks.update.update_1x8"]["taskNode"]["overrides"]
    asked = {entry["name"]: entry["value"] for entry in update["resources"]["requests"]}
    assert asked == {"CPU": "64", "MEMORY": "512Gi", "GPU": "8"}
    assert update["extendedResources"]["gpuAccelerator"]["device"] == "nvidia-h100"
    images = {task["id"]["name"]: task["container"]["image"] for task in found["tasks"] if "container" in task}
    assert images["tasks.update.update_1x8"] == IMAGES["train"]
    templates = {task["id"]["name"]: task for task in found["tasks"]}
    (workers,) = templates["tasks.rollout.rollout"]["custom"]["rayCluster"]["workerGroupSpec"]
    limits = workers["k8sPod"]["podSpec"]["containers"][0]["resources"]["limits"]
    assert (workers["replicas"], limits["nvidia.com/gpu"]) == (1, "8")
