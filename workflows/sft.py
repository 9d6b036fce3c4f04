"""Supervised fine-tuning on captioned images: the rounds of post_train without rollout, score and pair."""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from tasks.plan import Directory, Recipe, plan
from workflows.post_train import run_rounds


@workflow
def sft(
    recipe: Recipe,
    rounds: int | None = None,
    start_policy: Directory = None,
    overrides: list[str] = [],  # noqa: B006  (Flyte reads the default, nobody changes it)
    seed: int = 0,
) -> FlyteDirectory:
    """Fine-tune a diffusion model on captioned images.

    Args:
        recipe: Settings to start from, with algorithm sft; `python -m mdiff_core.config RECIPE` prints them.
        rounds: Rounds of train.updates_per_round optimizer steps, each leaving a policy; the recipe's when left out.
        start_policy: Folder of a policy (its policy.json) to go on from; the recipe's base model when left out.
        overrides: JSON list of settings as a.b=c, for example '["data.captions=images/captions.jsonl"]'.
        seed: Every random number of the run derives from it.
    """
    config, prompts, policy, state = plan(
        algorithm="sft",
        recipe=recipe,
        rounds=rounds,
        prompts=None,
        start_policy=start_policy,
        overrides=overrides,
        seed=seed,
    )
    return run_rounds(config=config, prompts=prompts, policy=policy, state=state)
