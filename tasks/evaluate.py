"""Measure a policy on the held-out prompts, on Ray."""

from flytekit import Cache, Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core.jobs import EvaluateJob
from mdiff_core.settings import Machine
from mdiff_core.stages import evaluate as stage
from tasks import decks, hardware
from tasks.handoff import Artifact, Folders, Metrics, lineage, planned, produce, retryable
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
def evaluate(job: str, store: str, prompts: FlyteDirectory, policy: FlyteDirectory) -> Artifact:
    """`evaluation` of the policy: samples with fixed seeds, and their scores; `job` is an EvaluateJob as JSON."""
    inputs = {"prompts": prompts, "policy": policy}
    made = planned(store, "evaluate", stage.VERSION, job, inputs, ("evaluation",))

    def run(read: Folders, write: Folders) -> Metrics:
        metrics = stage.run(EvaluateJob.from_json(job), read["prompts"], read["policy"], write["evaluation"])
        Deck("samples", decks.samples(write["evaluation"], write["evaluation"]))
        Deck("rewards", decks.rewards(write["evaluation"]) + decks.numbers(metrics))
        return {**metrics, **lineage(read["policy"])}

    with retryable(), local_ray():
        return produce(made, inputs, run)[0]
