"""What a run says as it goes: a line and a record for each round and each evaluation."""

from pathlib import Path

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from mdiff_core import runs
from mdiff_core.artifacts import read_manifest
from mdiff_core.observe import metrics, report
from mdiff_core.settings import RunConfig
from tasks import hardware
from tasks.handoff import uri_of
from tasks.telling import tell


@task(container_image=hardware.SCORE_IMAGE, requests=hardware.SMALL, enable_deck=True, deck_fields=())
def record(config: str, made: list[FlyteDirectory]) -> bool:
    """Tell what the artifacts of a round, of an evaluation or of both say; True when the target reward is reached."""
    settings = RunConfig.from_json(config)
    with runs.opened(settings.store, settings.name) as folder:
        told = tell(settings, folder, [read_manifest(uri_of(handle)) for handle in made])
        Deck("rewards", report.curve(series(folder), title="reward by round"))
    rewards = [found[metrics.REWARD] for found in told if metrics.REWARD in found]
    return settings.target_reward is not None and any(reward >= settings.target_reward for reward in rewards)


def series(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Reward by round, of training and of evaluation."""
    found = metrics.read(folder)
    keys = {"training": metrics.REWARD, "held out": metrics.EVALUATED}
    points = {name: [(float(r["round"]), float(r[key])) for r in found if key in r] for name, key in keys.items()}
    return {name: some for name, some in points.items() if some}
