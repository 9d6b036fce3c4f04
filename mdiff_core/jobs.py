"""Each stage's part of the RunConfig, and nothing more: what is in a job is what its cache key sees."""

from math import ceil

from mdiff_core.options import Choice, Options
from mdiff_core.settings import Advantage, Data, Evaluate, Model, Rollout, RunConfig, Sampling, Score, Train


class RolloutJob(Options):
    """Draw one round's trajectories."""

    model: Model
    sampling: Sampling
    rollout: Rollout
    prompts_per_round: int
    """Most groups that are drawn."""
    groups: int = 0
    """Groups after which drawing ends once so many pass the filters; 0 draws `prompts_per_round` whatever passes. Needs `score`."""
    score: Score | None = None
    """Given when samples are scored as they are drawn."""
    seed: int
    round: int


class ScoreJob(Options):
    """Score and filter one round's trajectories."""

    score: Score
    groups: int = 0
    """Groups that may train when more were drawn; 0 lets all that the filters keep."""


class PairJob(Options):
    """Turn scored trajectories into rows for the optimizer steps of a round."""

    rows: str
    """contracts.RowKind, as the loss declares."""
    combine: str
    weights: tuple[float, ...]
    """Of the rewards, for `gdpo`."""
    rewards: tuple[str, ...]
    advantage: Advantage
    updates: int
    seed: int
    round: int


class EncodeJob(Options):
    """Turn captioned images or clips into clean rows (supervised fine-tuning's stand-in for rollout, score and pair)."""

    model: Model
    data: Data
    captions: str = ""
    """sha256 of the captions file, so that a changed file is another job."""
    width: int
    height: int
    frames: int = 1
    negative: str
    batch: int
    seed: int


class UpdateJob(Options):
    """Train for one round."""

    model: Model
    sampling: Sampling
    loss: Choice
    train: Train
    seed: int
    round: int


class EvaluateJob(Options):
    """Measure a policy on held-out prompts."""

    model: Model
    sampling: Sampling
    rollout: Rollout
    score: Score
    evaluate: Evaluate
    seed: int


def rollout_job(config: RunConfig, round: int) -> RolloutJob:
    """Of round `round`, counted from 0."""
    return RolloutJob(
        model=config.model,
        sampling=config.sampling,
        rollout=config.rollout,
        prompts_per_round=groups_drawn(config),
        groups=groups_wanted(config) if config.score.stream else 0,
        score=config.score if config.score.stream else None,
        seed=config.seed,
        round=round,
    )


def groups_drawn(config: RunConfig) -> int:
    """Groups that a rollout draws, or may draw."""
    return ceil(config.prompts.per_round * config.prompts.oversample)


def groups_wanted(config: RunConfig) -> int:
    """Groups that are to train where more may be drawn; else 0."""
    return config.prompts.per_round if groups_drawn(config) > config.prompts.per_round else 0


def score_job(config: RunConfig) -> ScoreJob:
    """The same for every round."""
    return ScoreJob(score=config.score, groups=groups_wanted(config))


def pair_job(config: RunConfig, round: int, rows: str) -> PairJob:
    """Of round `round`; `rows` is what the loss trains on."""
    return PairJob(
        rows=rows,
        combine=config.score.combine,
        weights=tuple(term.weight for term in config.score.rewards),
        rewards=tuple(term.name for term in config.score.rewards),
        advantage=config.advantage,
        updates=config.train.updates_per_round,
        seed=config.seed,
        round=round,
    )


def encode_job(config: RunConfig, data: Data, captions: str) -> EncodeJob:
    """Once per run; `captions` is the sha256 of the captions file."""
    return EncodeJob(
        model=config.model,
        data=data,
        captions=captions,
        width=config.sampling.width,
        height=config.sampling.height,
        frames=config.sampling.frames,
        negative=config.sampling.negative,
        batch=config.score.batch,
        seed=config.seed,
    )


def update_job(config: RunConfig, round: int) -> UpdateJob:
    """Of round `round`, counted from 0."""
    return UpdateJob(
        model=config.model,
        sampling=config.sampling,
        loss=config.loss,
        train=config.train,
        seed=config.seed,
        round=round,
    )


def evaluate_job(config: RunConfig) -> EvaluateJob:
    """The same before and after training, so that pictures compare, and however often it is done."""
    # the prompts themselves are an input, wherever their files were; the alarm is nobody's who only measures
    sets = tuple(each.model_copy(update={"prompts": ""}) for each in config.evaluate.sets)
    told = {"every": 0, "sets": sets, "diversity_floor": 0.0}
    return EvaluateJob(
        model=config.model,
        sampling=config.sampling,
        rollout=config.rollout,
        score=config.score,
        evaluate=config.evaluate.model_copy(update=told),
        seed=config.seed,
    )
