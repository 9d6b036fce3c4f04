"""Score a round's samples and say which of them train."""

from flytekit import Cache, Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core.jobs import ScoreJob
from mdiff_core.stages import score as stage
from tasks import decks, hardware
from tasks.handoff import Artifact, Folders, Metrics, planned, produce, retryable


@task(
    container_image=hardware.SCORE_IMAGE,
    cache=Cache(version=stage.VERSION, ignored_inputs=("store",)),
    retries=2,
    enable_deck=True,
    deck_fields=(),
)
def score(job: str, store: str, trajectories: FlyteDirectory) -> Artifact:
    """`scores` of the trajectories; `job` is a ScoreJob as JSON."""
    inputs = {"trajectories": trajectories}
    made = planned(store, "score", stage.VERSION, job, inputs, ("scores",))

    def run(read: Folders, write: Folders) -> Metrics:
        metrics = stage.run(ScoreJob.from_json(job), read["trajectories"], write["scores"])
        Deck("samples", decks.samples(read["trajectories"], write["scores"]))
        Deck("rewards", decks.rewards(write["scores"]) + decks.numbers(metrics))
        return metrics

    with retryable():
        return produce(made, inputs, run)[0]
