"""Resume is equality: killed anywhere and started again, a run repeats nothing and ends with the same bits."""

import sys
from collections.abc import Mapping
from pathlib import Path

from mdiff_core.observe import metrics
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


def test_nft_with_old_policy_and_average_killed_in_round_2(ray_address: Mapping[str, str], tmp_path: Path) -> None:
    """In its optimizer loop, when the round was drawn by the old policy that round 1 left."""
    nft = ("train.ema={}", "train.old.slope=0.2", "evaluate.weights=ema")
    whole, stopped = (post_train(tmp_path / name, *nft, recipe="shapes_nft") for name in ("whole", "stopped"))
    undisturbed = call([*PYFLYTE, *whole], ray_address)
    assert undisturbed.code == 0, undisturbed.said
    assert call([*KILLED, "in_update", *stopped], ray_address).code == -9
    ended = call([*PYFLYTE, *stopped], ray_address)
    assert ended.code == 0, ended.said
    assert ended.checksum == undisturbed.checksum  # of live weights, average and old policy together
    assert manifests(tmp_path / "stopped").keys() == manifests(tmp_path / "whole").keys()
    (policy,) = [path for path in (tmp_path / "whole" / "policies").glob("*/00002-*")]
    assert {path.name for path in policy.iterdir() if path.is_dir()} == {"ema", "old"}
    rounds = metrics.read(next((tmp_path / "whole" / "runs").iterdir()))
    drawn = [record["rollout/weights"] for record in rounds if record["kind"] == "round"]
    measured = [record["evaluate/weights"] for record in rounds if record["kind"] == "evaluation"]
    assert (drawn, measured) == (["live", "old"], ["live", "ema"])  # the base has but one set
