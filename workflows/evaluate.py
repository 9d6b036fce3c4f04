"""Evaluation alone: a base model and a policy trained from it, on the recipe's held-out prompts."""

from flytekit import dynamic, workflow
from flytekit.types.directory import FlyteDirectory

from mdiff_core.settings import RunConfig
from tasks.compare import compare, plan_comparison
from tasks.handoff import Artifact
from tasks.local import local_ray, one_sentence
from tasks.plan import Recipe
from workflows.post_train import ORDERS, measure


@dynamic(**ORDERS)
def both(config: str, prompts: FlyteDirectory, base: FlyteDirectory, tuned: FlyteDirectory) -> Artifact:
    """Measure the two policies with the same noise, and compare."""
    run = RunConfig.from_json(config)
    with one_sentence(), local_ray():
        return compare(config=config, base=measure(run, prompts, base), tuned=measure(run, prompts, tuned))


@workflow
def evaluate(
    recipe: Recipe,
    policy: FlyteDirectory | str,
    overrides: list[str] = [],  # noqa: B006  (Flyte reads the default, nobody changes it)
    seed: int = 0,
) -> FlyteDirectory:
    """Compare a policy with the base model it was trained from: rewards, gold rewards, diversity, pictures.

    Args:
        recipe: Settings; those of evaluate, prompts.held_out and score count.
        policy: Folder of a policy (its policy.json).
        overrides: JSON list of settings as a.b=c, for example '["evaluate.samples=4"]'.
        seed: Every random number derives from it.
    """
    config, prompts, base, tuned = plan_comparison(recipe=recipe, policy=policy, overrides=overrides, seed=seed)
    return both(config=config, prompts=prompts, base=base, tuned=tuned)
