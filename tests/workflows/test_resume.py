"""Resume is equality: killed anywhere and started again, a run repeats nothing and ends with the same bits."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from mdiff_core.observe import metrics
from tests.workflows.conftest import PYFLYTE, ROOT, Finished, call, manifests, post_train, sft
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


def test_a_damaged_policy_is_made_again(finished: Finished, ray_address: Mapping[str, str], tmp_path: Path) -> None:
    """The command fails once, with a sentence that says that the same command helps; it repeats the one stage."""
    store = tmp_path / "store"
    shutil.copytree(finished.store, store)
    path = Finished(store=store, ended=finished.ended).artifact("policy", 1) / "adapter_model.safetensors"
    weights = bytearray(path.read_bytes())
    weights[-1] ^= 1
    path.write_bytes(weights)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    del manifest["sha256"][path.name]  # as of a file that is too large to be compared before each use
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    ended = call([*PYFLYTE, *post_train(store)], ray_address)
    assert ended.code == 1 and "Traceback" not in ended.said
    (sentence,) = ended.lines(f"{path}: its sha256 is not the one in policy.json")
    assert "; it no longer counts as finished, so run the same command again" in sentence
    before = manifests(store)
    ended = call([*PYFLYTE, *post_train(store)], ray_address)
    assert ended.code == 0, ended.said
    assert ended.checksum == finished.ended.checksum
    after = manifests(store)
    assert {name.split("/")[0] for name in after if before.get(name) != after[name]} == {"policy", "state"}
    assert " rollout reused score reused pair reused update reused" in ended.lines("round 1: ")[0]
    assert " pair reused update " in ended.lines("round 2: ")[0] and "update reused" not in ended.lines("round 2: ")[0]


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


def test_sft_with_average_killed_in_round_2(ray_address: Mapping[str, str], tmp_path: Path) -> None:
    """In its optimizer loop: every weight, the average and AdamW's moments go on from round 1."""
    whole, stopped = (sft(tmp_path / name, tmp_path / "images", rounds=2) for name in ("whole", "stopped"))
    undisturbed = call([*PYFLYTE, *whole], ray_address)
    assert undisturbed.code == 0, undisturbed.said
    assert call([*KILLED, "in_update", *stopped], ray_address).code == -9
    ended = call([*PYFLYTE, *stopped], ray_address)
    assert ended.code == 0, ended.said
    assert ended.checksum == undisturbed.checksum
    assert "update reused" in ended.lines("round 1: ")[0]
    assert manifests(tmp_path / "stopped").keys() == manifests(tmp_path / "whole").keys()
