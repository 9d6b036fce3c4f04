"""Resume is equality: killed anywhere and started again, a run repeats nothing and ends with the same bits."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.workflows.conftest import PYFLYTE, ROOT, Finished, call, manifests, post_train
from tests.workflows.killed import PLACES

KILLED = (sys.executable, str(ROOT / "tests/workflows/killed.py"))


def test_killed_everywhere_in_round_2(finished: Finished, ray_address: Mapping[str, str], tmp_path: Path) -> None:
    """One run, killed once at each place, in the order in which it comes by them; the same command each time."""
    command = post_train(tmp_path)
    before: dict[str, int] = {}
    for place in PLACES:
        ended = call([*KILLED, place, *command], ray_address)
        assert ended.code == -9, f"{place}: {ended.said}"
        now = manifests(tmp_path)
        assert before.items() <= now.items(), f"{place}: a finished stage was repeated"
        before = before if place == "while_publishing" else now  # a stage has finished when all its outputs have
    ended = call([*PYFLYTE, *command], ray_address)
    assert ended.code == 0, ended.said
    assert before.items() <= manifests(tmp_path).items()
    assert not list(tmp_path.rglob("*.partial"))
    assert manifests(tmp_path).keys() == manifests(finished.store).keys()
    assert ended.checksum == finished.ended.checksum
    assert [line.partition(" rollout ")[0] for line in ended.lines("round ")] == [
        line.partition(" rollout ")[0] for line in finished.ended.lines("round ")
    ]
