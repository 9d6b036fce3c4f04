"""What a run leaves: the policy under its name, and the report."""

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core import policies, runs
from mdiff_core.artifacts import damage_told, read_manifest
from mdiff_core.observe import metrics, report
from mdiff_core.settings import RunConfig
from tasks import decks, hardware
from tasks.handoff import Artifact, fetch, handle_of, uri_of
from tasks.local import say
from tasks.telling import tell


@task(container_image=hardware.SCORE_IMAGE, requests=hardware.SMALL, enable_deck=True, deck_fields=())
def publish(config: str, before: FlyteDirectory, after: FlyteDirectory, policy: FlyteDirectory) -> Artifact:
    """The last policy under the run's name in `<store>/policies`; writes the report and prints where both are."""
    settings = RunConfig.from_json(config)
    with runs.opened(settings.store, settings.name) as folder:
        tell(settings, folder, [read_manifest(uri_of(after))])
        first, last, trained = fetch(before), fetch(after), fetch(policy)
        with damage_told([first, last, trained]):
            published = policies.publish(f"{settings.store}/policies", settings.name, trained)
            path = report.write(folder, before=decks.grid(first, first), after=decks.grid(last, last), policy=published)
        Deck("report", path.read_text(encoding="utf-8"))
        rewards = [found[metrics.EVALUATED] for found in metrics.read(folder) if found["kind"] == "evaluation"]
    say(f"policy {published}")
    say(f"checksum {policies.open_policy(trained, verify=False).checksum}")
    say(f"report {runs.address(settings.store, settings.name)}/{report.FILE}")
    say(f"reward {rewards[0]:.4f} -> {rewards[-1]:.4f}")
    return handle_of(published)
