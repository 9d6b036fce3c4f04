"""Everything that Flyte is told when the project is registered."""

import tarfile
from pathlib import Path

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flytekit.exceptions.user import FlyteRecoverableException

from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.settings import Topology
from tests.workflows.conftest import PYFLYTE, call

IMAGES = {name: f"registry.example/mdiff-{name}:v1" for name in ("rollout", "train", "score")}
CACHED = {
    "tasks.rollout.rollout": "rollout",
    "tasks.evaluate.evaluate": "rollout",
    "tasks.score.score": "score",
    "tasks.pair.pair": "train",
    "tasks.pair.encode": "train",
    **{f"tasks.update.update_{topology}": "train" for topology in Topology.__args__},
}
"""Tasks with a result to find again, and their image."""
UNCACHED = (
    "tasks.plan.plan",
    "tasks.record.record",
    "tasks.publish.publish",
    "tasks.compare.plan_comparison",
    "tasks.compare.compare",
)
DYNAMICS = (
    *(f"workflows.post_train.{name}" for name in ("one_round", "some_rounds", "run_rounds")),
    "workflows.evaluate.both",
)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every entity of `pyflyte package` by `<number of kind>:<name>`: 1 a task, 2 a workflow, 3 a launch plan."""
    out = tmp_path_factory.mktemp("package") / "out.tgz"
    images = [part for name, image in IMAGES.items() for part in ("-i", f"{name}={image}")]
    command = ["-c", "flyte.config", "--pkgs", "workflows", "package", *images, "-o", str(out), "-f"]
    ended = call([*PYFLYTE, *command], {})  # what a run in this process leaves in flytekit would spoil it
    assert ended.code == 0, ended.said
    found = {}
    with tarfile.open(out) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file and member.name.endswith(".pb"):
                name, _, kind = Path(member.name).stem.partition("_")[2].rpartition("_")
                found[f"{kind}:{name}"] = file.read()
    return found


def test_every_workflow_and_its_launch_plan_are_there(packaged: dict[str, bytes]) -> None:
    names = {name.partition(":")[2] for name in packaged if name.startswith("2:")}
    assert names == {"workflows.post_train.post_train", "workflows.sft.sft", "workflows.evaluate.evaluate"}
    inputs = {}
    for name in names:
        plan = launch_plan_pb2.LaunchPlan.FromString(packaged[f"3:{name}"])
        inputs[name] = {key for key, parameter in plan.spec.default_inputs.parameters.items() if parameter.required}
        assert workflow_pb2.WorkflowSpec.FromString(packaged[f"2:{name}"]).template.nodes
    assert inputs.pop("workflows.evaluate.evaluate") == {"recipe", "policy"}
    assert inputs == {name: {"recipe"} for name in inputs}


def test_every_task_has_its_image_its_cache_and_its_retries(packaged: dict[str, bytes]) -> None:
    names = {name.partition(":")[2] for name in packaged if name.startswith("1:")}
    assert names == {*CACHED, *UNCACHED, *DYNAMICS}
    for name in names:
        task = task_pb2.TaskSpec.FromString(packaged[f"1:{name}"]).template
        image = task.container.image or task.k8s_pod.pod_spec["containers"][0]["image"]
        assert image == IMAGES[CACHED.get(name, "score")]
        assert task.metadata.discoverable == (name in CACHED)
        if name in CACHED:
            assert list(task.metadata.cache_ignore_input_vars) == ["store"]
            assert task.metadata.discovery_version
            assert task.metadata.retries.retries == 2


def test_topologies_are_what_they_are_called(packaged: dict[str, bytes]) -> None:
    """One node is a plain pod, more are a PyTorchJob."""
    for topology in Topology.__args__:
        task = task_pb2.TaskSpec.FromString(packaged[f"1:tasks.update.update_{topology}"]).template
        nodes, processes = map(int, topology.split("x"))
        assert task.type == ("python-task" if nodes == 1 else "pytorch")
        if nodes > 1:
            elastic = task.custom["elasticConfig"]
            assert (elastic["maxReplicas"], elastic["nprocPerNode"]) == (nodes, processes)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (EngineFailed("engine 3 hung"), True),
        (ConnectionResetError("by peer"), True),
        (BadSetting("train.lr: too high"), False),
        (ValueError("no"), False),
        (FileNotFoundError("gone"), False),
    ],
)
def test_only_what_another_try_may_mend_is_tried_again(error: Exception, again: bool) -> None:
    from tasks.handoff import retryable

    with pytest.raises(FlyteRecoverableException if again else type(error)) as caught, retryable():
        raise error
    assert str(error) in str(caught.value)
