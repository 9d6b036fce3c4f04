"""From the few flat inputs of a workflow to the one RunConfig; whatever can be wrong is found here, before anything is made."""

import json
import shlex
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from mdiff_core import runs
from mdiff_core.config import RECIPES
from mdiff_core.errors import BadSetting
from mdiff_core.observe import report
from mdiff_core.settings import RunConfig
from mdiff_core.stages import plan as stage
from mdiff_core.stages.encode import read_captions
from mdiff_core.stores import said, settled
from tasks import hardware
from tasks.handoff import Artifact, default_store, handle_of, uri_of
from tasks.local import one_sentence, say

Recipe = Enum("Recipe", {name: name for name in RECIPES})  # type: ignore[misc]
"""Every recipe, so that the console offers a list; name and value are equal."""

File = FlyteFile | str | None
"""A plain string is kept as one, so that a path that does not exist gets an error of ours."""
Directory = FlyteDirectory | str | None
WORKFLOWS = {"rl": "post_train", "sft": "sft"}
"""Of each algorithm."""


@task(container_image=hardware.SCORE_IMAGE, requests=hardware.SMALL, enable_deck=True, deck_fields=())
def plan(
    algorithm: str,
    recipe: Recipe,
    rounds: int | None,
    prompts: File,
    start_policy: Directory,
    overrides: list[str],
    seed: int,
) -> tuple[str, Artifact, Artifact, Artifact]:
    """Settings as JSON, and the prompts, policy and train state that the first round reads."""
    typed: dict[str, Any] = {"recipe": recipe.value, "rounds": rounds, "prompts": prompts, "start_policy": start_policy}
    typed |= {"overrides": json.dumps(overrides), "seed": seed}
    given = [f"seed={seed}"] + ([] if rounds is None else [f"rounds={rounds}"])
    with one_sentence():
        given += [] if prompts is None else [f"prompts.train={here('prompts', prompts)}"]
        config = stage.settings(recipe.value, [*given, *overrides])
        check(config, algorithm)
        store = settled(config.store or default_store())
        start = None if start_policy is None else here("start_policy", start_policy)
        made = stage.plan(config.model_copy(update={"store": store}), stage.opened(config, start))
        stage.run(made, command(config.algorithm, typed))
    say(
        f"run {made.config.name}: {config.rounds} rounds of {config.recipe}, in {runs.address(store, made.config.name)}"
    )
    Deck("settings", report.table(report.dotted(made.config.model_dump(mode="json"))))
    files = {role: handle_of(uri) for role, uri in made.files.items()}
    return made.config.to_json(), files["prompts"], files["policy"], files["state"]


def check(config: RunConfig, algorithm: str) -> None:
    """What only Flyte's side knows to be wrong, and the data of the run; BadSetting."""
    if config.algorithm != algorithm:
        raise BadSetting(
            f"recipe: '{config.recipe}' has algorithm '{config.algorithm}'; run it with workflow {WORKFLOWS[config.algorithm]}"
        )
    hardware.check(config)
    if config.data:
        read_captions(config.data.captions)


def here(field: str, given: FlyteFile | FlyteDirectory | str) -> Path:
    """The file or folder on this machine; BadSetting when it cannot be had."""
    if isinstance(given, str) and "://" not in given:
        if not Path(given).exists():
            raise BadSetting(f"{field}: '{given}' does not exist; give a path or URI of one that does")
        return Path(given)
    try:
        kind = FlyteFile if field == "prompts" else FlyteDirectory
        return Path((kind.from_source(given) if isinstance(given, str) else given).download())
    except Exception as error:
        where = given if isinstance(given, str) else uri_of(given)
        raise BadSetting(
            f"{field}: '{where}' cannot be fetched ({said(error)}); give a path or URI of one that can, and its store's credentials"
        ) from error


def command(algorithm: str, inputs: Mapping[str, Any]) -> str:
    """What to type to run this again; `algorithm` may be the workflow itself."""
    said = [f"--{name} {shlex.quote(str(value))}" for name, value in inputs.items() if value not in (None, "[]", 0)]
    name = WORKFLOWS.get(algorithm, algorithm)
    return f"pyflyte -c flyte.config run workflows/{name}.py {name} {' '.join(said)}"
