"""Draw a round's samples, on Ray."""

from flytekit import Cache, Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core.jobs import RolloutJob
from mdiff_core.settings import Machine
from mdiff_core.stages import rollout as stage
from tasks import decks, hardware
from tasks.handoff import Artifact, Folders, Metrics, planned, produce, retryable
from tasks.local import local_ray


@task(
    task_config=hardware.ray_job(1, Machine()),
    container_image=hardware.ROLLOUT_IMAGE,
    cache=Cache(version=stage.VERSION, ignored_inputs=("store",)),
    requests=hardware.SMALL,
    retries=2,
    enable_deck=True,
    deck_fields=(),
)
def rollout(job: str, store: str, prompts: FlyteDirectory, policy: FlyteDirectory) -> Artifact:
    """`trajectories` of the policy for the round's prompts; `job` is a RolloutJob as JSON."""
    inputs = {"prompts": prompts, "policy": policy}
    made = planned(store, "rollout", stage.VERSION, job, inputs, ("trajectories",))

    def run(read: Folders, write: Folders) -> Metrics:
        metrics = stage.run(RolloutJob.from_json(job), read["prompts"], read["policy"], write["trajectories"])
        Deck("rollout", decks.numbers(metrics))
        return metrics

    with retryable(), local_ray():
        return produce(made, inputs, run)[0]
