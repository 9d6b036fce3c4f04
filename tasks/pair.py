"""Make the rows that training reads: of a round's samples, or of captioned images."""

import hashlib

import fsspec
from flytekit import Cache, Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core import jobs
from mdiff_core.jobs import EncodeJob, PairJob
from mdiff_core.settings import Data, RunConfig
from mdiff_core.stages import encode as encode_stage
from mdiff_core.stages import pair as stage
from tasks import decks, hardware
from tasks.handoff import Artifact, Folders, Metrics, planned, produce, retryable


@task(
    container_image=hardware.TRAIN_IMAGE,
    cache=Cache(version=stage.VERSION, ignored_inputs=("store",)),
    retries=2,
    enable_deck=True,
    deck_fields=(),
)
def pair(job: str, store: str, trajectories: FlyteDirectory, scores: FlyteDirectory) -> Artifact:
    """`pairs`, the rows of each optimizer step; `job` is a PairJob as JSON."""
    inputs = {"trajectories": trajectories, "scores": scores}
    made = planned(store, "pair", stage.VERSION, job, inputs, ("pairs",))

    def run(read: Folders, write: Folders) -> Metrics:
        metrics = stage.run(PairJob.from_json(job), read["trajectories"], read["scores"], write["pairs"])
        Deck("rows", decks.numbers(metrics))
        return metrics

    with retryable():
        return produce(made, inputs, run)[0]


@task(
    container_image=hardware.TRAIN_IMAGE,
    cache=Cache(version=encode_stage.VERSION, ignored_inputs=("store",)),
    retries=2,
    enable_deck=True,
    deck_fields=(),
)
def encode(job: str, store: str) -> Artifact:
    """`pairs` of captioned images, once per run; `job` is an EncodeJob as JSON."""
    made = planned(store, "encode", encode_stage.VERSION, job, {}, ("pairs",))

    def run(_: Folders, write: Folders) -> Metrics:
        metrics = encode_stage.run(EncodeJob.from_json(job), write["pairs"])
        Deck("rows", decks.numbers(metrics))
        return metrics

    with retryable():
        return produce(made, {}, run)[0]


def encode_job(config: RunConfig, data: Data) -> str:
    """The EncodeJob of a run as JSON; reads the captions file, whose content is part of it."""
    with fsspec.open(data.captions, "rb") as file:
        return jobs.encode_job(config, data, hashlib.file_digest(file, "sha256").hexdigest()).to_json()
