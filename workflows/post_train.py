"""Reinforcement-learning post-training: the only loop over rounds."""

from flytekit import dynamic, workflow
from flytekit.types.directory import FlyteDirectory

from mdiff_core import jobs
from mdiff_core.registry import find
from mdiff_core.settings import RunConfig
from tasks import hardware
from tasks.evaluate import evaluate
from tasks.handoff import Artifact
from tasks.local import local_ray, one_sentence
from tasks.pair import encode, encode_job, pair
from tasks.plan import Directory, File, Recipe, plan
from tasks.publish import publish
from tasks.record import record
from tasks.rollout import rollout
from tasks.score import score
from tasks.update import UPDATES

CHUNK = 20
"""Rounds in one dynamic: about fifty nodes is as many as the console shows well."""
ORDERS = {"container_image": hardware.SCORE_IMAGE, "requests": hardware.SMALL}
"""Where the dynamics run, which only order tasks."""
Round = tuple[Artifact, Artifact, bool]
"""Policy, train state, and whether the target is reached."""


@dynamic(**ORDERS)
def one_round(
    config: str, index: int, done: bool, inputs: list[FlyteDirectory], policy: FlyteDirectory, state: FlyteDirectory
) -> Round:
    """Round `index` from 0; nothing once `done`. `inputs` are the prompts and, in sft, the encoded pairs."""
    if done:
        return policy, state, done
    run = RunConfig.from_json(config)
    made = inputs[1:] or draw(run, index, inputs[0], policy)
    policy, state = UPDATES[run.hardware.topology](
        job=jobs.update_job(run, index).to_json(), store=run.store, pairs=made[-1], policy=policy, state=state
    ).with_overrides(**hardware.pod(run.hardware.update))
    told = [policy] if index > 0 and inputs[1:] else [*made, policy]
    if run.evaluate.every and (index + 1) % run.evaluate.every == 0 and index + 1 < run.rounds:
        told.append(measure(run, inputs[0], policy))
    return policy, state, record(config=config, made=told)


def draw(run: RunConfig, index: int, prompts: FlyteDirectory, policy: FlyteDirectory) -> list[FlyteDirectory]:
    """Trajectories, scores and pairs of a round, as nodes of the calling dynamic."""
    store, machines = run.store, run.hardware
    job = jobs.rollout_job(run, index).to_json()
    drawn = rollout(job=job, store=store, prompts=prompts, policy=policy).with_overrides(**hardware.ray(machines))
    job = jobs.score_job(run).to_json()
    scores = score(job=job, store=store, trajectories=drawn).with_overrides(**hardware.pod(machines.score))
    job = jobs.pair_job(run, index, find("loss", run.loss.name).rows).to_json()
    pairs = pair(job=job, store=store, trajectories=drawn, scores=scores).with_overrides(**hardware.pod(machines.pair))
    return [drawn, scores, pairs]


def measure(run: RunConfig, prompts: FlyteDirectory, policy: FlyteDirectory) -> FlyteDirectory:
    """The held-out evaluation of a policy, as a node of the calling dynamic."""
    asked = {"job": jobs.evaluate_job(run).to_json(), "store": run.store}
    return evaluate(**asked, prompts=prompts, policy=policy).with_overrides(**hardware.ray(run.hardware))


@dynamic(**ORDERS)
def some_rounds(
    config: str, first: int, done: bool, inputs: list[FlyteDirectory], policy: FlyteDirectory, state: FlyteDirectory
) -> Round:
    """Up to CHUNK rounds from `first`."""
    for i in range(first, min(first + CHUNK, RunConfig.from_json(config).rounds)):
        policy, state, done = one_round(config=config, index=i, done=done, inputs=inputs, policy=policy, state=state)
    return policy, state, done


@dynamic(**ORDERS)
def run_rounds(config: str, prompts: FlyteDirectory, policy: FlyteDirectory, state: FlyteDirectory) -> Artifact:
    """Measure, train for the run's rounds or until the target is reached, measure again, publish."""
    run = RunConfig.from_json(config)
    with one_sentence(), local_ray():
        before = measure(run, prompts, policy)
        done, inputs = record(config=config, made=[before]), [prompts]
        if run.data:
            pairs = encode(job=encode_job(run, run.data), store=run.store)
            inputs.append(pairs.with_overrides(**hardware.pod(run.hardware.pair)))
        for i in range(0, run.rounds, CHUNK):
            policy, state, done = some_rounds(
                config=config, first=i, done=done, inputs=inputs, policy=policy, state=state
            )
        return publish(config=config, before=before, after=measure(run, prompts, policy), policy=policy)


@workflow
def post_train(
    recipe: Recipe,
    rounds: int | None = None,
    prompts: File = None,
    start_policy: Directory = None,
    overrides: list[str] = [],  # noqa: B006  (Flyte reads the default, nobody changes it)
    seed: int = 0,
) -> FlyteDirectory:
    """Post-train a diffusion model with reinforcement learning.

    Args:
        recipe: Settings to start from; `python -m mdiff_core.config RECIPE` prints them.
        rounds: Rounds of rollout, score, pair and update, at least 1; the recipe's when left out.
        prompts: Prompt file (.jsonl or .txt) to train on instead of the recipe's.
        start_policy: Folder of a policy (its policy.json) to go on from; the recipe's base model when left out.
        overrides: JSON list of settings as a.b=c, for example '["train.lr=1e-4"]'; they win over the other inputs.
        seed: Every random number of the run derives from it.
    """
    config, read, policy, state = plan(
        algorithm="rl",
        recipe=recipe,
        rounds=rounds,
        prompts=prompts,
        start_policy=start_policy,
        overrides=overrides,
        seed=seed,
    )
    return run_rounds(config=config, prompts=read, policy=policy, state=state)
