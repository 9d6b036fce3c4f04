"""Two policies on the same held-out prompts, side by side."""

import json
from functools import partial

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core import artifacts, runs
from mdiff_core.artifacts import damage_told, read_manifest
from mdiff_core.observe import alarm, metrics, report
from mdiff_core.settings import RunConfig
from mdiff_core.stages import plan as stage
from mdiff_core.stores import settled
from tasks import decks, hardware
from tasks.handoff import Artifact, default_store, fetch, handle_of, uri_of
from tasks.local import one_sentence, say
from tasks.plan import Recipe, command, here
from tasks.telling import alarmed, evaluation_of


@task(container_image=hardware.SCORE_IMAGE, requests=hardware.SMALL, enable_deck=True, deck_fields=())
def plan_comparison(
    recipe: Recipe, policy: FlyteDirectory | str, overrides: list[str], seed: int
) -> tuple[str, Artifact, Artifact, Artifact]:
    """Settings as JSON, the prompts, the base policy and the tuned one."""
    with one_sentence():
        config = stage.settings(recipe.value, [f"seed={seed}", *overrides])
        hardware.check(config)
        config = config.model_copy(update={"store": settled(config.store or default_store())})
        tuned = stage.plan(config, stage.opened(config, here("policy", policy)))
        base = stage.plan(tuned.config, None)
        made = {"prompts": (tuned, "prompts"), "base": (base, "policy"), "tuned": (tuned, "policy")}
        for each, role in made.values():
            artifacts.produce(each.productions[role], partial(stage.fill, role, each.writers[role]), {})
        files = {name: each.files[role] for name, (each, role) in made.items()}
        # a training run that goes on from this policy has the name already
        named = (
            tuned.config if config.name else tuned.config.model_copy(update={"name": f"evaluate-{tuned.config.name}"})
        )
        typed = {"recipe": recipe.value, "policy": policy, "overrides": json.dumps(overrides), "seed": seed}
        runs.begin(named.store, named, command("evaluate", typed), files)
    Deck("settings", report.table(report.dotted(named.model_dump(mode="json"))))
    return (named.to_json(), *(handle_of(uri) for uri in files.values()))


@task(container_image=hardware.SCORE_IMAGE, requests=hardware.SMALL, enable_deck=True, deck_fields=())
def compare(config: str, base: FlyteDirectory, tuned: FlyteDirectory) -> Artifact:
    """The evaluations' numbers and pictures side by side, in the run's folder, which is returned."""
    settings = RunConfig.from_json(config)
    with runs.opened(settings.store, settings.name) as folder:
        first = alarmed(settings, [], evaluation_of(0, read_manifest(uri_of(base))))
        last = alarmed(settings, [first], evaluation_of(1, read_manifest(uri_of(tuned))))
        with metrics.Metrics(folder) as sinks:
            for found in (first, last):
                sinks.write(found)
        before, after = fetch(base), fetch(tuned)
        with damage_told([before, after]):
            path = report.write(folder, before=decks.grid(before, before), after=decks.grid(after, after))
        Deck("report", path.read_text(encoding="utf-8"))
    for key, value in last.items():
        if key.startswith("evaluate/") and key.endswith(("reward_mean", "/mean", "/diversity")):
            say(f"{key.removeprefix('evaluate/').removesuffix('/mean')} {first[key]:.4f} -> {value:.4f}")
    if why := alarm.told([first, last]):
        say(f"ALARM {why}")
    address = runs.address(settings.store, settings.name)
    say(f"report {address}/{report.FILE}")
    return handle_of(address)
